"""What is made of benchmark results: the pages, the plots and the comparison. No GPU needed."""

import copy
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import compare, files  # noqa: E402
from benchmarks.peers import PEERS  # noqa: E402

ENVIRONMENT = ("driver", "cuda", "python", "triton", "fla")
CASES = {"8192/96": (96, [8192]), "8192/16/1": (16, [8192]), "2048/16/1": (16, [2048]), "mixed/96": (96, [300, 212])}


def make_result(**times):
    """Results of all CASES and both gates; times: {"ours" or "fla": GPU time of the first case, random gate}."""
    rows = []
    for name, time in times.items():
        for number, (case, (heads, lengths)) in enumerate(CASES.items(), start=1):
            for gate, factor in (("random", 1), ("long", 2)):
                row = {"case": case, "gate": gate, "heads": heads, "lengths": lengths, "floor_us": 50.0 * number}
                row |= {"table": "few heads" if "/1" in case else "many heads", "must_us": 400, "goal_us": 340}
                row |= {"gpu_us": time * number * factor, "gpu_us_least": 7.0, "gpu_us_spread": 0.5, "host_us": 33.4}
                row |= {"extra_bytes": 12_300_000, "error_out": 3.7e-3, "error_state": 2.5e-3, "input_sets": 1}
                row["peer"] = {"ours": "flash_kda sm90", "portable": "flash_kda portable", "fla": "FLA Triton"}[name]
                rows.append(row)
    return {
        "device": "NVIDIA H999",
        "torch": "2.11",
        "flash_kda": "0.1.0",
        "date": "2026-11-30T12:00:00+00:00",
        "copy_bandwidth": 4.28e12,
        "rows": rows,
    }


def with_both_times(result, ratio=1.0, clock=1980):
    """The same results as new files hold them: the sustained time is `ratio` times the rested one."""
    for row in result["rows"]:
        row |= {"gpu_us_sustained": ratio * row["gpu_us"], "gpu_us_sustained_spread": 4.5, "sm_clock_mhz": clock}
    return result


def row_of(result, case, gate, peer):
    return files.by_key(result)[case, gate, peer]


def fail(row, reason):
    for name in [name for name in row if name.startswith(("gpu_us", "host", "extra", "error_", "input"))]:
        del row[name]
    row["error"] = reason


class TestFiles:
    @pytest.mark.parametrize(
        "device, file, page",
        [
            ("NVIDIA H200", "nvidia-h200.json", "BENCHMARK_H200.md"),
            ("NVIDIA H20", "nvidia-h20.json", "BENCHMARK_H20.md"),
            ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3.json", "BENCHMARK_H100_80GB_HBM3.md"),
            ("NVIDIA GeForce RTX 5090", "nvidia-geforce-rtx-5090.json", "BENCHMARK_GEFORCE_RTX_5090.md"),
        ],
    )
    def test_names(self, device, file, page):
        assert files.landed(device) == ROOT / "benchmarks" / "results" / file
        assert files.page(device) == ROOT / page

    def test_landed_files_can_be_read_and_have_their_device_s_name(self):
        paths = list(files.RESULTS.glob("*.json"))
        assert files.landed("NVIDIA H200") in paths
        assert all(path == files.landed(files.read(path)["device"]) for path in paths)

    @pytest.mark.parametrize(
        "change, message",
        [
            (lambda result: result.pop("rows"), "an object with device and rows"),
            (lambda result: result.pop("device"), "an object with device and rows"),
            (lambda result: result.update(device=None), "device: expected a string, got None"),
            (lambda result: result.update(csrc=7), "csrc: expected a string, got 7"),
            (lambda result: result["rows"].append(result["rows"][0]), "row 8: expected one row of each .* got another"),
            (lambda result: result["rows"][1].pop("peer"), "row 1: expected an object with case, gate and peer"),
            (lambda result: result["rows"].insert(0, "row"), "row 0: expected an object"),
            (lambda result: result["rows"][2].pop("gpu_us"), "row 2: expected error, or gpu_us .* got None"),
            (lambda result: result["rows"][2].update(gpu_us=0), "got 0"),
            (lambda result: result["rows"][2].update(gpu_us=float("nan")), "got nan"),
            (lambda result: result["rows"][2].update(gpu_us_sustained=None), "row 2: .* gpu_us_sustained .* got None"),
            (lambda result: result["rows"][2].update(gpu_us_sustained=-1.0), "row 2: .* gpu_us_sustained .* got -1.0"),
        ],
    )
    def test_other_content_is_refused(self, change, message, tmp_path):
        result = make_result(ours=100)
        change(result)
        (tmp_path / "file.json").write_text(json.dumps(result))
        with pytest.raises(ValueError, match=f"file.json: .*{message}"):
            files.read(tmp_path / "file.json")

    @pytest.mark.parametrize("clock", [1980, None])
    def test_files_with_one_time_and_with_two(self, clock, tmp_path):
        old, new = make_result(ours=100), with_both_times(make_result(ours=100), 1.1, clock)
        for result in (old, new):
            (tmp_path / "file.json").write_text(json.dumps(result))
            assert files.read(tmp_path / "file.json") == result
        assert [files.is_rested(result["rows"][0]) for result in (old, new)] == [False, True]
        assert [files.sustained(result["rows"][0]) for result in (old, new)] == [100, pytest.approx(110)]

    def test_sustained_times_differ_beyond_2_percent(self):
        for ratio, differs in ((0.97, True), (0.985, False), (1.0, False), (1.015, False), (1.03, True)):
            rows = with_both_times(make_result(ours=100))["rows"]
            rows[-1]["gpu_us_sustained"] *= ratio
            assert files.sustained_differs(rows) == differs
        assert not files.sustained_differs(make_result(ours=100)["rows"] + [{"error": "no result"}])

    def test_definitions(self):
        old, new = make_result(ours=100)["rows"], with_both_times(make_result(ours=100))["rows"]
        fail(new[0], "out of memory")
        assert files.definitions(old).startswith("These have one time each, a sustained one")
        assert files.definitions(new).startswith("Rested: ") and "Sustained: " in files.definitions(new)
        assert files.definitions(new[:1]) == "No time was measured."


@pytest.fixture
def run_compare(tmp_path, capsys):
    def run(old, new, *arguments):
        for name, content in (("old.json", old), ("new.json", new)):
            if content is not None:
                (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        status = compare.main([str(tmp_path / "old.json"), str(tmp_path / "new.json"), *arguments])
        return status, capsys.readouterr().out

    return run


class TestCompare:
    def test_equal(self, run_compare):
        status, text = run_compare(make_result(ours=100, fla=900), make_result(ours=100, fla=900) | {"csrc": "ab" * 32})
        assert status == 0 and text.count("1.000") == 16 and "0 regressions" in text
        assert "old: NVIDIA H999, 2026-11-30T12:00:00+00:00, csrc digest not recorded" in text
        assert "csrc digest abababababab\n" in text

    @pytest.mark.parametrize("time, status, ratio", [(104, 0, "1.040"), (106, 1, "1.060"), (50, 0, "0.500")])
    def test_one_row_decides(self, run_compare, time, status, ratio):
        new = make_result(ours=100)
        row_of(new, "8192/96", "random", "flash_kda sm90")["gpu_us"] = time
        found, text = run_compare(make_result(ours=100), new)
        assert found == status and f"{status} regressions" in text
        line = next(line for line in text.splitlines() if ratio in line)
        assert "8192/96" in line and "random" in line and "100.0" in line and f"{time}.0" in line

    def test_rested_with_rested(self, run_compare):
        """What the power limit makes of the sustained times decides nothing."""
        old = with_both_times(make_result(ours=100), 1.2)
        status, text = run_compare(old, with_both_times(make_result(ours=104), 1.5))
        assert status == 0 and text.count("1.040") == text.count("│ rested │") == 8 and "one time a row" not in text
        status, text = run_compare(old, with_both_times(make_result(ours=106), 0.5))
        assert status == 1 and "8 regressions" in text

    def test_an_old_file_s_time_with_the_sustained_one(self, run_compare):
        old, new = make_result(ours=120), with_both_times(make_result(ours=100), 1.2)
        status, text = run_compare(old, new)
        assert status == 0 and text.count("1.000") == text.count("│ sustained │") == 8
        assert "old: one time a row, a sustained one; compared with sustained times" in text
        assert "new: one time a row" not in text
        assert "8 regressions" in run_compare(old, with_both_times(make_result(ours=100), 1.3))[1]
        # The other way round, the new file may be the one without rested times.
        status, text = run_compare(new, old)
        assert status == 0 and text.count("1.000") == 8 and "new: one time a row" in text

    def test_a_row_without_an_old_one_shows_its_rested_time(self, run_compare):
        status, text = run_compare(make_result(fla=900), with_both_times(make_result(ours=100), 1.2))
        line = next(line for line in text.splitlines() if "8192/96" in line and "flash_kda sm90" in line)
        assert status == 0 and " rested " in line and " 100.0 " in line and " new │" in line

    def test_threshold(self, run_compare):
        old, new = make_result(ours=100), make_result(ours=120)
        assert run_compare(old, new)[0] == 1
        assert run_compare(old, new, "--threshold", "1.19")[0] == 1
        assert run_compare(old, new, "--threshold", "1.21")[0] == 0

    def test_other_peers_do_not_count(self, run_compare):
        status, text = run_compare(make_result(ours=100, fla=900), make_result(ours=100, fla=1800))
        assert status == 0 and text.count("2.000") == 8
        status, text = run_compare(make_result(ours=100, fla=900), make_result(ours=100))
        assert status == 0 and text.count("gone") == 8

    def test_a_row_of_ours_is_gone(self, run_compare):
        new = make_result(ours=100)
        del new["rows"][3]
        status, text = run_compare(make_result(ours=100), new)
        assert status == 1 and text.count("gone") == 1

    @pytest.mark.parametrize("old", [make_result(ours=100), make_result(fla=900)], ids=["measured", "absent"])
    def test_a_row_of_ours_failed(self, run_compare, old):
        new = make_result(ours=100)
        fail(new["rows"][3], "out of [/memory]")
        status, text = run_compare(old, new)
        assert status == 1 and "failed: out of [/memory]" in text and "1 regressions" in text

    def test_what_failed_before_may_fail_or_be_gone(self, run_compare):
        old = make_result(ours=100)
        fail(old["rows"][3], "no such kernel")
        new = copy.deepcopy(old)
        assert run_compare(old, new)[0] == 0
        del new["rows"][3]
        assert run_compare(old, new)[0] == 0
        status, text = run_compare(old, make_result(ours=100))
        assert status == 0 and text.count(" new │") == 1

    @pytest.mark.parametrize("content", [None, "", "{}", "[1]", "\x00"])
    def test_an_unreadable_file_is_status_2_and_named(self, run_compare, capsys, content):
        with pytest.raises(SystemExit) as exit:
            run_compare(make_result(ours=100), content)
        assert exit.value.code == 2
        assert "new.json: " in capsys.readouterr().err.splitlines()[-1]

    @pytest.mark.parametrize("value", ["0.9", "nan", "inf", "five"])
    def test_unusable_threshold(self, run_compare, capsys, value):
        with pytest.raises(SystemExit) as exit:
            run_compare(make_result(ours=100), make_result(ours=100), "--threshold", value)
        assert exit.value.code == 2 and "--threshold" in capsys.readouterr().err

    def test_runs_as_a_module(self):
        path = files.landed("NVIDIA H200")
        command = [sys.executable, "-m", "benchmarks.compare", path, path]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0 and "0 regressions" in result.stdout, result.stderr


@pytest.fixture
def report(tmp_path, monkeypatch):
    """benchmarks.report, with a repository of its own to write to."""
    pytest.importorskip("matplotlib")
    from benchmarks import report

    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    monkeypatch.setattr(files, "ROOT", tmp_path)
    monkeypatch.setattr(files, "RESULTS", tmp_path / "benchmarks" / "results")
    return report


def write_page(report, result):
    files.landed(result["device"]).write_text(json.dumps(result))
    assert report.main([]) == 0
    return files.page(result["device"]).read_text()


class TestReport:
    def test_tables(self, report):
        result = make_result(portable=300, ours=100, fla=900) | {"csrc": "ab" * 32, "command": "python -m made.by"}
        text = write_page(report, result)
        assert text.startswith("# FlashKDA: NVIDIA H999\n")
        header = next(line for line in text.splitlines() if line.startswith("| sequences"))
        columns = [column.strip() for column in header.strip("|").split("|")]
        peers = ["flash_kda portable", "flash_kda sm90", "FLA Triton"]
        assert columns == [
            *("sequences", "H", "floor", *(f"{peer}: random / long" for peer in peers), "must", "goal"),
            *("flash_kda sm90: share of the floor", "speed-up over flash_kda portable", "speed-up over FLA Triton"),
        ]
        assert "| 8192 | 96 | 50 | 300 / 600 | 100 / 200 | 900 / 1800 | 400 | 340 | 50% / 25% | 3.00 | 9.00 |" in text
        assert "| [300, 212] | 96 | 200 | 1200 / 2400 | 400 / 800 |" in text
        assert text.index("## Many heads") < text.index("| [300, 212]") < text.index("## Few heads")
        assert "| 8192 | 96 | FLA Triton | 7.0 | 0.5 | 33 | not measured | 12.3 | 3.70e-3 | 2.50e-3 |" in text
        assert "must met in 2 of 4 cases, goal in 1" in text
        assert "csrc digest abababababab" in text and "Made by:" in text and "python -m made.by \\\n" in text
        assert "2026-11-30T12:00:00+00:00" in text and "4.28 TB/s" in text.replace("\n", " ")
        absent = ", ".join(peer for peer in PEERS if peer not in peers)
        assert f"Not in the file: {absent}." in text and "Rows without" not in text

    def test_sustained_times_have_a_column_where_they_differ(self, report):
        result = with_both_times(make_result(ours=100, fla=900), clock=1755)
        for gate, sustained in (("random", 120.0), ("long", 201.0)):
            row_of(result, "8192/96", gate, "flash_kda sm90")["gpu_us_sustained"] = sustained
        row_of(result, "8192/96", "random", "FLA Triton")["sm_clock_mhz"] = None
        text = write_page(report, result)
        many, few = [line for line in text.splitlines() if line.startswith("| sequences | H | floor")]
        ours, fla = "flash_kda sm90: random / long", "FLA Triton: random / long"
        assert f"| floor | {ours} | flash_kda sm90, sustained: random / long | {fla} | must |" in many
        assert f"| floor | {ours} | {fla} | must |" in few
        assert "| 8192 | 96 | 50 | 100 / 200 | 120 / 201 | 900 / 1800 | 400 | 340 | 50% / 25% | 9.00 |" in text
        assert "| 8192 | 96 | flash_kda sm90 | 7.0 | 0.5 | 120 / 201 | 4.5 | 1755 | 33 |" in text
        assert "| 8192 | 96 | FLA Triton | 7.0 | 0.5 | 900 / 1800 | 4.5 | not known / 1755 | 33 |" in text
        plain = text.replace("\n", " ")
        assert "Rested: median of" in plain and "Sustained: median of" in plain and "SM clock in MHz" in plain
        assert "one time each" not in plain

    def test_targets_are_held_by_rested_times(self, report):
        text = write_page(report, with_both_times(make_result(ours=100), 9.0))
        assert "must met in 2 of 4 cases, goal in 1" in text

    def test_a_file_with_one_time_says_which(self, report):
        text = write_page(report, make_result(ours=100)).replace("\n", " ")
        assert "These have one time each, a sustained one" in text and "Rested" not in text
        assert ", sustained:" not in text and "SM clock" not in text

    def test_what_the_file_lacks_is_said(self, report):
        result = make_result(ours=100, fla=900)
        reason = "not run: the time was up"
        for row in result["rows"]:
            if row["peer"] == "FLA Triton" and row["table"] == "few heads":
                fail(row, reason)
        fail(row_of(result, "8192/96", "long", "flash_kda sm90"), "wrong result")
        del row_of(result, "8192/96", "random", "flash_kda sm90")["host_us"]
        row_of(result, "8192/96", "random", "flash_kda sm90")["error_state"] = None
        result["rows"].remove(row_of(result, "mixed/96", "random", "FLA Triton"))
        text = write_page(report, result)
        assert (
            "| 8192 | 96 | 50 | 100 / no result | 900 / 1800 | 400 | 340 | 50% / no result | 9.00 / no result |" in text
        )
        assert "| not measured / 7200 |" in text
        assert "| 8192 | 96 | flash_kda sm90 | 7.0 / no result | 0.5 / no result | not measured / no result |" in text
        few = "8192/16/1 random, 8192/16/1 long, 2048/16/1 random, 2048/16/1 long"
        assert f"- FLA Triton: {reason}: {few}" in text.replace("\n  ", " ")
        assert "- flash_kda sm90: wrong result: 8192/96 long" in text
        assert "must met in 1 of 4 cases" in text
        assert "csrc digest not recorded" in text and "does not say by which command" in text
        assert "--peers 'flash_kda sm90' 'FLA Triton' \\\n" in text
        assert "Not in the file: flash_kda portable, " in text

    def test_a_peer_that_was_not_there_has_no_column(self, report):
        result = make_result(ours=100, fla=900)
        for row in result["rows"]:
            if row["peer"] == "FLA Triton":
                fail(row, "cannot be imported")
        text = write_page(report, result)
        assert "| FLA Triton" not in text.partition("## Rows without")[0] and "over FLA Triton" not in text
        assert "- FLA Triton: cannot be imported: 8192/96 random" in text

    def test_a_file_without_any_time(self, report):
        result = make_result(ours=100)
        for row in result["rows"]:
            fail(row, "no kernels")
        text = write_page(report, result)
        assert "- flash_kda sm90: no kernels: " in text and "share of the floor" not in text and "svg" not in text

    def test_plots_show_every_point_and_stay_the_same(self, report, monkeypatch):
        from matplotlib.figure import Figure

        figures = {}
        save = Figure.savefig
        monkeypatch.setattr(
            Figure,
            "savefig",
            lambda self, path, **more: (figures.setdefault(path.name, self), save(self, path, **more)),
        )
        result = make_result(ours=100, fla=900)
        text = write_page(report, result)
        paths = sorted(files.RESULTS.glob("*.svg"))
        assert [path.name for path in paths] == ["nvidia-h999-time-by-heads.svg", "nvidia-h999-time-by-tokens.svg"]
        assert all(f"](benchmarks/results/{path.name})" in text for path in paths)
        assert all(ElementTree.parse(path).getroot().tag.endswith("svg") for path in paths)

        def lines(name, peer, gate):
            (axes,) = [one for one in figures[name].axes if one.get_title() == f"{peer}, {gate} gate"]
            assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
            return [tuple(map(list, line.get_data())) for line in axes.get_lines()]

        # Time and floor: 16 heads at T = 2048 and 8192, then 96 heads; by heads, one sequence of 8192 alone has two.
        by_tokens = lines("nvidia-h999-time-by-tokens.svg", "FLA Triton", "long")
        assert by_tokens[:2] == [([2048, 8192], [5400, 3600]), ([2048, 8192], [150, 100])]
        assert by_tokens[2:] == [([8192], [1800]), ([8192], [50])]
        by_heads = lines("nvidia-h999-time-by-heads.svg", "flash_kda sm90", "random")
        assert by_heads == [([16, 96], [200, 100]), ([16, 96], [100, 50])]
        before = [path.read_bytes() for path in paths]
        write_page(report, result)
        assert [path.read_bytes() for path in paths] == before

    def test_plot_of_the_error_by_token(self, report, monkeypatch):
        from matplotlib.figure import Figure

        figures = {}
        save = Figure.savefig
        monkeypatch.setattr(
            Figure, "savefig", lambda self, path, **more: (figures.update({path.name: self}), save(self, path, **more))
        )
        result = make_result(ours=100, fla=900) | {"environment": dict.fromkeys(ENVIRONMENT, "1.2")}
        for peer, error in (("flash_kda sm90", 0.003), ("FLA Triton", 0.005)):
            row_of(result, "8192/96", "long", peer)["error_by_token"] = [[0, error], [128, 2 * error]]
            row_of(result, "8192/96", "long", peer)["wall_us"] = 77.0
        text = write_page(report, result)
        name = "nvidia-h999-error-by-token.svg"
        assert f"](benchmarks/results/{name})" in text and (files.RESULTS / name).is_file()
        assert "driver 1.2, CUDA 1.2, Python 1.2, Triton 1.2, flash-linear-attention 1.2." in text.replace("\n", " ")
        assert "| 33 | not measured / 77 |" in text
        random, long = figures[name].axes
        assert not random.get_lines()
        assert [(line.get_label(), *map(list, line.get_data())) for line in long.get_lines()] == [
            ("flash_kda sm90", [0, 128], [0.003, 0.006]),
            ("FLA Triton", [0, 128], [0.005, 0.01]),
        ]

    def test_other_text_of_a_page_stays(self, report):
        result = make_result(ours=100)
        page = files.page(result["device"])
        page.write_text("# Mine\n\n<!-- report -->\nold\n<!-- /report -->\n\nmine too\n")
        text = write_page(report, result)
        assert text.startswith("# Mine\n") and text.endswith("\nmine too\n") and "old" not in text
        assert write_page(report, result) == text

    @pytest.mark.parametrize(
        "prepare, message",
        [
            (lambda result: None, "no results in"),
            (lambda result: files.landed("other").write_text(json.dumps(result)), "expected the name nvidia-h999.json"),
            (lambda result: files.landed("other").write_text("{"), "other.json: expected JSON"),
            (
                lambda result: (
                    files.landed(result["device"]).write_text(json.dumps(result)),
                    files.page(result["device"]).write_text("no marks\n"),
                ),
                "BENCHMARK_H999.md: expected <!-- report -->",
            ),
        ],
    )
    def test_errors_are_one_line_and_exit_status_2(self, report, capsys, prepare, message):
        prepare(make_result(ours=100))
        with pytest.raises(SystemExit) as exit:
            report.main([])
        assert exit.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]

    def test_landed_pages_are_those_of_the_results(self):
        """python -m benchmarks.report"""
        pytest.importorskip("matplotlib")
        from benchmarks import report

        for path in files.RESULTS.glob("*.json"):
            result = files.read(path)
            text = files.page(result["device"]).read_text(encoding="utf-8")
            assert report.fill(text, report.text_of(result, report.pictures_of(result))) == text
            assert all(picture.is_file() for picture in report.pictures_of(result))


def test_gpu_script_compares_with_the_landed_results_of_its_device(tmp_path):
    """The last step of tests/gpu.sh, with a device that has landed results, and one that has none."""
    script = (ROOT / "tests" / "gpu.sh").read_text()
    tail = script[script.index("landed=$(") : script.index("}\n\nsetup_env gpu\n")]
    (tmp_path / "torch.py").write_text(
        "import os\nclass cuda:\n    get_device_name = staticmethod(lambda: os.environ['DEVICE'])\n"
    )
    for device, expected in (("NVIDIA H200", f"{files.landed('NVIDIA H200')} new/benchmark.json"), ("Other", "")):
        result = subprocess.run(
            ["bash", "-uc", f'run_step() {{ echo "${{@: -2}}"; }}; output=new; PYTHON={sys.executable}\n{tail}'],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "DEVICE": device},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.stdout.strip() == expected and not result.stderr

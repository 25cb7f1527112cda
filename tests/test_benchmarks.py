"""The benchmark's cases, command line and README filler, as far as they need no GPU."""

import json
import shlex
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from inputs import GATE_KINDS, make_inputs
from rich.console import Console
from source_digest import tree_digest

import flash_kda

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import features, record_readme, run, timing, warm_fla  # noqa: E402
from benchmarks.cases import CASES, ERROR_CASE, QUICK, Case  # noqa: E402
from benchmarks.peers import PEERS, published  # noqa: E402
from benchmarks.peers.peer import Peer  # noqa: E402
from benchmarks.timing import GpuTimes, SmClock, Times  # noqa: E402


class TestCases:
    def test_names_are_unique(self):
        names = [case.name for case in CASES]
        assert len(set(names)) == len(names) == 18 and set(QUICK) <= set(names)

    @pytest.mark.parametrize(
        "name, floor",
        [
            ("8192/96", 239),
            ("mixed/96", 253),
            ("8x1024/96", 259),
            ("8192/64", 159),
            ("mixed/64", 169),
            ("8x1024/64", 173),
        ]
        + [("2048/12/1", 7.7), ("8192/12/4", 31), ("16384/16/8", 82), ("32768/8/1", 79), ("65536/12/1", 236)],
    )
    def test_bytes_give_the_published_floor(self, name, floor):
        """The floors measured at a copy bandwidth of 4.28 TB/s."""
        case = next(case for case in CASES if case.name == name)
        assert case.bytes / 4.28e12 * 1e6 == pytest.approx(floor, rel=0.01)

    def test_goals_lie_between_floor_and_must(self):
        for case in CASES:
            assert case.bytes / 4.28e12 * 1e6 < case.goal_us < case.must_us
            assert all(length > 0 for length in case.lengths)


class TestChecking:
    """The check before a timing, on a CPU and small cases."""

    @pytest.mark.parametrize("lengths", [(40,), (5, 9, 30), (5, 9, 40)])
    def test_error_of_the_checked_heads(self, lengths, monkeypatch):
        from flash_kda.recurrence import recurrence

        monkeypatch.setattr(run, "CHECKED_TOKENS", 32)
        case = Case("small", "few heads", 3, lengths, 1, 1)
        cu_seqlens = run.cu_seqlens_of(lengths) if len(lengths) > 1 else None
        inputs = run.make_inputs("long", 1, sum(lengths), 3, "cpu", 0, torch.float32, N=len(lengths))
        out, state = recurrence(**inputs, cu_seqlens=cu_seqlens)
        expected = run.checked_part(case, inputs, cu_seqlens)
        error_out, error_state = run.errors_of(case, (out, state), expected)
        assert error_out < 1e-12
        assert error_state is None if max(lengths) > 32 else error_state < 1e-12
        out[:, 3, 2] += 1
        assert run.errors_of(case, (out, state), expected)[0] > 1e-2

    def test_environment_is_restored(self, monkeypatch):
        monkeypatch.setenv("FLASH_KDA_SCHEDULE", "auto")
        monkeypatch.delenv("FLA_FLASH_KDA", raising=False)
        with run.environment_set({"FLASH_KDA_SCHEDULE": "portable", "FLA_FLASH_KDA": "0"}):
            assert run.os.environ["FLASH_KDA_SCHEDULE"] == "portable" and run.os.environ["FLA_FLASH_KDA"] == "0"
        assert run.os.environ["FLASH_KDA_SCHEDULE"] == "auto" and "FLA_FLASH_KDA" not in run.os.environ

    def test_error_by_token(self):
        expected = torch.ones(1, 130, 2, 4, dtype=torch.float64)
        out = expected.clone()
        out[:, 6:9] += 0.5  # bins are of 3 tokens
        errors = run.error_by_token(out, expected)
        assert errors == [[3 * number, 0.5 if number == 2 else 0.0] for number in range(44)]
        assert len(run.error_by_token(out[:, :64], expected[:, :64])) == 64

    def test_the_case_of_the_error_plot_is_one_that_every_peer_runs(self):
        case = next(case for case in CASES if case.name == ERROR_CASE)
        assert len(case.lengths) == 1 and all(case.table in peer.tables for peer in PEERS.values())

    def test_times(self):
        times = Times.of([float(x) for x in range(1, 12)])
        assert (times.median, times.least, times.spread) == (6, 1, 8)


class LimitedGpu:
    """A GPU with a power limit, in place of what timing measures with; it takes no time itself.

    Beyond `busy_limit` seconds of work a replay takes a fifth longer. Half a second of rest undoes all of them, a
    shorter one its share.
    """

    def __init__(self, monkeypatch, replay_us, busy_limit=0.04):
        self.replay_us, self.busy_limit = replay_us, busy_limit
        self.busy, self.events = 0.0, []
        monkeypatch.setattr(timing, "elapsed", self.elapsed)
        monkeypatch.setattr(timing.time, "sleep", self.sleep)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def replay(self):
        self.last_us = self.replay_us * (1.2 if self.busy > self.busy_limit else 1.0)
        self.busy += self.last_us / 1e6

    def elapsed(self, enqueue, samples):
        self.events.append(samples)
        times = []
        for _ in range(samples):
            enqueue()
            times.append(self.last_us)
        return times

    def sleep(self, seconds):
        self.events.append("rest")
        self.busy *= max(1 - 2 * seconds, 0.0)

    def read(self, load):
        """The SmClock."""
        self.events.append("clock")
        before = self.busy
        load()
        self.load_seconds = self.busy - before
        return 1650 if self.busy > self.busy_limit else 1980


class TestGpuTimes:
    def test_rested_is_at_the_full_clock_and_sustained_is_not(self, monkeypatch):
        gpu = LimitedGpu(monkeypatch, 400.0)
        gpu.busy = 1.0  # hot from the case before
        times = timing.replay_times(gpu.replay, 1, gpu)
        assert times.rested == Times(400.0, 400.0, 0.0)
        assert times.sustained.median == 480.0 and times.sustained.least == 400.0 and times.sustained.spread == 80.0
        assert times.sm_clock == 1650
        assert gpu.events == [3, "rest", 40, 300, "clock"]

    def test_a_kernel_that_stays_within_the_limit_has_the_same_time_twice(self, monkeypatch):
        gpu = LimitedGpu(monkeypatch, 90.0, busy_limit=10.0)
        times = timing.replay_times(gpu.replay, 3, gpu)
        assert times == GpuTimes(Times(30.0, 30.0, 0.0), Times(30.0, 30.0, 0.0), 1980)

    @pytest.mark.parametrize(
        "replay_us, burst, sustained", [(10.0, 40, 300), (600.0, 33, 300), (1500.0, 13, 200), (5500.0, 10, 54)]
    )
    def test_replays(self, monkeypatch, replay_us, burst, sustained):
        """10 to 40 and about 20 ms, then 10 to 300 and about 0.3 s, then about 5 ms at a time under the reading."""
        gpu = LimitedGpu(monkeypatch, replay_us, busy_limit=10.0)
        timing.replay_times(gpu.replay, 1, gpu)
        assert gpu.events == [3, "rest", burst, sustained, "clock"]
        assert gpu.load_seconds == pytest.approx(max(0.005, replay_us / 1e6), rel=0.15)


class TestSmClock:
    """The reader, with programs in nvidia-smi's place."""

    @pytest.fixture
    def nvidia_smi(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

        def install(script):
            program = tmp_path / "nvidia-smi"
            program.write_text(f"#!/bin/sh\n{script}\n")
            program.chmod(0o755)
            return tmp_path

        return install

    def test_reads_under_load(self, nvidia_smi):
        folder = nvidia_smi('echo "$@" >"${0%/*}/arguments"; sleep 0.1; echo 1755')
        calls = []
        assert SmClock("GPU-1234").read(lambda: calls.append(time.sleep(0.005))) == 1755
        assert len(calls) > 2
        arguments = (folder / "arguments").read_text().split()
        assert arguments == ["--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "--id=GPU-1234"]

    @pytest.mark.parametrize(
        "script",
        [
            "echo '[N/A]'",
            "echo '[Not Supported]'",
            "echo 1755 MHz",
            "echo 0",
            "echo -1",
            "printf '1755\\n1980\\n'",
            "printf '\\377\\376'",
            "true",
            "echo 'No devices were found'; exit 6",
            "echo 1755; exit 9",
        ],
    )
    def test_what_is_no_clock_is_none(self, nvidia_smi, script):
        nvidia_smi(script)
        assert SmClock("GPU-1234").read(lambda: None) is None

    def test_no_nvidia_smi(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        assert SmClock("GPU-1234").read(lambda: pytest.fail("nothing to wait for")) is None

    def test_one_that_hangs_is_ended_and_not_started_for_ever(self, nvidia_smi):
        folder = nvidia_smi('echo x >>"${0%/*}/starts"; exec sleep 60')
        clock = SmClock("GPU-1234", budget=0.4)
        started = time.monotonic()
        assert [clock.read(lambda: time.sleep(0.01)) for _ in range(3)] == [None] * 3
        assert time.monotonic() - started < 10
        assert (folder / "starts").read_text() == "x\n"

    def test_one_that_is_slow_is_read_until_the_budget_is_spent(self, nvidia_smi):
        nvidia_smi("sleep 0.2; echo 1980")
        clock = SmClock("GPU-1234", budget=20.0)
        assert clock.read(lambda: time.sleep(0.01)) == 1980 and clock.left < 19.9
        clock.left = 0.0
        assert clock.read(lambda: None) is None

    def test_an_error_under_load_ends_the_program(self, nvidia_smi):
        nvidia_smi("exec sleep 60")
        started = time.monotonic()

        def load():
            raise RuntimeError("CUDA error")

        with pytest.raises(RuntimeError, match="CUDA error"):
            SmClock("GPU-1234").read(load)
        assert time.monotonic() - started < 10

    @pytest.mark.parametrize("properties", [{"uuid": "12-34"}, {}])
    def test_the_gpu_is_named_by_its_uuid(self, monkeypatch, nvidia_smi, properties):
        """Its index need not be nvidia-smi's: CUDA_VISIBLE_DEVICES changes it."""
        nvidia_smi('echo "$*" | grep -q "id=GPU-12-34$" && echo 1980')
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch.cuda, "get_device_properties", {3: types.SimpleNamespace(**properties)}.__getitem__)
        timing.current_sm_clock.cache_clear()
        clock = timing.current_sm_clock()
        timing.current_sm_clock.cache_clear()
        assert clock.read(lambda: None) == (1980 if properties else None)


class TestRows:
    """What becomes of each peer on a case, on a CPU, where timing notes that it happened."""

    CASE = Case("small", "many heads", 3, (5, 9, 30), 40, 30)
    TIMES = GpuTimes(Times(2.0, 1.0, 0.5), Times(3.0, 1.5, 0.75), 1755)

    @pytest.fixture
    def timed(self, monkeypatch):
        inputs = make_inputs("long", 1, 44, 3, "cpu", 0, torch.float32, N=3)
        monkeypatch.setattr(run, "input_sets", lambda case, gate: [(inputs, run.cu_seqlens_of(case.lengths))])
        timed = []
        monkeypatch.setattr(run, "gpu_times", lambda calls: timed.append(calls) or self.TIMES)
        for name in ("host_time", "wall_time", "extra_memory"):
            monkeypatch.setattr(run, name, lambda call: 7)
        return timed

    @staticmethod
    def peer(name, change=lambda out: None, reason=None):
        def prepare(inputs, cu_seqlens):
            def call():
                out, state = torch.empty_like(inputs["v"]), torch.empty_like(inputs["initial_state"])
                flash_kda.fwd(**inputs, out=out, final_state=state, cu_seqlens=cu_seqlens)
                change(out)
                return out, state

            return call

        return Peer(name, {}, ("many heads",), lambda: reason, prepare)

    def test_missing_wrong_and_out_of_memory_are_rows_that_say_so(self, timed):
        def exhaust(out):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB\nmore")

        peers = [
            self.peer("flash_kda"),
            self.peer("wrong", lambda out: out[:, 7].add_(1)),
            self.peer("NaN", lambda out: out[:, 7].fill_(torch.nan)),
            self.peer("large", exhaust),
            self.peer("absent", reason="cannot be imported"),
        ]
        seen = []
        rows = run.rows_of(self.CASE, "long", peers, 4e12, seen.append, lambda: False)
        assert [row["peer"] for row in rows] == ["flash_kda", "wrong", "NaN", "large", "absent"]
        assert seen == [f"small long {row['peer']}" for row in rows]
        assert "error" not in rows[0] and rows[0]["error_out"] < 5e-3
        times = {name: value for name, value in rows[0].items() if name.startswith(("gpu_us", "sm_clock"))}
        assert times == {
            **{"gpu_us": 2.0, "gpu_us_least": 1.0, "gpu_us_spread": 0.5},
            **{"gpu_us_sustained": 3.0, "gpu_us_sustained_spread": 0.75, "sm_clock_mhz": 1755},
        }
        assert [row["error"].partition(":")[0] for row in rows[1:3]] == ["wrong result"] * 2
        assert rows[3]["error"].endswith("CUDA out of memory. Tried to allocate 20 GiB")
        assert rows[4]["error"] == "cannot be imported"
        assert len(timed) == 1 and not any("gpu_us" in row for row in rows[1:])
        assert all(row["floor_us"] == self.CASE.bytes / 4e12 * 1e6 and row["must_us"] == 40 for row in rows)

    @pytest.mark.parametrize("clock, shown", [(1755, "1755"), (None, "not known")])
    def test_printed(self, timed, monkeypatch, capsys, clock, shown):
        monkeypatch.setattr(self, "TIMES", replace(self.TIMES, sm_clock=clock))
        rows = run.rows_of(self.CASE, "long", [self.peer("flash_kda")], 4e12, lambda what: None, lambda: False)
        run.print_rows(Console(width=200), rows)
        line = next(line for line in capsys.readouterr().out.splitlines() if "flash_kda" in line)
        cells = [cell.strip() for cell in line.split("│")]
        assert cells[4:9] == ["2.0", "1.0", "0.5", "3.0", shown]

    def test_once_the_time_is_up_rows_say_so(self, timed):
        (row,) = run.rows_of(self.CASE, "long", [self.peer("flash_kda")], 4e12, lambda what: None, lambda: True)
        assert row["error"] == "not run: the time was up" and timed == []


class TestFeatures:
    """The check before a timing; on a CPU, so that timing only notes that it happened."""

    @pytest.fixture
    def timed(self, monkeypatch):
        timed = []
        monkeypatch.setattr(features, "gpu_times", timed.append)
        return timed

    @pytest.mark.parametrize("lengths", [(60,), (5, 9, 30)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_of_states_out_of_place(self, timed, lengths, dtype):
        case = Case("small", "many heads", 3, lengths, 1, 1)
        cu_seqlens = run.cu_seqlens_of(lengths) if len(lengths) > 1 else None
        x = make_inputs("long", 1, sum(lengths), 3, "cpu", 0, dtype, N=len(lengths))
        out, state = torch.empty_like(x["v"]), torch.empty_like(x["initial_state"])
        features.checked_times("a", case, features.fwd_into(x | {"cu_seqlens": cu_seqlens}, out, state), x, cu_seqlens)
        assert len(timed) == 1
        with pytest.raises(RuntimeError, match="b, small: errors of out, final_state"):
            features.checked_times("b", case, lambda: (out, state + 1), x, cu_seqlens)
        assert len(timed) == 1

    @pytest.mark.parametrize("clock, shown", [(1755, "1755"), (None, "not known")])
    def test_printed(self, capsys, clock, shown):
        row = {"case": "plain"} | GpuTimes(Times(2.0, 1.0, 0.5), Times(3.0, 1.5, 0.75), clock).fields()
        Console(width=200).print(features.table_of("gates", [row]))
        line = next(line for line in capsys.readouterr().out.splitlines() if "plain" in line)
        assert [cell.strip() for cell in line.split("│")[1:-1]] == ["plain", "2", "1", "0.5", "3", "0.75", shown]

    def test_of_a_pool_in_place(self, timed):
        case, indices = Case("small", "decoding", 2, (3,) * 4, 1, 1), torch.tensor([2, 0, 3, 1])
        x = make_inputs("long", 4, 3, 2, "cpu", 0, torch.float32)
        out, pool = torch.empty_like(x["v"]), x["initial_state"]
        call = features.fwd_into(x | {"state_indices": indices}, out, pool)
        features.checked_times("a", case, call, x, indices=indices)
        assert len(timed) == 1
        with pytest.raises(RuntimeError, match="b, small"):
            features.checked_times("b", case, call, x)  # the rows of others
        assert len(timed) == 1


class TestPublishedPeer:
    """The published kernel's package has the name of ours. In its place a package and an extension in a folder."""

    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        (tmp_path / "flash_kda").mkdir()
        (tmp_path / "flash_kda" / "__init__.py").write_text(
            "from flash_kda_C import scale_out\nfrom .more import factor\n"
            "def fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound,\n"
            "        initial_state, final_state, cu_seqlens):\n"
            "    scale_out(v, factor, out)\n    final_state.copy_(initial_state)\n"
        )
        (tmp_path / "flash_kda" / "more.py").write_text("factor = 3.0\n")
        (tmp_path / "flash_kda_C.py").write_text("def scale_out(v, factor, out):\n    out.copy_(v * factor)\n")
        monkeypatch.setenv(published.VARIABLE, str(tmp_path))
        yield tmp_path
        published.load.cache_clear()
        for name in [name for name in sys.modules if name.startswith((published.NAME, "flash_kda_C"))]:
            del sys.modules[name]

    def test_is_called_beside_ours(self, folder):
        before = list(sys.path)
        assert PEERS["published FlashKDA"].unavailable() is None
        inputs = make_inputs("random", 1, 20, 2, "cpu", state_dtype=torch.float32)
        out, state = PEERS["published FlashKDA"].prepare(inputs, None)()
        assert torch.equal(out, inputs["v"] * 3) and torch.equal(state, inputs["initial_state"])
        assert Path(flash_kda.__file__).parent == Path(sys.modules["flash_kda"].__file__).parent
        assert flash_kda.fwd is not sys.modules[published.NAME].fwd and sys.path == before

    def test_says_why_it_is_not_there(self, folder, monkeypatch):
        (folder / "flash_kda_C.py").unlink()
        assert "No module named 'flash_kda_C'" in published.unavailable()
        monkeypatch.setenv(published.VARIABLE, str(folder / "none"))
        assert "expected a folder with flash_kda/__init__.py" in published.unavailable()
        monkeypatch.delenv(published.VARIABLE)
        assert published.unavailable().startswith("FLASH_KDA_PUBLISHED does not name")


def test_cudnn_peer_calls_by_the_names_that_cudnn_frontend_has(monkeypatch):
    """A stand-in with the signature of cudnn.linear_attention.kimi_delta_attention, 1.32: tokens [B * T, H, K]."""

    def kimi_delta_attention(
        q, k, v, g, beta, cu_seqlens, *, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel, safe_gate, gate_lower_bound, a_log, dt_bias, plan_name,
    ):  # fmt: skip
        assert q.shape == g.shape == (40, 3, 128) and beta.shape == (40, 3) and plan_name == "kda_hopper_cuda"
        assert cu_seqlens.dtype == torch.int32 and cu_seqlens.tolist() == [0, 20, 40]
        return v, initial_state

    module = types.ModuleType("cudnn.linear_attention")
    module.kimi_delta_attention = kimi_delta_attention
    monkeypatch.setitem(sys.modules, "cudnn", types.ModuleType("cudnn"))
    monkeypatch.setitem(sys.modules, "cudnn.linear_attention", module)
    inputs = make_inputs("random", 2, 20, 3, "cpu", state_dtype=torch.float32)
    out, state = PEERS["cuDNN frontend"].prepare(inputs, None)()
    assert torch.equal(out, inputs["v"]) and torch.equal(state, inputs["initial_state"])


class TestWarmFla:
    """Compiling FLA's kernels beforehand; in FLA's and Triton's place modules that note what is asked of them."""

    def test_a_group_is_a_head_count_and_form(self):
        cases = [case for case in CASES if case.table == "many heads"]
        names = [[case.name for case in group] for group in warm_fla.groups_of(cases)]
        assert names == [["8192/96"], ["mixed/96", "8x1024/96"], ["8192/64"], ["mixed/64", "8x1024/64"]]

    def test_every_configuration_is_compiled_and_no_choice_kept(self, monkeypatch):
        calls = []
        testing = types.ModuleType("triton.testing")
        testing.do_bench = lambda call, **options: pytest.fail("measured a configuration")

        def chunk_kda(q, cu_seqlens, **more):
            """Tunes as Triton does: by what triton.testing holds at the call."""
            assert run.os.environ["FLA_FLASH_KDA"] == "0" and run.os.environ["FLA_CACHE_RESULTS"] == "0"
            configurations = [lambda number=number: calls.append((len(q[0]), number)) for number in range(3)]
            times = [testing.do_bench(one, quantiles=(0.5, 0.2, 0.8)) for one in configurations]
            configurations[times.index(min(times))]()

        modules = {name: types.ModuleType(name) for name in ("fla", "fla.ops", "fla.ops.kda", "triton")}
        modules["fla.ops.kda"].chunk_kda = chunk_kda
        modules["triton"].testing = testing
        for name, module in (modules | {"triton.testing": testing}).items():
            monkeypatch.setitem(sys.modules, name, module)
        for name in (*warm_fla.KEEP_NO_CHOICE, "FLA_FLASH_KDA"):
            monkeypatch.setenv(name, "1")
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        small = {"8192/96": 20, "mixed/96": 30}

        def inputs_of(case, gate):
            return [(make_inputs(gate, 1, small[case.name], 2, "cpu", 0, torch.float32), None)]

        monkeypatch.setattr(warm_fla, "input_sets", inputs_of)
        warm_fla.compile_group([case for case in CASES if case.name in small])
        assert calls == [(tokens, number) for tokens in (20, 30) for number in (0, 1, 2, 0)]

    def test_what_cannot_be_compiled_is_said(self, monkeypatch, capsys, tmp_path):
        (tmp_path / "fla").mkdir()
        (tmp_path / "fla" / "__init__.py").write_text("raise ImportError('an FLA that is broken')")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert warm_fla.main(["--cases", "*/96"]) == 1
        line = "RuntimeError: flash-linear-attention cannot be imported: an FLA that is broken"
        assert capsys.readouterr().out.splitlines() == [f"8192/96: {line}", f"mixed/96, 8x1024/96: {line}"]

    @pytest.mark.parametrize("arguments, message", [(["--cases", "no"], "no case matches 'no'"), ([], "no GPU")])
    def test_errors_are_one_line_and_exit_status_2(self, arguments, message, monkeypatch, capsys):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit) as exit:
            warm_fla.main(arguments)
        assert exit.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]


class TestCommandLine:
    @pytest.mark.parametrize(
        "arguments, message",
        [
            (["--cases", "nothing*"], "no case matches 'nothing*'"),
            (["--peers", "somebody"], "got 'somebody'"),
            (["--quick", "--peers", next(iter(PEERS))], "no GPU"),
        ],
    )
    def test_errors_are_one_line_and_exit_status_2(self, arguments, message, monkeypatch, capsys):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit) as exit:
            run.parse(arguments)
        assert exit.value.code == 2
        assert message in capsys.readouterr().err.splitlines()[-1]

    def test_unwritable_json_is_found_before_the_run(self, monkeypatch, capsys, tmp_path):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        with pytest.raises(SystemExit):
            run.parse(["--json", str(tmp_path / "none" / "file.json")])
        assert "--json: cannot write" in capsys.readouterr().err
        monkeypatch.setattr(sys, "argv", ["features", "--json", str(tmp_path)])
        monkeypatch.setattr(features, "copy_bandwidth", lambda: pytest.fail("measured all the same"))
        with pytest.raises(SystemExit):
            features.main()
        assert "--json: cannot write" in capsys.readouterr().err

    def test_results_stay_until_there_are_others(self, monkeypatch, tmp_path):
        path = tmp_path / "file.json"
        path.write_text("older results")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        run.parse(["--json", str(path)])
        assert path.read_text() == "older results"

    def test_selection(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert [case.name for case in run.parse(["--quick"]).cases] == list(QUICK)
        assert [case.name for case in run.parse(["--cases", "*/64"]).cases] == ["8192/64", "mixed/64", "8x1024/64"]
        assert len(run.parse([]).cases) == len(CASES)

    def test_the_command_is_kept(self, monkeypatch, tmp_path):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        peers = list(PEERS)[:2]
        arguments = ["--quick", "--cases", "*/64", "8192/96", "--peers", *peers, "--seconds", "90"]
        command = run.parse([*arguments, "--json", str(tmp_path / "out.json")]).command
        assert shlex.split(command) == ["python", "-m", "benchmarks.run", *arguments]
        assert run.parse([]).command == "python -m benchmarks.run"

    def test_runs_as_a_module(self):
        result = subprocess.run(
            [sys.executable, "-m", "benchmarks.run", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert result.returncode == 0 and "--quick" in result.stdout, result.stderr


def fake_record():
    rows = [
        {"case": "8192/96", "table": "many heads", "gate": gate, "peer": peer, "floor_us": 238.6, "gpu_us": us}
        for peer, us in (("flash_kda portable", 1500.2), ("FLA Triton", 2600.4))
        for gate in GATE_KINDS
    ]
    rows.append(
        {"case": "1024/4/1", "table": "few heads", "gate": "random", "peer": "flash_kda portable", "floor_us": 1.4}
    )
    rows[-1]["error"] = "out of memory"
    environment = {
        "device": "NVIDIA H200",
        "driver": "1",
        "cuda": "13.0",
        "torch": "2.11",
        "triton": "3.6",
        "fla": "0.6.0",
    }
    return {
        "csrc": tree_digest(ROOT / "csrc"),
        "environment": environment | {"date": "2026-11-30T12:00:00+00:00"},
        "steps": {"tests": "ok"},
        "tests": {"passed": 7, "failed": 0, "skipped": 1, "unpassed": []},
        "sanitizer": {"memcheck": {"status": "exit status 9", "summary": "2 errors"}},
        "errors": {
            "accuracy table, FLA Triton, long: final state": 0.004,
            "accuracy table, flash_kda portable, random: out": 0.00371,
            "FLA fused_recurrent_kda fed float32, random: out": 1.0,
        },
        "benchmark": {
            "device": "NVIDIA H200",
            "date": "2026-11-30T12:05:00+00:00",
            "copy_bandwidth": 4.28e12,
            "rows": rows,
        },
    }


TEXT = "a\n" + "".join(
    f"<!-- record:{name} -->old<!-- /record:{name} -->\nb\n" for name in ("speed", "accuracy", "environment")
)


class TestReadme:
    def test_fill(self):
        filled = record_readme.fill(TEXT, fake_record())
        assert "old" not in filled and filled.startswith("a\n") and filled.endswith("\nb\n")
        assert "| many heads | 8192/96 | 239 | 1500 / 1500 | 2600 / 2600 |" in filled
        assert "| few heads | 1024/4/1 | 1.4 | failed / failed | not measured |" in filled
        assert "| flash_kda portable | 3.71e-3 | not measured | not measured | not measured |" in filled
        assert "| FLA Triton | not measured | not measured | not measured | 4.00e-3 |" in filled
        assert "fused_recurrent" not in filled
        assert "NVIDIA H200" in filled and "7 GPU tests passed" in filled.replace("\n", " ")
        assert "- not passed: compute-sanitizer memcheck: exit status 9: 2 errors" in filled
        assert "From the record, NVIDIA H200, 2026-11-30, copy bandwidth 4.28 TB/s. These have one time" in filled
        assert record_readme.fill(filled, fake_record()) == filled

    def test_sustained_times_have_a_column_where_they_differ(self):
        record = fake_record()
        for row in record["benchmark"]["rows"][:4]:
            row["gpu_us_sustained"] = row["gpu_us"] * (1.1 if row["peer"].startswith("flash_kda") else 1.0)
        filled = record_readme.fill(TEXT, record)
        assert (
            "| flash_kda portable: random / long | flash_kda portable, sustained: random / long | FLA Triton:" in filled
        )
        assert "| many heads | 8192/96 | 239 | 1500 / 1500 | 1650 / 1650 | 2600 / 2600 |" in filled
        assert "| few heads | 1024/4/1 | 1.4 | failed / failed | failed / failed | not measured |" in filled
        assert "FLA Triton, sustained" not in filled and "Rested: median of" in filled.replace("\n", " ")

    def test_sustained_times_of_features(self):
        rows = {
            "gates": [{"case": "plain", "gpu_us": 400.0, "gpu_us_sustained": 440.0, "over_plain": 1.0}],
            "bf16_states": [
                {"case": "8192/64", "gate": gate, "gpu_us": us, "gpu_us_sustained": us + 30}
                for gate, us in (("random", 310.0), ("long", 320.0))
            ],
            "decoding": [{"case": "256 x 1", "peer": "flash_kda", "gpu_us": 297.0, "share_of_bandwidth": 0.855}],
        }
        rows["decoding"][0]["gpu_us_sustained"] = 298.0
        text = record_readme.features({"features": rows})
        assert text.startswith("Rested: ")
        assert "| microseconds | microseconds, sustained | over the plain call |" in text
        assert "| plain | 400 | 440 | 1.00 |" in text
        assert "| random | random, sustained | long | long, sustained | must |" in text
        assert "| 8192/64 | 310 | 340 | 320 | 350 | 320 |" in text
        assert "| by | microseconds | share of the copy bandwidth |" in text
        assert "| 256 x 1 | flash_kda | 297 | 86% |" in text

    def test_a_record_of_other_sources_says_so(self):
        text = "of older kernel sources than these"
        assert text not in record_readme.fill(TEXT, fake_record())
        other = fake_record() | {"csrc": {"total": "0", "files": {}}, "sanitizer": {}}
        assert text in record_readme.fill(TEXT, other)
        assert text in record_readme.checks(other) and text not in record_readme.checks(fake_record())

    def test_a_record_without_a_benchmark_takes_the_results_and_says_so(self):
        filled = record_readme.fill(TEXT, fake_record() | {"benchmark": {}})
        assert "benchmarks/results/nvidia-h200.json" in filled and "a run beside the record" in filled

    def test_deep_dive(self, monkeypatch, tmp_path):
        record = fake_record()
        record["errors"] |= {"sm90, g = -80: out": 4.2e-3, "sm90, g = -80: final state": 3.2e-3}
        for gate, us in (("random", 400), ("long", 500)):
            row = {"case": "8x1024/96", "table": "many heads", "gate": gate, "peer": "flash_kda sm90", "gpu_us": us}
            record["benchmark"]["rows"].append(row | {"floor_us": 250.0, "heads": 96, "lengths": [1024] * 8})
        record["benchmark"]["rows"] = record["benchmark"]["rows"][-2:]
        names = record_readme.PAGES[record_readme.DEEP_DIVE]
        text = "\n".join(f"<!-- record:{name} -->old<!-- /record:{name} -->" for name in names)
        filled = record_readme.fill(text, record, record_readme.DEEP_DIVE)
        assert ">old<" not in filled
        assert "| g = -80 | 4.20e-3 | 3.20e-3 |" in filled
        assert "<!-- record:features -->\nNot in the record.\n" in filled
        record["features"] = {
            "gates": [{"case": "softplus", "gpu_us": 481.2, "over_plain": 1.066}],
            "bf16_states": [{"case": "8192/64", "gate": gate, "gpu_us": 310.2} for gate in GATE_KINDS],
            "decoding": [{"case": "256 x 1", "peer": "flash_kda", "gpu_us": 297.4, "share_of_bandwidth": 0.855}],
        }
        filled = record_readme.fill(filled, record, record_readme.DEEP_DIVE)
        assert "| softplus | 481 | 1.07 |" in filled and "| 8192/64 | 310 | 310 | 320 |" in filled
        assert "| 256 x 1 | flash_kda | 297 | 86% |" in filled
        assert "| 8x1024/96 | 768 | 1024 | 500 | 50% | 488 |" in filled
        assert "- fuzzer: not in the record\n- compute-sanitizer memcheck: exit status 9" in filled
        assert "racecheck" not in filled
        result = {"status": "clean", "summary": "", "calls": {"short": 20, "cut": 9}, "left_out": ["long", "general"]}
        record["sanitizer"]["racecheck sm90"] = result
        filled = record_readme.fill(filled, record, record_readme.DEEP_DIVE)
        assert "- compute-sanitizer racecheck sm90: clean, 29 calls, left out: long, general\n" in filled
        assert "behind a `__syncwarp` that racecheck does not connect" in filled.replace("\n ", "")
        record["fuzz"] = {"cases": 2000, "seed": 0, "schedules": {"sm90": 2000}, "failures": []}
        record["fuzz"]["root mean square"] = {"long: out": 3.61e-3}
        filled = record_readme.fill(filled, record, record_readme.DEEP_DIVE)
        assert "- fuzzer: 2000 cases of seed 0 (2000 sm90), 0 failed\n" in filled and "long: out 3.61e-3" in filled

    def test_the_error_plot_is_shown_once_the_results_have_it(self, monkeypatch):
        row = {"case": "8192/96", "gate": "long", "peer": "flash_kda sm90", "gpu_us": 1.0}
        monkeypatch.setattr(record_readme, "read", lambda path: {"rows": [row]})
        assert record_readme.error_plot({}).startswith("Not measured yet")
        monkeypatch.setattr(record_readme, "read", lambda path: {"rows": [row | {"error_by_token": [[0, 1e-3]]}]})
        assert record_readme.error_plot({}).endswith("(../benchmarks/results/nvidia-h200-error-by-token.svg)")

    def test_a_missing_spot_is_an_error(self):
        with pytest.raises(ValueError, match="record:accuracy"):
            record_readme.fill(TEXT.replace("<!-- record:accuracy -->", ""), fake_record())

    @pytest.mark.parametrize("page", record_readme.PAGES, ids=lambda page: page.name)
    def test_page_matches_the_record(self, page):
        """The pages' numbers are those of tests/gpu_record.json: python -m benchmarks.record_readme."""
        if torch.cuda.is_available():
            pytest.skip("a GPU machine may hold a newer record than the pages': python -m benchmarks.record_readme")
        text = page.read_text(encoding="utf-8")
        assert record_readme.fill(text, json.loads(record_readme.RECORD.read_text()), page) == text

"""The GPU record against the sources, and the parts that make it."""

import json
import shutil
import textwrap

import gpu_record
import pytest
import source_digest
import torch
from hypothesis import given
from hypothesis import strategies as st
from open_problems import OPEN_PROBLEMS, UNRECORDED
from source_digest import canonical, changes, tree_digest

AGAIN = "run `bash tests/gpu.sh` on a machine with a GPU"


@pytest.fixture(scope="module")
def record():
    if torch.cuda.is_available():
        pytest.skip("the kernels can run here: bash tests/gpu.sh tests them and writes a new record")
    assert gpu_record.RECORD.exists(), f"there is no tests/gpu_record.json: {AGAIN}"
    return json.loads(gpu_record.RECORD.read_text())


class TestRecord:
    def test_was_made_of_these_sources(self, record):
        sources = tree_digest(gpu_record.ROOT / "csrc")
        differences = changes(record["csrc"], sources)
        if differences and sources["total"] in UNRECORDED:
            pytest.xfail(f"csrc {sources['total'][:12]} has no GPU record: {UNRECORDED[sources['total']]}")
        assert not differences, f"csrc differs from what the GPU record was made of ({'; '.join(differences)}): {AGAIN}"
        assert record["csrc"]["total"] == sources["total"]

    def test_only_these_sources_may_go_unrecorded(self, record):
        sources = tree_digest(gpu_record.ROOT / "csrc")["total"]
        allowed = set() if record["csrc"]["total"] == sources else {sources}
        assert set(UNRECORDED) <= allowed, "remove this from tests/open_problems.py: there is a record, or csrc changed"

    def test_everything_passed(self, record):
        assert record["format"] == gpu_record.FORMAT, f"the record has another format: {AGAIN}"
        problems = gpu_record.problems(record)
        unknown = [text for text in problems if not any(text.startswith(known) for known in OPEN_PROBLEMS)]
        assert not unknown, f"the record has failures: {AGAIN}"
        settled = [known for known in OPEN_PROBLEMS if not any(text.startswith(known) for text in problems)]
        assert not settled, "remove these from tests/open_problems.py: the record does not have them"
        if problems:
            pytest.xfail("; ".join(f"{known}: {why}" for known, why in OPEN_PROBLEMS.items()))

    def test_saw_fla_dispatch(self, record):
        assert "chunk_kda -> flash_kda" in record["notes"].get("fla dispatch", ""), (
            f"no FLA dispatch in the record: {AGAIN}"
        )


SOURCE = textwrap.dedent(
    r"""
    #include "params.h"  // with a comment
    #define TWICE(x) \
        ((x) + (x))
    #define SPACED (x)
    /* block // "quoted */
    char const* a = "not // a comment /* nor this */ \" \\";
    char const* raw = R"x(keeps   // its   spaces )" and /* text */)x";
    int big = 1'000'000, c = '"', d = '\'', e = L'/';
    float f(float x) { return x - -1.5e-3f / *p; }
    """
)


class TestCanonical:
    @pytest.mark.parametrize(
        "old, new",
        [
            ("  // with a comment", "   // with another one"),
            ("  // with a comment", ""),
            ('/* block // "quoted */', "// don't\n"),
            ('/* block // "quoted */', "// continued \\\n return 1;"),
            ("int big = 1'000'000, c", "int   big=1'000'000,\n\n    c"),
            ("x - -1.5e-3f", "x/**/- /* two */ -1.5e-3f"),
            ("TWICE(x) \\\n    ((x)", "TWICE(x)   \\\n\\\n ((x)"),
            ("\n", "\r\n"),
        ],
    )
    def test_comments_and_layout_do_not_count(self, old, new):
        assert old in SOURCE
        assert canonical(SOURCE.replace(old, new)) == canonical(SOURCE)

    @pytest.mark.parametrize(
        "old, new",
        [
            ("not // a comment", "not /a comment"),
            ("not // a comment", "not  // a comment"),
            ("nor this */", "nor that */"),
            ("keeps   //", "keeps //"),
            ("/* text */", ""),
            ("1'000'000", "1'000'001"),
            ("c = '\"'", "c = '/'"),
            ("- -1.5", "--1.5"),
            ("/ *p", "/ p"),
            ("((x) + (x))", "((x) + (x) + 1)"),
            ("SPACED (x)", "SPACED(x)"),
            ("((x) + (x))\n", "((x) + (x)) "),
            ("float f", "floatf"),
            ("params.h", "param.h"),
            ('/* block // "quoted */', "// continued \\\n not code\nreturn 1;"),
            ('/* block // "quoted */', "return 1;"),
        ],
    )
    def test_code_counts(self, old, new):
        assert old in SOURCE
        assert canonical(SOURCE.replace(old, new)) != canonical(SOURCE)

    def test_string_continued_on_the_next_line(self):
        assert canonical('a = "one \\\ntwo";') == canonical('a = "one two";')

    @given(st.text(alphabet="ab1.'\"\\/*#(){}<>=+-R \n\t", max_size=60))
    def test_any_text_has_a_canonical_form(self, text):
        assert isinstance(canonical(text), str)

    @given(
        st.lists(st.sampled_from(["a", "b1", "(", ")", "+", '"s // t"', "'c'", "0x1f", ";"]), min_size=1, max_size=20)
    )
    def test_separators_do_not_count(self, tokens):
        plain, commented = " ".join(tokens), " /* // */\n\t".join(tokens)
        assert canonical(plain) == canonical(commented)


class TestTreeDigest:
    @pytest.fixture
    def tree(self, tmp_path):
        (tmp_path / "portable").mkdir()
        (tmp_path / "params.h").write_text(SOURCE)
        (tmp_path / "portable" / "fwd.cu").write_text("__global__ void fwd() {}\n")
        (tmp_path / "notes.txt").write_text("not a source\n")
        return tmp_path

    def test_names_what_changed(self, tree):
        before = tree_digest(tree)
        assert set(before["files"]) == {"params.h", "portable/fwd.cu"}
        (tree / "portable" / "fwd.cu").write_text("// comment\n__global__ void fwd( ) { }\n")
        (tree / "notes.txt").write_text("other\n")
        assert tree_digest(tree) == before and changes(before, tree_digest(tree)) == []
        (tree / "portable" / "fwd.cu").write_text("__global__ void fwd() { return; }\n")
        (tree / "new.cuh").write_text("int x;\n")
        (tree / "params.h").unlink()
        after = tree_digest(tree)
        assert after["total"] != before["total"]
        assert changes(before, after) == ["changed: portable/fwd.cu", "gone: params.h", "new: new.cuh"]

    def test_a_moved_file_counts(self, tree):
        before = tree_digest(tree)
        shutil.move(tree / "portable" / "fwd.cu", tree / "fwd.cu")
        assert tree_digest(tree)["total"] != before["total"]

    def test_every_source_of_csrc_is_covered(self):
        files = {path.suffix for path in (gpu_record.ROOT / "csrc").rglob("*") if path.is_file()}
        assert files <= source_digest.SUFFIXES, f"suffixes that the digest leaves out: {files - source_digest.SUFFIXES}"


JUNIT = """<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest" tests="5">
<testcase classname="tests.test_a.TestA" name="test_one[0]" time="0.1"><properties>
<property name="error: portable, random: out" value="0.003"/><property name="fla dispatch" value="x -&gt; y"/>
</properties></testcase>
<testcase classname="tests.test_a.TestA" name="test_one[1]" time="0.1"><properties>
<property name="error: portable, random: out" value="0.004"/></properties></testcase>
<testcase classname="tests.test_a" name="test_two"><failure message="assert 1 == 2&#10;more">trace</failure></testcase>
<testcase classname="tests.test_a" name="test_three"><skipped message="needs two GPUs">where</skipped></testcase>
<testcase classname="tests.test_a" name="test_four"><error message="failed on setup">trace</error></testcase>
</testsuite></testsuites>"""


def benchmark_result(**change):
    row = {"case": "8192/96", "table": "many heads", "gate": "random", "peer": "flash_kda portable", "floor_us": 239.0}
    row |= {"must_us": 400, "gpu_us": 1234.5, "host_us": 9.0, "error_out": 4e-3, "error_state": 2e-3, "extra_bytes": 0}
    return {"copy_bandwidth": 4.28e12, "rows": [row | change]}


def fuzz_result(**change):
    result = {"device": "cuda", "seed": 0, "cases": 2000, "schedules": {"sm90": 1100, "portable": 900}, "failures": []}
    errors = {"worst of a (sequence, head)": {"random: out": 9e-3}, "root mean square": {"random: out": 3.6e-3}}
    return result | errors | change


def features_result(over_plain=1.3, share=0.7, fla_us=290.0, decoding="256 x 1 tokens, 32 heads"):
    rows = [
        {"case": decoding, "peer": "flash_kda", "gpu_us": 290.0, "share_of_bandwidth": share},
        {"case": decoding, "peer": "FLA fused_recurrent_kda", "gpu_us": fla_us, "share_of_bandwidth": 0.7},
    ]
    gates = [{"case": "plain", "gpu_us": 460.0, "over_plain": 1.0}]
    gates.append({"case": "softplus", "gpu_us": 500.0, "over_plain": over_plain})
    states = [{"case": "8192/96", "gate": "random", "gpu_us": 455.0}]
    return {"gates": gates, "decoding": rows, "bf16_states": states}


@pytest.fixture
def results(tmp_path):
    """A folder as tests/gpu.sh fills it, of a run in which everything passed."""
    passing = JUNIT.replace('<failure message="assert 1 == 2&#10;more">trace</failure>', "")
    passing = passing.replace('<error message="failed on setup">trace</error>', "")
    (tmp_path / "tests.xml").write_text(passing)
    (tmp_path / "benchmark.json").write_text(json.dumps(benchmark_result()))
    (tmp_path / "features.json").write_text(json.dumps(features_result()))
    (tmp_path / "fuzz.json").write_text(json.dumps(fuzz_result()))
    (tmp_path / "memcheck sm90.status").write_text("0\n")
    (tmp_path / "memcheck sm90.log").write_text(
        "========= COMPUTE-SANITIZER\nsm90, short: 29 calls\nsm90, long: 4 calls\n"
        "========= ERROR SUMMARY: 0 errors\ntook 40 s\n"
    )
    (tmp_path / "racecheck sm90.status").write_text("missing\n")
    return tmp_path


def make(results, steps=(("tests", "ok"), ("benchmark", "ok"))):
    return gpu_record.make_record(
        [results / "tests.xml"],
        results / "benchmark.json",
        results / "features.json",
        results / "fuzz.json",
        results,
        steps,
    )


class TestMaking:
    def test_junit(self, tmp_path):
        (tmp_path / "tests.xml").write_text(JUNIT)
        tests, errors, notes = gpu_record.read_junit([tmp_path / "tests.xml"])
        assert {name: tests[name] for name in ("run", "passed", "failed", "skipped")} == {
            "run": 4,
            "passed": 2,
            "failed": 2,
            "skipped": 1,
        }
        assert [(test["name"].rpartition("::")[2], test["outcome"], test["reason"]) for test in tests["unpassed"]] == [
            ("test_two", "failed", "assert 1 == 2\nmore"),
            ("test_three", "skipped", "needs two GPUs"),
            ("test_four", "failed", "failed on setup"),
        ]
        assert errors == {"portable, random: out": 0.004}
        assert notes == {"fla dispatch": "x -> y"}

    def test_a_run_in_which_everything_passed(self, results):
        record = make(results)
        assert gpu_record.problems(record) == []
        assert json.loads(json.dumps(record)) == record
        assert record["csrc"] == tree_digest(gpu_record.ROOT / "csrc")
        clean = {"status": "clean", "summary": "ERROR SUMMARY: 0 errors"}
        assert record["sanitizer"]["memcheck sm90"] == clean | {"calls": {"short": 29, "long": 4}, "left_out": []}
        assert record["sanitizer"]["racecheck sm90"]["status"].startswith("not run")
        text = gpu_record.summary(record)
        assert "result: passed" in text and len(text.splitlines()) < 100
        assert "compute-sanitizer memcheck sm90: clean, 33 calls; ERROR SUMMARY: 0 errors" in text
        assert "features: decoding 256 x 1 tokens, 32 heads, flash_kda: 290 us, 70% of the copy bandwidth" in text
        assert "fuzz: seed 0, 2000 cases, 0 failed; worst of a (sequence, head): random: out 9.00e-03" in text

    def test_the_summary_has_sustained_times_where_there_are_some(self, results):
        assert "flash_kda portable random 1234.5 |" in gpu_record.summary(make(results))
        (results / "benchmark.json").write_text(json.dumps(benchmark_result(gpu_us_sustained=1300.25)))
        assert "flash_kda portable random 1234.5 (1300.2 sustained) |" in gpu_record.summary(make(results))

    @pytest.mark.parametrize(
        "file, content, found",
        [
            ("tests.xml", JUNIT, "test_two: assert 1 == 2"),
            ("tests.xml", None, "tests: no results"),
            ("tests.xml", "<broken", "tests: no results"),
            ("tests.xml", "<testsuites/>", "no test passed"),
            ("benchmark.json", None, "benchmark: no results"),
            ("benchmark.json", json.dumps(benchmark_result(error="wrong result")), "benchmark 8192/96, random"),
            ("features.json", None, "features: no results"),
            ("features.json", json.dumps(features_result(over_plain=1.31)), "softplus: 1.31 times plain, at most 1.3"),
            ("features.json", json.dumps(features_result(share=0.69)), "69% of the copy bandwidth, at least 70%"),
            ("features.json", json.dumps(features_result(fla_us=289.0)), "290 us, FLA fused_recurrent_kda 289 us"),
            ("features.json", json.dumps(features_result(decoding="1 x 1")), "features: no results of softplus or"),
            ("fuzz.json", None, "fuzz: no results"),
            ("fuzz.json", json.dumps(fuzz_result(cases=1999)), "fuzz: 1999 cases, fewer than 2000"),
            ("fuzz.json", json.dumps(fuzz_result(failures=["a command"])), "fuzz: a command"),
            ("memcheck sm90.status", "9\n", "memcheck sm90: exit status 9"),
            ("memcheck sm90.status", "124\n", "memcheck sm90: timed out"),
            ("memcheck sm90.log", "========= ERROR SUMMARY: 0 errors\n", "memcheck sm90: clean, but of no calls"),
            ("memcheck sm90.log", "sm90, a: 2 calls\nsm90, left out: b, c\n", "memcheck sm90: left out: b, c"),
        ],
    )
    def test_what_failed_is_in_the_record(self, results, file, content, found):
        (results / file).unlink()
        if content is not None:
            (results / file).write_text(content)
        record = make(results)
        assert any(found in problem for problem in gpu_record.problems(record)), gpu_record.problems(record)
        text = gpu_record.summary(record)
        assert "result: " in text and "result: passed" not in text

    def test_a_run_of_tests_without_results_takes_none_from_the_others(self, results):
        record = gpu_record.make_record(
            [results / "fla.xml", results / "tests.xml"],
            *(results / f"{name}.json" for name in ("benchmark", "features", "fuzz")),
            results,
            [("tests", "ok"), ("fla", "exit status 4")],
        )
        assert record["tests"]["passed"] == 4 and record["errors"] == {"portable, random: out": 0.004}
        assert gpu_record.problems(record) == ["fla: no results: FileNotFoundError: No such file or directory"]

    def test_racecheck_may_leave_out_parts_and_says_so(self, results):
        (results / "racecheck sm90.status").write_text("0\n")
        (results / "racecheck sm90.log").write_text("sm90, short: 29 calls\nsm90, left out: long, general\n")
        record = make(results)
        assert gpu_record.problems(record) == []
        assert "racecheck sm90: clean, 29 calls, left out: long, general;" in gpu_record.summary(record)

    def test_nothing_is_written_without_a_gpu(self, results, monkeypatch, capsys):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(gpu_record, "RECORD", results / "gpu_record.json")
        arguments = [
            "gpu_record.py",
            "--junit",
            "tests.xml",
            "--benchmark",
            "benchmark.json",
            "--features",
            "features.json",
            "--fuzz",
            "fuzz.json",
            "--sanitizer",
            str(results),
        ]
        monkeypatch.setattr("sys.argv", arguments)
        with pytest.raises(SystemExit) as exit:
            gpu_record.main()
        assert exit.value.code == 2 and "no GPU" in capsys.readouterr().err
        assert not gpu_record.RECORD.exists()

    def test_a_failed_step_is_a_problem(self, results):
        assert gpu_record.problems(make(results, [("set-up and build", "exit status 2")])) == [
            "set-up and build: exit status 2"
        ]

    def test_a_missing_peer_is_no_problem(self, results):
        (results / "benchmark.json").write_text(json.dumps(benchmark_result(peer="FLA Triton", error="not importable")))
        assert gpu_record.problems(make(results)) == []

    def test_a_summary_of_many_failures_stays_short(self, results):
        failure = '<testcase classname="a" name="b"><failure message="m">trace</failure></testcase>'
        (results / "tests.xml").write_text(f"<testsuites><testsuite>{failure * 500}</testsuite></testsuites>")
        assert len(gpu_record.summary(make(results)).splitlines()) < 100

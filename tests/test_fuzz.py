"""Short runs of the fuzzer, and that it finds faults. The long run is tests/gpu.sh's: 2000 cases."""

import json
import os
import re
import subprocess
import sys

import fuzz
import pytest
import torch
from guarded import POISON, bits
from inputs import HEAD_DIM
from project_copy import ROOT

import flash_kda

SEED = 1


def test_cpu():
    """The same cases everywhere; as many as take some ten seconds."""
    report = fuzz.fuzz(SEED, range(80), "cpu")
    assert report["failures"] == [] and report["cases"] == 80


@pytest.mark.gpu
def test_gpu(record_property):
    report = fuzz.fuzz(SEED, range(200), "cuda", seconds=20)
    assert report["failures"] == []
    record_property("fuzz", f"{report['cases']} cases")


class TestCases:
    def test_are_functions_of_seed_and_number(self):
        assert fuzz.case_of(3, 14) == fuzz.case_of(3, 14)
        assert len({repr(fuzz.case_of(seed, number)) for seed in (1, 2) for number in range(100)}) == 200

    def test_contents_are_the_same_again(self):
        first, second = (fuzz.Call(fuzz.case_of(3, 14), "cpu", flash_kda.fwd) for _ in range(2))
        for name, memory in first.buffers.items():
            assert torch.equal(memory.buffer, second.buffers[name].buffer)

    def test_cover_what_they_should(self):
        """In 500 cases: every gate, schedule, state mode, layout and poisoned argument; every kind of shape."""
        cases = [fuzz.case_of(SEED, number) for number in range(500)]
        assert {case.gate for case in cases} == set(fuzz.GATES)
        assert {case.schedule for case in cases} == set(fuzz.SCHEDULES)
        modes = {(case.initial_state, case.final_state, case.state_dtype) for case in cases}
        assert len(modes) == 2 * (2 + 3)
        for name in ("q", "k", "v", "g"):
            assert {case.layouts[name] for case in cases} == {*fuzz.LAYOUTS, "one head for all", "fused"}
        assert {case.layouts["out"] for case in cases} == set(fuzz.LAYOUTS)
        assert {case.poisoned for case in cases} == {*fuzz.TOKEN_INPUTS, "initial_state"}
        assert {case.packed for case in cases} == {True, False}
        assert any(0 in case.lengths and max(case.lengths) for case in cases)
        assert any(not any(case.lengths) for case in cases)
        assert max(max(case.lengths) for case in cases) > 500
        assert max(len(case.lengths) for case in cases) > 130
        assert max(case.heads for case in cases) > 90

    def test_half_of_them_are_plain(self):
        """And those are what they were before there were options: the same draws in all else."""
        cases = [fuzz.case_of(SEED, number) for number in range(500)]
        assert 200 < sum(case.kind == case.gate for case in cases) < 300

    def test_cover_the_keyword_only_arguments(self):
        cases = [fuzz.case_of(SEED, number) for number in range(500)]
        checkpoints = [case.checkpoints for case in cases if case.checkpoint_places]
        values = {
            "form": {"bounded", "softplus", "log"},
            "beta": {"sigmoid", "twice sigmoid", "activated"},
            "normalise": {True, False},
            "missing": {(), ("A_log",), ("dt_bias",), ("A_log", "dt_bias")},
            "flat_bias": {True, False},
            "pitch": {0, 64},
            **dict.fromkeys(("g_dtype", "beta_dtype"), {torch.bfloat16, torch.float32}),
            **dict.fromkeys(("index_dtype", "cu_seqlens_dtype"), {torch.int32, torch.int64}),
        }
        for name, expected in values.items():
            assert {getattr(case, name) for case in cases} == expected, name
        assert {1, 2, 3} < {case.group for case in cases}
        assert any(case.indices and None in case.state_rows and case.final_state == "in place" for case in cases)
        assert {x.at for x in checkpoints} == {"end", "start"} and {x.interval for x in checkpoints} == {64, 128, 192}
        assert {x.offsets is None for x in checkpoints} == {True, False}
        assert {x.dtype for x in checkpoints} == {torch.bfloat16, torch.float32}
        places = [place for case in cases for place in case.checkpoint_places]
        assert sum(step > 0 for _, _, step in places) > 100 and any(step == 0 for _, _, step in places)

    def test_draw_from_the_schedules_that_are_asked_for(self):
        names = ("portable", "sm90")
        assert {fuzz.case_of(SEED, number, names).schedule for number in range(50)} == set(names)
        report = fuzz.fuzz(SEED, range(2), "cpu", names, fwd=faulty(be_inaccurate))
        options = fuzz.parse(report["failures"][0].partition("  # ")[0].split()[2:])
        assert tuple(options.schedule) == names

    def test_2000_cases_fit_the_gpu_record(self):
        """100 microseconds a step of the recurrence and 25 ms a case for everything else stay below 150 s."""
        fuzzer = fuzz.Fuzzer("cuda")
        steps, states, longest = 0, 0, 0
        for number in range(2000):
            case = fuzz.case_of(0, number)
            states += case.states
            longest = max(longest, *case.lengths)
            if states >= fuzzer.most_pending:
                steps, states, longest = steps + longest, 0, 0
        assert 100e-6 * steps + 25e-3 * 2000 < 150


def faulty(fault):
    """flash_kda.fwd with a fault: fault(arguments, call number) after the call."""
    calls = 0

    def fwd(**arguments):
        nonlocal calls
        calls += 1
        flash_kda.fwd(**arguments)
        fault(arguments, calls)

    return fwd


def change_one(x):
    """Changes one element that is not NaN by a hundredth."""
    flat = x.reshape(-1)
    where = flat.isfinite().nonzero()
    if len(where):
        flat[where[-1]] = flat[where[-1]] * 1.01 + 1e-6
        x.copy_(flat.view(x.shape))


def last_row(arguments):
    """Of out, the last that a sequence covers, or None."""
    out, cu_seqlens = arguments["out"], arguments.get("cu_seqlens")
    end = out.shape[1] if cu_seqlens is None else int(cu_seqlens[-1])
    start = 0 if cu_seqlens is None else int(cu_seqlens[0])
    return out[-1, end - 1] if end > start else None


def skip_a_row(arguments, call):
    if (row := last_row(arguments)) is not None:
        row.view(torch.int16).fill_(0x7FA5)  # as if never written


def write_past_the_end(arguments, call):
    out, cu_seqlens = arguments["out"], arguments.get("cu_seqlens")
    if cu_seqlens is not None and int(cu_seqlens[-1]) < out.shape[1]:
        out[0, int(cu_seqlens[-1])] = 0


def write_beside_out(arguments, call):
    out = arguments["out"]
    out.as_strided((8,), (1,), out.storage_offset() - 8).fill_(0)


def write_beside_the_state(arguments, call):
    if arguments.get("final_state") is not None:
        state = arguments["final_state"]
        state.as_strided((1,), (1,), state.storage_offset() + state.numel()).fill_(0)


def change_an_input(arguments, call):
    change_one(arguments["v"][:, :, :1])


def differ_from_call_to_call(arguments, call):
    if call % 2 and (row := last_row(arguments)) is not None:
        change_one(row)


def look_ahead(arguments, call):
    v, out = arguments["v"], arguments["out"]
    if arguments.get("cu_seqlens") is None and out.shape[1] > 1:
        out[:, 0] += 1e-3 * v[:, -1].clamp(-100, 100)


def look_at_another_sequence(arguments, call):
    v, out = arguments["v"], arguments["out"]
    if arguments.get("cu_seqlens") is None and out.shape[0] > 1 and out.shape[1]:
        out[0, 0] += 1e-5 * v[1, 0]


def lose_the_sign_of_zero(arguments, call):
    state, cu_seqlens = arguments.get("final_state"), arguments.get("cu_seqlens")
    if state is not None and cu_seqlens is not None:
        state[cu_seqlens.diff() == 0] *= 1.5


def be_inaccurate(arguments, call):
    out = arguments["out"]
    rows = out.isfinite()
    out[rows] = out[rows] * 1.01


def be_slightly_inaccurate(arguments, call):
    """Too little for a single row, and too much for all of them."""
    out = arguments["out"]
    rows = out.isfinite()
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).mul_(2e-3)
    out[rows] = (out * (1 + noise)).to(out.dtype)[rows]


def have_an_inaccurate_state(arguments, call):
    if arguments.get("final_state") is not None and arguments["final_state"].dtype == torch.float32:
        arguments["final_state"].mul_(1 + 3e-5)


def write_a_row_that_nobody_names(arguments, call):
    if arguments.get("state_indices") is not None and arguments.get("final_state") is not None:
        others = set(range(len(arguments["final_state"]))) - set(arguments["state_indices"].tolist())
        for row in others:
            arguments["final_state"][row, 0, 0, 0] = 0


def read_the_last_row_for_minus_1(arguments, call):
    indices, states = arguments.get("state_indices"), arguments.get("initial_state")
    if indices is not None and states is not None and -1 in indices.tolist():
        n, cu_seqlens, out = indices.tolist().index(-1), arguments.get("cu_seqlens"), arguments["out"]
        rows = out[n] if cu_seqlens is None else out[0, int(cu_seqlens[n]) : int(cu_seqlens[n + 1])]
        rows += states[-1, :, 0].to(torch.bfloat16)


def skip_a_checkpoint(arguments, call):
    if arguments.get("checkpoints") is not None:
        first = bits(arguments["checkpoints"])[0]
        first.fill_(POISON[arguments["checkpoints"].dtype][1])


def write_a_checkpoint_too_many(arguments, call):
    if arguments.get("checkpoints") is not None:
        arguments["checkpoints"][-1] = 0


def have_inaccurate_checkpoints(arguments, call):
    if arguments.get("checkpoints") is not None and arguments["checkpoint_at"] == "end":
        x = arguments["checkpoints"]
        x.copy_(torch.where(x.isfinite(), 1.02 * x, x))


FAULTS = {
    skip_a_row: "not written",
    write_past_the_end: "written, though no sequence covers it",
    write_beside_out: "guard region before|written, though",
    write_beside_the_state: "guard region after",
    change_an_input: "beside it was changed",
    differ_from_call_to_call: "second call",
    look_ahead: "other tokens in sequence",
    look_at_another_sequence: "NaN in v of sequence|other tokens",
    lose_the_sign_of_zero: "which has no tokens",
    be_inaccurate: "out: error",
    be_slightly_inaccurate: "out: root mean square error|out: error",
    have_an_inaccurate_state: "final state: ",
    write_a_row_that_nobody_names: "final_state: .*written, though no sequence names it",
    read_the_last_row_for_minus_1: "out: ",
    skip_a_checkpoint: "checkpoints: .*not written",
    write_a_checkpoint_too_many: "checkpoints: .*written, though no checkpoint goes there",
    have_inaccurate_checkpoints: "checkpoints: error",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_finds(fault):
    """Each fault within 60 cases, by the check that is for it."""
    report = fuzz.fuzz(SEED, range(60), "cpu", fwd=faulty(fault))
    assert any(re.search(FAULTS[fault], line) for line in report["failures"]), report["failures"]


def test_a_failure_is_one_line_that_reproduces_it(capsys, monkeypatch):
    report = fuzz.fuzz(SEED, range(20), "cpu", fwd=faulty(be_inaccurate))
    command, _, reason = report["failures"][0].partition("  # ")
    assert "\n" not in report["failures"][0] and reason.startswith("out: error")
    words = command.split()
    assert words[:2] == ["python", "tests/fuzz.py"]
    options = fuzz.parse(words[2:])
    assert len(options.numbers) == 1 and options.seed == SEED and options.device == "cpu"
    again = fuzz.fuzz(options.seed, options.numbers, "cpu", fwd=faulty(be_inaccurate))
    assert again["failures"][0] == report["failures"][0]


def test_an_exception_is_a_failure_and_the_run_goes_on():
    def fwd(**arguments):
        if arguments["v"].shape[2] == 2:
            raise RuntimeError("the kernel launch failed\nwith a second line")
        flash_kda.fwd(**arguments)

    report = fuzz.fuzz(SEED, range(12), "cpu", fwd=fwd)
    expected = [number for number in range(12) if fuzz.case_of(SEED, number).heads == 2]
    assert [int(line.split()[5]) for line in report["failures"]] == expected and report["cases"] == 12
    assert all("launch failed with a second line" in line for line in report["failures"])


def test_the_reference_of_many_cases_at_once_is_that_of_each():
    from flash_kda.recurrence import recurrence

    cases = [case for case in (fuzz.case_of(SEED, number) for number in range(60)) if case.states <= 12]
    with_options = [case for case in cases if case.kind != case.gate]
    calls = [fuzz.Call(case, "cpu", flash_kda.fwd) for case in with_options[:8] + cases[:3]]
    out, states, checkpoint = fuzz.expected_of(calls)
    row = pair = 0
    names = ("state_indices", "checkpoint_offsets")
    for call in calls:
        case = call.case
        arguments = {name: x for name, x in call.arguments.items() if name not in names}
        if case.initial_state:
            initial = [call.initial_state_of(n) for n in range(len(case.lengths))]
            zeros = torch.zeros(case.heads, HEAD_DIM, HEAD_DIM, dtype=case.state_dtype)
            arguments["initial_state"] = torch.stack([zeros if x is None else x for x in initial])
        expected, state, taken = recurrence(**arguments, checkpoint_interval=64)
        rows = fuzz.by_pair(expected, case)[0, :, 0]
        torch.testing.assert_close(out[row : row + len(rows)], rows, rtol=1e-9, atol=1e-12 * rows.abs().max().item())
        state = state.view(-1, HEAD_DIM, HEAD_DIM)
        torch.testing.assert_close(states[pair : pair + len(state)], state, rtol=1e-9, atol=1e-12)
        wanted = [
            checkpoint(pair + n * case.heads + head, step)
            for n, length in enumerate(case.lengths)
            for step in range(64, length + 1, 64)
            for head in range(case.heads)
        ]
        if wanted:
            torch.testing.assert_close(torch.stack(wanted), taken.flatten(0, 1), rtol=1e-9, atol=1e-12)
        row, pair = row + len(rows), pair + len(state)
    assert row == len(out) and pair == len(states)
    assert sum(max(call.case.lengths) >= 64 for call in calls) > 2


class TestCommandLine:
    def test_needs_no_installed_package(self, tmp_path):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [sys.executable, ROOT / "tests" / "fuzz.py", "--cases", "1", "--device", "cpu"]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        assert "seed 0: 1 cases on cpu" in result.stdout

    def test_json_and_exit_status(self, tmp_path, capsys):
        path = tmp_path / "fuzz.json"
        assert fuzz.main(["--cases", "3", "--seed", "5", "--device", "cpu", "--json", str(path)]) == 0
        report = json.loads(path.read_text())
        assert (report["cases"], report["seed"], report["failures"]) == (3, 5, [])
        assert "seed 5: 3 cases on cpu" in capsys.readouterr().out

    def test_a_failure_is_status_1(self, capsys, monkeypatch):
        monkeypatch.setattr(fuzz, "fuzz", lambda *x, **y: {**fuzz.Fuzzer().report(5), "failures": ["line"]})
        assert fuzz.main(["--cases", "1", "--device", "cpu"]) == 1
        assert capsys.readouterr().out.startswith("line\n")

    def test_seconds_end_the_run(self):
        assert fuzz.fuzz(SEED, range(10**6), "cpu", seconds=0.5)["cases"] < 1000
        assert len(fuzz.parse(["--seconds", "3"]).numbers) > 10**9 and len(fuzz.parse([]).numbers) == 100

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (["--seed", "-1"], "--seed"),
            (["--case", "x"], "--case"),
            (["--schedule", "fastest"], "--schedule"),
            (["--device", "cuda"], "no GPU that PyTorch can use"),
        ],
    )
    def test_unusable_arguments_are_status_2(self, arguments, message, monkeypatch, capsys):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit) as exit:
            fuzz.parse(arguments)
        assert exit.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]

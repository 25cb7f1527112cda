"""Random calls of flash_kda.fwd against the fp64 recurrence and against what holds bit for bit.

    python tests/fuzz.py [--cases N] [--seconds S] [--seed X] [--device cpu|cuda] [--schedule NAME] [--json FILE]
    python tests/fuzz.py --seed X --case N [--device ...] [--schedule ...]      # one case again

A case is a pure function of (seed, number): shape, packing, memory layouts, gates, states, schedule and contents. Each
buffer lies between guard regions and is poisoned where a call has nothing to read or write. Of every case is checked:

- every row of `out` that a sequence covers is written and finite, all else in its buffer is untouched; the same for
  `final_state`; a sequence without tokens keeps its state to the bit; the inputs and what lies beside them stay
- determinism: a second call gives the same bits
- causality: other tokens from a position on change no bit before it
- isolation: NaN in one sequence's tokens or state changes no bit of another sequence
- accuracy: out and final_state of every (sequence, head), and their root mean square over all cases of a gate kind

The accuracy of many cases is checked at once, since the recurrence takes as many steps as the longest sequence of them.
Exit status: 0 passed, 1 a case failed (one line each, which reproduces it), 2 unusable arguments.
"""

import argparse
import dataclasses
import json
import math
import os
import random
import sys
import time
from collections import Counter
from itertools import accumulate
from pathlib import Path

# Without an installed package, that of the folder that this file is in.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import schedules
import torch
from accuracy import BOUNDS, NO_DECAY_BOUNDS
from guarded import Guarded, assert_same_bits
from inputs import HEAD_DIM, LOWER_BOUND, TOKEN_INPUTS, make_inputs

import flash_kda
from flash_kda.interface import SCHEDULES
from flash_kda.recurrence import recurrence

EDGES = (0, 1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65)
# Gate kind -> bounds on the GPU for the root mean square over its cases: a mixture is held to the bounds of its slowest
# channels.
GATES = {
    "random": BOUNDS["random"],
    "long": BOUNDS["long"],
    "saturated": BOUNDS["long"],
    "no decay": NO_DECAY_BOUNDS,
    "extreme": BOUNDS["long"],
    "token by token": NO_DECAY_BOUNDS,
}
LAYOUTS = ("contiguous", "heads first", "wide heads", "wide tokens", "padded batch")
MOST_FAILURES = 10


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. `lengths`: tokens of each sequence; if not packed, each is a batch row of the same length."""

    seed: int
    number: int
    heads: int
    packed: bool
    lengths: tuple[int, ...]
    uncovered: tuple[int, int]  # rows before the first and after the last sequence
    gate: str
    lower_bound: float
    scale: float
    magnitudes: dict[str, float]  # of q, k, v and the initial state, as factors of make_inputs' values
    initial_state: bool
    final_state: str  # none, separate or in place
    state_dtype: torch.dtype
    layouts: dict[str, str]
    schedule: str
    victim: int  # the sequence whose tokens and state are changed
    position: float  # of the first changed token, as a share of the victim's length
    poisoned: str  # the argument that gets NaN

    @property
    def shape(self):
        """B, T, H"""
        if self.packed:
            return 1, sum(self.lengths) + sum(self.uncovered), self.heads
        return len(self.lengths), self.lengths[0], self.heads

    @property
    def rows(self):
        """(batch row, tokens) of each sequence."""
        if not self.packed:
            return [(b, slice(0, length)) for b, length in enumerate(self.lengths)]
        starts = accumulate(self.lengths, initial=self.uncovered[0])
        return [(0, slice(start, start + length)) for start, length in zip(starts, self.lengths, strict=False)]

    @property
    def states(self):
        return len(self.lengths) * self.heads


def length_of(rng, most):
    return rng.choice(EDGES) if rng.random() < 0.5 else rng.randint(0, most)


def shape_of(rng):
    """(heads, packed, lengths): mostly small, some with more sequences, heads or tokens than run at once."""
    kind = rng.choices(("packed", "batch", "crowd", "wide", "long"), (50, 25, 8, 5, 12))[0]
    if kind == "batch":
        return rng.randint(1, 6), False, (length_of(rng, 100),) * rng.randint(1, 4)
    if kind == "crowd":
        return rng.randint(1, 3), True, tuple(rng.randint(0, 6) for _ in range(rng.randint(40, 160)))
    if kind == "wide":
        return rng.randint(30, 100), True, tuple(length_of(rng, 20) for _ in range(rng.randint(1, 2)))
    if kind == "long":
        return rng.randint(1, 3), True, tuple(rng.randint(0, 700) for _ in range(rng.randint(1, 3)))
    return rng.randint(1, 5), True, tuple(length_of(rng, 50) for _ in range(rng.randint(1, 6)))


def case_of(seed, number):
    """The case of this number. Each aspect has random numbers of its own, so that a new one leaves the others alone."""

    def rng(aspect):
        return random.Random(f"{seed} {number} {aspect}")

    heads, packed, lengths = shape_of(rng("shape"))
    states, layouts, changes = rng("states"), rng("layouts"), rng("changes")
    initial_state = states.random() < 0.6
    names = ("q", "k", "v", "g")
    chosen = {name: layouts.choice((*LAYOUTS, "one head for all")) for name in names}
    if layouts.random() < 0.25:
        chosen = dict.fromkeys(names, "fused")
    chosen["beta"] = layouts.choice(("contiguous", "heads first", "column slice"))
    chosen["out"] = layouts.choice(LAYOUTS)
    return Case(
        seed=seed,
        number=number,
        heads=heads,
        packed=packed,
        lengths=lengths,
        uncovered=(rng("before").choice((0, 0, 5)), rng("after").choice((0, 0, 7, 40))) if packed else (0, 0),
        gate=rng("gate").choice(tuple(GATES)),
        lower_bound=rng("lower bound").choice((LOWER_BOUND, LOWER_BOUND, LOWER_BOUND, -1.0, -1e-3)),
        scale=rng("scale").choice((HEAD_DIM**-0.5, HEAD_DIM**-0.5, 1.0, -0.25)),
        magnitudes={
            name: rng(f"magnitude {name}").choice((1.0, 1.0, 1.0, *others))
            for name, others in (("q", (0.01, 50.0)), ("k", (0.01, 50.0)), ("v", (1e-3, 1e3)), ("state", (10.0, 1e3)))
        },
        initial_state=initial_state,
        final_state=states.choice(("none", "separate", "separate", *("in place",) * initial_state)),
        state_dtype=states.choice((torch.float32, torch.bfloat16)),
        layouts=chosen,
        schedule=rng("schedule").choice(SCHEDULES),
        victim=changes.randrange(len(lengths)),
        position=changes.random(),
        poisoned=changes.choice((*TOKEN_INPUTS, *("initial_state",) * initial_state)),
    )


def laid_out(B, T, H, layout, own=None):
    """(shape of the memory, function from it to its [B, T, H, 128] view) of a layout; own: the part of a fused one."""
    return {
        "contiguous": ((B, T, H, HEAD_DIM), lambda x: x),
        "heads first": ((B, H, T, HEAD_DIM), lambda x: x.transpose(1, 2)),
        "wide heads": ((B, T, H, HEAD_DIM + 8), lambda x: x[..., 8:]),
        "wide tokens": ((B, T, H + 1, HEAD_DIM), lambda x: x[:, :, 1:]),
        "padded batch": ((B, T + 3, H, HEAD_DIM), lambda x: x[:, 2 : 2 + T]),
        "one head for all": ((B, T, 1, HEAD_DIM), lambda x: x.expand(B, T, H, HEAD_DIM)),
        "fused": ((B, T, 4, H, HEAD_DIM), lambda x: x[:, :, own]),
    }[layout]


def beta_laid_out(B, T, H, layout):
    return {
        "contiguous": ((B, T, H), lambda x: x),
        "heads first": ((B, H, T), lambda x: x.transpose(1, 2)),
        "column slice": ((B, T, H + 7), lambda x: x[..., 3 : 3 + H]),
    }[layout]


class Call:
    """A case's arguments on a device, and calls of `fwd` with them."""

    def __init__(self, case, device, fwd):
        self.case, self.device, self.fwd = case, device, fwd
        B, T, H = case.shape
        N = len(case.lengths)
        kind = case.gate if case.gate in ("random", "long") else "random"
        content = make_inputs(kind, B, T, H, device, hash_of(case), case.state_dtype, N=N)
        generator = torch.Generator(device=device).manual_seed(hash_of(case) + 1)
        self._change_gate(content, generator)
        for name in ("q", "k", "v"):
            content[name] *= case.magnitudes[name]
        content["initial_state"] *= case.magnitudes["state"]
        content |= {"lower_bound": case.lower_bound, "scale": case.scale}

        self.buffers, self.arguments, self.own = {}, content, {}
        for i, name in enumerate(TOKEN_INPUTS):
            layout = case.layouts[name]
            shape, view = (beta_laid_out if name == "beta" else laid_out)(B, T, H, layout, *(i,) * (layout == "fused"))
            key = "fused" if layout == "fused" else name
            memory = self.buffers.setdefault(key, Guarded(shape, torch.bfloat16, device))
            # What is written to: of a head that serves for all, only itself. Rows of no sequence stay poisoned.
            self.own[name] = memory.tensor if layout == "one head for all" else view(memory.tensor)
            for b, tokens in case.rows:
                self.own[name][b, tokens] = content[name][b, tokens, : self.own[name].shape[2]]
            self.arguments[name] = view(memory.tensor)
        for name in ("A_log", "dt_bias", "initial_state"):
            memory = self.buffers[name] = Guarded(content[name].shape, content[name].dtype, device)
            memory.tensor.copy_(content[name])
            self.arguments[name] = memory.tensor
        if not case.initial_state:
            self.arguments["initial_state"] = None
        if case.packed:
            starts = [tokens.start for _, tokens in case.rows] + [case.rows[-1][1].stop]
            memory = self.buffers["cu_seqlens"] = Guarded((len(starts),), torch.int64, device)
            memory.tensor.copy_(torch.tensor(starts))
            self.arguments["cu_seqlens"] = memory.tensor
        self.before = {name: memory.buffer.clone() for name, memory in self.buffers.items()}
        self.covered = torch.zeros(B, T, dtype=torch.bool, device=device)
        for b, tokens in case.rows:
            self.covered[b, tokens] = True

    def _change_gate(self, content, generator):
        g = content["g"]
        if self.case.gate == "saturated":
            g.fill_(80.0)
        elif self.case.gate == "no decay":
            g.fill_(-80.0)
        elif self.case.gate == "extreme":
            g *= 8
            content["dt_bias"] = torch.sign(content["dt_bias"] - 0.5) * 8
            content["A_log"] *= 2.8
        elif self.case.gate == "token by token":
            g.copy_(torch.randint(-1, 2, g.shape[:2], generator=generator, device=g.device)[..., None, None] * 80.0)

    def run(self):
        """(out [B, T, H, 128], final_state or None) of one call into poisoned memory, with the writes checked."""
        case, arguments = self.case, dict(self.arguments)
        shape, view = laid_out(*case.shape, case.layouts["out"])
        out, state = Guarded(shape, torch.bfloat16, self.device), None
        if case.final_state != "none":
            states = (len(case.lengths), case.heads, HEAD_DIM, HEAD_DIM)
            state = Guarded(states, case.state_dtype, self.device)
            if case.final_state == "in place":
                state.tensor.copy_(arguments["initial_state"])
                arguments["initial_state"] = state.tensor
            arguments["final_state"] = state.tensor
        self.fwd(**arguments, out=view(out.tensor))

        expected = torch.zeros(shape, dtype=torch.bool, device=self.device)
        view(expected)[self.covered] = True
        out.assert_guards_untouched()
        wrong = out.written() != expected
        if bool(wrong.any()):
            where = tuple(wrong.nonzero()[0].tolist())
            what = "not written" if bool(expected[where]) else "written, though no sequence covers it"
            raise AssertionError(f"out: {int(wrong.sum())} elements wrong, the first, {where} of its memory, {what}")
        if state is not None:
            state.assert_guards_untouched()
            assert bool(state.written().all()), "final_state: not all of it was written"
        return view(out.tensor), None if state is None else state.tensor

    def assert_inputs_unchanged(self):
        for name, memory in self.buffers.items():
            assert torch.equal(memory.buffer, self.before[name]), f"{name} or what lies beside it was changed"

    def restore(self):
        for name, memory in self.buffers.items():
            memory.buffer.copy_(self.before[name])

    def assert_same(self, results, kept_rows, kept_states, what):
        """That a call now gives the bits of `results` in rows [B, T] and states [N]."""
        out, state = self.run()
        assert_same_bits(out[kept_rows], results[0][kept_rows], f"out, {what}")
        if state is not None:
            assert_same_bits(state[kept_states], results[1][kept_states], f"final_state, {what}")

    def check_bits(self):
        """Everything but the accuracy; returns (out, final_state)."""
        case = self.case
        results = out, state = self.run()
        self.assert_inputs_unchanged()
        assert bool(out[self.covered].isfinite().all()), "out: not finite"
        if state is not None:
            for n, length in enumerate(case.lengths):
                if length == 0:
                    kept = self.arguments["initial_state"]
                    kept = torch.zeros_like(state[n]) if kept is None else kept[n]
                    assert_same_bits(state[n], kept, f"final_state of sequence {n}, which has no tokens")
        every_state = torch.ones(len(case.lengths), dtype=torch.bool, device=self.device)
        self.assert_same(results, self.covered, every_state, "second call")

        b, tokens = case.rows[case.victim]
        others = every_state.clone()
        others[case.victim] = False
        changed = slice(tokens.start + int(case.position * (tokens.stop - tokens.start)), tokens.stop)
        kept = self.covered.clone()
        kept[b, changed] = False
        factors = {"q": -3.0, "k": 2.0, "v": 1e6, "g": -1.0, "beta": -2.0}
        for name, factor in factors.items():
            self.own[name][b, changed] *= factor
        self.assert_same(results, kept, others, f"other tokens in sequence {case.victim} from {changed.start} on")
        self.restore()

        kept[b, tokens] = False
        if case.poisoned == "initial_state":
            self.arguments["initial_state"][case.victim] = torch.nan
        else:
            self.own[case.poisoned][b, tokens] = torch.nan
        self.assert_same(results, kept, others, f"NaN in {case.poisoned} of sequence {case.victim}")
        self.restore()
        return results


def hash_of(case):
    """The seed of a case's contents."""
    return random.Random(f"{case.seed} {case.number} contents").randrange(2**40)


def by_pair(x, case):
    """[B, T, H, ...] -> [1, rows, 1, ...]: the tokens of one (sequence, head) after those of another."""
    pieces = [x[b, tokens].transpose(0, 1).flatten(0, 1) for b, tokens in case.rows]
    return torch.cat(pieces)[None, :, None]


def expected_of(calls):
    """fp64 (rows of out by pair, states by pair) of calls with one lower_bound, by a single run of the recurrence.

    Every (sequence, head) of every call becomes a sequence of one head. What belongs to a head or a call, exp(A_log),
    dt_bias and scale, goes into g before and into out afterwards.
    """
    inputs = {name: [by_pair(call.arguments[name], call.case) for call in calls] for name in TOKEN_INPUTS}
    initial_states, lengths, scales = [], [], []
    for i, call in enumerate(calls):
        case, arguments = call.case, call.arguments
        g = arguments["A_log"].double().exp()[:, None] * (arguments["g"].double() + arguments["dt_bias"].double())
        inputs["g"][i] = by_pair(g, case)
        state = arguments["initial_state"]
        shape = (case.states, 1, HEAD_DIM, HEAD_DIM)
        initial_states.append(
            torch.zeros(shape, dtype=torch.float64, device=call.device) if state is None else state.double().view(shape)
        )
        lengths += [length for length in case.lengths for _ in range(case.heads)]
        scales.append(torch.full((inputs["g"][i].shape[1],), case.scale, dtype=torch.float64, device=call.device))
    device = calls[0].device
    out, states = recurrence(
        **{name: torch.cat(pieces, 1) for name, pieces in inputs.items()},
        scale=1.0,
        A_log=torch.zeros(1, device=device),
        dt_bias=torch.zeros(1, HEAD_DIM, device=device),
        lower_bound=calls[0].case.lower_bound,
        initial_state=torch.cat(initial_states),
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], device=device),
    )
    return out[0, :, 0] * torch.cat(scales)[:, None], states[:, 0]


def errors_of(case, initial_state, results, expected):
    """(tokens, relative errors of out, of final_state or None) of each (sequence, head) with tokens, in fp64.

    The error of a pair's rows of out is relative to their norm, but at least to what a query of any direction reads of
    the final state: a query that happens to be orthogonal to all keys has no digits to compare. That of a final state
    is relative to its norm, but at least to 2^-10 of the initial state's: what is erased to less has gone through
    products whose operand, the state, was rounded to bf16 (2^-9).
    """
    out, state = results
    expected_out, expected_state = expected
    tokens = torch.tensor(case.lengths, device=expected_out.device).repeat_interleave(case.heads)
    pair = torch.arange(len(tokens), device=tokens.device).repeat_interleave(tokens)
    some = tokens > 0

    def norms(x):
        return torch.zeros_like(tokens, dtype=torch.float64).index_add_(0, pair, x.square().sum(-1)).sqrt()

    difference = norms(by_pair(out, case)[0, :, 0].double() - expected_out)
    state_norm = torch.linalg.matrix_norm(expected_state)
    readable = abs(case.scale) * state_norm * HEAD_DIM**-0.5
    error_out = relative(difference, torch.maximum(norms(expected_out), readable))[some]
    if state is None:
        return tokens[some].double(), error_out, None
    difference = torch.linalg.matrix_norm(state.reshape(expected_state.shape).double() - expected_state)
    if initial_state is not None:
        initial_norm = torch.linalg.matrix_norm(initial_state.double().reshape(expected_state.shape))
        state_norm = torch.maximum(state_norm, 2**-10 * initial_norm)
    return tokens[some].double(), error_out, relative(difference, state_norm)[some]


def relative(difference, norm):
    """difference / norm; 0 where both are 0, inf where the norm alone is 0 or the difference is no number."""
    error = torch.where(difference == 0, 0.0, difference / norm)
    return torch.where(error.isfinite(), error, math.inf)


class Tally:
    """Sums of squared errors by gate kind, and the worst errors of single (sequence, head) pairs."""

    def __init__(self, device):
        self.cuda = device == "cuda"
        self.sums = {}
        self.worst = {}

    def pair_bounds(self, part, tokens, dtype):
        """Largest error of each (sequence, head) of so many tokens.

        On a CPU `out` is rounded to bf16 once, by 2^-8 of an element at most, and all else is fp32. On a GPU few tokens
        average less than the thousands of rows that the bounds in GATES are for. An emulation of the kernels' roundings
        found, in 27000 pairs of 1000 cases, up to 2.2e-2 for out of less than 8 tokens, 9.7e-3 of less than 32, 5.4e-3
        of less than 64, 4.7e-3 of more, and up to 6.3e-3 for the final state.
        """
        if part == "out":
            return 5e-3 + 0.16 / tokens if self.cuda else torch.full_like(tokens, 2**-8 + 1e-5)
        bound = (8e-3 if self.cuda else 1e-5) + 2**-8 * (dtype == torch.bfloat16)
        return torch.full_like(tokens, bound)

    def add(self, case, errors):
        """AssertionError where the error of a pair exceeds its bound. Those without tokens were held to their bits."""
        tokens, *parts = errors
        for part, error in zip(("out", "final state"), parts, strict=True):
            if error is None or not len(error):
                continue
            key = f"{case.gate}: {part}"
            self.worst[key] = max(error.max().item(), self.worst.get(key, 0.0))
            bounds = self.pair_bounds(part, tokens, case.state_dtype)
            if bool((error > bounds).any()):
                pair = int((error / bounds).argmax())
                raise AssertionError(
                    f"{part}: error {error[pair]:.3e} of {int(tokens[pair])} tokens of a head, bound {bounds[pair]:.3e}"
                )
            if part == "final state" and case.state_dtype == torch.bfloat16:
                continue  # the rounding of the result would hide what the bounds are for
            weights = tokens if part == "out" else torch.ones_like(tokens)
            total = self.sums.setdefault(key, [0.0, 0.0])
            total[0] += (error.square() * weights).sum().item()
            total[1] += weights.sum().item()

    def pooled(self):
        """{"GATE: PART": root mean square of the errors, those of out weighted by tokens}"""
        return {key: math.sqrt(squares / count) for key, (squares, count) in self.sums.items()}

    def exceeded(self):
        """What of pooled() is beyond its bound, in words. Few rows average little, hence the count."""
        found = []
        for key, error in self.pooled().items():
            gate, _, part = key.partition(": ")
            if self.cuda:
                bound = GATES[gate][part != "out"]
            else:
                bound = 2e-3 if part == "out" else 2e-6
            if self.sums[key][1] >= 200 and error > bound:
                found.append(f"{key}: root mean square error {error:.3e} over all cases, bound {bound:.3e}")
        return found


class Fuzzer:
    """Runs cases on one device and keeps what it found."""

    def __init__(self, device="cpu", schedule=None, fwd=flash_kda.fwd):
        self.device, self.schedule, self.fwd = device, schedule, fwd
        self.tally = Tally(device)
        self.failures = []
        self.done = Counter()
        self.pending = []
        # Cases whose accuracy is checked together: as many states as the memory and the caches take.
        self.most_pending = 2048 if device == "cuda" else 64

    def command(self, case):
        words = f"python tests/fuzz.py --seed {case.seed} --case {case.number} --device {self.device}"
        return words + f" --schedule {self.schedule}" * bool(self.schedule)

    def fail(self, case, error):
        text = " ".join(str(error).split()) or type(error).__name__
        self.failures.append(f"{self.command(case)}  # {text}")

    def run(self, case):
        """Checks a case's bits now, and its accuracy with those of others, at the latest at finish()."""
        schedule = self.schedule or case.schedule
        if self.device == "cuda" and schedule != "auto" and schedules.why_not(schedule):
            schedule = "auto"
        self.done[schedule if self.device == "cuda" else "cpu"] += 1
        os.environ["FLASH_KDA_SCHEDULE"] = schedule
        try:
            call = Call(case, self.device, self.fwd)
            results = call.check_bits()
        except Exception as error:  # whatever it is, the case that shows it is what counts
            self.fail(case, error)
            return
        self.pending.append((call, results))
        if sum(call.case.states for call, _ in self.pending) >= self.most_pending:
            self.finish()

    def finish(self):
        pending, self.pending = self.pending, []
        by_bound = {}
        for call, results in pending:
            by_bound.setdefault(call.case.lower_bound, []).append((call, results))
        for group in by_bound.values():
            out, states = expected_of([call for call, _ in group])
            row = pair = 0
            for call, results in group:
                case = call.case
                rows = row + sum(case.lengths) * case.heads
                expected = out[row:rows], states[pair : pair + case.states]
                row, pair = rows, pair + case.states
                try:
                    errors = errors_of(case, call.arguments["initial_state"], results, expected)
                    self.tally.add(case, errors)
                except AssertionError as error:
                    self.fail(case, error)

    def report(self, seed):
        """What is kept of a run: for --json, and so for the GPU record."""
        return {
            "device": self.device,
            "seed": seed,
            "cases": sum(self.done.values()),
            "schedules": dict(self.done),
            "worst of a (sequence, head)": self.tally.worst,
            "root mean square": self.tally.pooled(),
            "failures": self.failures + self.tally.exceeded(),
        }


def fuzz(seed, numbers, device="cpu", schedule=None, seconds=math.inf, fwd=flash_kda.fwd, progress=None):
    """Runs the cases (seed, number) until `seconds` are over or too many have failed; returns Fuzzer.report()."""
    fuzzer = Fuzzer(device, schedule, fwd)
    before, end = os.environ.get("FLASH_KDA_SCHEDULE"), time.monotonic() + seconds
    try:
        for number in numbers:
            if time.monotonic() > end or len(fuzzer.failures) >= MOST_FAILURES:
                break
            fuzzer.run(case_of(seed, number))
            if progress:
                progress(sum(fuzzer.done.values()), len(fuzzer.failures))
        fuzzer.finish()
    finally:
        if before is None:
            os.environ.pop("FLASH_KDA_SCHEDULE", None)
        else:
            os.environ["FLASH_KDA_SCHEDULE"] = before
    return fuzzer.report(seed)


def parse(arguments):
    def natural(text):
        if not text.isdecimal():
            raise argparse.ArgumentTypeError(f"expected an integer of 0 or more, got {text!r}")
        return int(text)

    parser = argparse.ArgumentParser(prog="python tests/fuzz.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=natural, metavar="N", help="how many cases; default: 100, or what S allows")
    parser.add_argument("--seconds", type=float, default=math.inf, metavar="S", help="start no case after S seconds")
    parser.add_argument("--seed", type=natural, default=0, metavar="X", help="default: 0")
    parser.add_argument("--case", type=natural, metavar="N", help="only the case of this number")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where PyTorch sees a GPU")
    parser.add_argument("--schedule", choices=SCHEDULES, help="for every case; default: a random one each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there, too")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device cuda: no GPU that PyTorch can use")
        if options.schedule not in (None, "auto") and (reason := schedules.why_not(options.schedule)):
            parser.error(f"--schedule {options.schedule}: {reason}")
    if options.case is not None:
        options.numbers = range(options.case, options.case + 1)
    elif options.cases is None and options.seconds < math.inf:
        options.numbers = range(sys.maxsize)
    else:
        options.numbers = range(100 if options.cases is None else options.cases)
    return options


def main(arguments=None):
    options = parse(arguments)
    started = time.monotonic()

    def progress(done, failed):
        if sys.stderr.isatty():
            print(f"\r{done} cases, {failed} failed ", end="", file=sys.stderr, flush=True)

    report = fuzz(options.seed, options.numbers, options.device, options.schedule, options.seconds, progress=progress)
    report["seconds"] = round(time.monotonic() - started, 1)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    for line in report["failures"]:
        print(line)
    for name in ("root mean square", "worst of a (sequence, head)"):
        print(f"{name}: " + ", ".join(f"{key} {error:.2e}" for key, error in sorted(report[name].items())))
    ran = ", ".join(f"{count} {schedule}" for schedule, count in report["schedules"].items())
    print(
        f"seed {options.seed}: {report['cases']} cases on {options.device} ({ran}) in {report['seconds']} s, "
        f"{len(report['failures'])} failed"
    )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Random calls of flash_kda.fwd against the fp64 recurrence and against what holds bit for bit.

    python tests/fuzz.py [--cases N] [--seconds S] [--seed X] [--device cpu|cuda] [--schedule NAME ...] [--json FILE]
    python tests/fuzz.py --seed X --case N [--device ...] [--schedule ...]      # one case again

A case is a pure function of (seed, number): shape, packing, memory layouts, gates, states, schedule and contents, and
for half of the cases the keyword-only arguments: state pools, checkpoints, other gates and activations, grouped heads.
Each buffer lies between guard regions and is poisoned where a call has nothing to read or write. Of every case is
checked:

- every row of `out` that a sequence covers is written and finite, all else in its buffer is untouched; the same for
  `final_state` (of a pool, the rows that a sequence names) and `checkpoints`; a sequence without tokens keeps its state
  to the bit; the inputs and what lies beside them stay
- determinism: a second call gives the same bits
- causality: other tokens from a position on change no bit before it
- isolation: NaN in one sequence's tokens or state changes no bit of another sequence
- accuracy: out, final_state and checkpoints of every (sequence, head), and their root mean square over all cases of a
  gate kind, those with keyword-only arguments apart

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
from flash_kda.recurrence import L2_EPSILON, natural_log_decay, recurrence
from flash_kda.validation import CHECKPOINT_UNIT, checkpoint_count

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
# With keyword-only arguments, whatever the gate. The emulation of Tally.pair_bounds gives up to 3.9e-3 and 2.4e-3 for
# each kind of beta, gate and normalisation, in 406 of the first 590 such cases of seed 0; it does not cover softplus
# and decays beyond what a chunk's factors hold.
OPTIONS_BOUNDS = BOUNDS["long"]
LAYOUTS = ("contiguous", "heads first", "wide heads", "wide tokens", "padded batch")
MOST_FAILURES = 10
NO_DEFAULT = dataclasses.MISSING


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """Where a call's checkpoints go. `offsets`: None lays them one after the other."""

    interval: int
    at: str
    dtype: torch.dtype
    rows: int
    offsets: tuple[int, ...] | None

    def places(self, lengths):
        """[(row, sequence, tokens before it)] of those that are written for sequences of these lengths."""
        counts = [checkpoint_count(length, self.interval, self.at) for length in lengths]
        offsets = self.offsets or tuple(accumulate(counts, initial=0))
        return [
            (offsets[n] + i, n, (i + (self.at == "end")) * self.interval)
            for n, count in enumerate(counts)
            for i in range(count)
            if offsets[n] + i < min(offsets[n + 1], self.rows)
        ]


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
    # What the keyword-only arguments and their like ask for; the defaults make the plain call.
    group: int = 1  # heads of v for each of q and k
    form: str = "bounded"  # of the gate: bounded, softplus or log
    strength: float = 1.0  # factor of decays that are given as such
    beta: str = "sigmoid"  # or twice sigmoid, or activated
    normalise: bool = True
    missing: tuple[str, ...] = ()  # of A_log and dt_bias
    flat_bias: bool = False
    g_dtype: torch.dtype = torch.bfloat16
    beta_dtype: torch.dtype = torch.bfloat16
    cu_seqlens_dtype: torch.dtype = torch.int64
    indices: tuple[int, ...] | None = None  # rows of the state pools; those outside count as none
    index_dtype: torch.dtype = torch.int64
    pool_rows: int = 0  # 0: one state a sequence
    pitch: int = 0  # elements between the rows of the states
    checkpoints: Checkpoints | None = None

    @property
    def kind(self):
        """Cases that share bounds of the root mean square."""
        plain = all(getattr(self, x.name) == x.default for x in dataclasses.fields(self) if x.default is not NO_DEFAULT)
        return self.gate if plain else f"{self.gate}, options"

    @property
    def checkpoint_places(self):
        """[(row, sequence, tokens before it)] of the checkpoints that are written."""
        return self.checkpoints.places(self.lengths) if self.checkpoints else []

    @property
    def state_rows(self):
        """The row of the states that each sequence reads and writes; None reads zeros and writes nothing."""
        if self.indices is None:
            return list(range(len(self.lengths)))
        return [row if 0 <= row < self.pool_rows else None for row in self.indices]

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


def checkpoints_of(rng, packed, lengths):
    """Some or no checkpoints: one after the other, with gaps, or with room for only some of them."""
    if rng.random() < 0.2:
        return None
    interval = CHECKPOINT_UNIT * rng.choice((1, 1, 1, 2, 3))
    at, dtype = rng.choice(("end", "start")), rng.choice((torch.float32, torch.bfloat16))
    counts = [checkpoint_count(length, interval, at) for length in lengths]
    style = rng.choice(("dense", "gaps", "short"))
    if style == "dense":
        return Checkpoints(interval, at, dtype, sum(counts) + rng.choice((1, 3)), None)
    rooms = [max(0, count + rng.randint(*((0, 2) if style == "gaps" else (-2, 0)))) for count in counts]
    offsets = tuple(accumulate(rooms, initial=rng.randint(0, 2)))
    return Checkpoints(interval, at, dtype, max(1, offsets[-1] + rng.randint(-1, 2)), offsets)


def options_of(rng, heads, packed, lengths, layouts):
    """The fields of a Case beyond the plain call's. `rng` as in case_of."""
    form = rng("gate form").choice(("bounded", "bounded", "softplus", "log"))
    pool, N = rng("pool"), len(lengths)
    options = {"pitch": pool.choice((0, 0, 64))}
    if pool.random() < 0.5:
        rows = N + pool.randint(0, 4)
        named = pool.sample(range(rows), N)
        outside = (-1, -1, rows, -(2**31), 2**31 - 1)
        options |= {
            "indices": tuple(pool.choice(outside) if pool.random() < 0.25 else row for row in named),
            "index_dtype": pool.choice((torch.int32, torch.int64)),
            "pool_rows": rows,
        }
    either = (torch.bfloat16, torch.float32)
    return options | {
        "group": rng("group").choice((1, 1, *(n for n in range(2, heads + 1) if heads % n == 0))),
        "form": form,
        "strength": rng("strength").choice((1.0, 1.0, 200.0)) if form == "log" else 1.0,
        "beta": rng("beta").choice(("sigmoid", "twice sigmoid", "activated")),
        "normalise": rng("normalise").random() < 0.7,
        "missing": tuple(name for name in ("A_log", "dt_bias") if form == "log" or rng(f"no {name}").random() < 0.2),
        "flat_bias": rng("flat bias").random() < 0.5,
        "g_dtype": torch.bfloat16 if layouts["g"] == "fused" else rng("dtype of g").choice(either),
        "beta_dtype": rng("dtype of beta").choice(either),
        "cu_seqlens_dtype": rng("cu_seqlens").choice((torch.int32, torch.int64)) if packed else torch.int64,
        "checkpoints": checkpoints_of(rng("checkpoints"), packed, lengths),
    }


def case_of(seed, number, schedules=SCHEDULES):
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
    options = options_of(rng, heads, packed, lengths, chosen) if rng("options").random() < 0.5 else {}
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
        schedule=rng("schedule").choice(schedules),
        victim=changes.randrange(len(lengths)),
        position=changes.random(),
        poisoned=changes.choice((*TOKEN_INPUTS, *("initial_state",) * initial_state)),
        **options,
    )


def laid_out(B, T, H, layout, heads=None, first=0):
    """(shape of the memory, function from it to its [B, T, H, 128] view) of a layout.

    A fused one has `heads` heads in all, of which these are the `first` and the following.
    """
    return {
        "contiguous": ((B, T, H, HEAD_DIM), lambda x: x),
        "heads first": ((B, H, T, HEAD_DIM), lambda x: x.transpose(1, 2)),
        "wide heads": ((B, T, H, HEAD_DIM + 8), lambda x: x[..., 8:]),
        "wide tokens": ((B, T, H + 1, HEAD_DIM), lambda x: x[:, :, 1:]),
        "padded batch": ((B, T + 3, H, HEAD_DIM), lambda x: x[:, 2 : 2 + T]),
        "one head for all": ((B, T, 1, HEAD_DIM), lambda x: x.expand(B, T, H, HEAD_DIM)),
        "fused": ((B, T, heads, HEAD_DIM), lambda x: x[:, :, first : first + H]),
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
        B, T, HV = case.shape
        H = HV // case.group
        kind = case.gate if case.gate in ("random", "long") else "random"
        content = make_inputs(kind, B, T, HV, device, hash_of(case), case.state_dtype, N=len(case.lengths))
        generator = torch.Generator(device=device).manual_seed(hash_of(case) + 1)
        self._change_gate(content, generator)
        self._change_form(content)
        for name in ("q", "k", "v"):
            # Keys that are taken as they are have to be of length 1 at most: the state would grow without bound.
            keeps = name == "k" and not case.normalise
            content[name] *= min(1.0, case.magnitudes[name]) if keeps else case.magnitudes[name]
        content["initial_state"] *= case.magnitudes["state"]
        content |= {"lower_bound": case.lower_bound if case.form == "bounded" else None, "scale": case.scale}

        self.buffers, self.arguments, self.own = {}, content, {}
        heads = {"q": H, "k": H, "v": HV, "g": HV, "beta": HV}
        first = dict(zip(heads, accumulate(heads.values(), initial=0), strict=False))
        for name in TOKEN_INPUTS:
            layout, fused = case.layouts[name], case.layouts[name] == "fused"
            shape, view = (
                beta_laid_out(B, T, HV, layout)
                if name == "beta"
                else laid_out(B, T, heads[name], layout, 2 * (H + HV), first[name])
            )
            key = "fused" if fused else name
            if key not in self.buffers:
                self.buffers[key] = Guarded(shape, content[name].dtype, device)
            memory = self.buffers[key]
            # What is written to: of a head that serves for all, only itself. Rows of no sequence stay poisoned.
            self.own[name] = memory.tensor if layout == "one head for all" else view(memory.tensor)
            for b, tokens in case.rows:
                self.own[name][b, tokens] = content[name][b, tokens, : self.own[name].shape[2]]
            self.arguments[name] = view(memory.tensor)
        for name in ("A_log", "dt_bias"):
            if name in case.missing:
                self.arguments[name] = None
                continue
            shape = (-1,) if case.flat_bias else content[name].shape
            self._keep(name, content[name].reshape(shape))
        initial = content["initial_state"]
        self.arguments["initial_state"] = None
        if case.initial_state:
            # Rows that no sequence names stay poisoned.
            memory, states = self._states()
            for n, row in enumerate(case.state_rows):
                if row is not None:
                    states[row] = initial[n]
            self.buffers["initial_state"], self.arguments["initial_state"] = memory, states
        if case.packed:
            starts = [tokens.start for _, tokens in case.rows] + [case.rows[-1][1].stop]
            self._keep("cu_seqlens", torch.tensor(starts, dtype=case.cu_seqlens_dtype))
        # Without a pool to name rows of there are no indices.
        if case.indices is not None and (case.initial_state or case.final_state != "none"):
            self._keep("state_indices", torch.tensor(case.indices, dtype=case.index_dtype))
        if case.checkpoints and case.checkpoints.offsets:
            self._keep("checkpoint_offsets", torch.tensor(case.checkpoints.offsets))
        if case.form == "log":
            self.arguments["gate"] = "log"
        if case.beta != "sigmoid":
            switch = "allow_neg_eigval" if case.beta == "twice sigmoid" else "use_beta_sigmoid_in_kernel"
            self.arguments[switch] = case.beta == "twice sigmoid"
        if not case.normalise:
            self.arguments["use_qk_l2norm_in_kernel"] = False
        self.before = {name: memory.buffer.clone() for name, memory in self.buffers.items()}
        self.covered = torch.zeros(B, T, dtype=torch.bool, device=device)
        for b, tokens in case.rows:
            self.covered[b, tokens] = True

    def _keep(self, name, x):
        """An argument that is contiguous: a copy of x between guards."""
        memory = self.buffers[name] = Guarded(x.shape, x.dtype, self.device)
        memory.tensor.copy_(x)
        self.arguments[name] = memory.tensor

    def _states(self):
        """(memory, its view as states [rows, H, 128, 128])"""
        case = self.case
        row = case.heads * HEAD_DIM**2
        memory = Guarded((case.pool_rows or len(case.lengths), row + case.pitch), case.state_dtype, self.device)
        return memory, memory.tensor[:, :row].unflatten(1, (case.heads, HEAD_DIM, HEAD_DIM))

    def initial_state_of(self, n):
        """What sequence n starts from, or None for zeros."""
        row, states = self.case.state_rows[n], self.arguments["initial_state"]
        return None if states is None or row is None else states[row]

    def _change_form(self, content):
        """Contents for what is given activated or normalised, in the case's dtypes and numbers of heads."""
        case = self.case
        if case.form == "log":
            decays = (content[name] for name in ("g", "A_log", "dt_bias"))
            content["g"] = case.strength * natural_log_decay(*decays, case.lower_bound, dtype=torch.float32)
        for name, dtype in (("g", case.g_dtype), ("beta", case.beta_dtype)):
            x = content[name].float()
            if name == "beta" and case.beta == "activated":
                x = torch.sigmoid(x)
            if dtype == torch.float32 and not (name == "beta" and case.beta == "activated"):
                x = x * 1.001  # no bf16 numbers
            content[name] = x.to(dtype)
        for name in ("q", "k"):
            x = content[name][:, :, : case.heads // case.group]
            content[name] = x if case.normalise else torch.nn.functional.normalize(x.float(), dim=-1).bfloat16()

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
        """(out [B, T, H, 128], final states by sequence, checkpoints by place) of one call into poisoned memory, with
        the writes checked. Of a state that nothing is written of: zeros; of no states or checkpoints: None."""
        case, arguments = self.case, dict(self.arguments)
        shape, view = laid_out(*case.shape, case.layouts["out"])
        out = Guarded(shape, torch.bfloat16, self.device)
        state_memory = checkpoints = None
        if case.final_state != "none":
            state_memory, states = self._states()
            if case.final_state == "in place":
                state_memory.buffer.copy_(self.buffers["initial_state"].buffer)
                arguments["initial_state"] = states
            arguments["final_state"] = states
        if case.checkpoints:
            wanted = case.checkpoints
            places = [row for row, _, _ in case.checkpoint_places]
            checkpoints = Guarded((wanted.rows, case.heads, HEAD_DIM, HEAD_DIM), wanted.dtype, self.device)
            arguments |= {"checkpoints": checkpoints.tensor, "checkpoint_interval": wanted.interval}
            arguments["checkpoint_at"] = wanted.at
        self.fwd(**arguments, out=view(out.tensor))

        expected = torch.zeros(shape, dtype=torch.bool, device=self.device)
        view(expected)[self.covered] = True
        assert_written("out", out, expected, "no sequence covers it")
        results = [view(out.tensor), None, None]
        if state_memory is not None:
            written = torch.zeros(state_memory.tensor.shape, dtype=torch.bool, device=self.device)
            results[1] = torch.zeros_like(states[:1]).repeat(len(case.lengths), 1, 1, 1)
            for n, row in enumerate(case.state_rows):
                if row is not None:
                    written[row, : states[0].numel()] = True
                    results[1][n] = states[row]
            assert_written("final_state", state_memory, written, "no sequence names it")
        if checkpoints is not None:
            written = torch.zeros(checkpoints.tensor.shape, dtype=torch.bool, device=self.device)
            written[places] = True
            assert_written("checkpoints", checkpoints, written, "no checkpoint goes there")
            results[2] = checkpoints.tensor[places]
        return tuple(results)

    def assert_inputs_unchanged(self):
        for name, memory in self.buffers.items():
            assert torch.equal(memory.buffer, self.before[name]), f"{name} or what lies beside it was changed"

    def restore(self):
        for name, memory in self.buffers.items():
            memory.buffer.copy_(self.before[name])

    def assert_same(self, results, kept_rows, kept_states, kept_checkpoints, what):
        """That a call now gives the bits of `results` in rows [B, T], states [N] and checkpoints."""
        kept = (kept_rows, kept_states, kept_checkpoints)
        for name, old, new, some in zip(("out", "final_state", "checkpoints"), results, self.run(), kept, strict=True):
            if old is not None:
                assert_same_bits(new[some], old[some], f"{name}, {what}")

    def check_bits(self):
        """Everything but the accuracy; returns (out, final_state)."""
        case = self.case
        results = out, state, checkpoints = self.run()
        self.assert_inputs_unchanged()
        assert bool(out[self.covered].isfinite().all()), "out: not finite"
        if state is not None:
            for n, length in enumerate(case.lengths):
                if length == 0 and case.state_rows[n] is not None:
                    kept = self.initial_state_of(n)
                    kept = torch.zeros_like(state[n]) if kept is None else kept
                    assert_same_bits(state[n], kept, f"final_state of sequence {n}, which has no tokens")
        every_state = torch.ones(len(case.lengths), dtype=torch.bool, device=self.device)
        places = case.checkpoint_places
        for i, (_, n, step) in enumerate(places):
            if step == 0:
                kept = self.initial_state_of(n)
                kept = torch.zeros_like(checkpoints[i]) if kept is None else kept.to(checkpoints.dtype)
                assert_same_bits(checkpoints[i], kept, f"checkpoint of sequence {n} before its first token")
        self.assert_same(results, self.covered, every_state, slice(None), "second call")

        b, tokens = case.rows[case.victim]
        others = every_state.clone()
        others[case.victim] = False
        changed = slice(tokens.start + int(case.position * (tokens.stop - tokens.start)), tokens.stop)
        kept = self.covered.clone()
        kept[b, changed] = False
        before = [
            i for i, (_, n, step) in enumerate(places) if n != case.victim or step <= changed.start - tokens.start
        ]
        factors = {"q": -3.0, "k": 2.0, "v": 1e6, "g": -1.0, "beta": -2.0}
        # What is given as it is has to stay legal: keys of length 1 at most, decays, and betas from 0 to 1.
        factors |= {"k": 0.5} if not case.normalise else {}
        factors |= {"g": 3.0} if case.form == "log" else {}
        factors |= {"beta": 0.5} if case.beta == "activated" else {}
        for name, factor in factors.items():
            self.own[name][b, changed] *= factor
        what = f"other tokens in sequence {case.victim} from {changed.start} on"
        self.assert_same(results, kept, others, before, what)
        self.restore()

        kept[b, tokens] = False
        poisoned = self.own[case.poisoned][b, tokens] if case.poisoned in self.own else None
        if poisoned is None:
            poisoned = self.initial_state_of(case.victim)
        if poisoned is not None:  # else the sequence starts from zero
            poisoned.fill_(torch.nan)
        elsewhere = [i for i, (_, n, _) in enumerate(places) if n != case.victim]
        self.assert_same(results, kept, others, elsewhere, f"NaN in {case.poisoned} of sequence {case.victim}")
        self.restore()
        return results


def assert_written(name, memory, expected, why_not):
    """That of a Guarded exactly the `expected` elements were written."""
    memory.assert_guards_untouched()
    wrong = memory.written() != expected
    if bool(wrong.any()):
        where = tuple(wrong.nonzero()[0].tolist())
        what = "not written" if bool(expected[where]) else f"written, though {why_not}"
        raise AssertionError(f"{name}: {int(wrong.sum())} elements wrong, the first, {where} of its memory, {what}")


def hash_of(case):
    """The seed of a case's contents."""
    return random.Random(f"{case.seed} {case.number} contents").randrange(2**40)


def by_pair(x, case):
    """[B, T, H, ...] -> [1, rows, 1, ...]: the tokens of one (sequence, head) after those of another."""
    pieces = [x[b, tokens].transpose(0, 1).flatten(0, 1) for b, tokens in case.rows]
    return torch.cat(pieces)[None, :, None]


def expected_of(calls):
    """fp64 (rows of out by pair, states by pair, function to checkpoints) of calls, by one run of the recurrence.

    The function gives the state [128, 128] of a pair after a multiple of 64 tokens, but not after 0.

    Every (sequence, head) of every call becomes a sequence of one head. What belongs to a head or a call goes into its
    tokens before, as decays, normalised keys and queries and activated betas, and, the scale, into out afterwards.
    """
    inputs = {name: [] for name in TOKEN_INPUTS}
    initial_states, lengths, scales = [], [], []
    for call in calls:
        case, x = call.case, call.arguments
        tokens = {name: x[name].double() for name in ("v", "beta")}
        gate = (x["g"], x["A_log"], x["dt_bias"], x["lower_bound"], x.get("gate", "raw"))
        tokens["g"] = natural_log_decay(*gate)
        if case.beta != "activated":
            tokens["beta"] = torch.sigmoid(tokens["beta"]) * (2 if case.beta == "twice sigmoid" else 1)
        for name in ("q", "k"):
            y = x[name].double()
            if case.normalise:
                y = y / torch.sqrt(y.square().sum(-1, keepdim=True) + L2_EPSILON)
            tokens[name] = y.repeat_interleave(case.group, 2)
        for name, pieces in inputs.items():
            pieces.append(by_pair(tokens[name], case))
        zeros = torch.zeros(case.heads, HEAD_DIM, HEAD_DIM, dtype=torch.float64, device=call.device)
        for n, length in enumerate(case.lengths):
            state = call.initial_state_of(n)
            initial_states.append(zeros if state is None else state.double())
            lengths += [length] * case.heads
        rows = sum(case.lengths) * case.heads
        scales.append(torch.full((rows,), case.scale, dtype=torch.float64, device=call.device))
    out, states, taken = recurrence(
        **{name: torch.cat(pieces, 1) for name, pieces in inputs.items()},
        scale=1.0,
        **dict.fromkeys(("A_log", "dt_bias", "lower_bound")),
        gate="log",
        use_qk_l2norm_in_kernel=False,
        use_beta_sigmoid_in_kernel=False,
        initial_state=torch.cat(initial_states)[:, None],
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], device=calls[0].device),
        checkpoint_interval=CHECKPOINT_UNIT,
    )
    first = list(accumulate((length // CHECKPOINT_UNIT for length in lengths), initial=0))

    def checkpoint(pair, step):
        return taken[first[pair] + step // CHECKPOINT_UNIT - 1, 0]

    return out[0, :, 0] * torch.cat(scales)[:, None], states[:, 0], checkpoint


def errors_of(call, results, expected):
    """(tokens, relative errors of out, of final_state or None, of checkpoints or None) of each (sequence, head) with
    tokens, in fp64; of final states and checkpoints of those that are written.

    The error of a pair's rows of out is relative to their norm, but at least to what a query of any direction reads of
    the final state: a query that happens to be orthogonal to all keys has no digits to compare. That of a state is
    relative to its norm, but at least to 2^-10 of the initial state's: what is erased to less has gone through products
    whose operand, the state, was rounded to bf16 (2^-9).
    """
    case = call.case
    out, state, checkpoints = results
    expected_out, expected_state, expected_checkpoints = expected
    tokens = torch.tensor(case.lengths, device=expected_out.device).repeat_interleave(case.heads)
    pair = torch.arange(len(tokens), device=tokens.device).repeat_interleave(tokens)
    some = tokens > 0

    def norms(x):
        return torch.zeros_like(tokens, dtype=torch.float64).index_add_(0, pair, x.square().sum(-1)).sqrt()

    difference = norms(by_pair(out, case)[0, :, 0].double() - expected_out)
    state_norm = torch.linalg.matrix_norm(expected_state)
    query = 1.0 if case.normalise else case.magnitudes["q"]
    readable = abs(case.scale) * query * state_norm * HEAD_DIM**-0.5
    error_out = relative(difference, torch.maximum(norms(expected_out), readable))[some]

    initial = [call.initial_state_of(n) for n in range(len(case.lengths))]
    zeros = torch.zeros_like(expected_state[: case.heads])
    initial_norm = torch.cat([torch.linalg.matrix_norm(zeros if x is None else x.double()) for x in initial])

    def error_of_states(x, reference, pairs):
        difference = torch.linalg.matrix_norm(x.reshape(reference.shape).double() - reference)
        return relative(difference, torch.maximum(torch.linalg.matrix_norm(reference), 2**-10 * initial_norm[pairs]))

    errors = [tokens[some].double(), error_out, None, None]
    if state is not None:
        stored = torch.tensor([row is not None for row in case.state_rows], device=some.device)
        stored = some & stored.repeat_interleave(case.heads)
        errors[2] = error_of_states(state.flatten(0, 1)[stored], expected_state[stored], stored)
    if expected_checkpoints:  # those before the first token were held to their bits
        later = [(i, n) for i, (_, n, step) in enumerate(case.checkpoint_places) if step]
        pairs = [n * case.heads + head for _, n in later for head in range(case.heads)]
        errors[3] = error_of_states(checkpoints[[i for i, _ in later]], torch.stack(expected_checkpoints), pairs)
    return tuple(errors)


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
        return torch.full(tokens.shape, bound, dtype=torch.float64, device=tokens.device)

    def add(self, case, errors):
        """AssertionError where the error of a pair exceeds its bound. Those without tokens were held to their bits."""
        tokens, *parts = errors
        dtypes = (torch.bfloat16, case.state_dtype, case.checkpoints.dtype if case.checkpoints else None)
        for part, error, dtype in zip(("out", "final state", "checkpoints"), parts, dtypes, strict=True):
            if error is None or not len(error):
                continue
            key = f"{case.kind}: {part}"
            self.worst[key] = max(error.max().item(), self.worst.get(key, 0.0))
            bounds = self.pair_bounds(part, tokens if part == "out" else error, dtype)
            if bool((error > bounds).any()):
                pair = int((error / bounds).argmax())
                of = f"{int(tokens[pair])} tokens of a head" if part == "out" else "a head"
                raise AssertionError(f"{part}: error {error[pair]:.3e} of {of}, bound {bounds[pair]:.3e}")
            if part != "out" and dtype == torch.bfloat16:
                continue  # the rounding of the result would hide what the bounds are for
            weights = tokens if part == "out" else torch.ones_like(error)
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
                bound = GATES.get(gate, OPTIONS_BOUNDS)[part != "out"]
            else:
                bound = 2e-3 if part == "out" else 2e-6
            if self.sums[key][1] >= 200 and error > bound:
                found.append(f"{key}: root mean square error {error:.3e} over all cases, bound {bound:.3e}")
        return found


class Fuzzer:
    """Runs cases on one device and keeps what it found."""

    def __init__(self, device="cpu", schedules=SCHEDULES, fwd=flash_kda.fwd):
        self.device, self.schedules, self.fwd = device, tuple(schedules), fwd
        self.tally = Tally(device)
        self.failures = []
        self.done = Counter()
        self.pending = []
        # Cases whose accuracy is checked together: as many states as the memory and the caches take.
        self.most_pending = 2048 if device == "cuda" else 64

    def command(self, case):
        words = f"python tests/fuzz.py --seed {case.seed} --case {case.number} --device {self.device}"
        return words + f" --schedule {' '.join(self.schedules)}" * (self.schedules != SCHEDULES)

    def fail(self, case, error):
        text = " ".join(str(error).split()) or type(error).__name__
        self.failures.append(f"{self.command(case)}  # {text}")

    def run(self, case):
        """Checks a case's bits now, and its accuracy with those of others, at the latest at finish()."""
        schedule = case.schedule
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
        if not pending:
            return
        out, states, checkpoint = expected_of([call for call, _ in pending])
        row = pair = 0
        for call, results in pending:
            case = call.case
            rows, pairs = row + sum(case.lengths) * case.heads, pair + case.states
            taken = [
                checkpoint(pair + n * case.heads + head, step)
                for _, n, step in case.checkpoint_places
                if step
                for head in range(case.heads)
            ]
            expected = out[row:rows], states[pair:pairs], taken
            row, pair = rows, pairs
            try:
                self.tally.add(case, errors_of(call, results, expected))
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


def fuzz(seed, numbers, device="cpu", schedules=SCHEDULES, seconds=math.inf, fwd=flash_kda.fwd, progress=None):
    """Runs the cases (seed, number) until `seconds` are over or too many have failed; returns Fuzzer.report()."""
    fuzzer = Fuzzer(device, schedules, fwd)
    before, end = os.environ.get("FLASH_KDA_SCHEDULE"), time.monotonic() + seconds
    try:
        for number in numbers:
            if time.monotonic() > end or len(fuzzer.failures) >= MOST_FAILURES:
                break
            fuzzer.run(case_of(seed, number, fuzzer.schedules))
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
    parser.add_argument(
        "--schedule", choices=SCHEDULES, nargs="+", default=SCHEDULES, help="each case takes one of these; default: all"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there, too")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device cuda: no GPU that PyTorch can use")
        for name in options.schedule if options.schedule is not SCHEDULES else ():
            if name != "auto" and (reason := schedules.why_not(name)):
                parser.error(f"--schedule {name}: {reason}")
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

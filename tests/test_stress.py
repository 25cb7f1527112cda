"""Thousands of calls on several streams while memory comes and goes: bit for bit what each call gives by itself."""

import random

import pytest
import schedules
import torch
from guarded import bits
from inputs import HEAD_DIM, cu_seqlens_of, make_inputs

import flash_kda

pytestmark = pytest.mark.gpu

CALLS, STREAMS, SHAPES = 2000, 4, 40
MOST_IN_FLIGHT = 32


def random_call(rng, seed):
    """(inputs, cu_seqlens or None) of up to a few hundred tokens."""
    heads = rng.choice((1, 2, 4, 8, 48))
    if rng.random() < 0.5:
        lengths = [rng.randint(0, 90) for _ in range(rng.randint(1, 8))]
        inputs = make_inputs("long", 1, sum(lengths), heads, "cuda", seed, torch.float32, N=len(lengths))
        return inputs, cu_seqlens_of(lengths, "cuda")
    return make_inputs("random", rng.randint(1, 3), rng.randint(1, 300), heads, "cuda", seed, torch.float32), None


def call(inputs, cu_seqlens):
    """(out, final_state) of one call on the current stream, into memory that holds NaN."""
    N = inputs["q"].shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    out = torch.full_like(inputs["v"], torch.nan)
    state = torch.full((N, inputs["q"].shape[2], HEAD_DIM, HEAD_DIM), torch.nan, device="cuda")
    flash_kda.fwd(**inputs, out=out, final_state=state, cu_seqlens=cu_seqlens)
    return out, state


@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
def test_2000_calls_on_4_streams(schedule, monkeypatch):
    """Inputs are copies made on the call's own stream and dropped as soon as the call is enqueued, so that their memory
    goes to the next allocation there; other memory is filled and freed before and after; now and then all that is
    unused goes back to the driver. Differences are counted on the device: nothing waits for a call.
    """
    schedules.use(schedule, monkeypatch)
    rng = random.Random(schedule)
    calls = [random_call(rng, seed) for seed in range(SHAPES)]
    expected = []
    for one in calls:
        expected.append(call(*one))
        torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    differences = torch.zeros(STREAMS, SHAPES, dtype=torch.int64, device="cuda")
    made = torch.zeros_like(differences)
    torch.cuda.synchronize()

    in_flight = []
    for number in range(CALLS):
        which, where = rng.randrange(SHAPES), rng.randrange(STREAMS)
        with torch.cuda.stream(streams[where]):
            before = torch.full((rng.randint(1, 2**20),), torch.nan, device="cuda")
            inputs, cu_seqlens = calls[which]
            copies = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
            del before
            results = call(copies, None if cu_seqlens is None else cu_seqlens.clone())
            del copies
            after = torch.full((rng.randint(1, 2**20),), torch.nan, device="cuda")
            for x, ref in zip(results, expected[which], strict=True):
                differences[where, which] += (bits(x) != bits(ref)).sum()
            made[where, which] += 1
            done = torch.cuda.Event()
            done.record()
        in_flight.append((done, results, after))
        del results, after
        if len(in_flight) > MOST_IN_FLIGHT:
            in_flight.pop(0)[0].synchronize()
        if number % 250 == 249:
            torch.cuda.empty_cache()
    torch.cuda.synchronize()
    assert int(made.sum()) == CALLS
    wrong = [(stream, shape, int(differences[stream, shape])) for stream, shape in differences.nonzero().tolist()]
    assert wrong == [], f"(stream, shape, elements that differ): {wrong}"

"""Thousands of calls on several streams while memory comes and goes: bit for bit what each call gives by itself."""

import random

import pytest
import schedules
import torch
from guarded import bits
from inputs import cu_seqlens_of, make_inputs

import flash_kda

pytestmark = pytest.mark.gpu

CALLS, STREAMS, SHAPES = 2000, 4, 60
MOST_IN_FLIGHT = 32


def random_call(rng, seed):
    """The arguments of a call of up to a few hundred tokens but for its outputs; half of the calls are plain."""
    heads, N = rng.choice((1, 2, 4, 8, 48)), rng.randint(1, 8)
    kind = rng.choice(("plain",) * 4 + ("softplus", "pool", "decoding", "checkpoints"))
    if kind == "decoding":
        x = make_inputs("long", N, rng.randint(1, 4), heads, "cuda", seed, torch.float32)
    elif rng.random() < 0.5:
        lengths = [rng.randint(0, 90) for _ in range(N)]
        x = make_inputs("long", 1, sum(lengths), heads, "cuda", seed, torch.float32, N=N)
        x["cu_seqlens"] = cu_seqlens_of(lengths, "cuda")
    else:
        x = make_inputs("random", rng.randint(1, 3), rng.randint(1, 300), heads, "cuda", seed, torch.float32)
    if kind == "softplus":
        x["lower_bound"] = None
    elif kind == "checkpoints":
        x |= {"checkpoint_interval": 64, "allow_neg_eigval": True, "g": x["g"].float()}
    elif kind != "plain":
        rows = list(range(len(x["initial_state"])))
        rng.shuffle(rows)
        x["state_indices"] = torch.tensor([row if rng.random() < 0.8 else -1 for row in rows], device="cuda")
    return x


def call(x):
    """The outputs of one call on the current stream: in memory that holds NaN, or in place of the states of a pool."""
    state = x["initial_state"]
    if "state_indices" in x:
        x = x | {"initial_state": state.clone()}
        final_state = x["initial_state"]
    else:
        final_state = torch.full_like(state, torch.nan)
    outputs = {"out": torch.full_like(x["v"], torch.nan), "final_state": final_state}
    if "checkpoint_interval" in x:
        # At most as many as this, and one that no checkpoint reaches.
        rows = x["q"].shape[0] * (x["q"].shape[1] // 64) + 1
        outputs["checkpoints"] = torch.full((rows, *state.shape[1:]), torch.nan, device="cuda")
    flash_kda.fwd(**x, **outputs)
    return tuple(outputs.values())


@pytest.mark.parametrize("schedule", [*schedules.SCHEDULES, "auto"])
def test_2000_calls_on_4_streams(schedule, monkeypatch):
    """Inputs are copies made on the call's own stream and dropped as soon as the call is enqueued, so that their memory
    goes to the next allocation there; other memory is filled and freed before and after; now and then all that is
    unused goes back to the driver. Differences are counted on the device: nothing waits for a call.
    """
    schedules.use(schedule, monkeypatch)
    rng = random.Random(schedule)
    calls = [random_call(rng, seed) for seed in range(SHAPES)]
    expected = []
    for x in calls:
        expected.append(call(x))
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
            copies = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in calls[which].items()}
            del before
            results = call(copies)
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

"""What public reports say broke other kernels, on the CPU path and with every schedule on a GPU.

The CPU runs the same tests with fewer heads or tokens where a comment says so: its time would be minutes, its memory
tens of gigabytes.
"""

import os
from itertools import pairwise

import pytest
import schedules
import torch
from accuracy import BOUNDS
from guarded import Guarded, assert_same_bits
from inputs import HEAD_DIM, TOKEN_INPUTS, cu_seqlens_of, make_inputs, relative_error

import flash_kda
from flash_kda.recurrence import recurrence

# The CPU path is fp32 inside: what it adds to `out` is the rounding to bf16, to a state over thousands of tokens 1e-5.
CPU_BOUNDS = (2e-3, 1e-5)


def run(inputs, cu_seqlens=None, final_dtype=torch.float32, covered=None):
    """(out, final_state) of one call into poisoned memory; of each of them, nothing but the covered rows is written.

    covered: boolean [T] for packed sequences; without it every row.
    """
    device = inputs["v"].device
    N = inputs["q"].shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    out = Guarded(inputs["v"].shape, torch.bfloat16, device)
    state = Guarded((N, inputs["q"].shape[2], HEAD_DIM, HEAD_DIM), final_dtype, device)
    flash_kda.fwd(**inputs, out=out.tensor, final_state=state.tensor, cu_seqlens=cu_seqlens)
    out.assert_guards_untouched()
    state.assert_guards_untouched()
    assert bool(state.written().all())
    rows = out.written().flatten(2)
    if covered is None:
        assert bool(rows.all())
    else:
        assert torch.equal(rows.all(-1)[0], covered) and torch.equal(rows.any(-1)[0], covered)
    return out.tensor, state.tensor


def bounds(device, kind):
    return CPU_BOUNDS if device == "cpu" else BOUNDS[kind]


def heads_of(inputs, heads):
    part = inputs | {name: inputs[name][:, :, heads] for name in TOKEN_INPUTS}
    part |= {name: inputs[name][heads].contiguous() for name in ("A_log", "dt_bias")}
    if inputs["initial_state"] is not None:
        part["initial_state"] = inputs["initial_state"][:, heads].contiguous()
    return part


def tokens_of(inputs, tokens, **change):
    return inputs | {name: inputs[name][:, tokens] for name in TOKEN_INPUTS} | change


def assert_accurate(results, expected, bound, what=""):
    for name, x, ref, limit in zip(("out", "final_state"), results, expected, bound, strict=True):
        error = relative_error(x, ref)
        assert error <= limit, f"{name}{what}: error {error:.3e}, bound {limit:.1e}"


def test_sequences_of_8191_and_1_tokens_with_64_heads(device):
    """On the CPU 4 heads."""
    H = 4 if device == "cpu" else 64
    inputs = make_inputs("long", 1, 8192, H, device, 0, torch.float32, N=2)
    cu_seqlens = cu_seqlens_of([8191, 1], device)
    out, state = run(inputs, cu_seqlens)
    heads = [0, H // 2 - 1, H - 1]
    expected = recurrence(**heads_of(inputs, heads), cu_seqlens=cu_seqlens)
    assert_accurate((out[:, :, heads], state[:, heads]), expected, bounds(device, "long"))
    for n, tokens in enumerate((slice(0, 8191), slice(8191, 8192))):
        initial_state = inputs["initial_state"][n : n + 1]
        alone, alone_state = run(tokens_of(inputs, tokens, initial_state=initial_state))
        assert_same_bits(out[:, tokens], alone, f"out of sequence {n}")
        assert_same_bits(state[n : n + 1], alone_state, f"final_state of sequence {n}")


@pytest.mark.parametrize("name", [*TOKEN_INPUTS, "initial_state"])
def test_nan_in_one_of_sequences_of_2048_1_and_512_tokens(device, name):
    """Only that sequence's rows and state change."""
    lengths = [2048, 1, 512]
    cu_seqlens = cu_seqlens_of(lengths, device)
    inputs = make_inputs("long", 1, sum(lengths), 2, device, 1, torch.float32, N=3)
    out, state = run(inputs, cu_seqlens)
    rows = [slice(start, end) for start, end in pairwise(cu_seqlens.tolist())]
    for bad in range(3):
        poisoned = inputs[name].clone()
        poisoned[bad if name == "initial_state" else (slice(None), rows[bad])] = torch.nan
        bad_out, bad_state = run(inputs | {name: poisoned}, cu_seqlens)
        for n in range(3):
            if n != bad:
                assert_same_bits(bad_out[:, rows[n]], out[:, rows[n]], f"out of sequence {n}, NaN in {bad}")
                assert_same_bits(bad_state[n], state[n], f"final_state of sequence {n}, NaN in {bad}")
        assert bool(bad_out[:, rows[bad]].isnan().all())
        if name != "q":
            assert bool(bad_state[bad].isnan().any())


@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_sequences_and_no_token(device, dtype, initial):
    inputs = make_inputs("random", 1, 0, 4, device, 2, dtype if initial else None, N=3)
    _, state = run(inputs, torch.zeros(4, dtype=torch.int64, device=device), dtype)
    expected = inputs["initial_state"] if initial else torch.zeros_like(state)
    assert_same_bits(state, expected, "final_state")


@pytest.mark.parametrize("kind", BOUNDS)
def test_states_of_heads_scaled_by_1_100_and_1000(device, kind):
    """Errors relative to the heads' own scale: a large head does not cover up for a small one beside it.

    Sixteen heads of each scale, because the state of a single head under the "random" gate is a few outer products, and
    its error varies by a tenth.
    """
    inputs = make_inputs(kind, 1, 1024, 48, device, 3, torch.float32)
    scales = torch.tensor([10.0, 1e3, 1e4], device=device).repeat(16)
    inputs["initial_state"] *= scales[:, None, None]
    out, state = run(inputs)
    expected_out, expected_state = recurrence(**inputs)
    for scale in scales[:3]:
        heads = scales == scale
        expected = expected_out[:, :, heads], expected_state[:, heads]
        assert_accurate((out[:, :, heads], state[:, heads]), expected, bounds(device, kind), f", scale {scale:g}")


def test_gates_saturated_at_the_lower_bound_for_4096_tokens(device):
    inputs = make_inputs("random", 1, 4096, 2, device, 4, torch.float32)
    inputs["g"].fill_(80.0)
    assert_accurate(run(inputs), recurrence(**inputs), bounds(device, "long"))


@pytest.mark.parametrize("device", schedules.and_cpu((*schedules.EXACT, "segments")), indirect=True)
def test_a_million_tokens(device):
    """T = 1048576 with H = 32 on a GPU: 2^32 elements in each of q, k, v, g and out; element 2^31 is in token 524288.

    With the "random" gate a token's output depends on no more than the hundreds before it, so that pieces of the
    sequence are checked with the recurrence from some tokens earlier on. The CPU, where every index is 64 bits wide,
    walks 16384 tokens of one head.
    """
    T, H = (16384, 1) if device == "cpu" else (2**20, 32)
    if device == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] / 1e9
        if free < 48:
            pytest.skip(f"needs 48 GB of free device memory, {free:.0f} GB are free")
    inputs = make_inputs("random", 1, T, H, device, 5, torch.float32)
    out = torch.full_like(inputs["v"], torch.nan)
    state = torch.full((1, H, HEAD_DIM, HEAD_DIM), torch.nan, device=device)
    flash_kda.fwd(**inputs, out=out, final_state=state)
    earlier, length = 256, 512
    middle = T // 2
    for start in (0, middle - length, middle, T - length):
        first = max(start - earlier, 0)
        piece = tokens_of(inputs, slice(first, start + length))
        expected_out, expected_state = recurrence(**piece | ({"initial_state": None} if first else {}))
        error = relative_error(out[:, start : start + length], expected_out[:, start - first :])
        assert error <= bounds(device, "random")[0], f"out from token {start} on: error {error:.3e}"
    assert relative_error(state, expected_state) <= bounds(device, "random")[1]


def test_1024_sequences_of_1_to_40_tokens(device):
    """On the CPU one head, on a GPU 4."""
    H = 1 if device == "cpu" else 4
    lengths = torch.randint(1, 41, (1024,), generator=torch.Generator().manual_seed(6)).tolist()
    inputs = make_inputs("long", 1, sum(lengths), H, device, 6, torch.float32, N=1024)
    cu_seqlens = cu_seqlens_of(lengths, device)
    assert_accurate(run(inputs, cu_seqlens), recurrence(**inputs, cu_seqlens=cu_seqlens), bounds(device, "long"))


def test_beta_as_a_column_slice_of_rows_of_40(device):
    inputs = make_inputs("long", 2, 300, 6, device, 7, torch.float32)
    rows = torch.full((2, 300, 40), torch.nan, dtype=torch.bfloat16, device=device)
    for column in (0, 3, 34):
        beta = rows[..., column : column + 6]
        beta.copy_(inputs["beta"])
        assert beta.stride() == (300 * 40, 40, 1)
        for name, x, expected in zip(("out", "final_state"), run(inputs | {"beta": beta}), run(inputs), strict=True):
            assert_same_bits(x, expected, f"{name}, column {column}")


@pytest.mark.parametrize("P", [63, 64, 65])
def test_a_prefix_of_63_64_or_65_tokens_and_the_rest_from_its_state(device, P):
    """As accurate as the uncut run, and where the cut is at a chunk's end the same bits, but for segments."""
    inputs = make_inputs("long", 1, 1024, 4, device, 8, torch.float32)
    uncut, uncut_state = run(inputs)
    head, state = run(tokens_of(inputs, slice(0, P)))
    tail, state = run(tokens_of(inputs, slice(P, None), initial_state=state))
    assert_same_bits(head, uncut[:, :P], "out of the prefix")
    if P == 64 and os.environ.get("FLASH_KDA_SCHEDULE") != schedules.PINNED:
        assert_same_bits(tail, uncut[:, P:], "out of the rest")
        assert_same_bits(state, uncut_state, "final_state")
    expected_out, expected_state = recurrence(**inputs)
    assert_accurate((tail, state), (expected_out[:, P:], expected_state), bounds(device, "long"))


@pytest.mark.parametrize("lengths", [[57], [20, 37], [16, 32, 0, 48]], ids=str)
def test_the_7_rows_after_the_last_sequence_are_left_alone(device, lengths):
    T = sum(lengths) + 7
    inputs = make_inputs("long", 1, T, 3, device, 9, torch.float32, N=len(lengths))
    for name in TOKEN_INPUTS:
        inputs[name][:, -7:] = torch.nan
    cu_seqlens = cu_seqlens_of(lengths, device)
    out, state = run(inputs, cu_seqlens, covered=torch.arange(T, device=device) < T - 7)
    exact = tokens_of(inputs, slice(0, T - 7))
    expected, expected_state = run(exact, cu_seqlens)
    assert_same_bits(out[:, :-7], expected, "out")
    assert_same_bits(state, expected_state, "final_state")


class TestOddStates:
    """-0.0, denormals and 1e30 in rows of the initial state: each value channel is a recurrence of its own."""

    ROWS = {"-0.0": slice(0, 16), "denormal": slice(16, 32), "1e30": slice(32, 48)}

    def inputs(self, device, dtype, N=None):
        inputs = make_inputs("long", 1, 256, 4, device, 10, dtype, N=N)
        state = inputs["initial_state"]
        state[:, :, self.ROWS["-0.0"]] = -0.0
        state[:, :, self.ROWS["denormal"]] = 1e-39 * torch.sign(state[:, :, self.ROWS["denormal"]])
        state[:, :, self.ROWS["1e30"]] *= 1e31
        return inputs

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_survive_a_sequence_without_tokens(self, device, dtype):
        inputs = self.inputs(device, dtype, N=3)
        lengths = [100, 0, 156]
        _, state = run(inputs, cu_seqlens_of(lengths, device), dtype)
        assert_same_bits(state[1], inputs["initial_state"][1], "final_state of the sequence without tokens")
        assert bool((state[1, :, self.ROWS["-0.0"]].signbit()).all())

    def test_start_a_sequence(self, device):
        inputs = self.inputs(device, torch.float32)
        out, state = run(inputs)
        expected_out, expected_state = recurrence(**inputs)
        from_zero, state_from_zero = run(inputs | {"initial_state": torch.zeros_like(inputs["initial_state"])})
        for name in ("-0.0", "denormal"):
            rows = self.ROWS[name]
            assert torch.equal(out[..., rows], from_zero[..., rows]), name
            assert torch.equal(state[:, :, rows], state_from_zero[:, :, rows]), name
        for rows in (self.ROWS["1e30"], slice(48, HEAD_DIM)):
            results, expected = (
                (out[..., rows], state[:, :, rows]),
                (expected_out[..., rows], expected_state[:, :, rows]),
            )
            assert_accurate(results, expected, bounds(device, "long"), f", rows {rows.start} to {rows.stop}")

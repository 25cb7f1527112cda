"""The reference itself, against the report's formula with explicit matrices, one sequence and one head at a time."""

import pytest
import torch
from inputs import GATE_KINDS, cu_seqlens_of, make_inputs, relative_error

from flash_kda.recurrence import recurrence, sequence_bounds


def by_the_formula(q, k, v, g, beta, scale, A_log, dt_bias, lower_bound, state):
    """S_t = S_{t-1} Diag(alpha_t) (I - b_t k_t k_t^T) + b_t v_t k_t^T of one sequence and head, in fp64."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    S = state.double()
    outs = []
    for t in range(len(q)):
        q_t = q[t] / torch.sqrt(q[t] @ q[t] + 1e-6)
        k_t = k[t] / torch.sqrt(k[t] @ k[t] + 1e-6)
        alpha = torch.exp(lower_bound / (1 + torch.exp(-torch.exp(A_log.double()) * (g[t] + dt_bias.double()))))
        b_t = 1 / (1 + torch.exp(-beta[t]))
        erase = torch.eye(128).double() - b_t * torch.outer(k_t, k_t)
        S = S @ torch.diag(alpha) @ erase + b_t * torch.outer(v[t], k_t)
        outs.append(scale * S @ q_t)
    return (torch.stack(outs) if outs else v), S


@pytest.mark.parametrize("kind", GATE_KINDS)
def test_packed_sequences_follow_the_formula(kind):
    lengths = [5, 0, 13, 1]
    x = make_inputs(kind, 1, sum(lengths), 2, "cpu", state_dtype=torch.float32, N=4)
    cu_seqlens = cu_seqlens_of(lengths)
    out, final_state = recurrence(**x, cu_seqlens=cu_seqlens)
    for n in range(len(lengths)):
        tokens = slice(int(cu_seqlens[n]), int(cu_seqlens[n + 1]))
        for h in range(2):
            rows = (x[name][0, tokens, h] for name in ("q", "k", "v", "g", "beta"))
            expected, state = by_the_formula(
                *rows, x["scale"], x["A_log"][h], x["dt_bias"][h], x["lower_bound"], x["initial_state"][n, h]
            )
            assert relative_error(final_state[n, h], state) < 1e-13
            if lengths[n]:
                assert relative_error(out[0, tokens, h], expected) < 1e-13


def test_batch_rows_are_sequences_and_dtype_is_kept():
    x = make_inputs("long", 2, 9, 2, "cpu")
    out, final_state = recurrence(**x, dtype=torch.float32)
    assert out.dtype == final_state.dtype == torch.float32
    for b in range(2):
        alone = {name: y[b : b + 1] if name in ("q", "k", "v", "g", "beta") else y for name, y in x.items()}
        expected, state = recurrence(**alone)
        assert relative_error(out[b], expected[0]) < 1e-6
        assert relative_error(final_state[b], state[0]) < 1e-6


def test_uncovered_rows_are_zero():
    x = make_inputs("random", 1, 8, 1, "cpu")
    out, _ = recurrence(**x, cu_seqlens=torch.tensor([1, 3, 5]))
    assert not out[:, 0].any() and not out[:, 5:].any() and out[:, 1:5].abs().sum((0, 2, 3)).min() > 0


@pytest.mark.parametrize(
    ("cu_seqlens", "starts", "lengths"),
    [
        ([0, 3, 10], [0, 3], [3, 7]),
        ([-4, 3, 99], [0, 3], [3, 7]),
        ([0, 8, 2, 10], [0, 8, 2], [8, 0, 8]),
        ([50, 60], [10], [0]),
        ([0], [], []),
    ],
)
def test_bounds_are_clamped(cu_seqlens, starts, lengths):
    assert sequence_bounds(1, 10, torch.tensor(cu_seqlens)) == (starts, lengths)

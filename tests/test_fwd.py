"""flash_kda.fwd on a GPU: bit for bit against tests/torch_ref.py, and the invariants that hold bit for bit."""

from itertools import cycle, pairwise, product

import pytest
import schedules
import torch
from guarded import Guarded, assert_same_bits
from inputs import GATE_KINDS, HEAD_DIM, TOKEN_INPUTS, cu_seqlens_of, cut, make_inputs, packed_inputs

import flash_kda

pytestmark = pytest.mark.gpu

HEADS = (1, 4, 32, 96)
LENGTHS = (1, 15, 16, 17, 37, 64, 97, 256, 1024, 8192)
PACKINGS = ([16], [4, 8, 12], [17, 33, 65], [1, 1, 1, 500], [1300, 547, 2048, 963, 271, 3063], [1024] * 8)
# (is initial_state given, is final_state given, their dtype)
STATE_MODES = (
    (False, False, torch.float32),
    (True, True, torch.float32),
    (True, False, torch.bfloat16),
    (False, True, torch.float32),
    (True, True, torch.bfloat16),
    (True, False, torch.float32),
    (False, True, torch.bfloat16),
)


@pytest.fixture(autouse=True, params=schedules.SCHEDULES)
def schedule(request, monkeypatch):
    schedules.use(request.param, monkeypatch)
    return request.param


def state_name(mode):
    initial, final, dtype = mode
    return f"{('none', 'out', 'in', 'both')[2 * initial + final]}-{'fp32' if dtype == torch.float32 else 'bf16'}"


def packing_name(lengths):
    return "x".join(map(str, lengths)) if len(set(lengths)) > 1 else f"{len(lengths)}x{lengths[0]}"


def cases(shapes):
    """Every shape once, with the state modes and gate kinds taken in turn."""
    return [
        pytest.param(*shape, mode, kind, id=f"{shape[0]}-H{shape[1]}-{state_name(mode)}-{kind}")
        for shape, mode, kind in zip(shapes, cycle(STATE_MODES), cycle(GATE_KINDS), strict=False)
    ]


def run(inputs, cu_seqlens=None, final_dtype=torch.float32, all_written=True):
    """One call into poisoned out and final_state; returns them as Guarded. `final_dtype` None: without final_state."""
    out = Guarded(inputs["v"].shape, torch.bfloat16)
    N = inputs["q"].shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    H = inputs["q"].shape[2]
    final = None if final_dtype is None else Guarded((N, H, HEAD_DIM, HEAD_DIM), final_dtype)
    arguments = inputs | {"final_state": None if final is None else final.tensor, "cu_seqlens": cu_seqlens}
    assert flash_kda.fwd(**arguments, out=out.tensor) is None
    torch.cuda.synchronize()
    out.assert_guards_untouched()
    if all_written:
        assert bool(out.written().all()), "an element of out was not written"
    if final is not None:
        final.assert_guards_untouched()
        assert bool(final.written().all()), "an element of final_state was not written"
    return out, final


def fwd(inputs, cu_seqlens=None, final_dtype=torch.float32):
    """(out, final_state) of one checked call."""
    out, final = run(inputs, cu_seqlens, final_dtype)
    return out.tensor, None if final is None else final.tensor


@pytest.fixture
def check_against_reference(monkeypatch):
    """Compares every exact schedule that the device runs with one run of the reference, which takes far longer."""
    from torch_ref import forward

    def check(inputs, mode, cu_seqlens=None):
        initial, final, dtype = mode
        expected_out, expected_state = forward(**inputs, cu_seqlens=cu_seqlens, state_dtype=dtype)
        for name in schedules.each_exact(monkeypatch):
            out, final_state = fwd(inputs, cu_seqlens, dtype if final else None)
            assert_same_bits(out, expected_out, f"out of schedule {name}")
            if final:
                assert_same_bits(final_state, expected_state, f"final_state of schedule {name}")

    return check


class TestAgainstReference:
    @pytest.fixture(autouse=True)
    def schedule(self):
        """In place of the module's: each test runs every exact schedule."""

    @pytest.mark.parametrize("T, H, mode, kind", cases(product(LENGTHS, HEADS)))
    def test_one_sequence(self, check_against_reference, T, H, mode, kind):
        check_against_reference(make_inputs(kind, 1, T, H, "cuda", T + H, mode[2] if mode[0] else None), mode)

    @pytest.mark.parametrize("name, H, mode, kind", cases(product(map(packing_name, PACKINGS), HEADS)))
    def test_packed(self, check_against_reference, name, H, mode, kind):
        lengths = next(lengths for lengths in PACKINGS if packing_name(lengths) == name)
        inputs, cu_seqlens = packed_inputs(lengths, H, kind, len(lengths) + H, mode[2] if mode[0] else None)
        check_against_reference(inputs, mode, cu_seqlens)

    @pytest.mark.parametrize("B, T, H", [(8, 1024, 32), (3, 37, 4)])
    def test_batch(self, check_against_reference, B, T, H):
        mode = (True, True, torch.float32)
        check_against_reference(make_inputs("long", B, T, H, "cuda", 5, torch.float32), mode)

    @pytest.mark.parametrize("kind", GATE_KINDS)
    @pytest.mark.parametrize("mode", STATE_MODES, ids=state_name)
    @pytest.mark.parametrize("T", [1, 16, 37])
    def test_every_state_mode(self, check_against_reference, T, mode, kind):
        check_against_reference(make_inputs(kind, 2, T, 4, "cuda", T, mode[2] if mode[0] else None), mode)

    @pytest.mark.parametrize("mode", STATE_MODES, ids=state_name)
    def test_every_state_mode_packed(self, check_against_reference, mode):
        inputs, cu_seqlens = packed_inputs([17, 33, 65], 4, state_dtype=mode[2] if mode[0] else None)
        check_against_reference(inputs, mode, cu_seqlens)

    @pytest.mark.parametrize("mode", STATE_MODES, ids=state_name)
    def test_zero_length_sequences_between_others(self, check_against_reference, mode):
        lengths = [0, 5, 0, 0, 33, 16, 0]
        inputs, cu_seqlens = packed_inputs(lengths, 4, state_dtype=mode[2] if mode[0] else None)
        check_against_reference(inputs, mode, cu_seqlens)

    def test_4096_sequences(self, check_against_reference):
        inputs, cu_seqlens = packed_inputs([n % 4 for n in range(4096)], 4)
        check_against_reference(inputs, (True, True, torch.float32), cu_seqlens)

    @pytest.mark.parametrize("lower_bound, scale", [(-5.0, 1.0), (-1.0, -0.25), (-1e-3, 0.5)])
    def test_scale_and_lower_bound(self, check_against_reference, lower_bound, scale):
        inputs = make_inputs("random", 1, 97, 4, "cuda", 1, torch.float32)
        inputs |= {"lower_bound": lower_bound, "scale": scale}
        check_against_reference(inputs, (True, True, torch.float32))


class TestEmpty:
    @pytest.mark.parametrize("mode", STATE_MODES, ids=state_name)
    @pytest.mark.parametrize("T", [0, 7])
    def test_all_sequences_empty(self, T, mode):
        initial, final, dtype = mode
        inputs = make_inputs("random", 1, T, 4, "cuda", 0, dtype if initial else None, N=3)
        cu_seqlens = torch.zeros(4, dtype=torch.int64, device="cuda")
        out, state = run(inputs, cu_seqlens, dtype if final else None, all_written=False)
        assert not bool(out.written().any()), "a row of out that no sequence covers was written"
        if final:
            assert_same_bits(
                state.tensor, inputs["initial_state"] if initial else torch.zeros_like(state.tensor), "state"
            )

    @pytest.mark.parametrize("initial", [False, True])
    def test_no_tokens_in_a_batch(self, initial):
        inputs = make_inputs("random", 2, 0, 4, "cuda", 0, torch.float32 if initial else None)
        _, state = fwd(inputs)
        assert_same_bits(state, inputs["initial_state"] if initial else torch.zeros_like(state), "final_state")

    def test_negative_zero_and_denormals_in_the_state_of_an_empty_sequence(self):
        inputs, cu_seqlens = packed_inputs([0, 3], 1)
        inputs["initial_state"][0, 0, 0, :4] = torch.tensor([-0.0, 1e-40, -1e-45, 1e30])
        assert_same_bits(fwd(inputs, cu_seqlens)[1][0], inputs["initial_state"][0], "final_state of the empty sequence")


class TestCuSeqlens:
    @pytest.mark.parametrize(
        "given, equivalent",
        [
            ([-5, 10, 20], [0, 10, 20]),
            ([0, 10, 100000], [0, 10, 40]),
            ([-(2**63), 2**63 - 1], [0, 40]),
            ([2**40, 2**41], [40, 40]),
            ([-(2**40), -7, 33], [0, 0, 33]),
            ([40, 39, 38, 0], [40, 40, 40, 40]),
            ([2**32, 2**32 + 16], [40, 40]),
        ],
    )
    def test_out_of_range_values_are_clamped(self, given, equivalent):
        inputs = make_inputs("random", 1, 40, 4, "cuda", 0, torch.float32, N=len(given) - 1)
        results = [
            run(inputs, torch.tensor(cu_seqlens, device="cuda"), all_written=False)
            for cu_seqlens in (given, equivalent)
        ]
        (out, state), (expected_out, expected_state) = results
        assert_same_bits(out.tensor, expected_out.tensor, "out, poisoned where not written")
        assert_same_bits(state.tensor, expected_state.tensor, "final_state")
        covered = torch.zeros(40, dtype=torch.bool, device="cuda")
        covered[equivalent[0] : equivalent[-1]] = True
        assert torch.equal(out.written()[0].all(-1).all(-1), covered)
        assert torch.equal(out.written()[0].any(-1).any(-1), covered)

    def test_non_monotone_values_stay_inside_the_tensors(self):
        inputs = make_inputs("random", 1, 32, 4, "cuda", 0, torch.float32, N=3)
        # The sequences are [0, 20), an empty one and [10, 28); tokens 10 to 19 belong to two and may come from either.
        out, state = run(inputs, torch.tensor([0, 20, 10, 28], device="cuda"), all_written=False)
        first_out, first_state = fwd(cut(inputs, 0, 20, 0))
        last_out, last_state = fwd(cut(inputs, 10, 28, 2))
        assert_same_bits(out.tensor[:, :10], first_out[:, :10], "out of the first sequence alone")
        assert_same_bits(out.tensor[:, 20:28], last_out[:, 10:], "out of the last sequence alone")
        assert_same_bits(
            state.tensor, torch.cat([first_state, inputs["initial_state"][1:2], last_state]), "final_state"
        )
        assert not bool(out.written()[:, 28:].any())

    @pytest.mark.parametrize("end", [1, 16, 33, 57])
    def test_rows_past_the_last_sequence_stay_untouched(self, end):
        inputs = make_inputs("long", 1, 64, 4, "cuda", 0, torch.float32, N=2)
        first = end // 2
        out, state = run(inputs, torch.tensor([0, first, end], device="cuda"), all_written=False)
        assert bool(out.written()[:, :end].all()) and not bool(out.written()[:, end:].any())
        expected, expected_state = fwd(cut(inputs, 0, end), torch.tensor([0, first, end], device="cuda"))
        assert_same_bits(out.tensor[:, :end], expected, "out")
        assert_same_bits(state.tensor, expected_state, "final_state")

    def test_first_sequence_may_start_late(self):
        inputs = make_inputs("long", 1, 64, 4, "cuda", 0)
        out, _ = run(inputs, torch.tensor([9, 40], device="cuda"), all_written=False)
        assert not bool(out.written()[:, :9].any()) and not bool(out.written()[:, 40:].any())
        assert_same_bits(out.tensor[:, 9:40], fwd(cut(inputs, 9, 40))[0], "out")


class TestLargeOffsets:
    @pytest.fixture(autouse=True, params=(*schedules.EXACT, "segments:512"))
    def schedule(self, request, monkeypatch):
        """In place of the module's: shorter segments would need a workspace of 40 GB."""
        schedules.use(request.param, monkeypatch)

    @staticmethod
    def require_memory(gigabytes):
        free = torch.cuda.mem_get_info()[0] / 1e9
        if free < gigabytes:
            pytest.skip(f"needs {gigabytes} GB of free device memory, {free:.0f} GB are free")

    @pytest.fixture(autouse=True)
    def release_memory(self):
        torch.cuda.empty_cache()
        yield
        torch.cuda.empty_cache()

    def test_token_offsets_beyond_2_to_the_31(self):
        """300 sequences of 1000 tokens of 64 heads are 2.46e9 elements; element 2^31 is token 144 of sequence 262."""
        self.require_memory(53)
        N, length, H = 300, 1000, 64
        inputs = make_inputs("long", 1, N * length, H, "cuda")
        out = torch.empty_like(inputs["v"])
        state = torch.empty(N, H, HEAD_DIM, HEAD_DIM, device="cuda")
        flash_kda.fwd(**inputs, out=out, final_state=state, cu_seqlens=cu_seqlens_of([length] * N, "cuda"))
        for n in (0, 130, 131, 261, 262, 263, N - 1):
            rows = slice(n * length, (n + 1) * length)
            expected, expected_state = fwd(cut(inputs, rows.start, rows.stop))
            assert_same_bits(out[:, rows], expected, f"out of sequence {n}")
            assert_same_bits(state[n : n + 1], expected_state, f"final_state of sequence {n}")

        batch = inputs | {name: inputs[name].view(N, length, *inputs[name].shape[2:]) for name in TOKEN_INPUTS}
        batch_out = torch.empty_like(batch["v"])
        flash_kda.fwd(**batch, out=batch_out)
        for n in range(0, N, 50):
            assert_same_bits(
                batch_out[n : n + 50], out.view(batch_out.shape)[n : n + 50], f"out of batch rows from {n}"
            )

    def test_state_offsets_beyond_2_to_the_31(self):
        """4160 sequences of 32 heads: the states hold 2.18e9 elements."""
        self.require_memory(43)
        N, H = 4160, 32
        inputs = make_inputs("long", 1, N, H, "cuda", state_dtype=torch.bfloat16, N=N)
        out = torch.empty_like(inputs["v"])
        state = torch.empty_like(inputs["initial_state"])
        flash_kda.fwd(**inputs, out=out, final_state=state, cu_seqlens=torch.arange(N + 1, device="cuda"))
        for n in (0, 2047, 2048, 4095, 4096, N - 1):
            expected, expected_state = fwd(cut(inputs, n, n + 1, n), final_dtype=torch.bfloat16)
            assert_same_bits(out[:, n : n + 1], expected, f"out of sequence {n}")
            assert_same_bits(state[n : n + 1], expected_state, f"final_state of sequence {n}")


def in_fused_projection(inputs):
    """q, k, v, g as slices of one [B, T, 4 H 128 + 8] projection."""
    B, T, H, _ = inputs["q"].shape
    names = ("q", "k", "v", "g")
    fused = torch.empty(B, T, 4 * H * HEAD_DIM + 8, dtype=torch.bfloat16, device="cuda")
    views = {
        n: fused[..., i * H * HEAD_DIM : (i + 1) * H * HEAD_DIM].unflatten(-1, (H, HEAD_DIM))
        for i, n in enumerate(names)
    }
    return views


def in_heads_first(inputs):
    """q, k, v, g as transposed views of [B, H, T, 128] tensors."""
    B, T, H, _ = inputs["q"].shape
    make = lambda: torch.empty(B, H, T, HEAD_DIM, dtype=torch.bfloat16, device="cuda").transpose(1, 2)  # noqa: E731
    return {name: make() for name in ("q", "k", "v", "g")}


class TestStrides:
    @pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
    @pytest.mark.parametrize("layout", [in_fused_projection, in_heads_first])
    def test_strided_inputs_give_the_bits_of_contiguous_ones(self, layout, packed):
        B, T, H = (1, 99, 6) if packed else (3, 49, 6)
        cu_seqlens = cu_seqlens_of([17, 0, 33, 49], "cuda") if packed else None
        inputs = make_inputs("long", B, T, H, "cuda", 2, torch.float32, N=4 if packed else None)
        views = layout(inputs)
        views["beta"] = torch.empty(B, T, 40, dtype=torch.bfloat16, device="cuda")[..., 3 : 3 + H]
        for name, view in views.items():
            view.copy_(inputs[name])
            assert not view.is_contiguous()
        out, state = fwd(inputs | views, cu_seqlens)
        expected, expected_state = fwd(inputs, cu_seqlens)
        assert_same_bits(out, expected, "out")
        assert_same_bits(state, expected_state, "final_state")

    def test_beta_heads_first(self):
        inputs = make_inputs("long", 2, 49, 6, "cuda", 2)
        beta = inputs["beta"].transpose(1, 2).contiguous().transpose(1, 2)
        assert_same_bits(fwd(inputs | {"beta": beta})[0], fwd(inputs)[0], "out")

    @pytest.mark.parametrize("layout", ["slice of wider rows", "heads first"])
    def test_strided_out_leaves_its_neighbours_untouched(self, layout):
        B, T, H = 2, 49, 6
        inputs = make_inputs("random", B, T, H, "cuda", 3)
        if layout == "slice of wider rows":
            whole = Guarded((B, T, H, 2 * HEAD_DIM), torch.bfloat16)
            out = whole.tensor[..., :HEAD_DIM]
            untouched = lambda: whole.written()[..., HEAD_DIM:]  # noqa: E731
        else:
            whole = Guarded((B, H, T + 5, HEAD_DIM), torch.bfloat16)
            out = whole.tensor[:, :, :T].transpose(1, 2)
            untouched = lambda: whole.written()[:, :, T:]  # noqa: E731
        flash_kda.fwd(**inputs, out=out)
        assert_same_bits(out, fwd(inputs)[0], "out")
        assert not bool(untouched().any())
        whole.assert_guards_untouched()


class TestInvariants:
    @pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
    def test_twenty_runs_give_the_same_bits(self, packed):
        if packed:
            inputs, cu_seqlens = packed_inputs([1300, 17, 0, 547, 64, 1], 32)
        else:
            inputs, cu_seqlens = make_inputs("long", 2, 777, 32, "cuda", 0, torch.float32), None
        expected, expected_state = fwd(inputs, cu_seqlens)
        for i in range(19):
            out, state = fwd(inputs, cu_seqlens)
            assert_same_bits(out, expected, f"out of run {i + 2}")
            assert_same_bits(state, expected_state, f"final_state of run {i + 2}")

    @pytest.mark.parametrize("P", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100])
    def test_causality(self, P):
        """out[:P] and the state after P tokens do not depend on what follows."""
        T, H = 160, 4
        inputs = make_inputs("long", 2, T, H, "cuda", 4, torch.float32)
        expected, _ = fwd(inputs)
        other = make_inputs("random", 2, T, H, "cuda", 5)
        later = {
            "other tokens": {name: other[name][:, P:] for name in TOKEN_INPUTS},
            "gates saturated at the lower bound": {"g": torch.full_like(other["g"][:, P:], 80.0)},
            "gates without decay": {"g": torch.full_like(other["g"][:, P:], -80.0)},
            "large values": {"v": other["v"][:, P:] * 1e30, "q": other["q"][:, P:] * 1e4, "k": other["k"][:, P:] * 1e4},
            "zero keys and queries": {name: torch.zeros_like(other[name][:, P:]) for name in ("q", "k")},
        }
        for what, tokens in later.items():
            changed = inputs | {name: torch.cat([inputs[name][:, :P], x], dim=1) for name, x in tokens.items()}
            assert_same_bits(fwd(changed)[0][:, :P], expected[:, :P], f"out[:{P}] followed by {what}")
        assert_same_bits(fwd(cut(inputs, 0, P))[0], expected[:, :P], f"out of the first {P} tokens alone")

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("name", [*TOKEN_INPUTS, "initial_state"])
    def test_a_nan_or_inf_stays_in_its_sequence(self, name, value):
        lengths = [17, 33, 5, 64, 1]
        inputs, cu_seqlens = packed_inputs(lengths, 4, "random", 6)
        expected, expected_state = fwd(inputs, cu_seqlens)
        bounds = cu_seqlens.tolist()
        for bad, (start, end) in enumerate(pairwise(bounds)):
            rows = (bad, slice(None)) if name == "initial_state" else (slice(None), slice(start, end))
            changed = inputs | {name: inputs[name].clone()}
            changed[name][rows] = value
            out, state = fwd(changed, cu_seqlens)
            for n, (start_n, end_n) in enumerate(pairwise(bounds)):
                if n != bad:
                    assert_same_bits(
                        out[:, start_n:end_n], expected[:, start_n:end_n], f"out of sequence {n}, {bad} is bad"
                    )
                    assert_same_bits(state[n], expected_state[n], f"final_state of sequence {n}, {bad} is bad")

    def test_a_nan_stays_in_its_batch_row_and_head(self):
        inputs = make_inputs("random", 3, 37, 4, "cuda", 6, torch.float32)
        expected, expected_state = fwd(inputs)
        changed = inputs | {"v": inputs["v"].clone()}
        changed["v"][1, :, 2] = float("nan")
        out, state = fwd(changed)
        assert bool(out[1, :, 2].isnan().all())
        for b, h in product(range(3), range(4)):
            if (b, h) != (1, 2):
                assert_same_bits(out[b, :, h], expected[b, :, h], f"out of batch row {b}, head {h}")
                assert_same_bits(state[b, h], expected_state[b, h], f"final_state of batch row {b}, head {h}")

    def test_a_sequence_gives_the_same_bits_alone_and_packed(self):
        lengths = [1, 15, 0, 16, 17, 300, 64, 33, 1023]
        inputs, cu_seqlens = packed_inputs(lengths, 4, "long", 7)
        out, state = fwd(inputs, cu_seqlens)
        bounds = cu_seqlens.tolist()
        for n, (start, end) in enumerate(pairwise(bounds)):
            alone, alone_state = fwd(cut(inputs, start, end, n))
            assert_same_bits(out[:, start:end], alone, f"out of sequence {n}")
            assert_same_bits(state[n : n + 1], alone_state, f"final_state of sequence {n}")

    def test_inputs_stay_as_they_were(self):
        inputs, cu_seqlens = packed_inputs([17, 33, 65], 4, "long", 8)
        before = {name: x.clone() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
        fwd(inputs, cu_seqlens)
        for name, x in before.items():
            assert_same_bits(inputs[name], x, name)
        assert cu_seqlens.tolist() == [0, 17, 50, 115]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_final_state_may_be_the_initial_state(self, dtype):
        inputs, cu_seqlens = packed_inputs([17, 0, 33, 65], 32, "long", 9, dtype)
        expected, expected_state = fwd(inputs, cu_seqlens, dtype)
        state = inputs["initial_state"].clone()
        out = torch.empty_like(inputs["v"])
        flash_kda.fwd(**inputs | {"initial_state": state}, out=out, final_state=state, cu_seqlens=cu_seqlens)
        assert_same_bits(out, expected, "out")
        assert_same_bits(state, expected_state, "final_state")


class TestStreams:
    def test_cuda_graph_replays_with_new_contents(self):
        """The captured call reads tokens, states and cu_seqlens anew at each replay."""
        packings = ([17, 33, 65], [115, 0, 0], [1, 50, 40])
        static, cu_seqlens = packed_inputs(packings[0], 8, "long", 10)
        out = Guarded(static["v"].shape, torch.bfloat16)
        state = torch.empty_like(static["initial_state"])
        arguments = static | {"out": out.tensor, "final_state": state, "cu_seqlens": cu_seqlens}
        flash_kda.fwd(**arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            flash_kda.fwd(**arguments)
        for seed, lengths in enumerate(packings):
            new = make_inputs("random", 1, 115, 8, "cuda", seed, torch.float32, N=3)
            new_cu_seqlens = cu_seqlens_of(lengths, "cuda")
            expected, expected_state = run(new, new_cu_seqlens, all_written=False)
            for name, x in new.items():
                if isinstance(x, torch.Tensor):
                    static[name].copy_(x)
            cu_seqlens.copy_(new_cu_seqlens)
            out.buffer.fill_(out.pattern)
            graph.replay()
            torch.cuda.synchronize()
            out.assert_guards_untouched()
            assert_same_bits(out.tensor, expected.tensor, f"out of replay {seed}, poisoned where not written")
            assert_same_bits(state, expected_state.tensor, f"final_state of replay {seed}")

    def test_runs_on_the_current_stream_without_waiting_for_it(self):
        inputs = make_inputs("long", 1, 256, 4, "cuda", 11, torch.float32)
        expected, expected_state = fwd(inputs)
        late = {name: torch.zeros_like(inputs[name]) for name in TOKEN_INPUTS}
        out, state = torch.zeros_like(expected), torch.zeros_like(expected_state)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000_000)
            for name, x in late.items():
                x.copy_(inputs[name])
            flash_kda.fwd(**inputs | late, out=out, final_state=state)
            pending = not stream.query()
        assert pending, "the call waited for the device"
        stream.synchronize()
        assert_same_bits(out, expected, "out")
        assert_same_bits(state, expected_state, "final_state")

    def test_two_streams_at_once(self):
        batches = [make_inputs("long", 1, 512, 8, "cuda", seed, torch.float32) for seed in range(2)]
        expected = [fwd(inputs) for inputs in batches]
        results = [(torch.empty_like(out), torch.empty_like(state)) for out, state in expected]
        streams = [torch.cuda.Stream() for _ in batches]
        torch.cuda.synchronize()
        for _ in range(10):
            for stream, inputs, (out, state) in zip(streams, batches, results, strict=True):
                with torch.cuda.stream(stream):
                    flash_kda.fwd(**inputs, out=out, final_state=state)
        torch.cuda.synchronize()
        for i, ((out, state), (expected_out, expected_state)) in enumerate(zip(results, expected, strict=True)):
            assert_same_bits(out, expected_out, f"out on stream {i}")
            assert_same_bits(state, expected_state, f"final_state on stream {i}")


class TestRejectedCalls:
    @pytest.mark.parametrize(
        "error, change, name",
        [
            (TypeError, lambda x: {"q": x["q"].float()}, "q"),
            (ValueError, lambda x: {"k": x["k"].cpu()}, "k"),
            (ValueError, lambda x: {"v": x["v"][..., :64]}, "v"),
            (ValueError, lambda x: {"A_log": x["A_log"].cpu()}, "A_log"),
            (ValueError, lambda x: {"initial_state": x["initial_state"].cpu()}, "initial_state"),
            (ValueError, lambda x: {"cu_seqlens": cu_seqlens_of([10, 27])}, "cu_seqlens"),
            (ValueError, lambda x: {"lower_bound": -5.5}, "lower_bound"),
        ],
        ids=["dtype", "q-k devices", "shape", "A_log device", "state device", "cu_seqlens device", "lower_bound"],
    )
    def test_nothing_is_written(self, error, change, name):
        inputs = make_inputs("random", 1, 37, 4, "cuda", 13, torch.float32, N=2)
        inputs["cu_seqlens"] = cu_seqlens_of([10, 27], "cuda")
        out, state = Guarded(inputs["v"].shape, torch.bfloat16), Guarded(inputs["initial_state"].shape, torch.float32)
        with pytest.raises(error, match=rf"\b{name}\b"):
            flash_kda.fwd(**inputs | change(inputs), out=out.tensor, final_state=state.tensor)
        torch.cuda.synchronize()
        assert not bool(out.written().any()) and not bool(state.written().any())

    def test_unknown_schedule(self, monkeypatch):
        monkeypatch.setenv("FLASH_KDA_SCHEDULE", "fastest")
        inputs = make_inputs("random", 1, 16, 1, "cuda")
        with pytest.raises(ValueError, match="auto, pairs, portable, sm90"):
            flash_kda.fwd(**inputs, out=torch.empty_like(inputs["v"]))

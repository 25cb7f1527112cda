"""What `flash_kda.fwd` serves beyond the plain call, on a CPU and, marked `gpu`, by each kernel schedule.

Where a feature only says where a value lies or how it came about, the bits are those of the plain call; otherwise the
fp64 recurrence is the yardstick.
"""

import math

import pytest
import schedules
import torch
from accuracy import BOUNDS
from guarded import Guarded, assert_same_bits
from inputs import HEAD_DIM, TOKEN_INPUTS, cu_seqlens_of, make_inputs, packed_inputs, relative_error

import flash_kda
from flash_kda.recurrence import natural_log_decay, recurrence

CPU_BOUNDS = (2e-3, 2e-6)  # as in test_cpu.py: the rounding of out to bf16, and fp32 states
LENGTHS = [70, 0, 130, 1, 64, 200]


def packed(device, lengths=LENGTHS, H=2, kind="long", seed=0, dtype=torch.float32):
    return packed_inputs(lengths, H, kind, seed, dtype, device)


def fwd(x, cu_seqlens=None, final_dtype=torch.float32, **options):
    """(out, final_state) of one call; out and final_state stand between poisoned guards and are poisoned before it."""
    N = len(x["q"]) if cu_seqlens is None else len(cu_seqlens) - 1
    HV = x["v"].shape[2]
    out = Guarded(x["v"].shape, torch.bfloat16, x["v"].device)
    final = Guarded((N, HV, HEAD_DIM, HEAD_DIM), final_dtype, x["v"].device)
    flash_kda.fwd(**x, out=out.tensor, final_state=final.tensor, cu_seqlens=cu_seqlens, **options)
    for guarded in (out, final):
        guarded.assert_guards_untouched()
        assert bool(guarded.written().all())
    return out.tensor, final.tensor


def assert_same(results, expected):
    for name, x, y in zip(("out", "final_state"), results, expected, strict=True):
        assert_same_bits(x, y, name)


def assert_accurate(x, cu_seqlens=None, **options):
    """out and final_state against the fp64 recurrence."""
    results, expected = fwd(x, cu_seqlens, **options), recurrence(**x, cu_seqlens=cu_seqlens, **options)
    bounds = CPU_BOUNDS if x["q"].device.type == "cpu" else BOUNDS["long"]
    for name, bound, y, ref in zip(("out", "final_state"), bounds, results, expected, strict=True):
        error = relative_error(y, ref)
        assert error < bound, f"{name}: relative error {error:.3g}, bound {bound}"
    return results


# Every schedule, and auto, which has a kernel for decoding.
GPU_WITH_DECODING = schedules.and_cpu((*schedules.SCHEDULES, "auto"))[1:]


def needs_memory(size):
    """Skips a test on a GPU with less than that many bytes free."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < size:
        pytest.skip(f"needs {size / 1e9:.0f} GB of free device memory, {free / 1e9:.0f} GB are free")


class TestStatePool:
    INDICES = [5, -1, 0, 7, -1, 3]

    @staticmethod
    def pool(device, dtype, P=9, H=2, padding=64, seed=3):
        """A pool [P, H, V, K] with `padding` elements between rows, the guard around it, and its contents."""
        row = H * HEAD_DIM * HEAD_DIM
        guarded = Guarded((P, row + padding), dtype, device)
        pool = guarded.tensor[:, :row].unflatten(1, (H, HEAD_DIM, HEAD_DIM))
        generator = torch.Generator().manual_seed(seed)
        pool.copy_(torch.randn(pool.shape, generator=generator).mul_(0.1))
        return pool, guarded

    @pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("in_place", [True, False])
    def test_rows_are_read_and_written_in_place(self, device, dtype, index_dtype, in_place):
        x, cu_seqlens = packed(device, dtype=dtype)
        pool, guarded = self.pool(device, dtype)
        final, final_guarded = (pool, guarded) if in_place else self.pool(device, dtype, padding=8, seed=4)
        before = final_guarded.buffer.clone()
        named = [(n, row) for n, row in enumerate(self.INDICES) if row >= 0]
        x["initial_state"] = torch.zeros(len(LENGTHS), 2, HEAD_DIM, HEAD_DIM, dtype=dtype, device=device)
        for n, row in named:
            x["initial_state"][n] = pool[row]
        expected_out, expected_state = fwd(x, cu_seqlens, dtype)

        out = torch.empty_like(x["v"])
        indices = torch.tensor(self.INDICES, dtype=index_dtype, device=device)
        states = {"initial_state": pool, "final_state": final}
        flash_kda.fwd(**x | states, out=out, cu_seqlens=cu_seqlens, state_indices=indices)
        assert_same_bits(out, expected_out, "out")
        for n, row in named:
            assert_same_bits(final[row], expected_state[n], f"row {row}")
            final[row] = 0
        after = final_guarded.buffer.clone()
        final_guarded.buffer.copy_(before)
        for _, row in named:
            final[row] = 0
        assert torch.equal(after, final_guarded.buffer), "something beside the named rows was written"

    @pytest.mark.parametrize("bad", [-2, 9, 2**31 - 1, -(2**31), 2**40, -(2**63), 2**63 - 1])
    def test_an_index_outside_the_pool_counts_as_none(self, device, bad):
        x, cu_seqlens = packed(device, [40, 30])
        pool, guarded = self.pool(device, torch.float32)
        before = guarded.buffer.clone()
        dtype = torch.int32 if -(2**31) <= bad < 2**31 else torch.int64
        out = torch.empty_like(x["v"])
        indices = torch.tensor([bad, bad], dtype=dtype, device=device)
        states = {"initial_state": pool, "final_state": pool}
        flash_kda.fwd(**x | states, out=out, cu_seqlens=cu_seqlens, state_indices=indices)
        assert torch.equal(guarded.buffer, before)
        assert_same_bits(out, fwd(x | {"initial_state": None}, cu_seqlens)[0], "out")

    @pytest.mark.parametrize("missing", ["initial_state", "final_state"])
    def test_one_pool_alone(self, device, missing):
        x, cu_seqlens = packed(device, [40, 30])
        pool, _ = self.pool(device, torch.float32)
        indices = torch.tensor([4, 1], device=device)
        out = torch.empty_like(x["v"])
        states = {"initial_state": pool, "final_state": pool, missing: None}
        initial = None if missing == "initial_state" else pool[[4, 1]].contiguous()
        expected_out, expected_state = fwd(x | {"initial_state": initial}, cu_seqlens)
        flash_kda.fwd(**x | states, out=out, cu_seqlens=cu_seqlens, state_indices=indices)
        assert_same_bits(out, expected_out, "out")
        if missing == "initial_state":
            assert_same_bits(pool[[4, 1]], expected_state, "final_state")

    def test_padded_rows_without_indices(self, device):
        x, cu_seqlens = packed(device, [40, 0, 30])
        expected = fwd(x, cu_seqlens)
        pool, guarded = self.pool(device, torch.float32, P=3)
        pool.copy_(x["initial_state"])
        out = torch.empty_like(x["v"])
        flash_kda.fwd(**x | {"initial_state": pool}, final_state=pool, out=out, cu_seqlens=cu_seqlens)
        assert_same(((out), pool.contiguous()), expected)
        padding = guarded.written()[:, 2 * HEAD_DIM * HEAD_DIM :]
        assert not bool(padding.any())

    def test_empty_sequences_copy_their_row_to_the_last_bit(self, device):
        x, cu_seqlens = packed(device, [0, 0])
        pool, _ = self.pool(device, torch.float32)
        other, _ = self.pool(device, torch.float32, seed=5)
        pool[2, 0, 0, :4] = torch.tensor([-0.0, 1e-40, -1e-45, 1e30])
        indices = torch.tensor([2, -1], dtype=torch.int32, device=device)
        states = {"initial_state": pool, "final_state": other}
        rest = other.clone()
        flash_kda.fwd(**x | states, out=torch.empty_like(x["v"]), cu_seqlens=cu_seqlens, state_indices=indices)
        rest[2] = pool[2]
        assert_same_bits(other.contiguous(), rest.contiguous(), "final_state")

    @pytest.mark.parametrize("device", GPU_WITH_DECODING, indirect=True)
    @pytest.mark.parametrize("lengths", [[40, 30], [1, 3]], ids=["prefill", "decoding"])
    def test_offsets_beyond_2_to_the_31(self, device, lengths):
        """Rows of 2^14 numbers 2^18 apart: row 9000 begins at element 2.36e9. The bits of a small pool, and no other
        row is written."""
        needs_memory(12e9)
        buffer = torch.zeros(9100, 2**18, dtype=torch.bfloat16, device=device)
        pool = buffer[:, : HEAD_DIM * HEAD_DIM].view(9100, 1, HEAD_DIM, HEAD_DIM)
        x, cu_seqlens = packed(device, lengths, H=1, dtype=torch.bfloat16)
        rows = torch.tensor([9000, 8200], device=device)
        pool[rows] = x["initial_state"]
        results = []
        for states, indices in ((x["initial_state"].clone(), torch.arange(2, device=device)), (pool, rows)):
            out = torch.full_like(x["v"], torch.nan)
            states_in_place = {"initial_state": states, "final_state": states}
            flash_kda.fwd(**x | states_in_place, out=out, cu_seqlens=cu_seqlens, state_indices=indices)
            results.append((out, states[indices]))
        assert_same(results[1], results[0])
        assert not torch.equal(results[0][1], x["initial_state"])
        pool[rows] = 0
        assert not bool(buffer.any())


class TestCheckpoints:
    @pytest.mark.parametrize("interval", [64, 128])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("at", ["end", "start"])
    def test_states_are_those_of_shorter_sequences(self, device, interval, dtype, at):
        x, cu_seqlens = packed(device)
        bounds = cu_seqlens.tolist()
        expected = []
        for n, length in enumerate(LENGTHS):
            for tokens in range(0, length + 1, interval):
                if (tokens == 0) if at == "end" else (tokens == length):
                    continue
                rows = slice(bounds[n], bounds[n] + tokens)
                alone = x | {name: x[name][:, rows].clone() for name in TOKEN_INPUTS}
                state = fwd(alone | {"initial_state": x["initial_state"][n : n + 1].clone()})[1][0]
                expected.append(state.to(dtype))
        offsets = flash_kda.checkpoint_offsets(cu_seqlens.diff(), interval, at)
        assert int(offsets[-1]) == len(expected)
        options = {"checkpoint_interval": interval, "checkpoint_at": at}
        plain = fwd(x, cu_seqlens)
        for given in (None, offsets):
            checkpoints = Guarded((len(expected) + 1, 2, HEAD_DIM, HEAD_DIM), dtype, device)
            results = fwd(x, cu_seqlens, checkpoints=checkpoints.tensor, checkpoint_offsets=given, **options)
            assert_same(results, plain)
            checkpoints.assert_guards_untouched()
            assert not bool(checkpoints.written()[-1].any()), "a row past the last checkpoint was written"
            assert_same_bits(checkpoints.tensor[:-1], torch.stack(expected), "checkpoints")

    def test_130_tokens_at_64(self, device):
        """As the issue of prefix caches puts it: after 64 and 128, and not after 130."""
        x = make_inputs("long", 1, 130, 2, device, state_dtype=torch.float32)
        checkpoints = Guarded((3, 2, HEAD_DIM, HEAD_DIM), torch.float32, device)
        fwd(x, checkpoints=checkpoints.tensor, checkpoint_interval=64)
        assert checkpoints.written().flatten(1).all(1).tolist() == [True, True, False]
        expected = recurrence(**x, checkpoint_interval=64)[2]
        bound = CPU_BOUNDS[1] if device == "cpu" else BOUNDS["long"][1]
        assert relative_error(checkpoints.tensor[:2], expected) < bound

    @pytest.mark.parametrize("at", ["end", "start"])
    def test_batch_rows(self, device, at):
        x = make_inputs("long", 3, 200, 2, device, state_dtype=torch.float32)
        count = 3 if at == "end" else 4
        checkpoints = torch.empty(3 * count, 2, HEAD_DIM, HEAD_DIM, device=device)
        fwd(x, checkpoints=checkpoints, checkpoint_interval=64, checkpoint_at=at)
        expected = recurrence(**x, checkpoint_interval=64, checkpoint_at=at)[2]
        assert relative_error(checkpoints, expected) < (CPU_BOUNDS[1] if device == "cpu" else BOUNDS["long"][1])
        if at == "start":
            assert_same_bits(checkpoints[::count], x["initial_state"], "the states before the first token")

    def test_rows_of_others_and_outside_the_tensor_are_left_out(self, device):
        x, cu_seqlens = packed(device, [200, 200, 200, 200])
        checkpoints = Guarded((4, 2, HEAD_DIM, HEAD_DIM), torch.float32, device)
        # Room for two of three; rows that begin before the tensor, that lie after it, and a range that runs backwards.
        offsets = torch.tensor([0, 2, -1, 7, 6], device=device)
        options = {"checkpoints": checkpoints.tensor, "checkpoint_interval": 64, "checkpoint_offsets": offsets}
        fwd(x, cu_seqlens, **options)
        checkpoints.assert_guards_untouched()
        expected = recurrence(**x, cu_seqlens=cu_seqlens, checkpoint_interval=64)[2].view(4, 3, 2, HEAD_DIM, HEAD_DIM)
        # Sequence 1 has rows [2, -1), none; sequence 2 has [-1, 7): its second checkpoint is row 0 ... of which
        # sequence 0's first is also one, so that only rows 1 to 3 are told apart.
        bound = CPU_BOUNDS[1] if device == "cpu" else BOUNDS["long"][1]
        written = checkpoints.written().flatten(1)
        assert written.all(1).tolist() == [True, True, False, False] and not bool(written[2:].any())
        row_1 = checkpoints.tensor[1]
        assert min(relative_error(row_1, expected[0, 1]), relative_error(row_1, expected[2, 2])) < bound

    def test_offsets_leave_gaps_untouched(self, device):
        x, cu_seqlens = packed(device, [64, 128])
        checkpoints = Guarded((8, 2, HEAD_DIM, HEAD_DIM), torch.float32, device)
        offsets = torch.tensor([1, 4, 8], device=device)
        options = {"checkpoints": checkpoints.tensor, "checkpoint_interval": 64, "checkpoint_offsets": offsets}
        _, state = fwd(x, cu_seqlens, **options)
        rows = [row in (1, 4, 5) for row in range(8)]
        written = checkpoints.written().flatten(1)
        assert written.all(1).tolist() == written.any(1).tolist() == rows
        assert_same_bits(checkpoints.tensor[[1, 5]], state, "the last checkpoints, at the sequences' ends")

    @pytest.mark.parametrize("device", schedules.and_cpu(schedules.EXACT), indirect=True)
    def test_resuming_from_a_checkpoint_gives_the_same_bits(self, device):
        x = make_inputs("long", 1, 200, 2, device, state_dtype=torch.float32)
        checkpoints = torch.empty(3, 2, HEAD_DIM, HEAD_DIM, device=device)
        out, state = fwd(x, checkpoints=checkpoints, checkpoint_interval=64)
        for i in range(3):
            cut = 64 * (i + 1)
            tail = x | {name: x[name][:, cut:].clone() for name in TOKEN_INPUTS}
            assert_same(fwd(tail | {"initial_state": checkpoints[i : i + 1].clone()}), (out[:, cut:], state))

    @pytest.mark.parametrize("device", GPU_WITH_DECODING, indirect=True)
    @pytest.mark.parametrize("pooled", [False, True])
    def test_rows_beyond_2_to_the_31(self, device, pooled):
        """Row 140000 of one head begins at element 2.29e9. With a pool, auto takes the kernel for decoding."""
        needs_memory(12e9)
        x, cu_seqlens = packed(device, [0] * 50 + [130], H=1)
        if pooled:
            x["state_indices"] = torch.arange(51, device=device)
        options = {"checkpoint_interval": 64, "out": torch.empty_like(x["v"]), "cu_seqlens": cu_seqlens}
        options["final_state"] = torch.empty_like(x["initial_state"])
        near = torch.zeros(2, 1, HEAD_DIM, HEAD_DIM, dtype=torch.bfloat16, device=device)
        flash_kda.fwd(**x, **options, checkpoints=near)
        far = torch.zeros(140_003, 1, HEAD_DIM, HEAD_DIM, dtype=torch.bfloat16, device=device)
        offsets = torch.tensor([140_000] * 51 + [140_002], device=device)
        flash_kda.fwd(**x, **options, checkpoints=far, checkpoint_offsets=offsets)
        assert bool(near.any()) and near.isfinite().all()
        assert_same_bits(far[140_000:140_002], near, "checkpoints")
        far[140_000:140_002] = 0
        assert not bool(far.any())


class TestCuSeqlens:
    @pytest.mark.parametrize(
        "cu_seqlens", [[0, 70, 70, 200], [0, 0, 0], [0], [5, 5, 40, 999], [-7, 20, 2**31 - 1], [30, 20, 10]], ids=str
    )
    def test_int32_gives_the_bits_of_int64(self, device, cu_seqlens):
        N = len(cu_seqlens) - 1
        x = make_inputs("long", 1, 210, 2, device, state_dtype=torch.float32, N=N)
        results = []
        for dtype in (torch.int64, torch.int32):
            out = Guarded(x["v"].shape, torch.bfloat16, device)
            state = Guarded((N, 2, HEAD_DIM, HEAD_DIM), torch.float32, device)
            bounds = torch.tensor(cu_seqlens, dtype=dtype, device=device)
            flash_kda.fwd(**x, out=out.tensor, final_state=state.tensor, cu_seqlens=bounds)
            results.append((out, state))
        for x, y in zip(*results, strict=True):
            assert torch.equal(x.buffer, y.buffer)

    def test_many_sequences(self, device):
        """More than the SM90 kernel ranks by length."""
        x, cu_seqlens = packed(device, [n % 4 for n in range(300)])
        assert_same(fwd(x, cu_seqlens.int()), fwd(x, cu_seqlens))


class TestStrides:
    """q, k, v, g, beta and out of the general kernels anywhere in wider tensors; test_fwd.py has the plain ones."""

    @pytest.mark.parametrize("g_dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("layout", ["fused", "heads first"])
    def test_bits_of_contiguous_tensors(self, device, layout, g_dtype):
        x, cu_seqlens = packed(device, H=4)
        x |= {name: x[name][:, :, :2].clone() for name in ("q", "k")}
        x |= {"g": x["g"].to(g_dtype), "beta": x["beta"].to(g_dtype)}
        expected = fwd(x, cu_seqlens)
        views = {}
        for name in TOKEN_INPUTS:
            y = x[name]
            if name == "beta":
                views[name] = torch.empty(*y.shape[:2], 11, dtype=y.dtype, device=device)[..., 3:7]
            elif layout == "fused":
                wide = torch.empty(*y.shape[:2], y[0, 0].numel() + 24, dtype=y.dtype, device=device)
                views[name] = wide[..., 8:-16].unflatten(-1, y.shape[2:])
            else:
                shape = (len(y), y.shape[2], y.shape[1], HEAD_DIM)
                views[name] = torch.empty(shape, dtype=y.dtype, device=device).transpose(1, 2)
            views[name].copy_(y)
            assert not views[name].is_contiguous()
        whole = Guarded((1, sum(LENGTHS), 4, 2 * HEAD_DIM), torch.bfloat16, device)
        out, state = whole.tensor[..., :HEAD_DIM], torch.empty_like(expected[1])
        flash_kda.fwd(**x | views, out=out, final_state=state, cu_seqlens=cu_seqlens)
        assert_same((out.contiguous(), state), expected)
        assert not bool(whole.written()[..., HEAD_DIM:].any())

    def test_a_stride_of_zero(self, device):
        """One token for all: what TMA cannot address."""
        x = make_inputs("long", 1, 50, 2, device, state_dtype=torch.float32)
        same = {name: x[name][:, :1].expand(-1, 50, -1, -1) for name in ("q", "k", "g")}
        expected = fwd(x | {name: y.contiguous() for name, y in same.items()})
        assert_same(fwd(x | same | {"dt_bias": x["dt_bias"].flatten()}), expected)


class TestGroupedHeads:
    @pytest.mark.parametrize("group", [2, 3, 8])
    def test_bits_of_repeated_heads(self, device, group):
        x, cu_seqlens = packed(device, [40, 0, 33], H=2 * group)
        few = {name: x[name][:, :, :2].clone() for name in ("q", "k")}
        repeated = {name: y.repeat_interleave(group, 2) for name, y in few.items()}
        assert_same(fwd(x | few, cu_seqlens), fwd(x | repeated, cu_seqlens))

    def test_against_the_recurrence(self, device):
        x = make_inputs("long", 2, 100, 6, device, state_dtype=torch.float32)
        assert_accurate(x | {name: x[name][:, :, :2].clone() for name in ("q", "k")})


def softplus_inputs(device, mean, T=150, H=2, seed=0, g_dtype=torch.float32):
    """Inputs of the softplus gate whose decays a token have about this mean."""
    x = make_inputs("random", 1, T, H, device, seed, torch.float32)
    generator = torch.Generator(device=device).manual_seed(seed)
    bias = math.log(math.expm1(mean)) if mean < 30 else mean
    g = torch.randn(x["g"].shape, generator=generator, device=device) * max(1.0, 0.3 * mean) + bias
    return x | {
        "g": g.to(g_dtype),
        "A_log": torch.tensor([0.0, 0.7] * H, device=device)[:H],
        "dt_bias": 0.1 * torch.randn(H, HEAD_DIM, generator=generator, device=device),
        "lower_bound": None,
    }


class TestGates:
    @pytest.mark.parametrize("g_dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("missing", [("A_log",), ("dt_bias",), ("A_log", "dt_bias"), ()], ids=str)
    def test_bounded_gate_without_its_parameters(self, device, missing, g_dtype):
        """The bits of zeros; and those of bf16 for an fp32 g of the same values."""
        x, cu_seqlens = packed(device, [50, 0, 33])
        zeros = {name: torch.zeros_like(x[name]) for name in missing}
        changes = dict.fromkeys(missing) | {"g": x["g"].to(g_dtype)}
        assert_same(fwd(x | changes, cu_seqlens), fwd(x | zeros, cu_seqlens))

    def test_flat_bias(self, device):
        x = make_inputs("random", 1, 50, 3, device)
        assert_same(fwd(x | {"dt_bias": x["dt_bias"].flatten()}), fwd(x))

    def test_fp32_gate_beyond_bf16(self, device):
        x = make_inputs("long", 2, 150, 2, device, state_dtype=torch.float32)
        g = x["g"].float()
        assert_accurate(x | {"g": g + 1e-3 * torch.rand(g.shape, device=device)})

    @pytest.mark.parametrize("g_dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("mean", [1e-4, 0.01, 0.3, 2.0, 5.5, 8.0, 30.0, 1000.0])
    def test_softplus(self, device, mean, g_dtype):
        """Mean decays from those of trained models to far beyond what a chunk's factors hold."""
        assert_accurate(softplus_inputs(device, mean, g_dtype=g_dtype))

    def test_softplus_over_thousands_of_tokens(self, device):
        """Slow decays: an error of each that has a sign adds up."""
        x = make_inputs("random", 1, 3000, 1, device, state_dtype=torch.float32)
        generator = torch.Generator(device=device).manual_seed(1)
        rate = torch.rand(1, HEAD_DIM, generator=generator, device=device) * -6 - 3  # e^-9 to e^-3 a token
        x |= {"g": x["g"] * 0.1, "A_log": torch.full((1,), 1.5, device=device), "dt_bias": rate, "lower_bound": None}
        x["beta"] -= 6  # a state that is hardly renewed shows it
        assert_accurate(x)

    @pytest.mark.parametrize("g_dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("packing", [[16], [1], [15, 17, 33], [0, 5, 0, 64]], ids=str)
    @pytest.mark.parametrize("mean", [0.5, 20.0])
    def test_softplus_packed(self, device, packing, mean, g_dtype):
        x = softplus_inputs(device, mean, sum(packing), g_dtype=g_dtype)
        x["initial_state"] = 0.1 * torch.randn(len(packing), 2, HEAD_DIM, HEAD_DIM, device=device)
        assert_accurate(x, cu_seqlens_of(packing, device))

    @pytest.mark.parametrize(
        ("A_log", "bias"),
        [(4.0, -7.0), (4.3, -7.0), (9.0, -12.0), (0.0, -60.0), (3.0, 70.0), (-2.0, 9.0), (-4.0, 40.0), (-9.0, 100.0)],
        ids=str,
    )
    def test_softplus_of_unusual_heads(self, device, A_log, bias):
        """Steep and slight slopes, large biases: on either side of where GPU kernels change their way."""
        x = softplus_inputs(device, 1.0, g_dtype=torch.bfloat16)
        x |= {"A_log": torch.tensor([A_log, 0.5], device=device), "dt_bias": x["dt_bias"] + bias}
        assert_accurate(x)
        strays = x["g"].clone()
        strays[:, ::7, :, ::5] = -bias  # where the two cancel
        assert_accurate(x | {"g": strays})

    @pytest.mark.parametrize("mean", [0.01, 0.5, 6.0, 100.0])
    def test_softplus_where_more_is_asked_for(self, device, mean):
        """The bits are the same with an fp32 g of the same values, and with checkpoints: other kernels, on a GPU."""
        lengths = [70, 0, 130, 1, 16]
        x = softplus_inputs(device, mean, sum(lengths), H=4, g_dtype=torch.bfloat16)
        x["initial_state"] = 0.1 * torch.randn(5, 4, HEAD_DIM, HEAD_DIM, device=device)
        cu_seqlens = cu_seqlens_of(lengths, device)
        expected = fwd(x, cu_seqlens)
        assert_same(fwd(x | {"g": x["g"].float()}, cu_seqlens), expected)
        checkpoints = torch.empty(3, 4, HEAD_DIM, HEAD_DIM, device=device)
        assert_same(fwd(x, cu_seqlens, checkpoints=checkpoints, checkpoint_interval=64), expected)

    @pytest.mark.parametrize("g_dtype", [torch.bfloat16, torch.float32])
    def test_any_finite_input(self, device, g_dtype):
        """Extremes of g, dt_bias and A_log, alone and together; nothing becomes NaN, and the decays are right."""
        values = [-3e38, -1e4, -104.0, -88.0, -20.0, -15.0, -14.9, -1.0, 0.0, 1.0, 14.0, 20.5, 88.0, 89.0, 1e4, 3e38]
        x = make_inputs("random", 1, 64, 4, device, state_dtype=torch.float32)
        picks = torch.randint(len(values), x["g"].shape, generator=torch.Generator().manual_seed(0))
        for A_log in ([0.0, 1.0, -1.0, 3.0], [-104.0, -90.0, 88.0, 89.0], [-700.0, 700.0, 100.0, -50.0]):
            x |= {
                "g": torch.tensor(values)[picks].to(device, g_dtype),
                "A_log": torch.tensor(A_log, device=device),
                "dt_bias": torch.tensor([0.0, 3e37, -3e38, 1.0], device=device).repeat(128).view(4, 128),
                "lower_bound": None,
            }
            assert_accurate(x)

    @pytest.mark.parametrize("g_dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("strength", [0.01, 1.0, 7.0, 1000.0, 1e38])
    def test_log_decays(self, device, strength, g_dtype):
        x = make_inputs("random", 1, 150, 2, device, state_dtype=torch.float32)
        generator = torch.Generator(device=device).manual_seed(2)
        g = -strength * torch.rand(x["g"].shape, generator=generator, device=device)
        none = dict.fromkeys(("A_log", "dt_bias", "lower_bound"))
        assert_accurate(x | none | {"g": g.to(g_dtype)}, gate="log")

    def test_log_decays_of_rare_resets(self, device):
        """Hardly any decay but for single tokens that forget everything, in some channels or in all."""
        x = make_inputs("random", 1, 200, 2, device, state_dtype=torch.float32)
        generator = torch.Generator(device=device).manual_seed(3)
        g = -1e-3 * torch.rand(x["g"].shape, generator=generator, device=device)
        some = torch.rand(g.shape, generator=generator, device=device) < 0.03
        g = torch.where(some, -math.inf, g)
        g[:, [31, 32, 100]] = -500.0
        none = dict.fromkeys(("A_log", "dt_bias", "lower_bound"))
        out, state = fwd(x | none | {"g": g}, gate="log")
        expected = recurrence(**x | none | {"g": g}, gate="log")
        bounds = CPU_BOUNDS if device == "cpu" else BOUNDS["long"]
        assert relative_error(out, expected[0]) < bounds[0] and relative_error(state, expected[1]) < bounds[1]

    def test_activated_gates_agree_with_raw_ones(self, device):
        x = make_inputs("long", 1, 150, 2, device, state_dtype=torch.float32)
        decays = natural_log_decay(x["g"], x["A_log"], x["dt_bias"], x["lower_bound"]).float()
        none = dict.fromkeys(("A_log", "dt_bias", "lower_bound"))
        results, expected = fwd(x | none | {"g": decays}, gate="log"), fwd(x)
        bounds = (2.5e-3, 1e-5) if device == "cpu" else BOUNDS["long"]
        for y, ref, bound in zip(results, expected, bounds, strict=True):
            assert relative_error(y, ref) < bound

    @pytest.mark.parametrize("g_dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("P", [1, 5, 15, 16, 17, 31, 32, 33, 50])
    def test_causality_to_the_bit(self, device, P, g_dtype):
        """Strong decays later in a chunk change no bit of what comes before, and neither does being cut off."""
        x = softplus_inputs(device, 0.5, 80, g_dtype=g_dtype)
        out, _ = fwd(x)
        for strong in (9.0, 60.0, 2000.0):
            changed = x | {"g": torch.cat((x["g"][:, :P], torch.full_like(x["g"][:, P:], strong)), 1)}
            assert_same_bits(fwd(changed)[0][:, :P], out[:, :P], f"out[:{P}] before decays of {strong}")
        first = {name: x[name][:, :P].clone() for name in TOKEN_INPUTS}
        assert_same_bits(fwd(x | first)[0], out[:, :P], f"out of the first {P} tokens alone")
        strong = x | {"g": x["g"] + 9.0}
        first["g"] = strong["g"][:, :P].clone()
        assert_same_bits(fwd(x | first)[0], fwd(strong)[0][:, :P], f"the same where most decays are strong, {P}")

    @pytest.mark.parametrize("g_dtype", [torch.bfloat16, torch.float32])
    def test_a_nan_stays_in_its_sequence(self, device, g_dtype):
        lengths = [40, 27, 33]
        x = softplus_inputs(device, 3.0, sum(lengths), g_dtype=g_dtype)
        x["initial_state"] = torch.randn(3, 2, HEAD_DIM, HEAD_DIM, device=device) * 0.1
        cu_seqlens = cu_seqlens_of(lengths, device)
        out, state = fwd(x, cu_seqlens)
        for name in TOKEN_INPUTS:
            bad = x | {name: x[name].clone()}
            bad[name][0, 50] = torch.nan
            bad_out, bad_state = fwd(bad, cu_seqlens)
            for tokens in (slice(0, 40), slice(67, None)):
                assert_same_bits(bad_out[:, tokens], out[:, tokens], f"out beside a NaN in {name}")
            assert_same_bits(bad_state[[0, 2]], state[[0, 2]], f"final_state beside a NaN in {name}")
            assert bool(bad_out[0, 50].isnan().all()), name

    @pytest.mark.parametrize("g_dtype", [torch.bfloat16, torch.float32])
    def test_alone_and_packed_give_the_same_bits(self, device, g_dtype):
        lengths = [40, 1, 16, 33]
        x = softplus_inputs(device, 6.0, sum(lengths), g_dtype=g_dtype)
        x["initial_state"] = torch.randn(4, 2, HEAD_DIM, HEAD_DIM, device=device) * 0.1
        cu_seqlens = cu_seqlens_of(lengths, device)
        out, state = fwd(x, cu_seqlens)
        bounds = cu_seqlens.tolist()
        for n in range(4):
            rows = slice(bounds[n], bounds[n + 1])
            alone = x | {name: x[name][:, rows].clone() for name in TOKEN_INPUTS}
            results = fwd(alone | {"initial_state": x["initial_state"][n : n + 1].clone()})
            assert_same(results, (out[:, rows], state[n : n + 1]))


class TestActivations:
    def test_negative_eigenvalues(self, device):
        x = make_inputs("long", 1, 150, 2, device, state_dtype=torch.float32)
        out, _ = assert_accurate(x, allow_neg_eigval=True)
        assert relative_error(out, fwd(x)[0]) > 0.1

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_activated_beta(self, device, dtype):
        x = make_inputs("long", 2, 70, 2, device, state_dtype=torch.float32)
        beta = (2 * torch.sigmoid(x["beta"].float())).to(dtype)
        assert_accurate(x | {"beta": beta}, use_beta_sigmoid_in_kernel=False)

    def test_fp32_logits(self, device):
        x, cu_seqlens = packed(device, [50, 0, 33])
        assert_same(fwd(x | {"beta": x["beta"].float()}, cu_seqlens), fwd(x, cu_seqlens))

    def test_normalised_keys_and_queries(self, device):
        x = make_inputs("long", 1, 150, 2, device, state_dtype=torch.float32)
        unit = {name: torch.nn.functional.normalize(x[name].float(), dim=-1).bfloat16() for name in ("q", "k")}
        assert_accurate(x | unit, use_qk_l2norm_in_kernel=False)

    @pytest.mark.parametrize("mean", [0.3, 20.0])
    def test_everything_at_once(self, device, mean):
        lengths = [70, 0, 130, 1]
        x = softplus_inputs(device, mean, sum(lengths), H=4)
        x |= {name: torch.nn.functional.normalize(x[name][:, :, :2].float(), dim=-1).bfloat16() for name in ("q", "k")}
        x["beta"] = x["beta"].float()
        initial = 0.1 * torch.randn(4, 4, HEAD_DIM, HEAD_DIM, device=device)
        cu_seqlens = cu_seqlens_of(lengths, device).int()
        pool = torch.randn(6, 4, HEAD_DIM, HEAD_DIM, device=device)
        indices = [4, 1, 0, 5]
        pool[indices] = initial
        before = pool.clone()
        switches = {"use_qk_l2norm_in_kernel": False, "allow_neg_eigval": True}
        expected = recurrence(
            **x | {"initial_state": initial}, cu_seqlens=cu_seqlens, checkpoint_interval=64, **switches
        )
        out, checkpoints = torch.empty_like(x["v"]), torch.empty_like(expected[2], dtype=torch.float32)
        flash_kda.fwd(
            **x | {"initial_state": pool, "final_state": pool},
            out=out,
            cu_seqlens=cu_seqlens,
            state_indices=torch.tensor(indices, device=device),
            checkpoints=checkpoints,
            checkpoint_interval=64,
            **switches,
        )
        bounds = CPU_BOUNDS if device == "cpu" else BOUNDS["long"]
        assert relative_error(out, expected[0]) < bounds[0]
        assert relative_error(pool[indices], expected[1]) < bounds[1]
        assert relative_error(checkpoints, expected[2]) < bounds[1]
        assert_same_bits(pool[[2, 3]], before[[2, 3]], "rows that no sequence names")


@pytest.mark.parametrize("device", schedules.and_cpu(schedules.SETTINGS), indirect=True)
class TestDecoding:
    """Few tokens for each state of a pool: on a GPU also the kernel that `auto` takes for them, in fp32 throughout."""

    @staticmethod
    def check(x, cu_seqlens, indices, dtype=torch.float32, **options):
        """A call in place on a pool; returns the error of the named rows. All other rows stay."""
        device = x["q"].device
        HV = x["v"].shape[2]
        pool = Guarded((max(indices) + 3, HV, HEAD_DIM, HEAD_DIM), dtype, device)
        named = [row for row in indices if row >= 0]
        pool.tensor[named] = 0.1 * torch.randn(len(named), HV, HEAD_DIM, HEAD_DIM, device=device).to(dtype)
        before = pool.buffer.clone()
        initial = torch.stack([pool.tensor[row] if row >= 0 else torch.zeros_like(pool.tensor[0]) for row in indices])
        out = Guarded(x["v"].shape, torch.bfloat16, device)
        states = {"initial_state": pool.tensor, "final_state": pool.tensor}
        rows = torch.tensor(indices, device=device)
        flash_kda.fwd(**x | states, out=out.tensor, cu_seqlens=cu_seqlens, state_indices=rows, **options)
        expected = recurrence(**x | {"initial_state": initial}, cu_seqlens=cu_seqlens, **options)
        out.assert_guards_untouched()
        bounds = CPU_BOUNDS if device.type == "cpu" else BOUNDS["long"]
        state_bound = max(bounds[1], 2e-3 if dtype == torch.bfloat16 else 0)
        assert bool(out.written().all()) and relative_error(out.tensor, expected[0]) < bounds[0]
        kept = [n for n, row in enumerate(indices) if row >= 0]
        assert relative_error(pool.tensor[named], expected[1][kept]) < state_bound
        after = pool.buffer.clone()
        pool.buffer.copy_(before)
        untouched = torch.ones(len(pool.tensor), dtype=torch.bool)
        untouched[named] = False
        old = pool.tensor[untouched].clone()
        pool.buffer.copy_(after)
        assert torch.equal(old.view(torch.uint8), pool.tensor[untouched].view(torch.uint8))
        pool.assert_guards_untouched()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("T", [1, 2, 3, 15, 16])
    def test_batch(self, device, T, dtype):
        x = make_inputs("long", 5, T, 3, device, T)
        self.check(x, None, [4, -1, 0, 7, 2], dtype)

    @pytest.mark.parametrize("lengths", [[1] * 7, [1, 0, 4, 2, 0, 3, 1], [0, 0, 0, 26, 0, 1, 1]], ids=str)
    def test_packed(self, device, lengths):
        x = make_inputs("random", 1, sum(lengths), 2, device, 3)
        self.check(x, cu_seqlens_of(lengths, device).int(), [6, 1, 0, 9, -1, 3, 5])

    @pytest.mark.parametrize("mean", [0.02, 3.0, 500.0])
    @pytest.mark.parametrize("g_dtype", [torch.bfloat16, torch.float32])
    def test_softplus_grouped_and_activated(self, device, mean, g_dtype):
        x = softplus_inputs(device, mean, 16, H=4, g_dtype=g_dtype)
        x |= {name: torch.nn.functional.normalize(x[name][:, :, :2].float(), dim=-1).bfloat16() for name in ("q", "k")}
        x["beta"] = torch.sigmoid(x["beta"].float())
        switches = {"use_qk_l2norm_in_kernel": False, "use_beta_sigmoid_in_kernel": False}
        self.check({name: y for name, y in x.items() if name != "initial_state"}, None, [3], **switches)

    def test_log_decays_and_negative_eigenvalues(self, device):
        x = make_inputs("random", 4, 5, 2, device, 4)
        none = dict.fromkeys(("A_log", "dt_bias", "lower_bound"))
        self.check(x | none | {"g": -x["g"].abs()}, None, [3, 2, 0, 1], gate="log", allow_neg_eigval=True)

    def test_many_heads_and_sequences(self, device):
        x = make_inputs("long", 1, 40, 96 if device == "cuda" else 8, device, 5)
        self.check(x, cu_seqlens_of([1] * 40, device), list(range(39, -1, -1)))

    def test_a_long_sequence_with_checkpoints(self, device):
        """Nothing depends on lengths being what their mean suggests."""
        lengths = [0] * 40 + [130]
        x = make_inputs("long", 1, 130, 2, device, 6)
        checkpoints = torch.empty(2, 2, HEAD_DIM, HEAD_DIM, device=device)
        cu_seqlens = cu_seqlens_of(lengths, device)
        pool = torch.zeros(41, 2, HEAD_DIM, HEAD_DIM, device=device)
        flash_kda.fwd(
            **x | {"initial_state": pool, "final_state": pool},
            out=torch.empty_like(x["v"]),
            cu_seqlens=cu_seqlens,
            state_indices=torch.arange(41, device=device),
            checkpoints=checkpoints,
            checkpoint_interval=64,
        )
        _, state, expected = recurrence(**x, cu_seqlens=cu_seqlens, checkpoint_interval=64)
        bound = CPU_BOUNDS[1] if device == "cpu" else BOUNDS["long"][1]
        assert relative_error(checkpoints, expected) < bound and relative_error(pool, state) < bound


@pytest.mark.parametrize("device", schedules.and_cpu(schedules.SETTINGS)[1:], indirect=True)
@pytest.mark.parametrize("T", [1, 16])
def test_decoding_512_sequences_of_96_heads(device, T):
    """States of 3.2 GB in place: all outputs are written, some sequences are checked with the recurrence."""
    needs_memory(24e9)
    N, H = 512, 96
    x = make_inputs("long", N, T, H, device, 8, torch.float32)
    pool = torch.cat((x["initial_state"], x["initial_state"][:1]))
    rows = torch.randperm(N, generator=torch.Generator().manual_seed(0)).to(device)
    out = torch.full_like(x["v"], torch.nan)
    flash_kda.fwd(**x | {"initial_state": pool}, out=out, final_state=pool, state_indices=rows)
    assert bool(out.isfinite().all()) and bool(pool.isfinite().all())
    assert_same_bits(pool[N], x["initial_state"][0], "the row that no sequence names")
    some = [0, 1, 255, 256, 510, 511]
    part = x | {name: x[name][some] for name in TOKEN_INPUTS}
    expected_out, expected_state = recurrence(**part | {"initial_state": x["initial_state"][rows[some]]})
    assert relative_error(out[some], expected_out) < BOUNDS["long"][0]
    assert relative_error(pool[rows[some]], expected_state) < BOUNDS["long"][1]
    assert bool((pool[:N] != x["initial_state"]).flatten(1).any(1).all()), "a row was not written"


@pytest.mark.gpu
def test_exact_schedules_agree_to_the_bit(monkeypatch):
    lengths = [70, 0, 130, 1, 16]
    for mean in (0.3, 6.0, 100.0):
        for g_dtype in (torch.bfloat16, torch.float32):
            x = softplus_inputs("cuda", mean, sum(lengths), H=4, g_dtype=g_dtype)
            x["initial_state"] = torch.randn(5, 4, HEAD_DIM, HEAD_DIM, device="cuda")
            results = [fwd(x, cu_seqlens_of(lengths, "cuda")) for _ in schedules.each_exact(monkeypatch)]
            for other in results[1:]:
                assert_same(other, results[0])

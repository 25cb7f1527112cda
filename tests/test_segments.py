"""The segment schedule: sequences cut every L tokens, against the fp64 recurrence and against whole pairs.

FLASH_KDA_SCHEDULE=segments:L cuts wherever it says. Then the bits of a (sequence, head) hang on its own tokens and on L
alone, and a sequence of at most L tokens has those of `sm90`. Many heads are therefore checked against the recurrence
at once, most of whose time goes into its steps, and calls of fewer heads or sequences against the bits of those.
"""

from functools import cache
from itertools import pairwise
from math import hypot

import pytest
import schedules
import torch
from accuracy import BOUNDS, reference
from guarded import Guarded, assert_same_bits
from inputs import GATE_KINDS, HEAD_DIM, TOKEN_INPUTS, cu_seqlens_of, cut, make_inputs, packed_inputs, relative_error

import flash_kda
from benchmarks.cases import CASES
from flash_kda import interface
from flash_kda.recurrence import recurrence

SLOT_BYTES = 128 * 1024  # of the workspace, for a segment of a head


@pytest.fixture
def use(monkeypatch):
    """use(name): from here on calls take that schedule."""
    return lambda name: schedules.use(name, monkeypatch)


@pytest.fixture(scope="module", autouse=True)
def release_references():
    yield
    of_one_length.cache_clear()
    mixed_lengths.cache_clear()
    slow.cache_clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def fwd(x, cu_seqlens=None, final_dtype=torch.float32, all_written=True, **options):
    """(out, final_state) of one call, which stand between poisoned guards and are poisoned before it.

    final_dtype None: without final_state, which is then None.
    """
    N = len(x["q"]) if cu_seqlens is None else len(cu_seqlens) - 1
    out = Guarded(x["v"].shape, torch.bfloat16)
    final = None if final_dtype is None else Guarded((N, x["v"].shape[2], HEAD_DIM, HEAD_DIM), final_dtype)
    arguments = x | {"final_state": None if final is None else final.tensor}
    flash_kda.fwd(**arguments, out=out.tensor, cu_seqlens=cu_seqlens, **options)
    for guarded in (out, *(() if final is None else (final,))):
        guarded.assert_guards_untouched()
    if all_written:
        assert bool(out.written().all()), "an element of out was not written"
    if final is not None:
        assert bool(final.written().all()), "an element of final_state was not written"
    return out.tensor, None if final is None else final.tensor


def assert_same(results, expected, what=""):
    for name, x, y in zip(("out", "final_state"), results, expected, strict=True):
        assert_same_bits(x, y, f"{name} {what}")


def errors_of(results, expected):
    return [relative_error(x, ref) for x, ref in zip(results, expected, strict=True)]


def assert_accurate(results, expected, bounds, what=""):
    errors = errors_of(results, expected)
    assert all(error <= bound for error, bound in zip(errors, bounds, strict=True)), (
        f"errors of out, final_state {errors}, bounds {bounds} {what}"
    )


def assert_close_to_whole(results, whole, expected, what=""):
    """Segments and whole pairs differ by less than if their errors had nothing to do with each other.

    Both round the same factors alike. What differs is the rounding of the state as an operand, and what that does to
    the rounding of `out` to bf16, which alone is 1.7e-3 on either side: no fixed difference below that can be asked.
    """
    own, others = errors_of(results, expected), errors_of(whole, expected)
    for name, x, y, error, other in zip(("out", "final_state"), results, whole, own, others, strict=True):
        difference = relative_error(x, y)
        assert difference <= hypot(error, other), f"{name}: {difference} apart, errors {error} and {other} {what}"


def heads_of(x, heads):
    part = x | {name: x[name][:, :, heads].contiguous() for name in TOKEN_INPUTS}
    part |= {name: x[name][heads].contiguous() for name in ("A_log", "dt_bias")}
    if x["initial_state"] is not None:
        part["initial_state"] = x["initial_state"][:, heads].contiguous()
    return part


@cache
def of_one_length(T, kind):
    """(inputs, results of the recurrence) of 24 heads: the state of a few under the "random" gate is a few outer
    products, and its error varies by a tenth from head to head."""
    x = make_inputs(kind, 1, T, 24, "cuda", T, torch.float32)
    return x, reference(x)


@pytest.mark.gpu
class TestOneLength:
    @pytest.mark.parametrize("setting", ["segments", *(f"segments:{L}" for L in (16, 48, 64, 256, 1008, 4096))])
    @pytest.mark.parametrize("kind", GATE_KINDS)
    @pytest.mark.parametrize("T", [64, 1000, 4096])
    def test_against_the_recurrence_and_whole_pairs(self, use, T, kind, setting):
        x, expected = of_one_length(T, kind)
        use("sm90")
        whole = fwd(x)
        use(setting)
        results = fwd(x)
        assert_accurate(results, expected, BOUNDS[kind])
        assert_close_to_whole(results, whole, expected)
        if setting == "segments":
            return
        if int(setting.partition(":")[2]) >= T:
            assert_same(results, whole, "of whole pairs, where nothing is cut")
        for heads in (slice(0, 1), slice(1, 4), slice(2, 10), slice(12, 24)):
            part = fwd(heads_of(x, heads))
            assert_same(part, (results[0][:, :, heads], results[1][:, heads]), f"of heads {heads} alone")

    @pytest.mark.parametrize("H", [1, 3, 8, 12])
    @pytest.mark.parametrize("T", [64, 1000, 4096])
    def test_cut_by_the_cost_model(self, use, T, H):
        """L hangs on T and H: each pair has its own. Bounds as for 24 heads at once, where those are enough."""
        x, expected = of_one_length(T, "long")
        heads = slice(0, H)
        use("segments")
        results = fwd(heads_of(x, heads))
        assert_accurate(results, (expected[0][:, :, heads], expected[1][:, heads]), BOUNDS["long"])

    @pytest.mark.parametrize("L", [16, 64, 240])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("initial", [False, True])
    def test_states_none_in_out_and_both(self, use, initial, dtype, L):
        """A given state counts at its dtype's values; the result rounds once, at the end; out does not hang on it."""
        use(f"segments:{L}")
        x = make_inputs("long", 1, 1000, 8, "cuda", 1, torch.bfloat16 if initial else None)
        as_fp32 = x | {"initial_state": x["initial_state"].float()} if initial else x
        exact = fwd(as_fp32)
        assert_accurate(exact, reference(as_fp32), BOUNDS["long"])
        given = x if dtype == torch.bfloat16 else as_fp32
        assert_same(fwd(given, final_dtype=dtype), (exact[0], exact[1].to(dtype)))
        assert_same_bits(fwd(given, final_dtype=None)[0], exact[0], "out without final_state")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_final_state_in_place(self, use, dtype):
        """A sequence's last segment, here of a token, writes what its first one reads."""
        x = make_inputs("long", 2, 16 * 60 + 1, 24, "cuda", 2, dtype)
        for setting in ("segments:16", "segments:64", "segments"):
            use(setting)
            expected = fwd(x, final_dtype=dtype)
            for _ in range(10):
                state, out = x["initial_state"].clone(), torch.empty_like(x["v"])
                flash_kda.fwd(**x | {"initial_state": state}, out=out, final_state=state)
                assert_same((out, state), expected, setting)


def fence_torch_empty(monkeypatch):
    """From here on torch.empty gives memory between fences, bytes of 7, of the returned list; and calls go the way by
    which their workspace comes from there."""
    empty, margin, made = torch.empty, 2**26, []

    def fenced(*shape, **options):
        size = empty(*shape, **options | {"device": "meta"})
        count = size.numel() * size.element_size()
        buffer = torch.full((count + 2 * margin,), 7, dtype=torch.uint8, device=options["device"])
        made.append((buffer[:margin], buffer[margin + count :]))
        return buffer[margin : margin + count].view(size.dtype).view(size.shape)

    monkeypatch.setattr(torch, "empty", fenced)
    monkeypatch.setattr(interface, "_launch", interface._not_launched)
    return made


LENGTHS = [40000, 0, 1, 15, 16, 17, 1000, 0, 0, 63, 64, 65, 4097, 12288, 2, 0]


@cache
def mixed_lengths():
    """(inputs, cu_seqlens, results of the recurrence)"""
    x, cu_seqlens = packed_inputs(LENGTHS, 3, seed=3)
    return x, cu_seqlens, reference(x, cu_seqlens)


@pytest.mark.gpu
class TestPacked:
    @pytest.mark.parametrize("setting", ["segments", *(f"segments:{L}" for L in (64, 272, 4096, 20000))])
    def test_lengths_of_1_to_40000_with_empty_sequences_between(self, use, setting):
        x, cu_seqlens, expected = mixed_lengths()
        use("sm90")
        whole = fwd(x, cu_seqlens)
        use(setting)
        results = fwd(x, cu_seqlens)
        assert_accurate(results, expected, BOUNDS["long"])
        assert_close_to_whole(results, whole, expected)
        L = 0 if setting == "segments" else int(setting.partition(":")[2])
        for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
            mine = results[0][:, start:end], results[1][n : n + 1]
            if start == end:
                assert_same_bits(mine[1], x["initial_state"][n : n + 1], f"state of empty sequence {n}")
            elif end - start <= L:
                assert_same(mine, (whole[0][:, start:end], whole[1][n : n + 1]), f"of sequence {n}, not cut")
            elif L:
                assert_same(fwd(cut(x, start, end, n)), mine, f"of sequence {n} alone")

    @pytest.mark.parametrize("L", [16, 64, 80])
    def test_sequence_ends_around_segment_ends(self, use, L):
        lengths = [k * L + d for k in range(1, 7) for d in (-16, -15, -1, 0, 1, 15, 16)]
        x, cu_seqlens = packed_inputs(lengths, 4, seed=4)
        expected = reference(x, cu_seqlens)
        use("sm90")
        whole = fwd(x, cu_seqlens)
        use(f"segments:{L}")
        results = fwd(x, cu_seqlens)
        assert_accurate(results, expected, BOUNDS["long"])
        assert_close_to_whole(results, whole, expected)
        for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
            mine = results[0][:, start:end], results[1][n : n + 1]
            assert_same(fwd(cut(x, start, end, n)), mine, f"of sequence {n}, {end - start} tokens, alone")
            # A wrong edge is off by all of a token. Few rows average little of a rounding, hence the bound.
            exact = expected[0][:, start:end], expected[1][n : n + 1]
            assert_accurate(mine, exact, (8e-3, 8e-3), f"of {end - start} tokens")

    @pytest.mark.parametrize("L", [16, 64, 512])
    def test_a_batch_gives_the_bits_of_packed_sequences(self, use, L):
        use(f"segments:{L}")
        x = make_inputs("long", 3, 500, 4, "cuda", 5, torch.float32)
        as_packed = x | {name: x[name].flatten(0, 1).unsqueeze(0) for name in TOKEN_INPUTS}
        out, state = fwd(as_packed, cu_seqlens_of([500] * 3, "cuda"))
        assert_same(fwd(x), (out.view(x["v"].shape), state))

    @pytest.mark.parametrize("given", [[-7, 300, 300, 2**40], [700, 650, 640, 0], [130, 400, 390, 700]], ids=str)
    def test_entries_out_of_order_or_range_are_clamped(self, use, given):
        """A sequence's segments are those of what is left of it; tokens of two sequences may come from either."""
        use("segments:64")
        T = 700
        x = make_inputs("long", 1, T, 3, "cuda", 6, torch.float32, N=3)
        starts = [min(max(start, 0), T) for start in given[:-1]]
        ends = [min(max(end, start), T) for start, end in zip(starts, given[1:], strict=True)]
        out, state = fwd(x, torch.tensor(given, device="cuda"), all_written=False)
        owners = torch.zeros(T, dtype=torch.int64)
        for start, end in zip(starts, ends, strict=True):
            owners[start:end] += 1
        for n, (start, end) in enumerate(zip(starts, ends, strict=True)):
            alone_out, alone_state = fwd(cut(x, start, end, n), cu_seqlens_of([end - start], "cuda"))
            sole = (owners[start:end] == 1).to("cuda")
            assert_same_bits(out[:, start:end][:, sole], alone_out[:, sole], f"out of sequence {n}")
            assert_same_bits(state[n : n + 1], alone_state, f"final_state of sequence {n}")

    def test_sequences_that_hold_more_tokens_than_there_are(self, use, monkeypatch):
        """Where sequences overlap they have more segments than the workspace was made for. Nothing beside it may suffer
        from that, and each sequence has a final state of its own."""
        x = make_inputs("long", 1, 700, 3, "cuda", 7, torch.float32, N=7)
        cu_seqlens = torch.tensor([0, 700, 0, 700, 0, 700, 0, 700], device="cuda")
        _, expected = reference(x, cu_seqlens)
        for L in (16, 64, 208):
            use(f"segments:{L}")
            out, state = torch.zeros_like(x["v"]), torch.zeros_like(x["initial_state"])
            with monkeypatch.context() as patch:
                made = fence_torch_empty(patch)
                flash_kda.fwd(**x, out=out, final_state=state, cu_seqlens=cu_seqlens)
            assert made, "the workspace does not come from torch.empty: this test sees nothing"
            for fences in made:
                assert all(bool((fence == 7).all()) for fence in fences), "wrote beside the workspace"
            for n in range(7):
                error = relative_error(state[n], expected[n])
                assert error <= BOUNDS["long"][1], f"final_state of sequence {n}: error {error}"

    def test_rows_that_no_sequence_covers_stay(self, use):
        use("segments:64")
        x = make_inputs("long", 1, 1000, 3, "cuda", 7, torch.float32, N=2)
        out = Guarded(x["v"].shape, torch.bfloat16)
        flash_kda.fwd(**x, out=out.tensor, cu_seqlens=torch.tensor([100, 500, 901], device="cuda"))
        out.assert_guards_untouched()
        written = out.written()[0].flatten(1)
        covered = torch.zeros(1000, dtype=torch.bool, device="cuda")
        covered[100:901] = True
        assert torch.equal(written.all(1), covered) and torch.equal(written.any(1), covered)


SLOW_HEADS = {
    "long": slice(0, 4),
    "no decay": slice(4, 6),
    "saturated": slice(6, 8),
    "one channel that never decays, others of the random gate": slice(8, 10),
    "one channel that never decays, others saturated": slice(10, 12),
}


@cache
def slow():
    """(inputs, results of the recurrence) of 65536 tokens and 12 heads, whose gates are those of SLOW_HEADS."""
    x = make_inputs("long", 1, 65536, 12, "cuda", 8, torch.float32)
    g = x["g"]
    g[:, :, 4:6] = -80
    g[:, :, 6:8] = 80
    x["dt_bias"][8:10].uniform_(0, 1, generator=torch.Generator("cuda").manual_seed(9))
    g[:, :, 8:10] *= 2  # N(0, 1)
    g[:, :, 10:12] = 80
    g[:, :, 8:12, 77] = -80
    return x, reference(x)


@pytest.mark.gpu
class Test65536Tokens:
    @pytest.mark.parametrize("setting", ["segments", "segments:128", "segments:1024", "segments:4096"])
    def test_every_gate_within_the_bounds(self, use, setting, record_property):
        x, expected = slow()
        use("sm90")
        whole = fwd(x)
        use(setting)
        results = fwd(x)
        assert_close_to_whole(results, whole, expected)
        for name, heads in SLOW_HEADS.items():
            part = results[0][:, :, heads], results[1][:, heads]
            exact = expected[0][:, :, heads], expected[1][:, heads]
            for what, error in zip(("out", "final state"), errors_of(part, exact), strict=True):
                record_property(f"error: {setting}, 65536 tokens, {name}: {what}", error)
            assert_accurate(part, exact, BOUNDS["long"], name)

    @pytest.mark.parametrize("H", [1, 8])
    def test_fewer_heads(self, use, H):
        x, expected = slow()
        use("segments:1024")
        results = fwd(x)
        heads = slice(0, H)
        part = heads_of(x, heads)
        assert_same(fwd(part), (results[0][:, :, heads], results[1][:, heads]))
        use("segments")
        assert_accurate(fwd(part), (expected[0][:, :, heads], expected[1][:, heads]), BOUNDS["long"])

    def test_strong_unbounded_decays(self, use):
        """The softplus gate, of which some rows decay beyond what a chunk's factors hold, over hundreds of groups."""
        x, _ = slow()
        x = cut(heads_of(x, slice(0, 2)), 0, 8192) | {"lower_bound": None}
        x["g"] = x["g"].float() * 4
        x["dt_bias"] = torch.linspace(-9, 12, 2 * HEAD_DIM, device="cuda").view(2, HEAD_DIM)
        expected = recurrence(**x)
        for setting in ("segments:16", "segments:256"):
            use(setting)
            assert_accurate(fwd(x), expected, BOUNDS["long"], setting)


NONE = dict.fromkeys(("A_log", "dt_bias", "lower_bound"))


GENERAL = (
    "fp32 g",
    "softplus, slow",
    "softplus, fast",
    "log, weak",
    "log, strong",
    "log, resets",
    "negative eigenvalues",
    "activated beta",
)


def general_case(name):
    """(inputs changed, options) of one of GENERAL, for 1500 packed tokens and 4 heads."""
    generator = torch.Generator("cuda").manual_seed(10)
    shape = (1, 1500, 4, HEAD_DIM)
    uniform = torch.rand(shape, generator=generator, device="cuda")
    normal = torch.randn(shape, generator=generator, device="cuda")
    resets = torch.where(torch.rand(shape, generator=generator, device="cuda") < 0.02, -300.0, -1e-3 * uniform)
    resets[:, [40, 63, 64, 640, 1279]] = -500.0  # of all channels at once, at and between segment ends
    softplus = {"lower_bound": None, "A_log": torch.zeros(4, device="cuda"), "dt_bias": None}
    cases = {
        "fp32 g": ({"g": 0.5 * normal}, {}),
        "softplus, slow": (softplus | {"g": normal - 5}, {}),
        "softplus, fast": (softplus | {"g": 3 * normal + 12}, {}),
        "log, weak": (NONE | {"g": -0.02 * uniform}, {"gate": "log"}),
        "log, strong": (NONE | {"g": (-30 * uniform).bfloat16()}, {"gate": "log"}),
        "log, resets": (NONE | {"g": resets}, {"gate": "log"}),
        "negative eigenvalues": ({"beta": normal[..., 0].contiguous()}, {"allow_neg_eigval": True}),
        "activated beta": ({"beta": uniform[..., 0].contiguous()}, {"use_beta_sigmoid_in_kernel": False}),
    }
    return cases[name]


@pytest.mark.gpu
class TestGeneral:
    """What calls beyond the plain one ask for, over more segments than tests/test_features.py makes."""

    LENGTHS = [1000, 0, 130, 1, 64, 305]

    @pytest.mark.parametrize("L", [16, 64, 128])
    @pytest.mark.parametrize("name", GENERAL)
    def test_gates_and_activations(self, use, name, L):
        use(f"segments:{L}")
        changes, options = general_case(name)
        x, cu_seqlens = packed_inputs(self.LENGTHS, 4, seed=11)
        expected = recurrence(**x | changes, cu_seqlens=cu_seqlens, **options)
        assert_accurate(fwd(x | changes, cu_seqlens, **options), expected, BOUNDS["long"])

    @pytest.mark.parametrize("L", [16, 64])
    def test_bits_of_the_plain_call(self, use, L):
        """Where only a form differs: int32 cu_seqlens, fp32 g and beta, grouped heads, strides, absent parameters."""
        use(f"segments:{L}")
        x, cu_seqlens = packed_inputs(self.LENGTHS, 4, seed=12)
        x |= {name: x[name][:, :, :2].repeat_interleave(2, 2) for name in ("q", "k")}
        x["dt_bias"] = torch.zeros_like(x["dt_bias"])
        plain = fwd(x, cu_seqlens)
        wide = torch.empty(*x["v"].shape[:2], 4 * 4 * HEAD_DIM + 8, dtype=torch.bfloat16, device="cuda")
        views = wide[..., 8:].unflatten(-1, (16, HEAD_DIM)).split(4, 2)
        strided = dict(zip(("q", "k", "v", "g"), views, strict=True))
        for name, view in strided.items():
            view.copy_(x[name])
        changes = {
            "fp32 g": {"g": x["g"].float()},
            "fp32 beta": {"beta": x["beta"].float()},
            "grouped heads": {name: x[name][:, :, ::2].contiguous() for name in ("q", "k")},
            "no parameters": {"A_log": None, "dt_bias": None},
            "strided": strided,
        }
        for name, change in changes.items():
            assert_same(fwd(x | change, cu_seqlens), plain, name)
        assert_same(fwd(x, cu_seqlens.int()), plain, "int32 cu_seqlens")

    @pytest.mark.parametrize("L", [16, 64, 128])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("in_place", [True, False])
    def test_state_pools(self, use, in_place, dtype, L):
        use(f"segments:{L}")
        x, cu_seqlens = packed_inputs(self.LENGTHS, 4, seed=13, state_dtype=dtype)
        rows = [6, 2, -1, 0, 99, 4]  # the third and the fifth have none
        named = [(n, row) for n, row in enumerate(rows) if 0 <= row < 8]
        pool = 0.1 * torch.randn(8, 4, HEAD_DIM, HEAD_DIM, device="cuda")
        pool = pool.to(dtype)
        initial = torch.zeros_like(x["initial_state"])
        for n, row in named:
            initial[n] = pool[row]
        expected_out, expected_state = fwd(x | {"initial_state": initial}, cu_seqlens, dtype)
        final = pool if in_place else torch.randn_like(pool)
        expected_pool = final.clone()
        for n, row in named:
            expected_pool[row] = expected_state[n]
        out, indices = torch.empty_like(x["v"]), torch.tensor(rows, dtype=torch.int32, device="cuda")
        states = {"initial_state": pool, "final_state": final, "state_indices": indices}
        flash_kda.fwd(**x | states, out=out, cu_seqlens=cu_seqlens)
        assert_same_bits(out, expected_out, "out")
        assert_same_bits(final, expected_pool, "the pool")

    @pytest.mark.parametrize("L", [16, 48, 64, 80, 128, 320])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("at", ["end", "start"])
    def test_checkpoints(self, use, at, dtype, L):
        """Every boundary, whether a segment ends there or not."""
        use(f"segments:{L}")
        x, cu_seqlens = packed_inputs(self.LENGTHS, 4, seed=14)
        options = {"checkpoint_interval": 64, "checkpoint_at": at}
        expected = recurrence(**x, cu_seqlens=cu_seqlens, **options)
        rows = len(expected[2])
        checkpoints = Guarded((rows + 1, 4, HEAD_DIM, HEAD_DIM), dtype)
        results = fwd(x, cu_seqlens, checkpoints=checkpoints.tensor, **options)
        checkpoints.assert_guards_untouched()
        written = checkpoints.written().flatten(1)
        assert bool(written[:-1].all()) and not bool(written[-1].any())
        assert_same(results, fwd(x, cu_seqlens), "without checkpoints")
        bound = hypot(BOUNDS["long"][1], 2**-9 if dtype == torch.bfloat16 else 0)
        assert relative_error(checkpoints.tensor[:-1], expected[2]) <= bound
        for row in range(rows):
            error = relative_error(checkpoints.tensor[row], expected[2][row])
            assert error <= 8e-3, f"checkpoint {row}: error {error}"
        if at == "end":  # the sequence of 64 tokens has one, at its end
            place = flash_kda.checkpoint_offsets(cu_seqlens.diff(), 64).tolist()[4]
            assert_same_bits(checkpoints.tensor[place], results[1][4].to(dtype), "the checkpoint at a sequence's end")

    def test_everything_at_once(self, use):
        x, cu_seqlens = packed_inputs(self.LENGTHS, 4, seed=15)
        x |= {name: torch.nn.functional.normalize(x[name][:, :, :2].float(), dim=-1).bfloat16() for name in ("q", "k")}
        x |= {"lower_bound": None, "g": 2 * x["g"].float() + 3, "beta": x["beta"].float(), "A_log": None}
        switches = {"use_qk_l2norm_in_kernel": False, "allow_neg_eigval": True, "checkpoint_interval": 64}
        expected = recurrence(**x, cu_seqlens=cu_seqlens, **switches)
        rows = [3, 0, 7, 1, 5, 2]
        for setting in ("segments:16", "segments:64", "segments:192", "segments"):
            use(setting)
            pool = torch.randn(9, 4, HEAD_DIM, HEAD_DIM, device="cuda")
            pool[rows] = x["initial_state"]
            before = pool.clone()
            out, checkpoints = torch.empty_like(x["v"]), torch.empty_like(expected[2], dtype=torch.float32)
            flash_kda.fwd(
                **x | {"initial_state": pool, "final_state": pool},
                out=out,
                cu_seqlens=cu_seqlens.int(),
                state_indices=torch.tensor(rows, device="cuda"),
                checkpoints=checkpoints,
                **switches,
            )
            assert_accurate((out, pool[rows]), expected[:2], BOUNDS["long"], setting)
            assert relative_error(checkpoints, expected[2]) <= BOUNDS["long"][1]
            assert_same_bits(pool[[4, 6, 8]], before[[4, 6, 8]], "rows that no sequence names")


@pytest.mark.gpu
class TestInvariants:
    @pytest.mark.parametrize("kind", ["plain", "general"])
    @pytest.mark.parametrize("setting", ["segments:16", "segments:64", "segments:160", "segments"])
    def test_causality(self, use, setting, kind):
        """out[:P] does not hang on what follows, not even on whether something does if L stays."""
        use(setting)
        x = make_inputs("long", 2, 700, 3, "cuda", 16, torch.float32)
        other = make_inputs("random", 2, 700, 3, "cuda", 17)
        if kind == "general":
            softplus = {"lower_bound": None, "dt_bias": None}
            x |= softplus | {"g": x["g"].float() - 2}
            other |= {"g": other["g"].float() * 20 + 20}
        out, _ = fwd(x)
        for P in (1, 16, 17, 63, 64, 65, 127, 128, 129, 160, 161, 192, 319, 320, 500, 672, 699):
            changes = {name: torch.cat([x[name][:, :P], other[name][:, P:]], 1) for name in TOKEN_INPUTS}
            assert_same_bits(fwd(x | changes)[0][:, :P], out[:, :P], f"out[:{P}] before other tokens")
            if setting != "segments":
                assert_same_bits(fwd(cut(x, 0, P))[0], out[:, :P], f"out of the first {P} tokens alone")

    @pytest.mark.parametrize("name", [*TOKEN_INPUTS, "initial_state"])
    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_a_nan_or_inf_stays_in_its_sequence_and_head(self, use, value, name):
        """And in one of its tokens it reaches no chunk before."""
        use("segments:64")
        lengths = [300, 0, 65, 1000, 1, 128]
        x, cu_seqlens = packed_inputs(lengths, 3, seed=18)
        out, state = fwd(x, cu_seqlens)
        bounds = cu_seqlens.tolist()
        for bad, offset in ((0, 299), (2, 0), (3, 0), (3, 127), (3, 640), (5, 64)):
            changed = x[name].clone()
            first = bounds[bad] + offset
            changed[(bad, 1) if name == "initial_state" else (0, first, 1)] = value
            bad_out, bad_state = fwd(x | {name: changed}, cu_seqlens)
            before = bounds[bad] if name == "initial_state" else bounds[bad] + offset // 16 * 16
            for tokens in (slice(0, before), slice(bounds[bad + 1], None)):
                assert_same_bits(bad_out[:, tokens], out[:, tokens], f"out beside sequence {bad}")
            assert_same_bits(bad_out[:, :, ::2], out[:, :, ::2], f"out of other heads of sequence {bad}")
            others = [n for n in range(len(lengths)) if n != bad]
            assert_same_bits(bad_state[others], state[others], f"final_state beside sequence {bad}")
            assert_same_bits(bad_state[bad, ::2], state[bad, ::2], f"final_state of other heads of sequence {bad}")
            if value is torch.nan and name in ("k", "v"):
                assert bool(bad_out[0, first : bounds[bad + 1], 1].isnan().any(-1).all()), "the NaN is lost"
                assert bool(bad_state[bad, 1].isnan().any()), "the NaN is lost"

    @pytest.mark.parametrize("setting", ["segments:16", "segments:64", "segments:512", "segments"])
    def test_runs_give_the_same_bits_one_right_behind_the_other(self, use, setting):
        """Kernels of a call start before those in front of them have ended, those of the next call must not."""
        use(setting)
        calls = [
            packed_inputs([1300, 17, 0, 547, 64, 1], 8, seed=19),
            packed_inputs([3, 926, 1000, 0, 0, 0], 8, "random", 20),
        ]
        expected = [fwd(*call) for call in calls]
        out, state = torch.empty_like(calls[0][0]["v"]), torch.empty_like(calls[0][0]["initial_state"])
        same = torch.ones((), dtype=torch.bool, device="cuda")
        for i in range(40):
            x, cu_seqlens = calls[i % 2]
            flash_kda.fwd(**x, out=out, final_state=state, cu_seqlens=cu_seqlens)
            for y, ref in zip((out, state), expected[i % 2], strict=True):
                same &= (y == ref).all()
            # The comparison reads what the next call writes; every third one follows without it.
            if i % 3 == 0:
                flash_kda.fwd(**x, out=out, final_state=state, cu_seqlens=cu_seqlens)
        assert bool(same), "two runs differ"

    @pytest.mark.parametrize("setting", ["segments:16", "segments:64", "segments"])
    def test_whatever_the_workspace_holds(self, use, setting):
        """PyTorch fills new memory with NaN where it is told to be deterministic."""
        use(setting)
        for call in (
            packed_inputs([1000, 0, 130, 1, 64, 305], 4, seed=21),
            (make_inputs("long", 2, 999, 4, "cuda", 22), None),
        ):
            expected = fwd(*call)
            assert torch.utils.deterministic.fill_uninitialized_memory
            torch.use_deterministic_algorithms(True)
            try:
                assert bool(torch.empty(7, device="cuda").isnan().all())
                results = fwd(*call)
            finally:
                torch.use_deterministic_algorithms(False)
            assert_same(results, expected)

    def test_inputs_stay_as_they_were(self, use):
        use("segments:64")
        x, cu_seqlens = packed_inputs([700, 0, 129], 4, seed=23)
        before = {name: y.clone() for name, y in x.items() if isinstance(y, torch.Tensor)}
        fwd(x, cu_seqlens)
        for name, y in before.items():
            assert_same_bits(x[name], y, name)
        assert cu_seqlens.tolist() == [0, 700, 700, 829]

    @pytest.mark.parametrize("setting", ["segments:64", "segments", "auto"])
    def test_a_cuda_graph_replays_with_new_contents_of_cu_seqlens(self, use, setting):
        use(setting)
        T, packings = 2000, ([700, 600, 700], [2000, 0, 0], [0, 1, 1999], [64, 64, 128], [900, 1000, 100])
        static, cu_seqlens = packed_inputs(packings[0], 4, seed=24)
        out, state = Guarded(static["v"].shape, torch.bfloat16), torch.empty_like(static["initial_state"])
        arguments = static | {"out": out.tensor, "final_state": state, "cu_seqlens": cu_seqlens}
        flash_kda.fwd(**arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            flash_kda.fwd(**arguments)
        for seed, lengths in enumerate(packings):
            new = make_inputs("random" if seed % 2 else "long", 1, T, 4, "cuda", seed, torch.float32, N=3)
            for name, x in new.items():
                if isinstance(x, torch.Tensor):
                    static[name].copy_(x)
            cu_seqlens.copy_(cu_seqlens_of(lengths, "cuda"))
            out.buffer.fill_(out.pattern)
            expected = Guarded(out.tensor.shape, torch.bfloat16)
            expected_state = torch.empty_like(state)
            flash_kda.fwd(**arguments | {"out": expected.tensor, "final_state": expected_state})
            for _ in range(2):
                graph.replay()
            torch.cuda.synchronize()
            out.assert_guards_untouched()
            assert_same((out.tensor, state), (expected.tensor, expected_state), f"of {lengths}")


def case_of(name):
    return next(case for case in CASES if case.name == name)


def case_inputs(case):
    """(inputs, cu_seqlens) of a benchmark's case."""
    N = len(case.lengths)
    x = make_inputs("long", 1, case.tokens, case.heads, "cuda", 25, torch.float32, N=N)
    return x, cu_seqlens_of(case.lengths, "cuda") if N > 1 else None


def workspace_of(call):
    """Bytes that a call asks PyTorch's allocator for beyond what there is."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    call()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def workspace_of_fwd(x, cu_seqlens=None):
    arguments = x | {"out": torch.empty_like(x["v"]), "final_state": torch.empty_like(x["initial_state"])}
    return workspace_of(lambda: flash_kda.fwd(**arguments, cu_seqlens=cu_seqlens))


@pytest.mark.gpu
class TestWorkspace:
    @pytest.mark.parametrize("lengths", [[1000], [1000] * 3, [5000, 0, 1, 640], [64] * 20], ids=str)
    @pytest.mark.parametrize("is_packed", [False, True])
    @pytest.mark.parametrize("L", [16, 64, 1024])
    def test_has_the_documented_size(self, use, L, is_packed, lengths):
        """128 KB a segment and head, of as many segments as there may be."""
        use(f"segments:{L}")
        N, T, H = len(lengths), sum(lengths), 4
        if is_packed:
            x, cu_seqlens = packed_inputs(lengths, H)
            slots = -(-T // L) if N == 1 else T // L + N
        else:
            x, cu_seqlens = make_inputs("long", N, T // N, H, "cuda", 0, torch.float32), None
            slots = N * -(-(T // N) // L)
        assert workspace_of_fwd(x, cu_seqlens) == slots * H * SLOT_BYTES

    @pytest.mark.parametrize("case", [case for case in CASES if case.table == "few heads"], ids=lambda case: case.name)
    def test_of_auto_is_at_most_64_mb_or_a_hundredth_of_the_inputs(self, use, case):
        use("auto")
        assert workspace_of_fwd(*case_inputs(case)) <= max(2**26, 0.01 * case.bytes)

    @pytest.mark.parametrize("setting", ["auto", "pairs", "sm90"])
    def test_many_heads_take_none(self, use, setting):
        use(setting)
        assert workspace_of_fwd(*case_inputs(case_of("8192/96"))) == 0


def assert_same_under(use, x, cu_seqlens, first, second):
    """Two schedules give the same bits; the second stays in use."""
    use(first)
    expected = fwd(x, cu_seqlens)
    use(second)
    assert_same(fwd(x, cu_seqlens), expected)


@pytest.mark.gpu
class TestChoice:
    @pytest.mark.parametrize("name", ["32768/8/1", "4096/8/1", "16384/16/8", "mixed/96", "8x1024/64"])
    def test_pairs_gives_the_bits_of_sm90(self, use, name):
        x, cu_seqlens = case_inputs(case_of(name))
        assert_same_under(use, x, cu_seqlens, "sm90", "pairs")
        assert workspace_of_fwd(x, cu_seqlens) == 0

    def test_under_pairs_a_sequence_s_bits_do_not_hang_on_the_batch(self, use):
        use("pairs")
        x, cu_seqlens = packed_inputs([9000, 0, 300, 1, 64] * 8, 4, seed=26)
        out, state = fwd(x, cu_seqlens)
        bounds = cu_seqlens.tolist()
        for n in (0, 2, 35):
            alone = fwd(cut(x, bounds[n], bounds[n + 1], n))
            assert_same(alone, (out[:, bounds[n] : bounds[n + 1]], state[n : n + 1]), f"of sequence {n}")

    @pytest.mark.parametrize("name", ["32768/8/1", "65536/12/1"])
    def test_auto_cuts_long_sequences_of_few_heads(self, use, name):
        x, cu_seqlens = case_inputs(case_of(name))
        assert_same_under(use, x, cu_seqlens, "segments", "auto")
        assert workspace_of_fwd(x, cu_seqlens) > 0

    @pytest.mark.parametrize("name", [case.name for case in CASES if case.table == "many heads"])
    def test_auto_leaves_many_heads_whole(self, use, name):
        x, cu_seqlens = case_inputs(case_of(name))
        assert_same_under(use, x, cu_seqlens, "pairs", "auto")

    def test_segments_cuts_what_has_more_than_a_chunk(self, use):
        use("segments")
        for T, slots in ((16, 1), (17, 2), (1000, 2)):
            x = make_inputs("long", 1, T, 200, "cuda", 27, torch.float32)  # more pairs than SMs: nothing to win
            assert workspace_of_fwd(x) >= slots * 200 * SLOT_BYTES

    def test_what_tma_cannot_address_goes_to_portable(self, use):
        x = make_inputs("long", 1, 300, 2, "cuda", 28, torch.float32)
        x |= {name: x[name][:, :1].expand(-1, 300, -1, -1) for name in ("q", "k", "g")}
        assert_same_under(use, x, None, "portable", "segments:64")


@pytest.mark.parametrize(
    "name",
    ["segments:", "segments:0", "segments:8", "segments:100", "segments:-64", "segments:64:64", "segments:64.0",
     "segments: 64", "segments:1e3", "segments:x", "segment", "Segments", "sm90:64", "auto:64"],
)  # fmt: skip
def test_a_schedule_that_is_none(name, monkeypatch):
    """Before anything is written."""
    monkeypatch.setenv("FLASH_KDA_SCHEDULE", name)
    x = make_inputs("random", 1, 20, 1, "cpu", 0, torch.float32)
    out, state = (Guarded(y.shape, y.dtype, "cpu") for y in (x["v"], x["initial_state"]))
    with pytest.raises(ValueError, match="FLASH_KDA_SCHEDULE: expected .*, got ") as error:
        flash_kda.fwd(**x, out=out.tensor, final_state=state.tensor)
    assert repr(name) in str(error.value)
    assert not bool(out.written().any()) and not bool(state.written().any())

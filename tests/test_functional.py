"""`flash_kda.chunk_kda` with flash-linear-attention's argument names, and the backend for its dispatcher.

On a CPU, and marked `gpu` by each schedule. tests/test_fla.py has the dispatch through FLA itself.
"""

import inspect
import re
import sys
import types

import pytest
import schedules
import torch
from accuracy import BOUNDS
from guarded import assert_same_bits
from inputs import HEAD_DIM, cu_seqlens_of, make_inputs, relative_error

import flash_kda
from flash_kda.integrations import fla as integration
from flash_kda.recurrence import recurrence

RAW = dict.fromkeys(("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True)
LENGTHS = [70, 0, 130, 1, 64]


def inputs(device, lengths=LENGTHS, H=2):
    x = make_inputs("long", 1, sum(lengths), H, device, 7, torch.float32, N=len(lengths))
    return x, cu_seqlens_of(lengths, device)


def state_bound(device):
    return 2e-6 if device == "cpu" else BOUNDS["long"][1]


def out_bound(device):
    return 2e-3 if device == "cpu" else BOUNDS["long"][0]


@pytest.mark.parametrize("state_v_first", [True, False])
def test_raw_inputs(device, state_v_first):
    """The bits of `fwd`, with states in either layout."""
    x, cu_seqlens = inputs(device)
    out, state = torch.empty_like(x["v"]), torch.empty_like(x["initial_state"])
    flash_kda.fwd(**x, out=out, final_state=state, cu_seqlens=cu_seqlens)
    x["dt_bias"] = x["dt_bias"].flatten()
    if not state_v_first:
        x["initial_state"], state = x["initial_state"].mT.contiguous(), state.mT
    results = flash_kda.chunk_kda(
        **x, **RAW, cu_seqlens=cu_seqlens, output_final_state=True, state_v_first=state_v_first, safe_gate=True
    )
    assert len(results) == 2 and results[1].is_contiguous() and results[1].dtype == torch.float32
    assert_same_bits(results[0], out, "out")
    assert_same_bits(results[1], state.contiguous(), "final_state")
    out_alone, none = flash_kda.chunk_kda(**x, **RAW, cu_seqlens=cu_seqlens, state_v_first=state_v_first)
    assert none is None
    assert_same_bits(out_alone, out, "out without final_state")


def test_defaults_take_activated_inputs(device):
    """g are natural-log decays, beta is activated, q and k are normalised, scale is K ** -0.5."""
    x, cu_seqlens = inputs(device)
    tokens = {name: torch.nn.functional.normalize(x[name].float(), dim=-1).bfloat16() for name in ("q", "k")}
    tokens |= {"v": x["v"], "g": -x["g"].float().abs(), "beta": torch.sigmoid(x["beta"].float())}
    out, _ = flash_kda.chunk_kda(**tokens, cu_seqlens=cu_seqlens)
    none = dict.fromkeys(("A_log", "dt_bias", "lower_bound"))
    switches = {"use_qk_l2norm_in_kernel": False, "use_beta_sigmoid_in_kernel": False, "gate": "log"}
    expected, _ = recurrence(**tokens, **none, scale=HEAD_DIM**-0.5, cu_seqlens=cu_seqlens, **switches)
    assert relative_error(out, expected) < out_bound(device)


@pytest.mark.parametrize("allow_neg_eigval", [False, True])
@pytest.mark.parametrize("missing", ["A_log", "dt_bias", "lower_bound", None])
def test_gates_and_grouped_heads(device, missing, allow_neg_eigval):
    x, cu_seqlens = inputs(device, H=4)
    x |= {name: x[name][:, :, :2].clone() for name in ("q", "k")}
    if missing:
        x[missing] = None
    results = flash_kda.chunk_kda(
        **x,
        **RAW,
        cu_seqlens=cu_seqlens,
        output_final_state=True,
        state_v_first=True,
        allow_neg_eigval=allow_neg_eigval,
    )
    expected = recurrence(**x, cu_seqlens=cu_seqlens, allow_neg_eigval=allow_neg_eigval)
    assert relative_error(results[0], expected[0]) < out_bound(device)
    assert relative_error(results[1], expected[1]) < state_bound(device)


@pytest.mark.parametrize("state_v_first", [True, False])
@pytest.mark.parametrize("form", ["batch", "packed", "lengths on the host", "static"])
def test_intermediate_states(device, form, state_v_first):
    """FLA's h: the states before every 64 tokens, [B, NT, HV, K, V]."""
    if form == "batch":
        x, cu_seqlens = make_inputs("long", 3, 150, 2, device, 7, torch.float32), None
    else:
        x, cu_seqlens = inputs(device)
    more = {"cu_seqlens_cpu": cu_seqlens.cpu()} if form == "lengths on the host" else {}
    given = x if state_v_first else x | {"initial_state": x["initial_state"].mT.contiguous()}
    out, state, h = flash_kda.chunk_kda(
        **given,
        **RAW,
        **more,
        cu_seqlens=cu_seqlens,
        use_graph=form == "static",
        state_v_first=state_v_first,
        return_intermediate_states=True,
        output_final_state=True,
    )
    expected_out, expected_state, expected = recurrence(
        **x, cu_seqlens=cu_seqlens, checkpoint_interval=64, checkpoint_at="start"
    )
    NT = 3 if form == "batch" else 9 if form == "static" else len(expected)
    assert h.dtype == torch.bfloat16 and h.shape == (3 if form == "batch" else 1, NT, 2, HEAD_DIM, HEAD_DIM)
    h = h.flatten(0, 1)[: len(expected)]
    if not state_v_first:
        h, state = h.mT, state.mT
    assert relative_error(out, expected_out) < out_bound(device)
    assert relative_error(state, expected_state) < state_bound(device)
    assert relative_error(h, expected) < max(2e-3, state_bound(device))


@pytest.mark.parametrize("device", schedules.and_cpu(schedules.SCHEDULES)[1:], indirect=True)
class TestWithoutWaiting:
    """Intermediate states of packed sequences where the host does not ask the device how many there are."""

    @staticmethod
    def call(x, cu_seqlens, **more):
        more |= {"output_final_state": True, "return_intermediate_states": True, "state_v_first": True}
        return flash_kda.chunk_kda(**x, **RAW, **more, cu_seqlens=cu_seqlens)

    @pytest.mark.parametrize("form", ["lengths on the host", "static"])
    def test_nothing_is_waited_for(self, device, form):
        x, cu_seqlens = inputs(device)
        more = {"use_graph": True} if form == "static" else {"cu_seqlens_cpu": cu_seqlens.cpu()}
        expected = self.call(x, cu_seqlens, **more)
        try:
            torch.cuda.set_sync_debug_mode("error")
            with pytest.raises(RuntimeError, match="synchroniz"):
                self.call(x, cu_seqlens)
            results = self.call(x, cu_seqlens, **more)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for y, ref in zip(results[:2], expected[:2], strict=True):
            assert_same_bits(y, ref, "out or final_state")

    def test_a_graph_replayed_with_other_lengths(self, device):
        x, cu_seqlens = inputs(device)
        more = {"use_graph": True, "max_num_seqs": len(LENGTHS)}
        self.call(x, cu_seqlens, **more)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = self.call(x, cu_seqlens, **more)
        for lengths in ([1, 64, 0, 130, 70], [265, 0, 0, 0, 0], LENGTHS):
            cu_seqlens.copy_(cu_seqlens_of(lengths, device))
            graph.replay()
            expected = self.call(x, cu_seqlens)
            rows = expected[2].shape[1]
            assert rows == sum(-(-length // 64) for length in lengths)
            results = (*captured[:2], captured[2][:, :rows])
            for name, y, ref in zip(("out", "final_state", "h"), results, expected, strict=True):
                assert_same_bits(y, ref, f"{name}, {lengths}")


@pytest.mark.parametrize("form", ["packed", "lengths on the host", "static"])
@pytest.mark.parametrize(
    ("given", "meant"),
    [([0, 50, 999], [0, 50, 100]), ([-70, 30, 100], [0, 30, 100]), ([100, 0, 100], [0, 0, 100]), ([0], [0])],
    ids=str,
)
def test_intermediate_states_of_clamped_sequences(device, form, given, meant):
    """As many rows as the sequences have that `fwd` makes of such entries, and those of legal ones."""
    given, meant = (torch.tensor(entries, device=device) for entries in (given, meant))
    x = make_inputs("long", 1, 100, 2, device, 7, torch.float32, N=len(given) - 1)
    options = RAW | {"return_intermediate_states": True, "state_v_first": True}
    h = []
    for cu_seqlens in (given, meant):
        more = {"cu_seqlens_cpu": cu_seqlens.cpu()} if form == "lengths on the host" else {}
        h.append(flash_kda.chunk_kda(**x, **options, **more, cu_seqlens=cu_seqlens, use_graph=form == "static")[2])
    assert h[0].shape == h[1].shape
    rows = int(flash_kda.checkpoint_offsets(meant.diff(), 64, "start")[-1])
    assert h[0].shape[1] == (len(meant) if form == "static" else rows)
    assert_same_bits(h[0][:, :rows], h[1][:, :rows], "h")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("N", "T"), [(0, 0), (0, 5), (2, 0), (1, 1)])
def test_nothing_or_next_to_nothing(device, N, T, packed):
    """Shapes without sequences, without tokens or of one token, intermediate states included."""
    x = make_inputs("long", 1 if packed else N, T, 2, device, 7, torch.float32, N=N)
    cu_seqlens = torch.tensor([0, *[T] * N], device=device) if packed else None
    for use_graph in (False, True):
        out, state, h = flash_kda.chunk_kda(
            **x,
            **RAW,
            cu_seqlens=cu_seqlens,
            use_graph=use_graph,
            output_final_state=True,
            return_intermediate_states=True,
        )
        assert out.shape == x["v"].shape and state.shape == (N, 2, HEAD_DIM, HEAD_DIM)
        assert h.shape[0] == len(x["q"]) and h.shape[2:] == state.shape[1:]
        if not T:
            assert_same_bits(state, x["initial_state"], "final_state")


@pytest.mark.parametrize("shape", [(2,), (1, 1, 2, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parameters_of_other_shapes_and_dtypes(shape, dtype):
    x = make_inputs("random", 1, 20, 2, "cpu")
    expected, _ = flash_kda.chunk_kda(**x | {name: x[name].to(dtype).float() for name in ("A_log", "dt_bias")}, **RAW)
    given = {"A_log": x["A_log"].to(dtype).view(shape), "dt_bias": x["dt_bias"].to(dtype).view(1, 2, HEAD_DIM)}
    assert_same_bits(flash_kda.chunk_kda(**x | given, **RAW)[0], expected, "out")


def test_rows_that_the_kernels_cannot_address_are_copied(device):
    x, cu_seqlens = inputs(device)
    expected, _ = flash_kda.chunk_kda(**x, **RAW, cu_seqlens=cu_seqlens, state_v_first=True)
    interleaved = {name: x[name].repeat_interleave(2, -1)[..., ::2] for name in ("q", "v")}
    shifted = torch.nn.functional.pad(x["k"], (1, 3))[..., 1:-3]
    out, _ = flash_kda.chunk_kda(**x | interleaved | {"k": shifted}, **RAW, cu_seqlens=cu_seqlens, state_v_first=True)
    assert_same_bits(out, expected, "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cp_context": object()}, r"^cp_context: expected None"),
        ({"safe_gate": True, "lower_bound": None}, r"^lower_bound: expected a number with safe_gate"),
        ({"A_log": None, "lower_bound": None}, r"^A_log: expected a tensor"),
        ({"return_intermediate_states": True, "chunk_size": 32}, r"^chunk_size: expected 64"),
        ({"chunk_size": 128}, r"^chunk_size: expected one of 32, 64, got 128"),
        ({"chunk_size": "64"}, r"^chunk_size: expected one of 32, 64, got '64'"),
        ({"dt_bias": torch.zeros(HEAD_DIM, 2)}, r"^dt_bias: expected shape .*, got \[128, 2\]"),
        ({"dt_bias": torch.zeros(HEAD_DIM)}, r"^dt_bias: expected shape"),
        ({"A_log": torch.zeros(3)}, r"^A_log: expected shape"),
        (dict.fromkeys(("q", "k", "v", "g"), torch.zeros(1, 20, 2, 0).bfloat16()), r"^q: expected shape"),
        ({"lower_bound": -6.0}, r"^lower_bound: expected a number in"),
        ({"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": True}, r"^allow_neg_eigval: expected False"),
        ({"q": torch.zeros(3)}, r"^q: expected four dimensions"),
        ({"initial_state": torch.zeros(3)}, r"^initial_state: expected four dimensions"),
        ({"cu_seqlens": torch.tensor(20)}, r"^cu_seqlens: expected shape \[N \+ 1\]"),
        (
            {"cu_seqlens_cpu": cu_seqlens_of([8, 12])},
            r"^cu_seqlens_cpu: expected None without cu_seqlens",
        ),
        (
            {"cu_seqlens": cu_seqlens_of([20]), "cu_seqlens_cpu": cu_seqlens_of([])},
            r"^cu_seqlens_cpu: expected the shape",
        ),
    ],
)
def test_rejected_calls(changes, message):
    x = make_inputs("random", 1, 20, 2, "cpu")
    with pytest.raises(ValueError, match=message):
        flash_kda.chunk_kda(**x | RAW | changes)


TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "cu_seqlens_cpu")


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("value", [[0, 20], "text", 3.0])
def test_not_a_tensor(name, value, states):
    x = make_inputs("random", 1, 20, 2, "cpu") | RAW | {"cu_seqlens": cu_seqlens_of([20])}
    x |= dict.fromkeys(("output_final_state", "return_intermediate_states"), states)
    with pytest.raises(TypeError, match=rf"^{name}: expected a torch\.Tensor.*, got {type(value).__name__}"):
        flash_kda.chunk_kda(**x | {name: value})


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"])
def test_tensors_that_are_not_dense(name):
    """The message is `fwd`'s, whatever has to be done with the tensor before."""
    x = make_inputs("random", 1, 20, 2, "cpu", state_dtype=torch.float32) | RAW

    class Subclass(torch.Tensor):
        pass

    with pytest.raises(TypeError, match=f"^{name}: expected a plain torch.Tensor or Parameter, got .* Subclass"):
        flash_kda.chunk_kda(**x | {name: x[name].as_subclass(Subclass)})
    with pytest.raises(TypeError, match=rf"^{name}: expected a strided \(dense\) tensor, got layout torch\.sparse_coo"):
        flash_kda.chunk_kda(**x | {name: x[name].to_sparse()})
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor with memory of its own"):
        torch.func.vmap(lambda y: flash_kda.chunk_kda(**x | {name: y}))(x[name][None])


@pytest.mark.parametrize("name", ["initial_state", "cu_seqlens", "cu_seqlens_cpu"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bool])
def test_dtypes_that_a_conversion_would_hide(name, dtype):
    x = make_inputs("random", 1, 20, 2, "cpu", state_dtype=torch.float32) | RAW
    x |= {"cu_seqlens": cu_seqlens_of([20]), "cu_seqlens_cpu": cu_seqlens_of([20])}
    x |= dict.fromkeys(("output_final_state", "return_intermediate_states"), True)
    with pytest.raises(TypeError, match=rf"^{name}: expected dtype .*, got {dtype}"):
        flash_kda.chunk_kda(**x | {name: x[name].to(dtype)})


@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_parameters_that_are_no_real_numbers(name, dtype):
    x = make_inputs("random", 1, 20, 2, "cpu")
    with pytest.raises(TypeError, match=rf"^{name}: expected a floating-point dtype, got {dtype}"):
        flash_kda.chunk_kda(**x | {name: x[name].to(dtype)}, **RAW)


class TestBackend:
    """The adapter against a stand-in for FLA's dispatcher, which needs Triton and so a GPU."""

    @pytest.fixture
    def backends(self, monkeypatch):
        registered = []
        backends = types.ModuleType("fla.backends")
        backends.BaseBackend = type("BaseBackend", (), {})
        backends._DISPATCH_DISABLED = False
        backends.registered = registered
        backends.register = lambda entry: lambda backend: registered.append((entry, backend()))
        kda = types.ModuleType("fla.ops.kda")
        kda.chunk_kda = object()
        package = types.ModuleType("fla")
        package.backends = backends
        for name, module in (("fla", package), ("fla.ops", types.ModuleType("fla.ops")), ("fla.ops.kda", kda)):
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(sys.modules, "fla.backends", backends)
        return backends

    def test_registers_in_place_of_the_shipped_backend(self, backends):
        integration.register()
        ((entry, backend),) = backends.registered
        assert entry is sys.modules["fla.ops.kda"].chunk_kda
        assert (backend.backend_type, backend.package_name, backend.env_var) == (
            "flash_kda",
            "flash_kda",
            "FLA_FLASH_KDA",
        )
        x = make_inputs("random", 1, 20, 2, "cpu", state_dtype=torch.float32)
        out, state = backend.chunk_kda(**x, **RAW, transpose_state_layout=True, output_final_state=True)
        expected, expected_state = flash_kda.chunk_kda(**x, **RAW, state_v_first=True, output_final_state=True)
        assert_same_bits(out, expected, "out")
        assert_same_bits(state, expected_state, "final_state")
        accepted, reason = backend.chunk_kda_verifier(**x, **RAW)
        assert not accepted and reason

    def test_dispatch_turned_off(self, backends):
        backends._DISPATCH_DISABLED = True
        with pytest.raises(RuntimeError, match="FLA_DISABLE_BACKEND_DISPATCH"):
            integration.register()

    def test_without_fla(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "fla", None)
        with pytest.raises(ImportError, match="needs flash-linear-attention 0.6 or newer"):
            integration.register()

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"q": [1, 2]}, "requires tensors, got q of list"),
            ({"initial_state": torch.zeros(1, 2, 128, 128).half()}, "got initial_state of torch.float16"),
            ({"initial_state": [1, 2]}, "got initial_state of list"),
            ({"q": torch.zeros(1, 4, 2, 128)}, "requires bfloat16, got q of torch.float32"),
            ({"g": torch.zeros(1, 4, 2, 128, dtype=torch.float16)}, "got g of torch.float16"),
            ({"v": torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16)}, "K = 128 and V = 64"),
            ({"v": torch.zeros(1, 4, 3, 128, dtype=torch.bfloat16)}, "HV = 3 and H = 2"),
            ({"cu_seqlens_cpu": torch.tensor([0, 4])}, "requires cu_seqlens with cu_seqlens_cpu"),
            ({"cp_context": object()}, "context parallelism"),
            ({"safe_gate": True, "lower_bound": None}, "requires lower_bound"),
            ({"A_log": None, "lower_bound": None}, "requires lower_bound"),
            ({"lower_bound": -7.0}, r"lower_bound in \[-5, 0\), got -7"),
            ({"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": True}, "allow_neg_eigval"),
            ({"return_intermediate_states": True, "chunk_size": 32}, "every 64 tokens"),
            ({"chunk_size": 128}, r"chunk_size in \(32, 64\), got 128"),
            ({"q": torch.zeros(4, 2, 128, dtype=torch.bfloat16)}, r"four dimensions, got q of shape \[4, 2, 128\]"),
            ({"q": torch.zeros(1, 4, 0, 128, dtype=torch.bfloat16)}, "HV = 2 and H = 0"),
            ({"state_v_first": True, "transpose_state_layout": False}, "state_v_first and transpose_state_layout"),
            ({"use_qk_l2norm_in_kernel": 1}, "requires a bool, got use_qk_l2norm_in_kernel of int"),
            ({"scale": torch.tensor(0.1)}, "requires a float, got scale of torch.Tensor"),
            ({"lower_bound": torch.tensor(-1.0)}, "requires a float, got lower_bound of torch.Tensor"),
            ({"something_new": 1}, "does not know these arguments.*something_new"),
        ],
    )
    def test_reasons(self, changes, reason, monkeypatch):
        """What it declines, on tensors that say they are a GPU's; the kernels are taken to be there."""
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        kernels = types.SimpleNamespace(build_info=lambda: {"archs": ["90a", "120a"]})
        monkeypatch.setattr(integration, "extension", lambda: kernels)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
        call = make_inputs("random", 1, 4, 2, "cpu") | RAW
        with torch.no_grad():
            assert integration.why_not(**call) is None
            assert re.search(reason, integration.why_not(**call | changes))
            for accepted in (
                {"allow_neg_eigval": True},
                {"A_log": None},
                {"dt_bias": None},
                {"lower_bound": None},
                {"return_intermediate_states": True},
                {"use_gate_in_kernel": False},
                {"state_v_first": True},
                {"transpose_state_layout": True},
                {"chunk_size": 32},
                {"v": torch.zeros(1, 4, 4, 128, dtype=torch.bfloat16)},
            ):
                assert integration.why_not(**call | accepted) is None
            for capability in ((8, 0), (10, 0), (12, 1)):
                monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
                reason = integration.why_not(**call)
                assert "built for 90a, 120a, and " in reason and reason.endswith(".".join(map(str, capability)))
        with torch.enable_grad():
            assert "gradients are enabled" in integration.why_not(**call)

    def test_without_kernels_or_a_gpu(self, monkeypatch):
        call = make_inputs("random", 1, 4, 2, "cpu") | RAW
        with torch.no_grad():
            assert "on CUDA devices, got cpu" in integration.why_not(**call)
            monkeypatch.setattr(torch.Tensor, "is_cuda", True)

            def none():
                raise RuntimeError("no kernels here")

            monkeypatch.setattr(integration, "extension", none)
            assert integration.why_not(**call) == "no kernels here"


def test_signature_is_that_of_fla():
    """Names and defaults, in order, of flash-linear-attention 0.6's chunk_kda."""
    parameters = inspect.signature(flash_kda.chunk_kda).parameters
    positional = [name for name, x in parameters.items() if x.kind is x.POSITIONAL_OR_KEYWORD]
    assert (
        positional
        == (
            "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel "
            "use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound disable_recompute "
            "return_intermediate_states state_v_first cu_seqlens cu_seqlens_cpu cp_context use_graph max_num_seqs"
        ).split()
    )
    switches = [x.default for x in parameters.values() if isinstance(x.default, bool)]
    assert switches == [False] * 10

"""Against flash-linear-attention (FLA) on a GPU: its Triton kernels, its recurrence, and its dispatch to flash_kda."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accuracy import BOUNDS, TABLE, record_error, reference
from guarded import assert_same_bits
from inputs import GATE_KINDS, HEAD_DIM, cu_seqlens_of, make_inputs, relative_error

import flash_kda

HERE = Path(__file__).resolve().parent
OUTPUT = Path(os.environ.get("FLASH_KDA_TEST_OUTPUT", HERE / "output"))
T, H = 1024, 4
LENGTHS = [1, 300, 17, 64, 500, 142]
# FLA's Triton kernels were measured at up to 5.0e-3 (out) and 4.0e-3 (state); beyond this something else is computed.
FLA_BOUND = 8e-3

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kda():
    """flash-linear-attention's ops.kda module; skips without one of version 0.5 or newer."""
    try:
        import fla
        from fla.ops import kda
    except ImportError as error:
        pytest.skip(f"flash-linear-attention cannot be imported: {error}")
    if tuple(map(int, fla.__version__.split(".")[:2])) < (0, 5):
        pytest.skip(f"needs flash-linear-attention 0.5 or newer, found {fla.__version__}")
    return kda


def case(kind, packed):
    N = len(LENGTHS) if packed else None
    inputs = make_inputs(kind, 1, T, H, "cuda", 21, torch.float32, N=N)
    return inputs, cu_seqlens_of(LENGTHS, "cuda") if packed else None


def ours(inputs, cu_seqlens=None):
    out = torch.empty_like(inputs["v"])
    N = inputs["q"].shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    state = torch.empty(N, inputs["q"].shape[2], HEAD_DIM, HEAD_DIM, device="cuda")
    flash_kda.fwd(**inputs, out=out, final_state=state, cu_seqlens=cu_seqlens)
    return out, state


def triton(kda, monkeypatch, inputs, cu_seqlens=None, **more):
    from fla_dispatch import KERNEL_FLAGS

    def refuse(*args, **kwargs):
        raise AssertionError("FLA_FLASH_KDA=0, yet FLA called flash_kda.fwd")

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setenv("FLA_FLASH_KDA", "0")
        patch.setattr(flash_kda, "fwd", refuse)
        return kda.chunk_kda(**inputs, **KERNEL_FLAGS, **more, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("packed", [False, True], ids=["one sequence", "packed"])
@pytest.mark.parametrize("kind", GATE_KINDS)
def test_more_accurate_than_triton(kda, kind, packed, monkeypatch, record_property):
    inputs, cu_seqlens = case(kind, packed)
    expected = reference(inputs, cu_seqlens)
    theirs = triton(kda, monkeypatch, inputs, cu_seqlens)
    ours_name, fla_name = f"beside FLA, {kind}", f"{TABLE}FLA Triton, {kind}"
    if packed:
        ours_name, fla_name = f"{ours_name}, packed", f"FLA Triton, {kind}, packed"
    for i, part in enumerate(("out", "final state")):
        error = record_error(record_property, f"{ours_name}: {part}", ours(inputs, cu_seqlens)[i], expected[i])
        fla_error = record_error(record_property, f"{fla_name}: {part}", theirs[i], expected[i])
        assert fla_error <= FLA_BOUND, f"FLA and the fp64 recurrence disagree on {part}: {fla_error}"
        assert error <= BOUNDS[kind][i]
        assert error <= fla_error, f"{part}: ours {error}, FLA's {fla_error}"


@pytest.mark.parametrize("packed", [False, True], ids=["one sequence", "packed"])
def test_results_are_shaped_like_those_of_triton(kda, packed, monkeypatch):
    """Intermediate states included: which they are, their order and their dtype."""
    from fla_dispatch import KERNEL_FLAGS

    inputs, cu_seqlens = case("long", packed)
    more = {"return_intermediate_states": True}
    theirs = triton(kda, monkeypatch, inputs, cu_seqlens, **more)
    ours = flash_kda.chunk_kda(**inputs, **KERNEL_FLAGS, **more, cu_seqlens=cu_seqlens)
    for name, x, ref in zip(("out", "final_state", "h"), ours, theirs, strict=True):
        assert (x.shape, x.dtype, x.is_contiguous()) == (ref.shape, ref.dtype, ref.is_contiguous()), name
        assert relative_error(x, ref) <= 2 * FLA_BOUND, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", GATE_KINDS)
def test_fused_recurrent(kda, kind, dtype, record_property):
    """FLA's recurrence computes in fp32 whatever it is fed: a second opinion on the formula, below bf16's rounding."""
    inputs, _ = case(kind, False)
    fed = {name: inputs[name].to(dtype) for name in ("q", "k", "v", "g", "beta")}
    flags = ("use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel")
    with torch.inference_mode():
        out, state = kda.fused_recurrent_kda(
            **inputs | fed, **dict.fromkeys(flags, True), state_v_first=True, output_final_state=True
        )
    expected = reference(inputs)
    name = f"FLA fused_recurrent_kda fed {str(dtype).removeprefix('torch.')}, {kind}"
    assert record_error(record_property, f"{name}: out", out, expected[0]) <= 1e-4
    assert record_error(record_property, f"{name}: final state", state, expected[1]) <= 1e-4
    for i, result in enumerate(ours(inputs)):
        assert relative_error(result, (out, state)[i]) <= BOUNDS[kind][i] + 1e-4


def test_plot_of_the_error_by_token_position(kda, monkeypatch):
    """Writes error_by_position.png: relative error of out at each token, over heads and channels, for both kernels."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), GATE_KINDS, strict=True):
        inputs, _ = case(kind, False)
        expected = reference(inputs)[0]
        norm = torch.linalg.vector_norm(expected, dim=(0, 2, 3))
        curves = {"flash_kda": ours(inputs)[0], "FLA Triton": triton(kda, monkeypatch, inputs)[0]}
        for label, out in curves.items():
            error = torch.linalg.vector_norm(out.double() - expected, dim=(0, 2, 3)) / norm
            assert bool(error.isfinite().all())
            axes.plot(error.cpu().numpy(), label=label, linewidth=0.8)
        axes.set(title=f"{kind} gate", xlabel="token", yscale="log")
        axes.legend()
    figure.supylabel("relative error of out")
    OUTPUT.mkdir(parents=True, exist_ok=True)
    path = OUTPUT / "error_by_position.png"
    path.unlink(missing_ok=True)
    figure.savefig(path, dpi=120)
    assert path.stat().st_size > 10_000


def start_dispatch(seed, path, **environment):
    env = {name: x for name, x in os.environ.items() if not name.startswith("FLA_")} | environment
    command = [sys.executable, str(HERE / "fla_dispatch.py"), str(seed), str(path)]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


def test_dispatch(kda, tmp_path, record_property):
    """FLA takes flash_kda by itself under inference_mode, Triton with FLA_FLASH_KDA=0; both agree within the bounds."""
    from fla_dispatch import dispatch_inputs

    seed = 22
    paths = {"dispatched": tmp_path / "dispatched.pt", "opted out": tmp_path / "opted_out.pt"}
    # Both at once, since importing FLA takes most of the time.
    processes = {
        "dispatched": start_dispatch(seed, paths["dispatched"]),
        "opted out": start_dispatch(seed, paths["opted out"], FLA_FLASH_KDA="0"),
    }
    logs = {}
    try:
        for name, process in processes.items():
            logs[name] = process.communicate(timeout=240)[1]
            assert process.returncode == 0, f"{name}:\n{logs[name]}"
    finally:
        for process in processes.values():
            process.kill()
    results = {name: torch.load(path, map_location="cuda") for name, path in paths.items()}

    lines = re.findall(r"\[FLA Backend\] \S*\bchunk_kda -> flash_kda(?!\S| rejected).*", logs["dispatched"])
    assert len(lines) == 1, f"FLA's log does not say that it took flash_kda:\n{logs['dispatched']}"
    record_property("fla dispatch", lines[0].strip())
    assert results["dispatched"]["calls"] == 1
    assert "-> flash_kda" not in logs["opted out"], logs["opted out"]
    assert results["opted out"]["calls"] == 0

    inputs = dispatch_inputs(seed)
    expected = reference(inputs)
    for i, part in enumerate(("out", "final_state")):
        dispatched, opted_out = results["dispatched"][part], results["opted out"][part]
        assert_same_bits(dispatched, ours(inputs)[i], f"{part} through FLA against a direct call")
        assert relative_error(dispatched, expected[i]) <= BOUNDS["long"][i]
        assert relative_error(opted_out, expected[i]) <= FLA_BOUND
        assert relative_error(dispatched, opted_out) <= BOUNDS["long"][i] + FLA_BOUND
        assert relative_error(dispatched, opted_out) > 0, "both took the same kernel"


def test_strided_views_arrive_and_are_served(kda):
    """FLA dispatches before it makes anything contiguous: slices of a projection give the bits of contiguous inputs."""
    from fla_dispatch import KERNEL_FLAGS

    inputs, _ = case("long", False)
    fused = torch.cat([inputs[name].flatten(2) for name in ("q", "k", "v", "g")], dim=-1)
    views = dict(
        zip(("q", "k", "v", "g"), (x.unflatten(-1, (H, HEAD_DIM)) for x in fused.chunk(4, dim=-1)), strict=True)
    )
    assert not any(x.is_contiguous() for x in views.values())
    with torch.inference_mode():
        out, state = kda.chunk_kda(**inputs | views, **KERNEL_FLAGS)
    for name, x, expected in zip(("out", "final_state"), (out, state), ours(inputs), strict=True):
        assert_same_bits(x, expected, name)


def test_example_of_the_readme(kda, monkeypatch):
    """After that of the call, whose bits it gives: by FLA's own adapter, and, registered, by ours."""
    from inspect import unwrap

    from fla import backends
    from test_readme import examples, run

    (call,), (dispatched, register) = examples("The call"), examples("With flash-linear-attention")
    if hasattr(backends, "register"):
        registry = backends._function_registries[unwrap(kda.chunk_kda)]
        monkeypatch.setattr(registry, "_backends", dict(registry._backends))
        blocks = ([dispatched], [register, dispatched])
    else:
        blocks = ([dispatched],)
    for more in blocks:
        names = run([call, "expected = out, state\n", *more])
        for name, expected in zip(("out", "final_state"), names["expected"], strict=True):
            assert_same_bits(names[name], expected, f"{name}, {len(more)} blocks")


@pytest.fixture
def registered(kda, monkeypatch):
    """flash_kda.integrations.fla in place of FLA's own backend, for one test; a list of the calls that it serves."""
    from inspect import unwrap

    from fla import backends

    import flash_kda.functional
    from flash_kda.integrations import fla as integration

    if not hasattr(backends, "register"):
        pytest.skip("this flash-linear-attention has no fla.backends.register: flash_kda.integrations.fla needs 0.6")
    registry = backends._function_registries[unwrap(kda.chunk_kda)]
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    for _ in range(2):  # it is idempotent
        integration.register()
    calls, fwd = [], flash_kda.fwd

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return fwd(*args, **kwargs)

    monkeypatch.setattr(flash_kda.functional, "fwd", counted)
    return calls


RAW_FLAGS = dict.fromkeys(("use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel"), True)


@pytest.mark.parametrize("packed", [False, True], ids=["one sequence", "packed"])
@pytest.mark.parametrize(
    "feature",
    ["plain", "grouped", "no A_log", "no dt_bias", "softplus", "negative eigenvalues", "key first", "activated"],
)
def test_registered_backend_serves(kda, registered, feature, packed):
    """What FLA's own backend declines (or, at times, gets wrong) goes to flash_kda, with intermediate states along."""
    inputs, cu_seqlens = case("long", packed)
    options, flags = {}, dict(RAW_FLAGS)
    if feature == "grouped":
        inputs |= {name: inputs[name][:, :, :2].clone() for name in ("q", "k")}
    elif feature.startswith("no "):
        inputs[feature.removeprefix("no ")] = None
    elif feature == "softplus":
        inputs |= {"lower_bound": None, "dt_bias": inputs["dt_bias"] - 3}
    elif feature == "negative eigenvalues":
        options["allow_neg_eigval"] = True
    elif feature == "activated":
        flags["use_gate_in_kernel"] = False
        inputs |= {"g": -inputs["g"].float().abs(), "A_log": None, "dt_bias": None, "lower_bound": None}
    expected = recurrence_with_states(inputs, cu_seqlens, **options, gate="log" if feature == "activated" else "raw")
    v_first = feature != "key first"
    given = dict(inputs)
    if not v_first:
        given["initial_state"] = inputs["initial_state"].mT.contiguous()
    with torch.inference_mode():
        results = kda.chunk_kda(
            **given,
            **flags,
            **options,
            cu_seqlens=cu_seqlens,
            output_final_state=True,
            return_intermediate_states=True,
            state_v_first=v_first,
        )
    assert len(registered) == 1, "FLA did not take flash_kda"
    out, state, h = results
    h = h.flatten(0, 1)
    if not v_first:
        state, h = state.mT, h.mT
    for name, x, ref, bound in zip(
        ("out", "state", "h"), (out, state, h), expected, (4.6e-3, 3.5e-3, 4e-3), strict=True
    ):
        assert x.shape == ref.shape, name
        assert relative_error(x, ref) < bound, name


def recurrence_with_states(inputs, cu_seqlens, **options):
    from flash_kda.recurrence import recurrence

    return recurrence(**inputs, cu_seqlens=cu_seqlens, checkpoint_interval=64, checkpoint_at="start", **options)


def test_signature_is_that_of_this_fla(kda):
    from inspect import Parameter, signature, unwrap

    import fla

    if tuple(map(int, fla.__version__.split(".")[:2])) < (0, 6):
        pytest.skip(f"flash_kda.chunk_kda has the signature of 0.6, found {fla.__version__}")
    theirs, ours = (
        [(x.name, x.default) for x in signature(f).parameters.values() if x.kind is Parameter.POSITIONAL_OR_KEYWORD]
        for f in (unwrap(kda.chunk_kda), flash_kda.chunk_kda)
    )
    assert ours == theirs


def test_registered_backend_declines(kda, registered):
    """What it declines goes on to FLA, which here has its own reason against it."""
    from flash_kda.integrations.fla import why_not

    steep = case("long", False)[0] | {"lower_bound": -7.0}
    with torch.inference_mode(), pytest.raises(ValueError, match="lower_bound"):
        kda.chunk_kda(**steep, **RAW_FLAGS, safe_gate=True)
    assert registered == []

    inputs, _ = case("long", False)
    with torch.inference_mode():
        assert why_not(**inputs, **RAW_FLAGS) is None
        assert "bfloat16" in why_not(**inputs | {"q": inputs["q"].half()}, **RAW_FLAGS)
    assert "gradients" in why_not(**inputs, **RAW_FLAGS)

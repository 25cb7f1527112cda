"""`torch.ops.flash_kda.fwd`: torch.library's checks of an operator, torch.compile, CUDA graphs of compiled code."""

import pytest
import torch
from guarded import assert_same_bits
from inputs import HEAD_DIM, cu_seqlens_of, make_inputs

import flash_kda

NONE = dict.fromkeys(("A_log", "dt_bias", "lower_bound"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """With the schedule that a call takes by itself: what is compiled does not know of schedules."""
    return request.param


def plain(device, T=40, seed=0):
    x = make_inputs("long", 2, T, 2, device, seed, torch.float32)
    return x | {"out": torch.zeros_like(x["v"]), "final_state": torch.zeros_like(x["initial_state"])}


def general(device, seed=0):
    """A packed call with a state pool updated in place and checkpoints."""
    lengths = [70, 0, 64]
    x = make_inputs("random", 1, sum(lengths), 2, device, seed, torch.float32, N=5)
    pool = x.pop("initial_state")
    return (
        x
        | NONE
        | {
            "A_log": x["A_log"],
            "out": torch.zeros_like(x["v"]),
            "initial_state": pool,
            "final_state": pool.clone(),
            "cu_seqlens": cu_seqlens_of(lengths, device).int(),
            "state_indices": torch.tensor([3, -1, 0], device=device),
            "checkpoints": torch.zeros(2, 2, HEAD_DIM, HEAD_DIM, device=device),
            "checkpoint_interval": 64,
            "allow_neg_eigval": True,
        }
    )


OUTPUTS = ("out", "final_state", "checkpoints")


def operator_arguments(x):
    """The operator takes everything by position."""
    names = [argument.name for argument in torch.ops.flash_kda.fwd.default._schema.arguments]
    defaults = {"checkpoint_at": "end", "gate": "raw", "allow_neg_eigval": False}
    defaults |= {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    return tuple(x.get(name, defaults.get(name)) for name in names)


@pytest.mark.parametrize("make", [plain, general])
def test_opcheck(device, make):
    torch.library.opcheck(torch.ops.flash_kda.fwd.default, operator_arguments(make(device)))


def test_declared_mutations():
    schema = torch.ops.flash_kda.fwd.default._schema
    assert tuple(x.name for x in schema.arguments if x.alias_info and x.alias_info.is_write) == (
        "out",
        "final_state",
        "checkpoints",
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("make", [plain, general])
def test_compiled_function(device, make, backend):
    """With fullgraph=True: one graph, the eager results, and nothing else changed."""

    def layer(x, gate_shift):
        flash_kda.fwd(**{**x, "g": x["g"] + gate_shift})
        return x["out"] * 2

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for seed in range(2):
        x, y = make(device, seed=seed), make(device, seed=seed)
        expected, doubled = layer(x, 0.5), compiled(y, 0.5)
        assert_same_bits(doubled, expected, "what the compiled function returns")
        for name, value in x.items():
            if isinstance(value, torch.Tensor):
                assert_same_bits(y[name], value, name)


def test_compiled_for_any_number_of_tokens(device):
    """One graph, in which T is a symbol, for all of them."""
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(flash_kda.fwd, fullgraph=True, dynamic=True, backend=backend)
    for T in (40, 57, 300):
        x, y = plain(device, T), plain(device, T)
        flash_kda.fwd(**x)
        compiled(**y)
        for name in ("out", "final_state"):
            assert_same_bits(y[name], x[name], f"{name}, {T} tokens")
    assert len(graphs) == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_with_the_state_in_place(device, backend):
    def step(x, state):
        out = torch.empty_like(x["v"])
        flash_kda.fwd(**{**x, "initial_state": state}, out=out, final_state=state)
        return out

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    x = plain(device)
    state, other = x["initial_state"].clone(), x["initial_state"].clone()
    x = {name: value for name, value in x.items() if name not in OUTPUTS}
    for _ in range(2):
        assert_same_bits(compiled(x, state), step(x, other), "out")
        assert_same_bits(state, other, "state")


def test_compiled_functional_form(device):
    def layer(x):
        return flash_kda.chunk_kda(
            *(x[name] for name in ("q", "k", "v", "g", "beta")),
            initial_state=x["initial_state"],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            A_log=x["A_log"],
            dt_bias=x["dt_bias"],
        )

    torch._dynamo.reset()
    x = plain(device)
    results = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    for y, expected in zip(results, layer(x), strict=True):
        assert_same_bits(y, expected, "result")


def test_a_rejected_call_in_compiled_code(device):
    """The rules hold where the graph runs."""
    torch._dynamo.reset()
    x = plain(device)
    compiled = torch.compile(flash_kda.fwd, fullgraph=True, backend="eager")
    with pytest.raises(ValueError, match=r"lower_bound: expected a number in \[-5, 0\), got -6"):
        compiled(**x | {"lower_bound": -6.0})
    assert not bool(x["out"].any()) and not bool(x["final_state"].any())


@pytest.mark.parametrize("name", ["q", "A_log", "beta", "out", "checkpoints"])
def test_the_operator_refuses_gradients(device, name):
    """As `flash_kda.fwd` does: they would be missing, silently. With grad mode off they are not asked for."""
    x = general(device)
    written = [x[output].clone() for output in OUTPUTS]
    arguments = operator_arguments(x | {name: x[name].clone().requires_grad_()})
    with pytest.raises(ValueError, match=rf"^{name}: expected a tensor that needs no gradient, got requires_grad=True"):
        torch.ops.flash_kda.fwd(*arguments)
    for output, before in zip(OUTPUTS, written, strict=True):
        assert_same_bits(x[output], before, output)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            torch.ops.flash_kda.fwd(*arguments)
    flash_kda.fwd(**x)
    for output, argument in zip(OUTPUTS, (arguments[6], arguments[11], arguments[14]), strict=True):
        assert_same_bits(argument, x[output], output)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_gradients_in_compiled_code(device, backend):
    """Refused where they would be missing; what is detached, or runs with grad mode off, is not."""

    def layer(q, x, detach):
        out = torch.empty_like(q)
        flash_kda.fwd(q.detach() if detach else q, **x, out=out)
        return out * q  # which has a gradient of its own

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    x = {name: value for name, value in plain(device).items() if name not in OUTPUTS}
    q = x.pop("q").requires_grad_()
    # Whatever the compiler makes of an exception while it traces.
    with pytest.raises(Exception, match="q: expected a tensor that needs no gradient"):
        compiled(q, x, False)
    result, expected = compiled(q, x, True), layer(q, x, True)
    assert_same_bits(result.detach(), expected.detach(), "result")
    gradients = [torch.autograd.grad(y.float().sum(), q)[0] for y in (result, expected)]
    assert_same_bits(*gradients, "gradient")
    with torch.no_grad():
        assert_same_bits(compiled(q, x, False), expected.detach(), "result without gradients")


@pytest.mark.gpu
@pytest.mark.parametrize("make", [plain, general])
def test_compiled_code_in_a_cuda_graph(device, make):
    """Captured and replayed with new contents, offsets of checkpoints that the call computes included."""
    if device == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    torch._dynamo.reset()
    compiled = torch.compile(flash_kda.fwd, fullgraph=True, backend="aot_eager")
    x = make(device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compiled(**x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compiled(**x)
    for seed in (1, 2):
        new = make(device, seed=seed)
        for name, value in new.items():
            if isinstance(value, torch.Tensor):
                x[name].copy_(value)
        graph.replay()
        flash_kda.fwd(**new)
        torch.cuda.synchronize()
        for name in OUTPUTS:
            if name in new:
                assert_same_bits(x[name], new[name], f"{name} of replay {seed}")

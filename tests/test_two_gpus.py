"""Two GPUs in one process: a call runs on the device of its tensors, whichever is current, beside calls on the other.

    python -m pytest -m gpu tests/test_two_gpus.py

`cuda:0` is the current device but where a test says otherwise, and the calls are those on `cuda:1`.
"""

import pytest
import schedules
import torch
from guarded import assert_same_bits
from inputs import HEAD_DIM, make_inputs
from test_streams import buffers, call, in_process, in_threads

import flash_kda

if torch.cuda.device_count() < 2:
    pytest.skip(f"needs two GPUs, PyTorch sees {torch.cuda.device_count()}", allow_module_level=True)

pytestmark = pytest.mark.gpu

OPTIONS = {"plain": {}, "general": {"allow_neg_eigval": True}, "softplus": {"lower_bound": None}}


@pytest.fixture(autouse=True, params=[*schedules.SCHEDULES, "auto"])
def schedule(request, monkeypatch):
    kinds = {(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in range(2)}
    if len(kinds) > 1:
        pytest.skip("needs two GPUs of one kind, which give the same bits")
    schedules.use(request.param, monkeypatch)
    assert torch.cuda.current_device() == 0
    yield request.param
    assert torch.cuda.current_device() == 0, "another device is current after the test"


def on(device, x):
    """The same arguments with their tensors on `device`."""
    return {name: y.to(device) if isinstance(y, torch.Tensor) else y for name, y in x.items()}


def synchronize():
    for i in range(2):
        torch.cuda.synchronize(i)


def assert_same(results, expected, what):
    """That results on any device have the bits of those on another."""
    synchronize()
    for name, y in results.items():
        assert bool(y.any()), f"{name} was not written, {what}"
        assert_same_bits(y.cpu(), expected[name].cpu(), f"{name}, {what}")


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("in_a_thread", [False, True])
def test_another_device_than_the_current_one(kind, in_a_thread):
    x = make_inputs("long", 1, 97, 4, "cuda:0", 12, torch.float32)
    moved = on("cuda:1", x)
    expected, results = buffers(x), buffers(moved)
    call(x, expected, **OPTIONS[kind])
    synchronize()

    def work(_=0):
        assert torch.cuda.current_device() == 0
        call(moved, results, **OPTIONS[kind])
        assert torch.cuda.current_device() == 0

    in_threads(work, 1) if in_a_thread else work()
    assert_same(results, expected, "on cuda:1")


def decode(x):
    """States of a pool in place, one token each: the kernel for decoding, where the schedule is auto."""
    pool, out = x["initial_state"].clone(), torch.zeros_like(x["v"][:, :1])
    tokens = {name: x[name][:, :1] for name in ("q", "k", "v", "g", "beta")}
    rows = torch.arange(len(pool) - 1, -1, -1, device=pool.device)
    flash_kda.fwd(**x | tokens | {"initial_state": pool}, out=out, final_state=pool, state_indices=rows)
    return {"out": out, "pool": pool}


def take_checkpoints(x):
    """Their offsets are made by the call."""
    B, T, H, _ = x["v"].shape
    results = buffers(x) | {"checkpoints": x["v"].new_zeros(B * (T // 64), H, HEAD_DIM, HEAD_DIM)}
    call(x, results, checkpoint_interval=64)
    return results


def call_as_fla(x):
    """All results are allocated by the call."""
    tensors = {name: y for name, y in x.items() if name != "scale"}
    flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
    flags += ("output_final_state", "return_intermediate_states")
    results = dict(
        zip(("out", "state", "h"), flash_kda.chunk_kda(**tensors, **dict.fromkeys(flags, True)), strict=True)
    )
    assert all(y.device == x["q"].device for y in results.values())
    return results


def call_compiled(x):
    torch._dynamo.reset()
    results = buffers(x)
    torch.compile(flash_kda.fwd, fullgraph=True, backend="aot_eager")(**x, **results)
    return results


@pytest.mark.parametrize("use", [decode, take_checkpoints, call_as_fla, call_compiled], ids=lambda use: use.__name__)
def test_what_a_call_makes_is_on_its_device(use):
    x = make_inputs("long", 3, 150, 4, "cuda:0", 13, torch.float32)
    expected = use(x)
    synchronize()
    assert_same(use(on("cuda:1", x)), expected, "on cuda:1")


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_current_stream_of_the_other_device(kind):
    """Not that of the current device, and without waiting for it."""
    x = make_inputs("long", 1, 256, 4, "cuda:1", 14, torch.float32)
    expected, results = buffers(x), buffers(x)
    call(x, expected, **OPTIONS[kind])
    late = {name: torch.zeros_like(x[name]) for name in ("q", "k", "v", "g", "beta")}
    stream = torch.cuda.Stream(device=1)
    synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)
        for name, y in late.items():
            y.copy_(x[name])
        with torch.cuda.device(0):
            call(x | late, results, **OPTIONS[kind])
            pending = not stream.query()
    assert pending, "the call waited for the device"
    assert_same(results, expected, "on a stream of cuda:1")


def test_two_threads_on_two_devices():
    """At once, each with the other's device current, and with the kernels of all kinds in turn."""
    batches = [make_inputs("long", 1, 300 + 7 * i, 4, "cuda:0", i, torch.float32) for i in range(2)]
    expected = []
    for x in batches:
        expected.append({kind: buffers(x) for kind in OPTIONS})
        for kind, options in OPTIONS.items():
            call(x, expected[-1][kind], **options)
    moved = [on(f"cuda:{i}", x) for i, x in enumerate(batches)]
    results = [{kind: buffers(x) for kind in OPTIONS} for x in moved]
    streams = [torch.cuda.Stream(device=i) for i in range(2)]
    synchronize()

    def work(i):
        torch.cuda.set_stream(streams[i])
        torch.cuda.set_device(1 - i)
        for _ in range(50):
            for kind, options in OPTIONS.items():
                call(moved[i], results[i][kind], **options)
        assert torch.cuda.current_device() == 1 - i
        streams[i].synchronize()

    in_threads(work, 2)
    for i in range(2):
        for kind in OPTIONS:
            assert_same(results[i][kind], expected[i][kind], f"{kind}, of thread {i}")


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_graph_of_the_other_device(kind):
    """Captured, and replayed with new contents, while cuda:0 is current."""
    x = make_inputs("long", 1, 200, 4, "cuda:1", 15, torch.float32)
    captured, eager = buffers(x), buffers(x)
    call(x, captured, **OPTIONS[kind])
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(1), torch.cuda.graph(graph, stream=torch.cuda.Stream(device=1)), torch.cuda.device(0):
        call(x, captured, **OPTIONS[kind])
    for _ in range(2):
        x["v"].mul_(-2)
        graph.replay()
        call(x, eager, **OPTIONS[kind])
        assert_same(captured, eager, "of a replay")


FIRST_CALL = """
import ctypes
import torch
import flash_kda
from guarded import assert_same_bits
from inputs import make_inputs

driver = ctypes.CDLL("libcuda.so.1")

def has_context(ordinal):
    device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    assert driver.cuDeviceGet(ctypes.byref(device), ordinal) == 0
    assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
    return active.value

results = {}
x = make_inputs("long", 1, 200, 4, "cuda:1", 16, torch.float32)
for ordinal in (1, 0):
    x = {name: y.to(f"cuda:{ordinal}") if isinstance(y, torch.Tensor) else y for name, y in x.items()}
    out, state = torch.zeros_like(x["v"]), torch.zeros_like(x["initial_state"])
    torch.cuda.synchronize(ordinal)
    before = has_context(0)
    flash_kda.fwd(**x, out=out, final_state=state)
    assert has_context(0) == before, "a call on cuda:1 made a context on cuda:0"
    torch.cuda.synchronize(ordinal)
    results[ordinal] = out.cpu(), state.cpu()
for name, y, expected in zip(("out", "final_state"), results[1], results[0], strict=True):
    assert bool(y.any()), name
    assert_same_bits(y, expected, name)
"""


def test_first_call_of_a_process_on_the_other_device():
    in_process(FIRST_CALL)


@pytest.mark.parametrize("name", ["k", "beta", "A_log", "initial_state"])
def test_tensors_of_two_devices(name):
    x = make_inputs("long", 1, 40, 4, "cuda:1", 17, torch.float32)
    results = buffers(x)
    with pytest.raises(ValueError, match=rf"^{name}: expected the device of q, cuda:1, got cuda:0"):
        call(x | {name: x[name].to("cuda:0")}, results)
    assert not any(bool(y.any()) for y in results.values())

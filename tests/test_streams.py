"""Threads and streams: a call runs on the current stream of its tensors' device. Two devices: test_two_gpus.py."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import schedules
import torch
from guarded import assert_same_bits
from inputs import make_inputs

import flash_kda

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, params=schedules.SCHEDULES)
def schedule(request, monkeypatch):
    schedules.use(request.param, monkeypatch)
    return request.param


def buffers(x):
    return {"out": torch.zeros_like(x["v"]), "final_state": torch.zeros_like(x["initial_state"])}


def call(x, results, **options):
    flash_kda.fwd(**x | results | options)


def expected_of(x, **options):
    results = buffers(x)
    call(x, results, **options)
    torch.cuda.synchronize()
    return results


def in_threads(work, count):
    """Runs `work(0)` to `work(count - 1)`, each in a fresh thread, and raises what one of them raised."""
    errors = []

    def guarded(i):
        try:
            work(i)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def in_process(code, *arguments):
    """Runs `code` in a Python of its own, which sees the tests' helpers, the package and this test's environment."""
    folder = Path(__file__).resolve().parent
    path = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(folder.parent)!r}]\n"
    done = subprocess.run(
        [sys.executable, "-c", path + code, *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("options", [{}, {"allow_neg_eigval": True}], ids=["plain", "general"])
def test_first_call_of_a_thread_on_its_own_stream(options):
    """A thread without a current CUDA context, whose first CUDA work is this call."""
    x = make_inputs("long", 1, 200, 4, "cuda", 1, torch.float32)
    expected, results = expected_of(x, **options), buffers(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def work(_):
        with torch.cuda.stream(stream):
            call(x, results, **options)

    in_threads(work, 1)
    stream.synchronize()
    for name, y in results.items():
        assert_same_bits(y, expected[name], name)


def test_first_call_of_a_process_in_a_thread():
    """The same where the process has made no call before: nothing may depend on the main thread having been first."""
    code = (
        "import threading, torch, flash_kda\n"
        "from inputs import make_inputs\n"
        "x = make_inputs('long', 1, 64, 2, 'cuda', 1)\n"
        "a, b = torch.zeros_like(x['v']), torch.zeros_like(x['v'])\n"
        "torch.cuda.synchronize()\n"
        "stream = torch.cuda.Stream()\n"
        "def work():\n"
        "    with torch.cuda.stream(stream):\n"
        "        flash_kda.fwd(**x, out=a)\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start(); thread.join(); torch.cuda.synchronize()\n"
        "flash_kda.fwd(**x, out=b)\n"
        "assert torch.equal(a, b) and bool(b.any())\n"
    )
    in_process(code)


FIRST_CALL_IN_A_CAPTURE = """
import sys
import torch
import flash_kda
from guarded import assert_same_bits
from inputs import make_inputs

H, T, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
x = make_inputs("long", 3, T, H, "cuda", 1, torch.float32)
if kind == "general":
    x["allow_neg_eigval"] = True
elif kind == "decoding":
    x["state_indices"] = torch.tensor([2, 0, 1], device="cuda")
names = ("out", "final_state")
captured, eager = (dict(zip(names, map(torch.zeros_like, (x["v"], x["initial_state"])))) for _ in range(2))
assert "flash_kda._C" not in sys.modules
torch.cuda.synchronize()

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    flash_kda.fwd(**x, **captured)
torch.cuda.synchronize()
assert not any(bool(y.any()) for y in captured.values()), "the captured call ran"
for _ in range(2):
    graph.replay()
    flash_kda.fwd(**x, **eager)
    torch.cuda.synchronize()
    for name in names:
        assert bool(eager[name].any()), name
        assert_same_bits(captured[name], eager[name], name)
    x["v"].mul_(-2)
"""


@pytest.mark.parametrize(("H", "T"), [(2, 200), (160, 40)], ids=["few heads", "many heads"])
@pytest.mark.parametrize("kind", ["plain", "general"])
def test_first_call_of_a_process_in_a_graph_capture(H, T, kind):
    """What is asked of the driver only once is asked here while a stream is captured: where its functions are, shared
    memory for a kernel, how many clusters fit; and the kernels are loaded."""
    in_process(FIRST_CALL_IN_A_CAPTURE, H, T, kind)


def test_first_call_of_a_process_in_a_graph_capture_decoding(schedule, monkeypatch):
    if schedule != schedules.SCHEDULES[0]:
        pytest.skip("the kernel for decoding is auto's: once is enough")
    monkeypatch.setenv("FLASH_KDA_SCHEDULE", "auto")
    in_process(FIRST_CALL_IN_A_CAPTURE, 4, 2, "decoding")


def test_three_threads_on_three_streams():
    """Each with kernels of its own: the plain ones, the general ones, those of the softplus gate."""
    options = [{}, {"allow_neg_eigval": True}, {"lower_bound": None}]
    batches = [make_inputs("long", 1, 300 + 7 * i, 4, "cuda", i, torch.float32) for i in range(len(options))]
    expected = [expected_of(x, **more) for x, more in zip(batches, options, strict=True)]
    results = [buffers(x) for x in batches]
    start = threading.Barrier(len(options))

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            start.wait(30)
            for _ in range(50):
                call(batches[i], results[i], **options[i])
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    in_threads(work, len(options))
    for i, more in enumerate(options):
        for name, y in results[i].items():
            assert_same_bits(y, expected[i][name], f"{name} of the thread with {more}")

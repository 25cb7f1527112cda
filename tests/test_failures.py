"""Calls that fail: a Python exception that says what happened, inputs intact, and the process usable afterwards."""

import ctypes
import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import schedules
import torch
from guarded import Guarded, assert_same_bits
from inputs import HEAD_DIM, make_inputs
from project_copy import copy_project

import flash_kda

HERE = Path(__file__).resolve().parent
HAVE_KERNELS = importlib.util.find_spec("flash_kda._C") is not None


def python(code, *arguments, path=(), timeout=300):
    """What a Python of its own prints for `code`, which sees the tests' helpers and the package."""
    folders = [str(HERE), *map(str, path), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))},
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


class Checked:
    """A call's arguments, copies of them, and poisoned outputs."""

    def __init__(self, device, H=4):
        self.inputs = make_inputs("long", 1, 200, H, device, 0, torch.float32)
        self.before = {name: x.clone() for name, x in self.inputs.items() if isinstance(x, torch.Tensor)}
        self.out = Guarded(self.inputs["v"].shape, torch.bfloat16, device)
        self.state = Guarded((1, H, HEAD_DIM, HEAD_DIM), torch.float32, device)

    def call(self):
        flash_kda.fwd(**self.inputs, out=self.out.tensor, final_state=self.state.tensor)

    def assert_nothing_changed(self):
        for name, x in self.before.items():
            assert_same_bits(self.inputs[name], x, name)
        for name, x in (("out", self.out), ("final_state", self.state)):
            x.assert_guards_untouched()
            assert not bool(x.written().any()), f"{name} was written"

    def assert_works(self, expected):
        """A later call gives the bits of `expected`."""
        self.call()
        for name, x, reference in zip(("out", "final_state"), (self.out, self.state), expected, strict=True):
            assert_same_bits(x.tensor, reference, name)


def results(device):
    checked = Checked(device)
    checked.call()
    return checked.out.tensor, checked.state.tensor


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
def test_a_launch_that_fails(schedule, monkeypatch):
    """On a stream whose graph capture was spoilt (it was waited for) no kernel can be launched until that is over."""
    schedules.use(schedule, monkeypatch)
    expected = results("cuda")
    checked = Checked("cuda")
    driver = ctypes.CDLL("libcuda.so.1")
    stream = torch.cuda.Stream()
    handle, graph, relaxed = ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p(), 2
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        assert driver.cuStreamBeginCapture_v2(handle, relaxed) == 0
        try:
            assert driver.cuStreamSynchronize(handle) != 0, "a stream in capture was waited for"
            with pytest.raises(RuntimeError, match=r"flash_kda: .*failed: cudaErrorStreamCapture\w+ \(.+\)"):
                checked.call()
        finally:
            driver.cuStreamEndCapture(handle, ctypes.byref(graph))
    torch.cuda.synchronize()
    checked.assert_nothing_changed()
    with torch.cuda.stream(stream):
        checked.assert_works(expected)
    stream.synchronize()
    Checked("cuda").assert_works(expected)


@pytest.mark.skipif(not HAVE_KERNELS, reason="flash_kda._C is not built: the package is CPU-only")
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU, and with it a driver")
def test_a_machine_without_a_driver():
    """The binding, called as the package calls it, on a machine where CUDA cannot even start."""
    from flash_kda import _C

    tensors, addresses, sizes = (0, 0, 0, 0) * 6, (0,) * 5, (16, 1, 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="flash_kda: the driver does not say which context is current"):
            _C.fwd(*tensors, *addresses, *sizes, 1.0, -5.0, True, 0, 0, "auto", 0, 0)
    assert results("cpu")[0].isfinite().all()


@pytest.mark.gpu
def test_a_binary_without_the_device_s_arch(tmp_path):
    """A build for another arch says which archs it holds, which device it met, and what to set."""
    capability = "{}{}a".format(*torch.cuda.get_device_capability())
    other = "120a" if capability != "120a" else "100a"
    project = copy_project(tmp_path / "project")
    environment = {**os.environ, "FLASH_KDA_CUDA_ARCHS": other}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", f"--build-temp={tmp_path / 'temp'}"]
    built = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-4000:]
    code = """
        import sys
        import torch
        import flash_kda
        from test_failures import Checked, results

        assert flash_kda.__file__.startswith(sys.argv[1]), flash_kda.__file__
        checked = Checked("cuda")
        for _ in range(2):
            try:
                checked.call()
            except RuntimeError as error:
                print(error)
            else:
                raise SystemExit("the call went through")
        torch.cuda.synchronize()
        checked.assert_nothing_changed()
        assert bool((torch.ones(3, device="cuda") + 1 == 2).all())
        assert results("cpu")[0].isfinite().all()
    """
    first, second = python(code, project, path=[project]).splitlines()
    name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    assert first == second and first.startswith("flash_kda: device 0")
    for text in (name, f"{major}.{minor}", f"kernels are for {other}", "FLASH_KDA_CUDA_ARCHS", capability):
        assert text in first, first


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
def test_gpu_memory_runs_out(schedule, monkeypatch):
    """Whole pairs, those of many heads, need no device memory beyond the arguments. Where a call does need some and
    there is none, it raises PyTorch's error, has written nothing, and works once there is memory again."""
    schedules.use(schedule, monkeypatch)
    few, many = results("cuda"), Checked("cuda", H=96)
    few_checked = Checked("cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(2**28, dtype=torch.uint8, device="cuda")
        if schedule in schedules.EXACT:
            many.call()
        else:  # a workspace of 48 MB
            with pytest.raises(torch.cuda.OutOfMemoryError):
                many.call()
            many.assert_nothing_changed()
        try:
            few_checked.call()
        except torch.cuda.OutOfMemoryError:
            few_checked.assert_nothing_changed()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    many.call()
    assert bool(many.out.written().all())
    few_checked.assert_works(few)


def test_cpu_memory_runs_out():
    """The CPU path's workspace does not fit: an exception, nothing written, and with memory the next call works."""
    pytest.importorskip("resource")
    code = """
        import resource
        import torch
        import flash_kda.cpu
        from test_failures import Checked, results

        torch.set_num_threads(1)
        expected = results("cpu")
        checked = Checked("cpu")
        limits = resource.getrlimit(resource.RLIMIT_AS)
        # The first call's workspace, 15 MB, goes back to the system; less than that is left now.
        del flash_kda.cpu._kept.workspace
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**20, limits[1]))
        try:
            checked.call()
        except (RuntimeError, MemoryError) as error:
            message = f"{type(error).__name__}: {error}"
        else:
            message = "the call went through"
        resource.setrlimit(resource.RLIMIT_AS, limits)
        print(" ".join(message.split()))
        checked.assert_nothing_changed()
        checked.assert_works(expected)
    """
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc/self/statm to know how much memory is taken")
    message = python(code).strip()
    assert "memory" in message.lower() and "allocate" in message.lower(), message


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_cpu_memory_that_lasts_for_some_sequences(gate):
    """Whatever is left, in steps of 2 MiB: the call goes through, or out and the states in place are as they were.

    The groups of sequences that are computed together are three, and NaN makes one more.
    """
    pytest.importorskip("resource")
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc/self/statm to know how much memory is taken")
    code = """
        import resource
        import sys
        import torch
        import flash_kda
        from inputs import cu_seqlens_of, make_inputs

        torch.set_num_threads(1)
        lengths = [20, 1, 16, 5] * 3
        x = make_inputs("random", 1, sum(lengths), 64, "cpu", 0, torch.float32, N=len(lengths))
        x["v"][0, 18, 3] = torch.nan
        x["cu_seqlens"] = cu_seqlens_of(lengths)
        if sys.argv[1] == "softplus":
            x |= {"lower_bound": None, "g": x["g"] * 20}
        before = x.pop("initial_state")
        pool, out = before.clone(), torch.full_like(x["v"], 7.0)

        def call():
            flash_kda.fwd(**x, initial_state=pool, out=out, final_state=pool)

        call()
        expected = out.clone(), pool.clone()
        limits, page = resource.getrlimit(resource.RLIMIT_AS), resource.getpagesize()
        failed = []
        for left in range(0, 60, 2):
            pool.copy_(before)
            out.fill_(7.0)
            pages = int(open("/proc/self/statm").read().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * page + left * 2**20, limits[1]))
            try:
                call()
            except (RuntimeError, MemoryError):
                failed.append(left)
            resource.setrlimit(resource.RLIMIT_AS, limits)
            wanted = (torch.full_like(out, 7.0), before) if left in failed else expected
            for name, got, want in zip(("out", "state"), (out, pool), wanted):
                assert torch.equal(got.nan_to_num(), want.nan_to_num()), (left, name, failed)
            if left - max(failed, default=left) > 8:
                break
        assert len(failed) > 3 and failed[-1] < 58, failed
    """
    python(code, gate)


@pytest.mark.parametrize("general", [False, True])
def test_overwriting_what_autograd_has_saved(device, general):
    """A backward pass that needs the outputs of an earlier call fails, and does not take a later call's for them."""
    x = make_inputs("long", 1, 40, 2, device, 0, torch.float32)
    x |= {"out": torch.empty_like(x["v"]), "final_state": torch.empty_like(x["initial_state"])}
    if general:
        x |= {"checkpoints": torch.empty_like(x["final_state"]), "checkpoint_interval": 64, "checkpoint_at": "start"}
    for name in ("out", "final_state", "checkpoints")[: 2 + general]:
        flash_kda.fwd(**x)
        weight = torch.ones_like(x[name], requires_grad=True)
        result = (x[name] * weight).sum()
        flash_kda.fwd(**x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward()

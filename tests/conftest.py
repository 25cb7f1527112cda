"""The `gpu` marker: tests that need an SM90 or newer GPU and kernels for it; elsewhere they are skipped.

And the fixture `device`, for tests that run on a CPU and, so marked, on a GPU.
"""

import pytest
import schedules
import torch

from flash_kda.interface import extension


def _why_no_gpu():
    if not torch.cuda.is_available():
        return "needs a CUDA GPU; PyTorch sees none"
    if torch.cuda.get_device_capability() < (9, 0):
        return f"needs SM90 or newer; the GPU is SM{''.join(map(str, torch.cuda.get_device_capability()))}"
    try:
        extension()
    except RuntimeError as error:
        return f"needs the CUDA kernels; {error}"
    return None


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs an SM90 or newer GPU and the compiled kernels; skipped without")


def pytest_collection_modifyitems(config, items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if marked else None
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=schedules.and_cpu(schedules.SCHEDULES))
def device(request, monkeypatch):
    """Where tensors live: `cpu`, or `cuda` with one kernel schedule chosen."""
    if request.param == "cpu":
        return "cpu"
    schedules.use(request.param, monkeypatch)
    return "cuda"

"""The `gpu` marker's reasons to skip, as far as they can be seen without a GPU."""

import sys

import conftest
import pytest
import torch

from flash_kda import interface


@pytest.mark.parametrize(
    ("available", "capability", "reason"),
    [
        (False, None, "needs a CUDA GPU; PyTorch sees none"),
        (True, (8, 9), "needs SM90 or newer; the GPU is SM89"),
        (True, (9, 0), "needs the CUDA kernels; this flash_kda was installed without CUDA kernels"),
    ],
)
def test_gpu_tests_are_skipped_with_a_reason(monkeypatch, available, capability, reason):
    """Also on a GPU machine whose flash_kda has no kernels."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(interface, "_extension", None)
    monkeypatch.setitem(sys.modules, "flash_kda._C", None)
    assert conftest._why_no_gpu().startswith(reason)

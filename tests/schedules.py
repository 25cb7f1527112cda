"""The kernel schedules that the GPU tests run, and which of them the current device has."""

import pytest
import torch

from flash_kda.interface import SCHEDULES as SETTINGS

SCHEDULES = tuple(name for name in SETTINGS if name != "auto")


def and_cpu(names):
    """Parameters of the fixture `device`: the CPU, and a GPU with each of these schedules."""
    return ["cpu", *(pytest.param(name, marks=pytest.mark.gpu) for name in names)]


def why_not(schedule):
    """Why the current CUDA device does not run `schedule`, or None if it does."""
    capability = torch.cuda.get_device_capability()
    if schedule == "sm90" and capability != (9, 0):
        return f"the sm90 schedule needs compute capability 9.0, the GPU has {'.'.join(map(str, capability))}"
    return None


def use(schedule, monkeypatch):
    """Sets FLASH_KDA_SCHEDULE for this test, or skips it where the device does not run `schedule`."""
    reason = why_not(schedule)
    if reason:
        pytest.skip(reason)
    monkeypatch.setenv("FLASH_KDA_SCHEDULE", schedule)


def each(monkeypatch):
    """Sets FLASH_KDA_SCHEDULE to one after the other of those that the device runs; yields their names."""
    for schedule in SCHEDULES:
        if not why_not(schedule):
            monkeypatch.setenv("FLASH_KDA_SCHEDULE", schedule)
            yield schedule

"""The kernel schedules that the GPU tests run, and which of them the current device has."""

import pytest
import torch

from flash_kda.interface import SCHEDULES as SETTINGS  # noqa: F401 - what FLASH_KDA_SCHEDULE takes, for tests of all

EXACT = ("portable", "sm90")  # agree to the bit with tests/torch_ref.py
# Sequences cut every 64 tokens, whatever the call: as with the others, a sequence's bits hang on nothing else. The
# state before a segment comes from the scan, not from the outputs' recurrence, so that a call does not go on from a
# given state with the bits of a longer one.
PINNED = "segments:64"
SCHEDULES = (*EXACT, PINNED)
# Cut as the cost model says: bits hang on the number of tokens, sequences and heads.
ACCURATE = (*SCHEDULES, "segments")


def and_cpu(names):
    """Parameters of the fixture `device`: the CPU, and a GPU with each of these schedules."""
    return ["cpu", *(pytest.param(name, marks=pytest.mark.gpu) for name in names)]


def why_not(schedule):
    """Why the current CUDA device does not run `schedule`, or None if it does."""
    name, capability = schedule.partition(":")[0], torch.cuda.get_device_capability()
    if name in ("sm90", "segments") and capability != (9, 0):
        return f"the {name} schedule needs compute capability 9.0, the GPU has {'.'.join(map(str, capability))}"
    return None


def use(schedule, monkeypatch):
    """Sets FLASH_KDA_SCHEDULE for this test, or skips it where the device does not run `schedule`."""
    reason = why_not(schedule)
    if reason:
        pytest.skip(reason)
    monkeypatch.setenv("FLASH_KDA_SCHEDULE", schedule)


def each_exact(monkeypatch):
    """Sets FLASH_KDA_SCHEDULE to one after the other of EXACT that the device runs; yields their names."""
    for schedule in EXACT:
        if not why_not(schedule):
            monkeypatch.setenv("FLASH_KDA_SCHEDULE", schedule)
            yield schedule

"""The README's examples, run as they stand. tests/test_fla.py has those that need flash-linear-attention."""

import re

import pytest
import torch
from project_copy import ROOT

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def examples(title):
    """The Python code of the README's section of this title, block after block."""
    section = re.search(rf"^## {title}\n(.*?)^## ", (ROOT / "README.md").read_text(), re.M | re.S)[1]
    return re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)


def run(blocks):
    """The names that the blocks leave behind, run one after the other."""
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    return names


@pytest.mark.parametrize("device", DEVICES)
def test_the_call(device):
    """On a CPU the same with that device's name, and with few tokens and heads."""
    (block,) = examples("The call")
    if device == "cpu":
        for old, new in (('"cuda"', '"cpu"'), ("8192, 96", "80, 2")):
            assert old in block
            block = block.replace(old, new)
    names = run([block])
    assert names["out"].device.type == device
    assert bool(names["out"].isfinite().all()) and bool(names["state"].isfinite().all())


@pytest.mark.parametrize("device", DEVICES)
def test_for_inference_engines(device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch._dynamo.reset()
    code = examples("For inference engines")
    assert len(code) >= 10
    names = run(code)
    assert names["pool"].device.type == device
    named = names["pool"].flatten(1).any(1).tolist()
    assert [row for row, written in enumerate(named) if written] == [2, 7]
    assert bool(names["slots"].flatten(1).any(1).all())
    padded = names["padded"]["out"]
    assert bool((padded[:, 12:] == 7).all()) and not bool((padded[:, :12] == 7).flatten(2).all(-1).any())
    assert names["offsets"].tolist() == [0, 2, 5]
    assert bool(names["checkpoints"].isfinite().all())
    assert bool(names["out"].isfinite().all()) and names["state"].shape == (1, 4, 128, 128)
    assert ("graph" in names) == (device == "cuda")

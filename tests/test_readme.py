"""The examples of the README's section for inference engines, run one after the other as they stand."""

import re

import pytest
import torch
from project_copy import ROOT


def examples():
    section = re.search(r"^## For inference engines\n(.*?)^## ", (ROOT / "README.md").read_text(), re.M | re.S)[1]
    return re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_examples_run(device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch._dynamo.reset()
    code = examples()
    assert len(code) >= 7
    names = {}
    for block in code:
        exec(compile(block, "README.md", "exec"), names)
    assert names["pool"].device.type == device
    named = names["pool"].flatten(1).any(1).tolist()
    assert [row for row, written in enumerate(named) if written] == [2, 7]
    assert names["offsets"].tolist() == [0, 2, 5]
    assert bool(names["checkpoints"].isfinite().all())
    assert bool(names["out"].isfinite().all()) and names["state"].shape == (1, 4, 128, 128)

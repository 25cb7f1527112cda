"""Tensors with a poisoned content between poisoned guard regions, and bit-for-bit comparison."""

import math

import torch

GUARD_BYTES = 16384
# A NaN with a payload that arithmetic does not produce, or a number beyond all indices: an element that still holds it
# was never written.
POISON = {
    torch.bfloat16: (torch.int16, 0x7FA5),
    torch.float32: (torch.int32, 0x7FA5A5A5),
    torch.int32: (torch.int32, 0x7FA5A5A5),
    torch.int64: (torch.int64, 0x7FA5A5A57FA5A5A5),
}


def bits(x):
    """The bits of a tensor with elements of 2, 4 or 8 bytes as integers."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])


class Guarded:
    """A poisoned contiguous tensor `.tensor` inside a larger allocation whose surroundings are poisoned too."""

    def __init__(self, shape, dtype, device="cuda"):
        integer, self.pattern = POISON[dtype]
        size, self.margin = math.prod(shape), GUARD_BYTES // dtype.itemsize
        self.buffer = torch.full((size + 2 * self.margin,), self.pattern, dtype=integer, device=device)
        self.tensor = self.buffer[self.margin : self.margin + size].view(dtype).view(shape)

    def assert_guards_untouched(self):
        for name, guard in (("before", self.buffer[: self.margin]), ("after", self.buffer[-self.margin :])):
            assert bool((guard == self.pattern).all()), f"wrote into the guard region {name} the tensor"

    def written(self):
        """Boolean tensor: which elements no longer hold the poison."""
        return bits(self.tensor) != self.pattern


def assert_same_bits(x, y, name):
    """Fail unless x and y agree in shape, dtype and every bit; say how many elements differ, where and by how much."""
    assert x.shape == y.shape and x.dtype == y.dtype, (
        f"{name}: {x.dtype} {tuple(x.shape)} against {y.dtype} {tuple(y.shape)}"
    )
    different = bits(x.contiguous()) != bits(y.contiguous())
    if bool(different.any()):
        where = different.nonzero()
        first = tuple(where[0].tolist())
        gap = (x.double() - y.double()).abs().max().item()
        raise AssertionError(
            f"{name}: {len(where)} of {x.numel()} elements differ, first at {first}: {x[first].item()!r} against "
            f"{y[first].item()!r}, largest difference {gap:.3g}"
        )

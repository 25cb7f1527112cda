"""FlashKDA: Kimi Delta Attention's forward pass on NVIDIA GPUs (SM90 and newer) and on CPUs."""

from flash_kda import operator as _operator  # noqa: F401 - registers torch.ops.flash_kda.fwd
from flash_kda._version import __version__
from flash_kda.functional import chunk_kda
from flash_kda.interface import checkpoint_offsets, fwd

__all__ = ["__version__", "checkpoint_offsets", "chunk_kda", "fwd"]

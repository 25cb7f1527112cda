"""FlashKDA: Kimi Delta Attention's forward pass on NVIDIA GPUs (SM90 and newer) and on CPUs."""

from flash_kda._version import __version__
from flash_kda.interface import fwd

__all__ = ["__version__", "fwd"]

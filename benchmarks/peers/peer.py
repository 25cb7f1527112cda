"""The interface of an adapter."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Peer:
    """An implementation to measure.

    unavailable() says why it cannot run here, None if it can. prepare(inputs, cu_seqlens) takes the arguments of
    `flash_kda.fwd` without out and final_state and returns a function without arguments that enqueues one call and
    returns (out, final_state). `environment` is set while the peer runs. `tables` are the tables of cases it is
    measured on by default.
    """

    name: str
    environment: Mapping[str, str]
    tables: tuple[str, ...]
    unavailable: Callable[[], str | None]
    prepare: Callable[[dict, torch.Tensor | None], Callable[[], tuple[torch.Tensor, torch.Tensor]]]

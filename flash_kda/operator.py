"""`torch.ops.flash_kda.fwd`: `flash_kda.fwd` as a custom operator, which torch.compile puts into its graphs."""

import torch

from flash_kda.interface import options_of, run
from flash_kda.validation import check_gradients


@torch.library.custom_op("flash_kda::fwd", mutates_args=("out", "final_state", "checkpoints"))
def fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    initial_state: torch.Tensor | None,
    final_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    state_indices: torch.Tensor | None,
    checkpoints: torch.Tensor | None,
    checkpoint_interval: int | None,
    checkpoint_offsets: torch.Tensor | None,
    checkpoint_at: str,
    gate: str,
    use_qk_l2norm_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
) -> None:
    """`flash_kda.fwd`, all arguments by position; the docstring there says what they are."""
    options = options_of(
        state_indices,
        checkpoints,
        checkpoint_interval,
        checkpoint_offsets,
        checkpoint_at,
        gate,
        use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
    )
    arguments = (q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens)
    run(arguments, options)


_operator = torch.ops.flash_kda.fwd.default
_NAMES = tuple(argument.name for argument in _operator._schema.arguments)
_library = torch.library.Library("flash_kda", "FRAGMENT")


# Without it autograd would run the operator with grad mode off, where every tensor is welcome, and the gradients would
# be missing without a word: none flows through what an operator writes in place.
def _without_gradients(keyset, *arguments):
    check_gradients({name: x for name, x in zip(_NAMES, arguments, strict=True) if isinstance(x, torch.Tensor)})
    with torch._C._AutoDispatchBelowAutograd():
        _operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


for _key in ("AutogradCPU", "AutogradCUDA"):
    _library.impl("fwd", _without_gradients, _key, with_keyset=True)


@fwd.register_fake
def _(*arguments) -> None:
    """Nothing is returned: what the call writes is there before it."""

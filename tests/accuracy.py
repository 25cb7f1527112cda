"""Accuracy bounds against the fp64 recurrence, which GPU tests and benchmarks share.

Relative error ||x - ref|| / ||ref|| over 1024 tokens and 4 heads with a state of 0.1 N(0, 1), as in the README's
accuracy table.
"""

from inputs import relative_error

import flash_kda.recurrence

# Gate kind -> (bound for out, bound for final_state)
BOUNDS = {"random": (4.0e-3, 2.5e-3), "long": (4.6e-3, 3.5e-3)}
# Where nothing decays (g far below 0), so that every token's rounding stays in the state. Emulated on a CPU, bf16
# operands with an all but exact inverse give up to 4.7e-3 for out and 3.8e-3 for the state there.
NO_DECAY_BOUNDS = (5.0e-3, 4.0e-3)


# Errors noted as "accuracy table, WHAT, GATE: out" and "...: final state" make the README's accuracy table.
TABLE = "accuracy table, "


def reference(inputs, cu_seqlens=None):
    """(out, final_state) of the fp64 recurrence for a dict of `flash_kda.fwd` arguments."""
    return flash_kda.recurrence.recurrence(**inputs, cu_seqlens=cu_seqlens)


def record_error(record_property, name, x, ref):
    """Relative error of x, noted under `error: <name>` for the GPU record."""
    error = relative_error(x, ref)
    record_property(f"error: {name}", error)
    return error

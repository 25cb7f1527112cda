"""What the features cost on a GPU, beside the plain call and beside flash-linear-attention's decoding.

    python -m benchmarks.features [--json FILE]

- Gates: 8192 tokens x 96 heads, the plain call, the same through the general kernels, and the softplus gate with the
  ordinary decays of trained models, each over the plain call's time.
- bf16 states: the many-heads cases of benchmarks.run with bf16 instead of fp32 states, in and out.
- Decoding: states of a pool updated in place, as a share of the copy bandwidth measured in the same run on the bytes
  that must move, with FLA's fused_recurrent_kda (which reads and writes the same states, out of place) beside it.

Each result is checked against the fp64 recurrence before it is timed; a wrong one ends the run. Times are those of
benchmarks.run: rested, which the ratios and shares are of, and sustained.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from inputs import GATE_KINDS, HEAD_DIM, cu_seqlens_of, make_inputs
from rich.console import Console
from rich.table import Table

import flash_kda
from benchmarks.cases import CASES, Case
from benchmarks.files import check_writable
from benchmarks.run import ERROR_LIMIT, checked_part, errors_of
from benchmarks.timing import copy_bandwidth, gpu_times

DECODING = ((256, 32, 1), (512, 96, 1), (256, 32, 4), (128, 96, 16))  # sequences, heads, tokens of each


def checked_times(what, case, call, inputs, cu_seqlens=None, indices=None):
    """GpuTimes of `call`, which takes `inputs` and returns (out, final_state), once those two are found to be right.

    indices: the rows of initial_state and final_state that the sequences have; default: in their order.
    """
    rows = slice(None) if indices is None else indices
    # Before the call, which may write to the states that it reads.
    expected = checked_part(case, inputs | {"initial_state": inputs["initial_state"][rows]}, cu_seqlens)
    out, state = call()
    errors = errors_of(case, (out, state[rows]), expected)
    if not max(errors) <= ERROR_LIMIT:
        raise RuntimeError(f"{what}, {case.name}: errors of out, final_state {errors}, limit {ERROR_LIMIT}")
    return gpu_times([call])


def fwd_into(arguments, out, state):
    """A function that makes one call of flash_kda.fwd and returns (out, state)."""

    def call():
        flash_kda.fwd(**arguments, out=out, final_state=state)
        return out, state

    return call


def gate_rows():
    """GPU times of one long sequence under several gates, as rows."""
    case = next(case for case in CASES if case.name == "8192/96")
    x = make_inputs("long", 1, case.tokens, case.heads, "cuda", 0, torch.float32)
    out, state = torch.empty_like(x["v"]), torch.empty_like(x["initial_state"])
    cu_seqlens = torch.tensor([0, case.tokens], dtype=torch.int32, device="cuda")
    # Decays of trained models: softplus(dt_bias) log-uniform in [0.001, 0.1], slopes in [1, 16].
    generator = torch.Generator(device="cuda").manual_seed(0)
    options = {"generator": generator, "device": "cuda"}
    step = torch.exp(torch.rand(96, HEAD_DIM, **options) * math.log(100) + math.log(1e-3))
    softplus = {
        "A_log": torch.log(1 + 15 * torch.rand(96, **options)),
        "dt_bias": step + torch.log(-torch.expm1(-step)),
        "lower_bound": None,
    }
    calls = {
        "plain": {},
        "general kernels, the same call": {"cu_seqlens": cu_seqlens},
        "fp32 g": {"g": x["g"].float()},
        "softplus": softplus,
        "softplus, fp32 g": softplus | {"g": x["g"].float()},
    }
    rows = []
    for name, changes in calls.items():
        call = fwd_into(x | changes, out, state)
        inputs = x | {key: value for key, value in changes.items() if key != "cu_seqlens"}
        times = checked_times(name, case, call, inputs)
        rows.append({"case": name} | times.fields())
    for row in rows:
        row["over_plain"] = row["gpu_us"] / rows[0]["gpu_us"]
    return rows


def bf16_state_rows():
    """GPU times of the many-heads cases with bf16 states, as rows."""
    rows = []
    for case in CASES:
        if case.table != "many heads":
            continue
        N = len(case.lengths)
        cu_seqlens = cu_seqlens_of(case.lengths, "cuda") if N > 1 else None
        for gate in GATE_KINDS:
            x = make_inputs(gate, 1, case.tokens, case.heads, "cuda", 0, torch.bfloat16, N=N)
            outputs = torch.empty_like(x["v"]), torch.empty_like(x["initial_state"])
            call = fwd_into(x | {"cu_seqlens": cu_seqlens}, *outputs)
            times = checked_times(f"bf16 states, {gate} gate", case, call, x, cu_seqlens)
            rows.append({"case": case.name, "gate": gate} | times.fields())
    return rows


def fla_decoding():
    """FLA's fused_recurrent_kda, or None without FLA."""
    try:
        from fla.ops.kda import fused_recurrent_kda
    except ImportError:
        return None
    return fused_recurrent_kda


def decoding_rows(bandwidth):
    """GPU times of short sequences with their states in a pool, as rows."""
    rows = []
    for N, H, T in DECODING:
        case = Case(f"{N} x {T} tokens, {H} heads", "decoding", H, (T,) * N, math.inf, math.inf)
        x = make_inputs("long", N, T, H, "cuda", 0, torch.float32)
        pool, out = x["initial_state"], torch.empty_like(x["v"])
        floor = (2 * pool.nbytes + T * N * H * (5 * HEAD_DIM + 1) * 2) / bandwidth * 1e6
        indices = torch.randperm(N, device="cuda")

        calls = {"flash_kda": (fwd_into(x | {"state_indices": indices}, out, pool), indices)}
        recurrent = fla_decoding()
        if recurrent is not None:

            @torch.inference_mode()
            def theirs(x=x, recurrent=recurrent):
                flags = ("use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel")
                return recurrent(**x, **dict.fromkeys(flags, True), state_v_first=True, output_final_state=True)

            calls["FLA fused_recurrent_kda"] = theirs, None
        for name, (call, rows_of_states) in calls.items():
            times = checked_times(name, case, call, x, indices=rows_of_states)
            row = {"case": case.name, "peer": name} | times.fields()
            rows.append(row | {"floor_us": floor, "share_of_bandwidth": floor / row["gpu_us"]})
    return rows


def table_of(title, rows):
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        words = ("not known" if value is None else value for value in row.values())
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in words))
    return table


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.features", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU that PyTorch can use")
    if options.json is not None:
        check_writable(parser, options.json)
    bandwidth = copy_bandwidth()
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_bandwidth": bandwidth,
        "gates": gate_rows(),
        "bf16_states": bf16_state_rows(),
        "decoding": decoding_rows(bandwidth),
    }
    console = Console()
    titles = {"gates": "8192 tokens x 96 heads", "bf16_states": "bf16 states", "decoding": "decoding in place"}
    for name, title in titles.items():
        console.print(table_of(title, result[name]))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

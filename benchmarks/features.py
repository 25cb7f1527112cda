"""What the features cost on a GPU, beside the plain call and beside flash-linear-attention's decoding.

    python -m benchmarks.features [--json FILE]

- Gates: 8192 tokens x 96 heads, the plain call, the same through the general kernels, and the softplus gate with the
  ordinary decays of trained models, each over the plain call's time.
- bf16 states: the many-heads cases of benchmarks.run with bf16 instead of fp32 states, in and out.
- Decoding: states of a pool updated in place, as a share of the copy bandwidth measured in the same run on the bytes
  that must move, with FLA's fused_recurrent_kda (which reads and writes the same states, out of place) beside it.
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
from benchmarks.cases import CASES
from benchmarks.timing import copy_bandwidth, gpu_times

DECODING = ((256, 32, 1), (512, 96, 1), (256, 32, 4), (128, 96, 16))  # sequences, heads, tokens of each


def gate_rows():
    """GPU times of one long sequence under several gates, as rows."""
    x = make_inputs("long", 1, 8192, 96, "cuda", 0, torch.float32)
    out, state = torch.empty_like(x["v"]), torch.empty_like(x["initial_state"])
    # Decays of trained models: softplus(dt_bias) log-uniform in [0.001, 0.1], slopes in [1, 16].
    generator = torch.Generator(device="cuda").manual_seed(0)
    options = {"generator": generator, "device": "cuda"}
    step = torch.exp(torch.rand(96, HEAD_DIM, **options) * math.log(100) + math.log(1e-3))
    softplus = {
        "A_log": torch.log(1 + 15 * torch.rand(96, **options)),
        "dt_bias": step + torch.log(-torch.expm1(-step)),
        "lower_bound": None,
    }
    cases = {
        "plain": {},
        "general kernels, the same call": {"cu_seqlens": torch.tensor([0, 8192], dtype=torch.int32, device="cuda")},
        "fp32 g": {"g": x["g"].float()},
        "softplus": softplus,
        "softplus, fp32 g": softplus | {"g": x["g"].float()},
    }
    rows = []
    for name, changes in cases.items():
        arguments = x | changes | {"out": out, "final_state": state}
        times = gpu_times([lambda arguments=arguments: flash_kda.fwd(**arguments)])
        rows.append({"case": name, "gpu_us": times.median, "least_us": times.least})
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
            outputs = {"out": torch.empty_like(x["v"]), "final_state": torch.empty_like(x["initial_state"])}
            arguments = x | outputs | {"cu_seqlens": cu_seqlens}
            times = gpu_times([lambda arguments=arguments: flash_kda.fwd(**arguments)])
            rows.append({"case": case.name, "gate": gate, "gpu_us": times.median, "least_us": times.least})
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
        x = make_inputs("long", N, T, H, "cuda", 0, torch.float32)
        pool, out = x["initial_state"], torch.empty_like(x["v"])
        floor = (2 * pool.nbytes + T * N * H * (5 * HEAD_DIM + 1) * 2) / bandwidth * 1e6
        indices = torch.randperm(N, device="cuda")

        def ours(x=x, pool=pool, out=out, indices=indices):
            flash_kda.fwd(**x, out=out, final_state=pool, state_indices=indices)

        calls = {"flash_kda": ours}
        recurrent = fla_decoding()
        if recurrent is not None:

            @torch.inference_mode()
            def theirs(x=x, recurrent=recurrent):
                flags = ("use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel")
                recurrent(**x, **dict.fromkeys(flags, True), state_v_first=True, output_final_state=True)

            calls["FLA fused_recurrent_kda"] = theirs
        for name, call in calls.items():
            times = gpu_times([call])
            row = {"case": f"{N} x {T} tokens, {H} heads", "peer": name, "gpu_us": times.median}
            rows.append(row | {"floor_us": floor, "share_of_bandwidth": floor / times.median})
    return rows


def table_of(title, rows):
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else value for value in row.values()))
    return table


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.features", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU that PyTorch can use")
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

"""Measures flash_kda.fwd and its peers on a GPU.

    python -m benchmarks.run [--quick] [--cases PATTERN ...] [--peers NAME ...] [--seconds S] [--json FILE]

Every case runs for both kinds of gate, every peer in turn in one process: first a check of the results against the fp64
recurrence, then GPU time (CUDA graph replay), host and wall time of an eager call and peak extra memory. GPU time is
measured twice: rested, at the full clock, as the targets were, and sustained, at the clock that the power limit leaves,
with that clock (benchmarks.timing.GpuTimes). The floor is the bytes that must move over the copy bandwidth measured in
the same run. A peer that is missing, wrong or out of memory is a row that says so. Ours go first, through all cases,
since others may take minutes to compile; --json is written after every case, so that a run that is cut short leaves
what it has.
"""

import argparse
import datetime
import json
import math
import os
import shlex
import sys
import time
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import torch
from gpu_record import environment
from inputs import GATE_KINDS, cu_seqlens_of, make_inputs, relative_error
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from source_digest import tree_digest

import flash_kda
from benchmarks.cases import CASES, ERROR_CASE, QUICK
from benchmarks.files import check_writable, is_ours
from benchmarks.peers import PEERS
from benchmarks.timing import copy_bandwidth, extra_memory, gpu_times, host_time, wall_time
from flash_kda.recurrence import recurrence

ROOT = Path(__file__).resolve().parents[1]
# Beyond this a result is wrong, whatever its rounding: the accuracy that flash_kda is held to is below half of it.
ERROR_LIMIT = 1e-2
# The check follows a sequence this far: the recurrence takes as many steps as the longest sequence has tokens.
CHECKED_TOKENS = 8192


@contextmanager
def environment_set(variables):
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def input_sets(case, gate):
    """Enough input sets that a call finds none of its own inputs in the L2 cache, as [(inputs, cu_seqlens), ...]."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    count = min(max(math.ceil(4 * cache / case.bytes), 1), 64)
    N = len(case.lengths)
    cu_seqlens = cu_seqlens_of(case.lengths, "cuda") if N > 1 else None
    return [
        (make_inputs(gate, 1, case.tokens, case.heads, "cuda", seed, torch.float32, N=N), cu_seqlens)
        for seed in range(count)
    ]


def checked_part(case, inputs, cu_seqlens):
    """fp64 (out, final_state) of the first and last head; of a very long sequence the first tokens of out alone."""
    heads = [0, case.heads - 1]
    part = inputs | {name: inputs[name][:, :, heads] for name in ("q", "k", "v", "g", "beta")}
    part |= {"A_log": inputs["A_log"][heads], "dt_bias": inputs["dt_bias"][heads]}
    part["initial_state"] = inputs["initial_state"][:, heads]
    if max(case.lengths) <= CHECKED_TOKENS:
        return recurrence(**part, cu_seqlens=cu_seqlens)
    # Causal: the outputs of the first tokens do not depend on the rest.
    part |= {name: part[name][:, :CHECKED_TOKENS] for name in ("q", "k", "v", "g", "beta")}
    return recurrence(**part, cu_seqlens=cu_seqlens)[0], None


def errors_of(case, results, expected):
    """Relative errors (out, final_state or None) on the checked heads and tokens."""
    heads = [0, case.heads - 1]
    out, state = results
    expected_out, expected_state = expected
    error_out = relative_error(out[:, : expected_out.shape[1], heads], expected_out)
    return error_out, None if expected_state is None else relative_error(state[:, heads], expected_state)


def error_by_token(out, expected, bins=64):
    """[[first token, relative error of its bin], ...] of a single sequence's out on the checked heads and tokens.

    Bins are of equal length; errors are relative to the bin's own norm.
    """
    difference = (out.double() - expected).square().sum((0, 2, 3))
    squares = expected.square().sum((0, 2, 3))
    length = math.ceil(len(squares) / bins)
    ratios = [
        math.sqrt(a.sum() / b.sum()) for a, b in zip(difference.split(length), squares.split(length), strict=True)
    ]
    return [[number * length, float(f"{ratio:.4g}")] for number, ratio in enumerate(ratios)]


def measure(case, peer, sets, expected):
    """What one peer does on one case, as the measured fields of a row."""
    calls = [peer.prepare(*one) for one in sets]
    results = calls[0]()
    errors = errors_of(case, results, expected)
    measured = {"error_out": errors[0], "error_state": errors[1]}
    if case.name == ERROR_CASE:
        checked = results[0][:, : expected[0].shape[1], [0, case.heads - 1]]
        measured["error_by_token"] = error_by_token(checked, expected[0])
    del results
    if max(error for error in errors if error is not None) > ERROR_LIMIT:
        return measured | {"error": f"wrong result: errors of out, final_state {errors}, limit {ERROR_LIMIT}"}
    for call in calls[1:]:
        call()
    measured |= gpu_times(calls).fields()
    return measured | {
        "host_us": host_time(calls[0]),
        "wall_us": wall_time(calls[0]),
        "extra_bytes": extra_memory(calls[0]),
        "input_sets": len(sets),
    }


def rows_of(case, gate, peers, bandwidth, advance, late):
    """One row for each peer on one case and gate kind. late() says whether the time is up."""
    fixed = {
        "case": case.name,
        "table": case.table,
        "gate": gate,
        "heads": case.heads,
        "lengths": list(case.lengths),
        "floor_us": case.bytes / bandwidth * 1e6,
        "must_us": case.must_us,
        "goal_us": case.goal_us,
    }
    sets = expected = None
    rows = []
    for peer in peers:
        advance(f"{case.name} {gate} {peer.name}")
        row = fixed | {"peer": peer.name}
        reason = "not run: the time was up" if late() else peer.unavailable()
        if reason is None:
            try:
                if sets is None:
                    sets = input_sets(case, gate)
                    expected = checked_part(case, *sets[0])
                with environment_set(peer.environment):
                    row |= measure(case, peer, sets, expected)
            except Exception as error:  # a row that says so; the other peers and cases go on
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        if reason is not None:
            row["error"] = reason
        rows.append(row)
        torch.cuda.empty_cache()
    return rows


def print_rows(console, rows):
    table = Table(title="GPU time in microseconds")
    for name in (
        "case",
        "gate",
        "peer",
        "GPU",
        "least",
        "spread",
        "sustained",
        "SM MHz",
        "floor share",
        "must",
        "host",
        "wall",
        "extra MB",
        "out",
        "state",
    ):
        table.add_column(name, justify="left" if name in ("case", "gate", "peer") else "right")
    for row in rows:
        if "error" in row:
            table.add_row(row["case"], row["gate"], row["peer"], row["error"])
            continue
        state = "" if row["error_state"] is None else f"{row['error_state']:.1e}"
        table.add_row(
            *(row["case"], row["gate"], row["peer"], f"{row['gpu_us']:.1f}", f"{row['gpu_us_least']:.1f}"),
            *(f"{row['gpu_us_spread']:.1f}", f"{row['gpu_us_sustained']:.1f}", f"{row['sm_clock_mhz'] or 'not known'}"),
            *(f"{row['floor_us'] / row['gpu_us']:.0%}", f"{row['must_us']}"),
            *(
                f"{row['host_us']:.0f}",
                f"{row['wall_us']:.0f}",
                f"{row['extra_bytes'] / 1e6:.1f}",
                f"{row['error_out']:.1e}",
                state,
            ),
        )
    console.print(table)


def chosen_cases(parser, patterns):
    """The cases that match any of `patterns`; an error of the parser's where one matches none."""
    names = [case.name for case in CASES]
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            parser.error(f"--cases: no case matches {pattern!r}; there are {', '.join(names)}")
    return [case for case in CASES if any(fnmatch(case.name, pattern) for pattern in patterns)]


def command_line(options):
    """The command that makes these rows, but for --json."""
    words = ["python", "-m", "benchmarks.run"] + ["--quick"] * options.quick
    for name in ("cases", "peers"):
        if getattr(options, name):
            words += [f"--{name}", *getattr(options, name)]
    if options.seconds < math.inf:
        words += ["--seconds", f"{options.seconds:g}"]
    return shlex.join(words)


def parse(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"only the cases {', '.join(QUICK)}")
    parser.add_argument(
        "--cases", nargs="+", metavar="PATTERN", help="names or patterns such as '*/96'; default: every case"
    )
    parser.add_argument(
        "--peers", nargs="+", metavar="NAME", help=f"out of: {', '.join(PEERS)}; default: each on its own tables"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, metavar="S", help="start no row after S seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows and the environment to FILE")
    options = parser.parse_args(arguments)
    cases = chosen_cases(parser, options.cases or (QUICK if options.quick else ["*"]))
    for name in options.peers or ():
        if name not in PEERS:
            parser.error(f"--peers: expected names out of {', '.join(PEERS)}, got {name!r}")
    options.command = command_line(options)
    options.cases = cases
    if not torch.cuda.is_available():
        parser.error("no GPU that PyTorch can use")
    if options.json is not None:
        check_writable(parser, options.json)
    return options


def main():
    options = parse()
    console = Console(width=160)
    started = time.monotonic()
    work = []
    for ours in (True, False):
        for case in options.cases:
            chosen = [
                peer
                for name, peer in PEERS.items()
                if is_ours(name) == ours and (name in options.peers if options.peers else case.table in peer.tables)
            ]
            work += [(case, gate, chosen) for gate in GATE_KINDS if chosen]
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "flash_kda": flash_kda.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "csrc": tree_digest(ROOT / "csrc")["total"],
        "command": options.command,
        "environment": environment(),
        "copy_bandwidth": bandwidth,
        "rows": [],
    }
    rows = result["rows"]
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=sum(len(peers) for _, _, peers in work))
        for case, gate, peers in work:
            rows += rows_of(
                case,
                gate,
                peers,
                bandwidth,
                lambda what: progress.update(task, advance=1, description=what),
                lambda: time.monotonic() - started > options.seconds,
            )
            if options.json is not None:
                options.json.write_text(json.dumps(result, indent=1) + "\n")
    print_rows(console, rows)
    console.print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s; floor share: floor over GPU time, rested")
    console.print("GPU, least, spread: rested, at the full clock; sustained: without a rest, and the SM clock by then")
    return 1 if any("error" in row for row in rows if is_ours(row["peer"])) else 0


if __name__ == "__main__":
    sys.exit(main())

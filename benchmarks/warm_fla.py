"""Compiles flash-linear-attention's (FLA's) kernels for the cases that benchmarks.run times it on.

    python -m benchmarks.warm_fla [--cases PATTERN ...]

FLA's autotuner tries each kernel in dozens of configurations, and compiling those takes minutes for every head count
and form, much longer than timing them. Here that happens beforehand, in a process for each head count and form, beside
whatever else the machine does; benchmarks.run then finds the binaries in Triton's cache on disk. Nothing is timed, and
no choice of a configuration is kept, since one made on a busy GPU would be unfair to FLA: the process that times FLA
makes its own.

Exit status 1 if a case could not be compiled; the others are.
"""

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from inputs import GATE_KINDS

from benchmarks.cases import CASES
from benchmarks.peers import fla_triton
from benchmarks.run import chosen_cases, input_sets

# FLA's setting and Triton's: what the autotuner finds stays in the process.
KEEP_NO_CHOICE = {"FLA_CACHE_RESULTS": "0", "TRITON_CACHE_AUTOTUNING": "0"}


def groups_of(cases):
    """The cases that share kernels, which are compiled for a head count, and for one length or packed sequences."""
    groups = {}
    for case in cases:
        groups.setdefault((case.heads, len(case.lengths) > 1), []).append(case)
    return list(groups.values())


def compile_once(call, **options):
    """In place of Triton's measurement of a configuration: one call, which compiles it. All are equally fast."""
    call()
    return [0.0, 0.0, 0.0]


def compile_group(cases):
    """Runs FLA on each of `cases`, in a process that has not imported FLA yet; returns the seconds that it took."""
    started = time.monotonic()
    os.environ.update(KEEP_NO_CHOICE | fla_triton.PEER.environment)
    reason = fla_triton.PEER.unavailable()
    if reason is not None:
        raise RuntimeError(reason)
    import triton.testing

    triton.testing.do_bench = compile_once
    for case in cases:
        inputs, cu_seqlens = input_sets(case, GATE_KINDS[0])[0]
        fla_triton.PEER.prepare(inputs, cu_seqlens)()
        torch.cuda.synchronize()
    return time.monotonic() - started


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.warm_fla", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--cases", nargs="+", metavar="PATTERN", help="as those of benchmarks.run; default: those it times FLA on"
    )
    options = parser.parse_args(arguments)
    cases = [case for case in CASES if case.table in fla_triton.PEER.tables]
    if options.cases:
        cases = chosen_cases(parser, options.cases)
    if not torch.cuda.is_available():
        parser.error("no GPU that PyTorch can use")
    groups = groups_of(cases)
    failed = 0
    with ProcessPoolExecutor(len(groups), mp_context=get_context("spawn")) as pool:
        for group, work in [(group, pool.submit(compile_group, group)) for group in groups]:
            names = ", ".join(case.name for case in group)
            try:
                print(f"{names}: compiled in {work.result():.0f} s", flush=True)
            except Exception as error:  # a line that says so; the other groups go on
                failed += 1
                print(f"{names}: {type(error).__name__}: {error}".partition("\n")[0], flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

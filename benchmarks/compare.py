"""Compares the GPU times of two result files: a guard against regressions.

    python -m benchmarks.compare OLD NEW [--threshold R]

Exit status 1 if a time of ours grew by more than the threshold, or a row of ours that OLD has measured is gone from NEW
or failed there, or one that OLD lacks failed; 2 if a file cannot be read. Other peers are shown and do not count.
"""

import argparse
import math
import sys

from rich.console import Console
from rich.table import Table

from benchmarks.files import by_key, is_ours, read, sources


def threshold(text):
    value = float(text)
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite ratio of at least 1, got {text}")
    return value


def verdict(peer, old, new, limit):
    """(what became of a row, whether that is a regression); old, new: the rows, None where there is none."""
    if new is None:
        return "gone", is_ours(peer) and "error" not in old
    if "error" in new:
        return f"failed: {new['error']}", is_ours(peer) and (old is None or "error" not in old)
    if old is None or "error" in old:
        return "new", False
    ratio = new["gpu_us"] / old["gpu_us"]
    return f"{ratio:.3f}", is_ours(peer) and ratio > limit


def compare(old, new, limit):
    """(a table of all rows, how many regressed) for two results."""
    table = Table("case", "gate", "peer", title="GPU time in microseconds")
    for name in ("old", "new", "new / old"):
        table.add_column(name, justify="right")
    old_rows, new_rows = by_key(old), by_key(new)
    regressions = 0
    for key in old_rows | new_rows:
        rows = old_rows.get(key), new_rows.get(key)
        what, regressed = verdict(key[2], *rows, limit)
        times = ("" if row is None or "error" in row else f"{row['gpu_us']:.1f}" for row in rows)
        table.add_row(*key, *times, what, style="red" if regressed else None)
        regressions += regressed
    return table, regressions


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.partition("\n")[0])
    parser.add_argument("old", metavar="OLD", help="JSON of an earlier python -m benchmarks.run")
    parser.add_argument("new", metavar="NEW", help="JSON of a later one")
    parser.add_argument(
        "--threshold", type=threshold, default=1.05, metavar="R", help="largest new / old that passes; default: 1.05"
    )
    options = parser.parse_args(arguments)
    try:
        old, new = read(options.old), read(options.new)
    except ValueError as error:
        parser.error(str(error))
    table, regressions = compare(old, new, options.threshold)
    console = Console(width=160, highlight=False, markup=False)
    for name, result in (("old", old), ("new", new)):
        console.print(f"{name}: {result['device']}, {result.get('date', 'no date')}, {sources(result)}")
    console.print(table)
    console.print(f"{regressions} regressions of ours, threshold {options.threshold:g}")
    return 1 if regressions else 0


if __name__ == "__main__":
    sys.exit(main())

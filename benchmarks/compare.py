"""Compares the GPU times of two result files: a guard against regressions.

    python -m benchmarks.compare OLD NEW [--threshold R]

Exit status 1 if a time of ours grew by more than the threshold, or a row of ours that OLD has measured is gone from NEW
or failed there, or one that OLD lacks failed; 2 if a file cannot be read. Other peers are shown and do not count.

Rested times are compared with rested ones. Where either file is older than those and has one time a row, which is a
sustained one, that is compared with the other's sustained time. Each row says which it is.
"""

import argparse
import math
import sys

from rich.console import Console
from rich.table import Table

from benchmarks.files import by_key, is_ours, is_rested, read, sources, sustained


def threshold(text):
    value = float(text)
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite ratio of at least 1, got {text}")
    return value


def verdict(peer, old, new, times, limit):
    """(what became of a row, whether that is a regression).

    old, new: the rows, None where there is none; times: their times of one kind, None where there is none.
    """
    if new is None:
        return "gone", is_ours(peer) and "error" not in old
    if "error" in new:
        return f"failed: {new['error']}", is_ours(peer) and (old is None or "error" not in old)
    if old is None or "error" in old:
        return "new", False
    ratio = times[1] / times[0]
    return f"{ratio:.3f}", is_ours(peer) and ratio > limit


def times_of(rows):
    """(the kind of time that all of these rows with a time have, that time of each row)"""
    timed = [None if row is None or "error" in row else row for row in rows]
    if all(row is None or is_rested(row) for row in timed):
        return "rested", [row and row["gpu_us"] for row in timed]
    return "sustained", [row and sustained(row) for row in timed]


def compare(old, new, limit):
    """(a table of all rows, how many regressed) for two results."""
    table = Table("case", "gate", "peer", "time", title="GPU time in microseconds")
    for name in ("old", "new", "new / old"):
        table.add_column(name, justify="right")
    old_rows, new_rows = by_key(old), by_key(new)
    regressions = 0
    for key in old_rows | new_rows:
        rows = old_rows.get(key), new_rows.get(key)
        kind, times = times_of(rows)
        what, regressed = verdict(key[2], *rows, times, limit)
        shown = ("" if time is None else f"{time:.1f}" for time in times)
        table.add_row(*key, kind if any(times) else "", *shown, what, style="red" if regressed else None)
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
        if not any(map(is_rested, result["rows"])):
            console.print(f"{name}: one time a row, a sustained one; compared with sustained times")
    console.print(table)
    console.print(f"{regressions} regressions of ours, threshold {options.threshold:g}")
    return 1 if regressions else 0


if __name__ == "__main__":
    sys.exit(main())

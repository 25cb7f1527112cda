"""Fills the marked spots of README.md from tests/gpu_record.json.

    python -m benchmarks.record_readme [--check]

Where the record holds no benchmark, the speed comes from benchmarks/results/nvidia-h200.json, and the page says so.

A spot is what lies between <!-- record:NAME --> and <!-- /record:NAME -->, for NAME in environment, accuracy, speed.
"""

import argparse
import json
import re
import sys
import textwrap

from accuracy import BOUNDS, TABLE
from gpu_record import problems
from inputs import GATE_KINDS

from benchmarks.files import ROOT, landed, read

README = ROOT / "README.md"
RECORD = ROOT / "tests" / "gpu_record.json"
RESULTS = landed("NVIDIA H200")
PARTS = ("out", "final state")


def table(header, rows):
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def microseconds(x):
    return f"{x:.1f}" if x < 10 else f"{x:.0f}"


def error(x):
    return f"{x:.2e}".replace("e-0", "e-")


def environment(record):
    env, tests = record["environment"], record["tests"]
    text = (
        f"{env['device']}, driver {env['driver']}, CUDA {env['cuda']}, PyTorch {env['torch']}, Triton {env['triton']}, "
        f"flash-linear-attention {env['fla']}, {env['date'][:10]}: "
        f"{tests['passed']} GPU tests passed, {tests['failed']} failed, {tests['skipped']} skipped."
    )
    lines = [textwrap.fill(text, 120)]
    lines += [textwrap.fill(f"- not passed: {problem}", 120, subsequent_indent="  ") for problem in problems(record)]
    return "\n".join(lines)


def accuracy(record):
    """The accuracy table: the worst of the seeds tested for ours, one seed for FLA."""

    def number(x):
        return "not measured" if x is None else error(x)

    errors = {name.removeprefix(TABLE): x for name, x in record["errors"].items() if name.startswith(TABLE)}
    columns = [(kind, part) for kind in GATE_KINDS for part in PARTS]
    sources = sorted({name.partition(", ")[0] for name in errors}, key=lambda source: (source == "FLA Triton", source))
    rows = [
        [source, *(number(errors.get(f"{source}, {kind}: {part}")) for kind, part in columns)] for source in sources
    ]
    rows.append(["bound in the tests", *(number(BOUNDS[kind][PARTS.index(part)]) for kind, part in columns)])
    return table(["", *(f"{kind}: {part}" for kind, part in columns)], rows)


def speed(record):
    """GPU time in microseconds, one row a case and one column a peer, both gate kinds in a cell."""
    benchmark, origin = record["benchmark"], "the record"
    if not benchmark.get("rows"):
        benchmark, origin = read(RESULTS), f"`{RESULTS.relative_to(ROOT)}`, a run beside the record"
    rows = benchmark["rows"]
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    cells = {(row["case"], row["peer"], row["gate"]): row for row in rows}

    def cell(case, peer):
        found = [cells.get((case, peer, gate)) for gate in GATE_KINDS]
        if not any(found):
            return "not measured"
        return " / ".join("failed" if row is None or "error" in row else f"{row['gpu_us']:.0f}" for row in found)

    body = []
    for case in dict.fromkeys(row["case"] for row in rows):
        first = next(row for row in rows if row["case"] == case)
        body.append([first["table"], case, microseconds(first["floor_us"]), *(cell(case, peer) for peer in peers)])
    gates = " / ".join(GATE_KINDS)
    source = f"From {origin}, {benchmark['device']}, {benchmark['date'][:10]}, copy bandwidth "
    source += f"{benchmark['copy_bandwidth'] / 1e12:.2f} TB/s:\n\n"
    return source + table(["", "tokens / heads / sequences", "floor", *(f"{peer}: {gates}" for peer in peers)], body)


SPOTS = {"environment": environment, "accuracy": accuracy, "speed": speed}


def fill(text, record):
    """`text` with every spot filled; ValueError if it does not hold each spot once."""
    for name, make in SPOTS.items():
        pattern = re.compile(rf"(<!-- record:{name} -->).*?(<!-- /record:{name} -->)", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"README.md: expected <!-- record:{name} --> ... <!-- /record:{name} --> once")
        filling = f"\n{make(record)}\n"
        text = pattern.sub(lambda match, filling=filling: match[1] + filling + match[2], text)
    return text


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record_readme", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if README.md does not match the record"
    )
    arguments = parser.parse_args()
    try:
        text, record = README.read_text(encoding="utf-8"), json.loads(RECORD.read_text())
        filled = fill(text, record)
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{type(error).__name__}: {error}")
    if arguments.check:
        return 0 if filled == text else 1
    README.write_text(filled, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

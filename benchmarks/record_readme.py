"""Fills the marked spots of README.md and docs/deep-dive.md from tests/gpu_record.json.

    python -m benchmarks.record_readme [--check]

Where the record holds no benchmark, speed and limits come from benchmarks/results/nvidia-h200.json, and the page says
so; so does always the plot of the error by token, whose file is made from those results.

A spot is what lies between <!-- record:NAME --> and <!-- /record:NAME -->; SPOTS and PAGES say which there are.
"""

import argparse
import json
import re
import sys
import textwrap
from functools import partial
from operator import itemgetter

from accuracy import BOUNDS, TABLE
from gpu_record import extent, problems
from inputs import GATE_KINDS
from source_digest import tree_digest

from benchmarks.cases import CASES
from benchmarks.files import ROOT, definitions, is_ours, landed, read, shown_peers, sustained, sustained_differs

README, DEEP_DIVE = ROOT / "README.md", ROOT / "docs" / "deep-dive.md"
RECORD = ROOT / "tests" / "gpu_record.json"
RESULTS = landed("NVIDIA H200")
PARTS = ("out", "final state")
wrap = partial(textwrap.fill, width=120, break_long_words=False, break_on_hyphens=False)


def table(header, rows):
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def microseconds(x):
    return f"{x:.1f}" if x < 10 else f"{x:.0f}"


def error(x):
    return f"{x:.2e}".replace("e-0", "e-")


def of_other_sources(record):
    """A line that says so, if the record is not of the sources that are here."""
    if record["csrc"]["total"] == tree_digest(ROOT / "csrc")["total"]:
        return []
    return ["- of older kernel sources than these, which have no record yet: `tests/open_problems.py` says why"]


def environment(record):
    env, tests = record["environment"], record["tests"]
    text = (
        f"{env['device']}, driver {env['driver']}, CUDA {env['cuda']}, PyTorch {env['torch']}, Triton {env['triton']}, "
        f"flash-linear-attention {env['fla']}, {env['date'][:10]}: "
        f"{tests['passed']} GPU tests passed, {tests['failed']} failed, {tests['skipped']} skipped."
    )
    lines = [textwrap.fill(text, 120)]
    lines += of_other_sources(record)
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


def benchmark_of(record):
    """(the benchmark, the words that say where it is from and what its times are)"""
    benchmark, origin = record["benchmark"], "the record"
    if not benchmark.get("rows"):
        benchmark, origin = read(RESULTS), f"`{RESULTS.relative_to(ROOT)}`, a run beside the record"
    source = f"From {origin}, {benchmark['device']}, {benchmark['date'][:10]}, copy bandwidth "
    source += f"{benchmark['copy_bandwidth'] / 1e12:.2f} TB/s. {definitions(benchmark['rows'])}"
    return benchmark, wrap(source) + "\n\n"


def kinds_of(rows):
    """{what follows a column's name: the function that gives the time}, sustained ones where those of `rows` differ."""
    return {"": itemgetter("gpu_us")} | ({", sustained": sustained} if sustained_differs(rows) else {})


def speed(record):
    """GPU time in microseconds, one row a case and one column a peer, both gate kinds in a cell.

    A peer whose sustained times differ from its rested ones has a second column, of those.
    """
    benchmark, source = benchmark_of(record)
    rows = benchmark["rows"]
    peers = shown_peers(rows)
    cells = {(row["case"], row["peer"], row["gate"]): row for row in rows}

    def text(row, time):
        if row is None or "error" in row:
            return "not run" if row and row["error"].startswith("not run") else "failed"
        return f"{time(row):.0f}"

    def cell(case, peer, time):
        found = [cells.get((case, peer, gate)) for gate in GATE_KINDS]
        return " / ".join(text(row, time) for row in found) if any(found) else "not measured"

    gates = " / ".join(GATE_KINDS)
    columns = []
    for peer in peers:
        kinds = kinds_of(row for row in rows if row["peer"] == peer)
        columns += [(f"{peer}{suffix}: {gates}", peer, time) for suffix, time in kinds.items()]
    body = []
    for case in dict.fromkeys(row["case"] for row in rows):
        first = next(row for row in rows if row["case"] == case)
        times = (cell(case, peer, time) for _, peer, time in columns)
        body.append([first["table"], case, microseconds(first["floor_us"]), *times])
    return source + table(["", "tokens / heads / sequences", "floor", *(name for name, _, _ in columns)], body)


def sweep(record):
    """Errors of every measurement of the sm90 schedule outside the accuracy table."""
    errors = {}
    for name, x in record["errors"].items():
        what, _, part = name.removeprefix("sm90, ").rpartition(": ")
        if name.startswith("sm90, "):
            errors.setdefault(what, {})[part] = error(x)
    if not errors:
        return "Not in the record."
    return table(["", *PARTS], [[what, *(parts[part] for part in PARTS)] for what, parts in sorted(errors.items())])


def error_plot(record):
    """The plot of the error by token position, where the landed results hold what it needs."""
    if not any(row.get("error_by_token") for row in read(RESULTS)["rows"]):
        return "Not measured yet: the landed results are older than this plot."
    plot = RESULTS.with_name(f"{RESULTS.stem}-error-by-token.svg").relative_to(ROOT)
    return f"![Relative error of out by token position](../{plot})"


def limits(record):
    """What a case asks of the GPU, and how far from each limit our fastest schedule is, with the slower gate kind."""
    benchmark, source = benchmark_of(record)
    slowest = {}
    for row in benchmark["rows"]:
        if is_ours(row["peer"]) and "error" not in row:
            times = slowest.setdefault((row["case"], row["gate"]), [])
            times.append((row["gpu_us"], row))
    cases = {}
    for (case, _), times in slowest.items():
        best = min(times, key=lambda item: item[0])
        cases[case] = max(cases.get(case, best), best, key=lambda item: item[0])
    rows = []
    for case, (time, row) in cases.items():
        longest = max(row["lengths"])
        rows.append([case, f"{len(row['lengths']) * row['heads']}", f"{longest}", microseconds(time)])
        rows[-1] += [f"{row['floor_us'] / time:.0%}", f"{1e3 * time / longest:.0f}"]
    header = ["tokens / heads / sequences", "pairs", "longest sequence", "microseconds", "share of the floor"]
    return source + table([*header, "nanoseconds a token of it"], rows)


LEFT_OUT = (
    "why parts of the calls in `tests/sanitizer_grid.py` are left out: there a stage of the ring is filled again after "
    "one lane has handed it back for its warp, behind a `__syncwarp` that racecheck does not connect with it, and it "
    "reports a hazard that is none; the other tools run all parts"
)


def features(record):
    """What calls beyond the benchmark's cost: gates, bf16 states, decoding."""
    found = record.get("features")
    if not found:
        return "Not in the record."
    gates, states, decoding = found["gates"], found["bf16_states"], found["decoding"]

    def named(rows, name="microseconds"):
        return [name + suffix for suffix in kinds_of(rows)]

    def times(row, rows):
        return [microseconds(time(row)) for time in kinds_of(rows).values()]

    musts = {case.name: str(case.must_us) for case in CASES}
    by_case = {}
    for row in states:
        by_case.setdefault(row["case"], {})[row["gate"]] = times(row, states)
    absent = ["not measured"] * len(kinds_of(states))
    tables = (
        wrap(definitions(gates + states + decoding)),
        table(
            ["8192 tokens, 96 heads, long gate", *named(gates), "over the plain call"],
            [[row["case"], *times(row, gates), f"{row['over_plain']:.2f}"] for row in gates],
        ),
        table(
            ["bf16 states: tokens / heads", *(name for gate in GATE_KINDS for name in named(states, gate)), "must"],
            [
                [case, *(cell for gate in GATE_KINDS for cell in cells.get(gate, absent)), musts[case]]
                for case, cells in by_case.items()
            ],
        ),
        table(
            ["sequences, states of a pool in place", "by", *named(decoding), "share of the copy bandwidth"],
            [[row["case"], row["peer"], *times(row, decoding), f"{row['share_of_bandwidth']:.0%}"] for row in decoding],
        ),
    )
    return "\n\n".join(tables)


def checks(record):
    """What the fuzzer and compute-sanitizer said."""
    fuzz = record.get("fuzz")
    lines = ["- fuzzer: not in the record"]
    if fuzz:
        ran = ", ".join(f"{count} {schedule}" for schedule, count in sorted(fuzz["schedules"].items()))
        errors = ", ".join(f"{name} {error(x)}" for name, x in sorted(fuzz["root mean square"].items()))
        lines = [f"- fuzzer: {fuzz['cases']} cases of seed {fuzz['seed']} ({ran}), {len(fuzz['failures'])} failed"]
        lines.append(f"- their root mean square errors: {errors}")
    sanitizer = sorted(record["sanitizer"].items())
    lines += [f"- compute-sanitizer {tool}: {x['status']}{extent(x)}" for tool, x in sanitizer]
    if any(x.get("left_out") for _, x in sanitizer):
        lines.append(f"- {LEFT_OUT}")
    lines += of_other_sources(record)
    return "\n".join(textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False) for line in lines)


SPOTS = {
    "environment": environment,
    "accuracy": accuracy,
    "speed": speed,
    "sweep": sweep,
    "error-plot": error_plot,
    "limits": limits,
    "features": features,
    "checks": checks,
}
PAGES = {
    README: ("environment", "accuracy", "speed"),
    DEEP_DIVE: ("accuracy", "sweep", "error-plot", "limits", "features", "checks"),
}


def fill(text, record, page=README):
    """`text` of a page with every spot of it filled; ValueError if it does not hold each spot once."""
    for name in PAGES[page]:
        pattern = re.compile(rf"(<!-- record:{name} -->).*?(<!-- /record:{name} -->)", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"{page.name}: expected <!-- record:{name} --> ... <!-- /record:{name} --> once")
        filling = f"\n{SPOTS[name](record)}\n"
        text = pattern.sub(lambda match, filling=filling: match[1] + filling + match[2], text)
    return text


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record_readme", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if a page does not match the record"
    )
    arguments = parser.parse_args()
    try:
        record = json.loads(RECORD.read_text())
        texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
        filled = {page: fill(text, record, page) for page, text in texts.items()}
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{type(error).__name__}: {error}")
    if arguments.check:
        return 0 if filled == texts else 1
    for page, text in filled.items():
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

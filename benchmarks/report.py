"""Writes BENCHMARK_<DEVICE>.md and its plots from every file in benchmarks/results.

    python -m benchmarks.report

The page shows what its file holds and nothing else. It is what lies between <!-- report --> and <!-- /report -->; a
page that exists keeps its other text.
"""

import argparse
import re
import shlex
import sys
from functools import partial
from itertools import product

import matplotlib
from inputs import GATE_KINDS
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from benchmarks import files
from benchmarks.files import by_key, definitions, is_ours, is_rested, shown_peers
from benchmarks.peers import PEERS
from benchmarks.record_readme import error, kinds_of, microseconds, table, wrap

GATES = " / ".join(GATE_KINDS)


def sequences(row):
    lengths = row["lengths"]
    if len(set(lengths)) > 1:
        return str(lengths)
    return f"{len(lengths)} x {lengths[0]}" if len(lengths) > 1 else str(lengths[0])


def heads(row):
    return row["heads"]


def peers_of(result):
    return list(dict.fromkeys(row["peer"] for row in result["rows"]))


def main_peer(result):
    """Of ours with any result, the fastest on what all of those measured; None if there is none."""
    times = {}
    for row in result["rows"]:
        if is_ours(row["peer"]) and "error" not in row:
            times.setdefault(row["peer"], {})[row["case"], row["gate"]] = row["gpu_us"]
    shared = set.intersection(*(set(one) for one in times.values())) if times else ()
    return min(times, key=lambda peer: sum(times[peer][key] for key in shared), default=None)


def cell(rows, case, peers, text):
    """text(row of each of `peers`) for each gate kind; once if they agree."""
    parts = []
    for gate in GATE_KINDS:
        found = [rows.get((case, gate, peer)) for peer in peers]
        if None in found:
            parts.append("not measured")
        else:
            parts.append("no result" if any("error" in row for row in found) else text(*found))
    return " / ".join(dict.fromkeys(parts))


def times_table(result, name):
    """Floor, every peer, must and goal, our share of the floor and speed-up, for the cases of one table.

    A peer whose sustained times in the table differ from the rested ones has a column of those too.
    """
    rows, peers, main = by_key(result), shown_peers(result["rows"]), main_peer(result)
    columns = [
        (f"{peer}{suffix}: {GATES}", peer, time)
        for peer in peers
        for suffix, time in kinds_of(
            row for row in result["rows"] if (row["table"], row["peer"]) == (name, peer)
        ).items()
    ]
    others = [peer for peer in peers if peer != main] if main else []
    first = {row["case"]: row for row in reversed(result["rows"]) if row["table"] == name}
    header = ["sequences", "H", "floor", *(column for column, _, _ in columns), "must", "goal"]
    header += [f"{main}: share of the floor"] * bool(main) + [f"speed-up over {peer}" for peer in others]
    body = []
    for case in dict.fromkeys(row["case"] for row in result["rows"] if row["table"] == name):
        row = first[case]
        line = [sequences(row), str(row["heads"]), microseconds(row["floor_us"])]
        line += [cell(rows, case, [peer], lambda one, time=time: microseconds(time(one))) for _, peer, time in columns]
        line += [str(row["must_us"]), str(row["goal_us"])]
        if main:
            line.append(cell(rows, case, [main], lambda one: f"{one['floor_us'] / one['gpu_us']:.0%}"))
        line += [
            cell(rows, case, [main, peer], lambda ours, other: f"{other['gpu_us'] / ours['gpu_us']:.2f}")
            for peer in others
        ]
        body.append(line)
    return table(header, body)


def targets(result):
    """In how many of its cases the main peer meets must and goal, with the slower gate kind."""
    main = main_peer(result)
    slowest, case_rows = {}, {}
    for row in result["rows"]:
        if row["peer"] == main:
            case_rows[row["case"]] = row
            time = float("inf") if "error" in row else row["gpu_us"]
            slowest[row["case"]] = max(time, slowest.get(row["case"], 0))
    met = [sum(time <= case_rows[case][key] for case, time in slowest.items()) for key in ("must_us", "goal_us")]
    return f"{main}, with the slower kind of gate: must met in {met[0]} of {len(slowest)} cases, goal in {met[1]}."


def details_table(result):
    """What else was measured, one line a case and peer; the sustained time and the SM clock where the file has them."""
    rows = by_key(result)
    timed = [row for row in result["rows"] if "error" not in row]
    columns = {
        "least": ("gpu_us_least", microseconds),
        "spread": ("gpu_us_spread", "{:.1f}".format),
    }
    if any(map(is_rested, timed)):
        columns |= {
            "sustained": ("gpu_us_sustained", microseconds),
            "its spread": ("gpu_us_sustained_spread", "{:.1f}".format),
            "SM clock": ("sm_clock_mhz", str),
        }
    columns |= {
        "host": ("host_us", "{:.0f}".format),
        "wall": ("wall_us", "{:.0f}".format),
        "extra MB": ("extra_bytes", lambda x: f"{x / 1e6:.1f}"),
        "error of out": ("error_out", error),
        "error of final state": ("error_state", error),
    }

    def text(name, show):
        absent = "not known" if name == "sm_clock_mhz" else "not measured"
        return lambda row: absent if row.get(name) is None else show(row[name])

    first = {(row["case"], row["peer"]): row for row in timed}
    body = [
        [sequences(row), str(row["heads"]), peer, *(cell(rows, case, [peer], text(*one)) for one in columns.values())]
        for (case, peer), row in first.items()
    ]
    return table(["sequences", "H", "peer", *columns], body)


def failures(result):
    """The rows without a result, those of one peer and reason together."""
    reasons = {}
    for row in result["rows"]:
        if "error" in row:
            reasons.setdefault((row["peer"], row["error"]), []).append(f"{row['case']} {row['gate']}")
    return "\n".join(
        wrap(f"- {peer}: {reason}: {', '.join(where)}", subsequent_indent="  ")
        for (peer, reason), where in reasons.items()
    )


def plot(path, rows, x, series, axis):
    """Writes GPU time against x(row), a panel for each peer and gate kind, a line for each series(row), floors dashed.

    axis, and the key: the names of x and of series.
    """
    names, peers = list(dict.fromkeys(map(series, rows))), list(dict.fromkeys(row["peer"] for row in rows))
    # Hollow and of different shapes, since points of several lines may coincide.
    colors, markers = matplotlib.colormaps["tab10"].colors, "os^vDPX"
    styles = {
        name: {"color": colors[i % len(colors)], "marker": markers[i % len(markers)], "markerfacecolor": "none"}
        for i, name in enumerate(names)
    }
    figure = Figure(figsize=(10, 1.2 + 3.4 * len(peers)), layout="constrained")
    panels = figure.subplots(len(peers), len(GATE_KINDS), sharex=True, sharey=True, squeeze=False)
    ticks = sorted(set(map(x, rows)))
    for (peer, gate), axes in zip(product(peers, GATE_KINDS), panels.flat, strict=True):
        for name in names:
            points = sorted(
                (x(row), row["gpu_us"], row["floor_us"])
                for row in rows
                if (row["peer"], row["gate"], series(row)) == (peer, gate, name)
            )
            if points:
                at, times, floors = zip(*points, strict=True)
                axes.plot(at, times, **styles[name], linewidth=1)
                axes.plot(at, floors, "_--", color=styles[name]["color"], linewidth=0.9)
        axes.set(title=f"{peer}, {gate} gate", xscale="log", yscale="log")
        axes.set_xticks(ticks, map(str, ticks), rotation=45)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3)
    for axes in panels[-1]:
        axes.set_xlabel(axis[0])
    figure.supylabel("GPU time in microseconds")
    handles = [Line2D([], [], **styles[name], label=str(name)) for name in names]
    handles.append(Line2D([], [], color="gray", linestyle="--", marker="_", label="floor"))
    figure.legend(handles=handles, title=axis[1], loc="outside lower center", ncols=6)
    save(figure, path)


def plot_errors(path, rows):
    """Writes the relative error of out by token position, a panel for each gate kind, a line for each peer."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    for gate, axes in zip(GATE_KINDS, figure.subplots(1, len(GATE_KINDS), sharey=True), strict=True):
        lines = [row for row in rows if row["gate"] == gate]
        for row in lines:
            at, errors = zip(*row["error_by_token"], strict=True)
            axes.plot(at, errors, drawstyle="steps-post", linewidth=1, label=row["peer"])
        axes.set(title=f"{gate} gate", xlabel="token", ylim=(0, None))
        axes.grid(alpha=0.3)
        if lines:
            axes.legend()
    figure.supylabel("relative error of out")
    save(figure, path)


def save(figure, path):
    # The same results give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "flash_kda"}):
        figure.savefig(path, metadata={"Date": None})


def single_sequences(result):
    """Rows to plot against T."""
    rows = (row for row in result["rows"] if "error" not in row and len(row["lengths"]) == 1)
    return sorted(rows, key=heads)


def several_head_counts(result):
    """Rows to plot by head count: of sequences that were measured with more than one."""
    counts = {}
    for row in result["rows"]:
        if "error" not in row:
            counts.setdefault(sequences(row), set()).add(heads(row))
    rows = (row for row in result["rows"] if "error" not in row and len(counts[sequences(row)]) > 1)
    return sorted(rows, key=lambda row: sum(row["lengths"]))


def pictures_of(result):
    """{path: (title, function that writes it there)} of the plots, beside the results file."""
    base = files.landed(result["device"])
    errors = [row for row in result["rows"] if row.get("error_by_token")]
    pictures = [
        (
            *("time-by-tokens", "GPU time against T, one sequence", single_sequences(result)),
            partial(plot, x=lambda row: row["lengths"][0], series=heads, axis=("T, one sequence", "heads")),
        ),
        (
            *("time-by-heads", "GPU time by head count, of sequences measured with several"),
            *(several_head_counts(result), partial(plot, x=heads, series=sequences, axis=("heads", "sequences"))),
        ),
        ("error-by-token", "Relative error of out by token position, one sequence of 8192", errors, plot_errors),
    ]
    return {
        base.with_name(f"{base.stem}-{name}.svg"): (title, partial(draw, rows=rows))
        for name, title, rows, draw in pictures
        if rows
    }


def text_of(result, pictures):
    """The page's text for one device."""
    device, path = result["device"], files.landed(result["device"]).relative_to(files.ROOT)
    peers = peers_of(result)
    absent = [peer for peer in PEERS if peer not in peers]
    command = result.get("command")
    made = "Made by" if command else "The file does not say by which command it was made; this one measures its peers"
    command = command or shlex.join(["python", "-m", "benchmarks.run", "--peers", *peers])
    about = f"{device}, PyTorch {result['torch']}, flash_kda {result['flash_kda']}, {files.sources(result)}, "
    about += f"{result['date']}, copy bandwidth {result['copy_bandwidth'] / 1e12:.2f} TB/s"
    if environment := result.get("environment"):
        about += (
            f"; driver {environment['driver']}, CUDA {environment['cuda']}, Python {environment['python']}, Triton "
        )
        about += f"{environment['triton']}, flash-linear-attention {environment['fla']}"
    about += "."
    parts = [
        f"From `{path}`, by `python -m benchmarks.report`.",
        wrap(about),
        f"{made}:",
        f"```bash\n{command} \\\n    --json {path}\n```",
        wrap(
            "Microseconds of GPU time by replay of CUDA graphs, bf16 inputs, K = V = 128, fp32 states in and out. "
            f"{definitions(result['rows'])} "
            "The floor is the bytes that must move over the copy bandwidth of the same run. Must and goal are targets "
            f"for an H200. {GATES} are the two kinds of gate; one number stands for both."
        ),
    ]
    if absent:
        parts.append(wrap(f"Not in the file: {', '.join(absent)}."))
    if main_peer(result):
        parts.append(targets(result))
    for name in dict.fromkeys(row["table"] for row in result["rows"]):
        parts += [f"## {name.capitalize()}", times_table(result, name)]
    if failed := failures(result):
        parts += ["## Rows without a result", failed]
    twice = (
        "the sustained time, its spread and the SM clock in MHz that nvidia-smi read right after it, while replays "
        "went on, "
        if any(map(is_rested, result["rows"]))
        else ""
    )
    parts += ["## Plots"] * bool(pictures)
    parts += [f"![{title}]({picture.relative_to(files.ROOT)})" for picture, (title, _) in pictures.items()]
    parts += [
        "## Spread, host time, memory and errors",
        wrap(
            f"Least and spread (10th to 90th percentile) of the GPU time, {twice}host time of an eager "
            "call, wall time from its start to the end of its work, in microseconds; peak memory beyond arguments and "
            "results; relative errors of the first and last head against the recurrence in fp64, the state's where all "
            "of the sequence is checked."
        ),
        details_table(result),
    ]
    return "\n\n".join(parts)


def fill(page, text):
    """`page` with `text` between its marks; ValueError if it does not have them once."""
    pattern = re.compile(r"(<!-- report -->).*?(<!-- /report -->)", re.DOTALL)
    if len(pattern.findall(page)) != 1:
        raise ValueError("expected <!-- report --> ... <!-- /report --> once")
    return pattern.sub(lambda match: f"{match[1]}\n{text}\n{match[2]}", page)


def write(path):
    """Writes the page and the plots of a results file; returns the page's path."""
    result = files.read(path)
    if path != files.landed(result["device"]):
        raise ValueError(f"{path}: holds {result['device']}: expected the name {files.landed(result['device']).name}")
    page = files.page(result["device"])
    old = page.read_text(encoding="utf-8") if page.exists() else None
    old = old or f"# FlashKDA: {result['device']}\n\n<!-- report -->\n<!-- /report -->\n"
    pictures = pictures_of(result)
    try:
        new = fill(old, text_of(result, pictures))
    except ValueError as error:
        raise ValueError(f"{page}: {error}") from None
    for picture, (_, draw) in pictures.items():
        draw(picture)
    page.write_text(new, encoding="utf-8")
    return page


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.partition("\n")[0])
    parser.parse_args(arguments)
    paths = sorted(files.RESULTS.glob("*.json"))
    if not paths:
        parser.error(f"no results in {files.RESULTS}: run python -m benchmarks.run --json FILE on a GPU machine")
    try:
        for path in paths:
            print(write(path))
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{type(error).__name__}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

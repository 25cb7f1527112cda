"""Result files of `python -m benchmarks.run --json`: where they lie, and reading them."""

import json
import math
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def landed(device):
    """The results file of a device, by the name that PyTorch gives it: NVIDIA H200 -> nvidia-h200.json."""
    return RESULTS / (re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json")


def page(device):
    """The page that shows them: NVIDIA H200 -> BENCHMARK_H200.md."""
    name = re.sub(r"[^A-Z0-9]+", "_", device.upper().removeprefix("NVIDIA ")).strip("_")
    return ROOT / f"BENCHMARK_{name}.md"


def is_ours(peer):
    return peer.startswith("flash_kda")


def shown_peers(rows):
    """The peers that tables have columns of: ours, and others that have a time in any of the rows."""
    timed = {row["peer"] for row in rows if "error" not in row}
    return [peer for peer in dict.fromkeys(row["peer"] for row in rows) if is_ours(peer) or peer in timed]


def check_writable(parser, path):
    """An error of the parser's, before anything is measured, where a file cannot be written; its content stays."""
    try:
        path.open("a").close()
    except OSError as error:
        parser.error(f"--json: cannot write {path}: {error.strerror}")


def read(path):
    """The results in a file; ValueError, naming the file, where it cannot be read or holds something else."""
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON of benchmarks.run, got {error}") from None
    if not isinstance(result, dict) or not isinstance(result.get("rows"), list) or "device" not in result:
        raise ValueError(f"{path}: expected JSON of benchmarks.run, an object with device and rows")
    for name, kinds in (("device", str), ("csrc", str | None)):
        if not isinstance(result.get(name), kinds):
            raise ValueError(f"{path}: {name}: expected a string, got {result[name]!r}")
    keys = set()
    for number, row in enumerate(result["rows"]):
        if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in ("case", "gate", "peer")):
            raise ValueError(f"{path}: row {number}: expected an object with case, gate and peer")
        key = _key(row)
        if key in keys:
            raise ValueError(
                f"{path}: row {number}: expected one row of each case, gate and peer, got another of {key}"
            )
        keys.add(key)
        if "error" in row:
            continue
        for name in ("gpu_us", "gpu_us_sustained") if is_rested(row) else ("gpu_us",):
            time = row.get(name)
            if not (isinstance(time, int | float) and math.isfinite(time) and time > 0):
                raise ValueError(f"{path}: row {number}: expected error, or {name} in microseconds, got {time!r}")
    return result


def is_rested(row):
    """Whether gpu_us of a row was measured after a rest. In older files, without gpu_us_sustained, it is that one."""
    return "gpu_us_sustained" in row


def sustained(row):
    """Microseconds of GPU time of a row under load without a rest."""
    return row["gpu_us_sustained"] if is_rested(row) else row["gpu_us"]


def sustained_differs(rows):
    """Whether the sustained time of any of these rows is not, within 2 %, the rested one."""
    return any(abs(sustained(row) / row["gpu_us"] - 1) > 0.02 for row in rows if "error" not in row)


def definitions(rows):
    """What the times of these rows are, in words; benchmarks.timing.GpuTimes measures them."""
    timed = [row for row in rows if "error" not in row]
    if not timed:
        return "No time was measured."
    if any(map(is_rested, timed)):
        return (
            "Rested: median of 10 to 40 replays, about 20 ms, after 0.5 s without work, at the GPU's full clock. "
            "Sustained: median of 0.3 s of replays, 300 at most, without a rest, at the clock that the power limit "
            "leaves. Times are rested where nothing else is said; a table of times has columns of sustained ones where "
            "any are more than 2 % away."
        )
    return (
        "These have one time each, a sustained one: median of 0.3 s of replays, 300 at most, without a rest, at the "
        "clock that the power limit leaves."
    )


def by_key(result):
    """{(case, gate, peer): row}"""
    return {_key(row): row for row in result["rows"]}


def _key(row):
    return row["case"], row["gate"], row["peer"]


def sources(result):
    """Of which kernel sources the results are, in words."""
    digest = result.get("csrc")
    return f"csrc digest {digest[:12]}" if digest else "csrc digest not recorded"

"""The GPU record: what tests/gpu.sh found on a GPU machine, in tests/gpu_record.json. Only gpu.sh writes it.

Machines without a GPU cannot run the kernels, so tests/test_gpu_record.py holds the record's digest of csrc against the
sources.
"""

import argparse
import datetime
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch
from source_digest import tree_digest

import flash_kda

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "gpu_record.json"
FORMAT = 1
# Fewer in a record are a problem.
FUZZ_CASES = 2000
# Where parts of tests/sanitizer_grid.py may be left out; tests/gpu.sh says why.
MAY_LEAVE_OUT = ("racecheck segments", "racecheck sm90")
# What benchmarks.features is held to: the softplus gate's time over the plain call's, and, decoding one token of each
# sequence, the share of the copy bandwidth. In no case of decoding may FLA be faster.
MOST_OVER_PLAIN = ("softplus", 1.3)
LEAST_SHARE = ("256 x 1 tokens, 32 heads", 0.7)


def read_junit(paths):
    """Tests and what they noted, from pytest's JUnit XML files.

    Returns (tests, errors, notes): counts and the list of unpassed tests; the worst value of each `error: NAME`
    property; all other properties.
    """
    counts = dict.fromkeys(("run", "passed", "failed", "skipped"), 0)
    unpassed, errors, notes = [], {}, {}
    for case in (case for path in paths for case in ElementTree.parse(path).iter("testcase")):
        name = f"{case.get('classname', '')}::{case.get('name')}".removeprefix("::")
        outcome, reason = "passed", ""
        for tag, what in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
            element = case.find(tag)
            if element is not None:
                outcome, reason = what, (element.get("message") or element.text or "").strip()
                break
        counts["run"] += outcome != "skipped"
        counts[outcome] += 1
        if outcome != "passed":
            unpassed.append({"name": name, "outcome": outcome, "reason": reason[:2000]})
        for item in case.iter("property"):
            key, value = item.get("name"), item.get("value")
            if key.startswith("error: "):
                key = key.removeprefix("error: ")
                errors[key] = max(float(value), errors.get(key, 0.0))
            else:
                notes[key] = value
    return {**counts, "unpassed": unpassed}, errors, notes


def read_sanitizer(folder):
    """{tool: {"status", "summary", "calls", "left_out"}} from gpu.sh's TOOL.log and TOOL.status files.

    A status is the program's exit status, or `missing`. "calls" counts the calls of each part of
    tests/sanitizer_grid.py that ran to its end, "left_out" lists those that were not to run.
    """
    tools = {}
    for path in sorted(Path(folder).glob("*.status")):
        log = path.with_suffix(".log")
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        marked = [line.removeprefix("========= ").strip() for line in lines if line.startswith("=========")]
        summary = next((line for line in reversed(marked) if "SUMMARY" in line), "; ".join(marked[:3]))
        exit_status = path.read_text().strip()
        words = {"0": "clean", "missing": "not run: the tool is not installed", "124": "timed out"}
        status = words.get(exit_status, f"exit status {exit_status}")
        if "Device not supported" in "".join(lines):
            status = "not run: the tool does not support this device or driver"
        calls = {m[1]: int(m[2]) for line in lines if (m := re.fullmatch(r"\S+, (\w+): (\d+) calls", line))}
        left_out = [
            part for line in lines if (m := re.fullmatch(r"\S+, left out: (.+)", line)) for part in m[1].split(", ")
        ]
        tools[path.stem] = {"status": status, "summary": summary, "calls": calls, "left_out": left_out}
    return tools


def environment():
    """The machine and the software that the tests ran with."""
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "flash_kda": flash_kda.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": command_line("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "driver": command_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
    }
    for name, package in (("triton", "triton"), ("fla", "flash-linear-attention")):
        try:
            result[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            result[name] = "not installed"
    try:
        from flash_kda import _C

        result["build"] = _C.build_info()
    except ImportError:
        result["build"] = "no kernels"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        result["device"] = properties.name
        result["capability"] = f"{properties.major}.{properties.minor}"
        result["multiprocessors"] = properties.multi_processor_count
        result["memory_gb"] = round(properties.total_memory / 1e9, 1)
    return result


def command_line(*command):
    """First line of a command's output; None where it fails or is missing."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip().partition("\n")[0] or None


def problems(record):
    """Why the record does not count as passed; empty if it does."""
    tests = record["tests"]
    found = [f"{step}: {what}" for step, what in record["steps"].items() if what != "ok"]
    found += [
        f"{test['name']}: {test['reason'].partition(chr(10))[0]}"
        for test in tests["unpassed"]
        if test["outcome"] == "failed"
    ]
    if not tests["passed"]:
        found.append("no test passed")
    for tool, result in record["sanitizer"].items():
        if result["status"] != "clean" and not result["status"].startswith("not run"):
            found.append(f"compute-sanitizer {tool}: {result['status']}: {result['summary']}")
        elif result["status"] == "clean" and result.get("calls") == {}:
            found.append(f"compute-sanitizer {tool}: clean, but of no calls")
        if result.get("left_out") and tool not in MAY_LEAVE_OUT:
            found.append(f"compute-sanitizer {tool}: left out: {', '.join(result['left_out'])}")
    fuzz = record.get("fuzz")
    if fuzz is None and "fuzz" not in record["steps"]:
        found.append("fuzz: no results")
    if fuzz is not None:
        found += [f"fuzz: {failure}" for failure in fuzz["failures"]]
        if fuzz["cases"] < FUZZ_CASES:
            found.append(f"fuzz: {fuzz['cases']} cases, fewer than {FUZZ_CASES}")
    for row in record["benchmark"].get("rows", []):
        if row.get("error") and row["peer"].startswith("flash_kda"):
            found.append(f"benchmark {row['case']}, {row['gate']}, {row['peer']}: {row['error']}")
    return found + problems_of_features(record.get("features"))


def problems_of_features(features):
    """Which of their targets the results of benchmarks.features miss."""
    if not features:
        return []  # the step that failed says so
    name, most = MOST_OVER_PLAIN
    ratios = [row["over_plain"] for row in features["gates"] if row["case"] == name]
    found = [f"features: {name}: {ratio:.2f} times plain, at most {most}" for ratio in ratios if ratio > most]
    cases = {}
    for row in features["decoding"]:
        cases.setdefault(row["case"], {})[row["peer"]] = row
    name, least = LEAST_SHARE
    share = cases[name]["flash_kda"]["share_of_bandwidth"] if name in cases else 0
    if not ratios or name not in cases:
        found.append(f"features: no results of {MOST_OVER_PLAIN[0]} or of {name}")
    elif share < least:
        found.append(f"features: decoding {name}: {share:.0%} of the copy bandwidth, at least {least:.0%}")
    for name, rows in cases.items():
        for peer, row in rows.items():
            if row["gpu_us"] < rows["flash_kda"]["gpu_us"]:
                ours = rows["flash_kda"]["gpu_us"]
                found.append(f"features: decoding {name}: {ours:.0f} us, {peer} {row['gpu_us']:.0f} us")
    return found


def describe(error):
    """An error without the paths of the machine it was met on."""
    return f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"


def make_record(junit, benchmark, features, fuzz, sanitizer, steps):
    """The record of one gpu.sh run; steps: {step: "ok" or what went wrong}. A missing file is a step that failed.

    junit: one file a run of tests, with the name of its step.
    """
    steps = dict(steps)
    readable = []
    for path in map(Path, junit):
        try:
            ElementTree.parse(path)
            readable.append(path)
        except (OSError, ElementTree.ParseError) as error:
            steps[path.stem] = f"no results: {describe(error)}"
    tests, errors, notes = read_junit(readable)
    results = {"benchmark": {}, "features": {}, "fuzz": None}
    for name, path in (("benchmark", benchmark), ("features", features), ("fuzz", fuzz)):
        try:
            results[name] = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            steps[name] = f"no results: {describe(error)}"
    return {
        "format": FORMAT,
        "environment": environment(),
        "steps": steps,
        "tests": tests,
        "errors": errors,
        "notes": notes,
        "sanitizer": read_sanitizer(sanitizer),
        **results,
        "csrc": tree_digest(ROOT / "csrc"),
    }


def extent(result):
    """Of how many calls a sanitizer's result is, and without which parts of tests/sanitizer_grid.py, in words."""
    words = f", {sum(result['calls'].values())} calls" if result.get("calls") else ""
    return words + (f", left out: {', '.join(result['left_out'])}" if result.get("left_out") else "")


def summary(record):
    """The record in under 100 lines."""
    env, tests = record["environment"], record["tests"]
    lines = [
        f"{env.get('device')}, driver {env['driver']}, CUDA {env['cuda']}, torch {env['torch']}, {env['date']}",
        f"triton {env['triton']}; built: {env['build']}; FLA {env['fla']}; csrc {record['csrc']['total'][:12]}",
        "steps: " + ", ".join(f"{step} {what}" for step, what in record["steps"].items()),
        f"tests: {tests['run']} run, {tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped",
    ]
    for outcome, most in (("failed", 25), ("skipped", 5)):
        chosen = [test for test in tests["unpassed"] if test["outcome"] == outcome]
        for test in chosen[:most]:
            lines.append(f"  {outcome}: {test['name']}: {test['reason'].partition(chr(10))[0][:160]}")
        if len(chosen) > most:
            lines.append(f"  {outcome}: and {len(chosen) - most} more")
    lines.append(f"FLA dispatch: {record['notes'].get('fla dispatch', 'not seen')}")
    lines += [
        f"compute-sanitizer {tool}: {x['status']}{extent(x)}; {x['summary'][:120]}"
        for tool, x in record["sanitizer"].items()
    ]
    features = record.get("features", {})
    for row in features.get("gates", []):
        lines.append(f"features: {row['case']}: {row['gpu_us']:.0f} us, {row['over_plain']:.2f} times plain")
    for row in features.get("decoding", []):
        share = f"{row['share_of_bandwidth']:.0%} of the copy bandwidth"
        lines.append(f"features: decoding {row['case']}, {row['peer']}: {row['gpu_us']:.0f} us, {share}")
    if states := features.get("bf16_states"):
        lines.append(
            "features: bf16 states in us: " + ", ".join(f"{x['case']} {x['gate']} {x['gpu_us']:.0f}" for x in states)
        )
    if fuzz := record["fuzz"]:
        worst = sorted(fuzz["worst of a (sequence, head)"].items(), key=lambda item: -item[1])[:2]
        lines.append(
            f"fuzz: seed {fuzz['seed']}, {fuzz['cases']} cases, {len(fuzz['failures'])} failed; worst of a (sequence, "
            f"head): {', '.join(f'{name} {error:.2e}' for name, error in worst)}"
        )
        lines += [f"  {failure[:160]}" for failure in fuzz["failures"][:10]]
    pairs = {}
    for name, error in record["errors"].items():
        case, _, part = name.rpartition(": ")
        pairs.setdefault(case, {})[part] = error
    if pairs:
        worst = sorted(pairs.items(), key=lambda item: -max(item[1].values()))[:22]
        lines.append(f"worst errors, {len(worst)} of {len(pairs)} cases:")
        lines += [f"  {case}: " + ", ".join(f"{part} {x:.2e}" for part, x in parts.items()) for case, parts in worst]
    cases = {}
    for row in record["benchmark"].get("rows", []):
        cases.setdefault((row["case"], row["must_us"], row["floor_us"]), []).append(row)
    if cases:
        lines.append(
            f"benchmark in us (case, floor, must | results), "
            f"copy bandwidth {record['benchmark']['copy_bandwidth'] / 1e12:.2f} TB/s:"
        )
    for (case, must, floor), rows in cases.items():
        results = [
            f"{row['peer']} {row['gate']} "
            + (f"failed: {row['error'][:60]}" if row.get("error") else f"{row['gpu_us']:.1f}")
            + (f" ({row['gpu_us_sustained']:.1f} sustained)" if "gpu_us_sustained" in row else "")
            for row in rows
        ]
        host = [row["host_us"] for row in rows if row["peer"].startswith("flash_kda") and not row.get("error")]
        lines.append(
            f"  {case} {floor:.0f} {must} | {', '.join(results)}" + (f" | host {max(host):.0f}" if host else "")
        )
    found = problems(record)
    lines.append(f"result: {'passed' if not found else f'{len(found)} problems, first: {found[0][:200]}'}")
    return "\n".join(lines)


def step(text):
    name, equals, what = text.partition("=")
    if not equals or not name or not what:
        raise argparse.ArgumentTypeError(f"expected NAME=ok or NAME=WHAT WENT WRONG, got {text!r}")
    return name, what


def main():
    parser = argparse.ArgumentParser(description="Writes tests/gpu_record.json; called by tests/gpu.sh alone.")
    parser.add_argument("--junit", required=True, action="append", help="pytest's JUnit XML, of one run or several")
    parser.add_argument("--benchmark", required=True, help="JSON of python -m benchmarks.run")
    parser.add_argument("--features", required=True, help="JSON of python -m benchmarks.features")
    parser.add_argument("--fuzz", required=True, help="JSON of tests/fuzz.py")
    parser.add_argument("--sanitizer", required=True, help="folder of TOOL.status and TOOL.log")
    parser.add_argument("--step", type=step, action="append", default=[], help="NAME=ok, or NAME=what went wrong")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(
            "no GPU that PyTorch can use: there is nothing to record, and tests/gpu_record.json stays as it is"
        )
    record = make_record(
        arguments.junit,
        arguments.benchmark,
        arguments.features,
        arguments.fuzz,
        arguments.sanitizer,
        arguments.step,
    )
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    print(summary(record))
    return 1 if problems(record) else 0


if __name__ == "__main__":
    sys.exit(main())

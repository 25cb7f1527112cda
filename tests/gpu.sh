#!/usr/bin/env bash
# On a GPU machine: sets up and builds, runs the GPU tests, the fuzzer, compute-sanitizer and the benchmark, and writes
# tests/gpu_record.json. Exit status 1, and a record that says so, if anything fails. Logs, plots and raw results:
# tests/output.
#
#     bash tests/gpu.sh [checks | times]
#
# `checks` leaves out the benchmarks, `times` goes on from there: two runs where one would be too long.
set -uo pipefail
SANITIZER_TOOLS="memcheck racecheck initcheck synccheck"
SANITIZER_SECONDS=280
FUZZ_CASES=2000
FUZZ_SEED=0
FUZZ_SECONDS=250
# Ours are measured first, FLA, which tunes its kernels for every head count and form, as far as this reaches.
BENCHMARK_SECONDS=300
COMPILE_SECONDS=280
# Tests beside the rest, each line a pytest of its own, named by its first word: those of segments, because they are
# many; those of streams, most of which start a Python of their own; those that build another binary; and those that
# wait for FLA's compiling and tuning, in two halves.
TESTS_APART="segments tests/test_segments.py
streams tests/test_streams.py
failures tests/test_failures.py
fla tests/test_fla.py -k not(packed)
fla_packed tests/test_fla.py -k packed"

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
export FLASH_KDA_TEST_OUTPUT=$ROOT/tests/output
output=$FLASH_KDA_TEST_OUTPUT
part=${1:-all}
case "$part" in
all | checks | times) ;;
*) echo "gpu.sh: expected checks, times or nothing, got $part" >&2 && exit 2 ;;
esac
if [ "$part" != times ]; then rm -rf "$output"; fi
mkdir -p "$output"
steps=()
# Whatever ends this script on a GPU machine, a failed build or a time limit too, leaves a record.
trap write_record EXIT
trap 'exit 143' TERM

names_apart() { cut -d " " -f 1 <<<"$TESTS_APART"; }
files_apart() { cut -d " " -f 2 <<<"$TESTS_APART" | sort -u; }

write_record() {
    local status=$?
    trap - EXIT
    if [ ${#steps[@]} = 0 ]; then steps=("set-up and build=exit status $status"); fi
    [ -n "${PYTHON:-}" ] || exit "$status"
    local name junit=()
    for name in tests $(names_apart); do junit+=(--junit "$output/$name.xml"); done
    "$PYTHON" tests/gpu_record.py "${junit[@]}" --benchmark "$output/benchmark.json" \
        --features "$output/features.json" --fuzz "$output/fuzz.json" --sanitizer "$output" "${steps[@]/#/--step=}" ||
        exit 1
    exit 0
}

# Runs a step, its output on the screen and in a log, and notes how it ended.
run_step() {
    local name=$1 started=$SECONDS status
    shift
    "$@" 2>&1 | tee "$output/$name.log"
    status=${PIPESTATUS[0]}
    echo "$name: exit status $status, $((SECONDS - started)) s"
    if [ "$status" = 0 ]; then note_step "$name=ok"; else note_step "$name=exit status $status"; fi
}

# In memory, and in a file for a second run.
note_step() {
    steps+=("$1")
    echo "$1" >>"$output/steps"
}

digest_of_sources() {
    "$PYTHON" -c 'from benchmarks.files import ROOT; from source_digest import tree_digest
print(tree_digest(ROOT / "csrc")["total"])'
}

# Each schedule by itself: the reports of one do not fill the list of another.
run_sanitizer() {
    local tool=$1 schedule=$2 name="$1 $2" started=$SECONDS status program
    program=$(command -v compute-sanitizer || ls "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer" 2>/dev/null)
    if [ -z "$program" ]; then
        echo missing >"$output/$name.status"
        return
    fi
    # racecheck follows the lane that arrives at a barrier alone. In the sm90 kernels one lane hands a stage back for
    # its warp, after a __syncwarp that racecheck does not connect with it: calls that fill a stage again are left out.
    # The record says which parts ran, from the program's output; the other tools run all of them.
    local parts=""  # all that the schedule has
    if [ "$name" = "racecheck sm90" ]; then parts="short"; fi
    if [ "$name" = "racecheck segments" ]; then parts="short cut"; fi
    # shellcheck disable=SC2086
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout "$SANITIZER_SECONDS" "$program" --tool "$tool" --error-exitcode 9 \
        "$PYTHON" tests/sanitizer_grid.py "$schedule" $parts >"$output/$name.log" 2>&1
    status=$?
    echo "took $((SECONDS - started)) s" >>"$output/$name.log"
    echo $status >"$output/$name.status"
}

run_tests() {
    "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider --tb=short --durations=40 --durations-min=1 \
        --junitxml="$output/$1.xml" -o junit_family=xunit1 "${@:2}"
}

run_fuzz() {
    "$PYTHON" tests/fuzz.py --device cuda --seed "$FUZZ_SEED" --cases "$FUZZ_CASES" --seconds "$FUZZ_SECONDS" \
        --json "$output/fuzz.json"
}

# What the benchmark will need of FLA, where nobody else wants a core. No check: what is not compiled by then is
# compiled where it is timed.
compile_fla() {
    timeout "$COMPILE_SECONDS" nice "$PYTHON" -m benchmarks.warm_fla >"$output/warm_fla.log" 2>&1
}

# Runs a command in the background; end_step NAME waits for it and makes a step of it.
declare -A background
start_step() {
    local name=$1
    shift
    {
        started=$SECONDS
        "$@" >"$output/$name.background" 2>&1
        echo $? >"$output/$name.exit"
        echo "$name took $((SECONDS - started)) s" >>"$output/$name.background"
    } &
    background[$name]=$!
}

end_step() {
    wait "${background[$1]}"
    run_step "$1" show "$1"
}

show() {
    cat "$output/$1.background"
    return "$(cat "$output/$1.exit")"
}

run_checks() {
    note_step "set-up and build=ok"
    digest_of_sources >"$output/digest"
    # All beside each other, since nothing here is timed. Most of the sanitizers' time is PyTorch starting under them.
    local name words
    schedules=$("$PYTHON" tests/sanitizer_grid.py --list)
    for tool in $SANITIZER_TOOLS; do
        for schedule in $schedules; do run_sanitizer "$tool" "$schedule" & done
    done
    compile_fla &
    while read -ra words <&3; do
        start_step "${words[0]}" run_tests "${words[@]}"
    done 3<<<"$TESTS_APART"
    start_step fuzz run_fuzz
    # shellcheck disable=SC2046
    run_step tests run_tests tests tests $(files_apart | sed s/^/--ignore=/)
    for name in $(names_apart) fuzz; do end_step "$name"; done
    wait
    grep -H "^took" "$output"/*.log
    cat "$output/warm_fla.log"
}

run_times() {
    # FLA's kernels are tuned by the process that times them, not by one that had the GPU together with the tests.
    export FLA_CACHE_RESULTS=0
    run_step benchmark "$PYTHON" -m benchmarks.run --seconds "$BENCHMARK_SECONDS" --json "$output/benchmark.json"
    run_step features "$PYTHON" -m benchmarks.features --json "$output/features.json"
    # A guard against regressions: the landed results of this device, where there are any. By rested times, which
    # repeat within 1 % from one run to another (docs/sm90-forward.md).
    landed=$("$PYTHON" -c 'import torch
from benchmarks.files import landed
print(landed(torch.cuda.get_device_name()))')
    if [ -f "$landed" ]; then
        run_step compare "$PYTHON" -m benchmarks.compare --threshold 1.05 "$landed" "$output/benchmark.json"
    fi
}

setup_env gpu
if [ "$part" = times ]; then
    if [ "$(cat "$output/digest" 2>/dev/null)" != "$(digest_of_sources)" ]; then
        echo "gpu.sh: no checks of these sources in $output: run 'bash tests/gpu.sh checks' first" >&2
        trap - EXIT
        exit 2
    fi
    mapfile -t steps <"$output/steps"
else
    run_checks
fi
if [ "$part" != checks ]; then run_times; fi

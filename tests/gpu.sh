#!/usr/bin/env bash
# On a GPU machine: sets up and builds, runs the GPU tests, the benchmark and compute-sanitizer, and writes
# tests/gpu_record.json. Exit status 1, and a record that says so, if anything fails. Logs, plots and raw results:
# tests/output.
set -uo pipefail
SANITIZER_TOOLS="memcheck racecheck"
SANITIZER_SECONDS=90
# FLA compiles and tunes its kernels for every shape, for minutes: ours are measured first, FLA as far as this reaches.
BENCHMARK_SECONDS=240

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
export FLASH_KDA_TEST_OUTPUT=$ROOT/tests/output
output=$FLASH_KDA_TEST_OUTPUT
rm -rf "$output"
mkdir -p "$output"
steps=()
# Whatever ends this script on a GPU machine, a failed build too, leaves a record.
trap write_record EXIT

write_record() {
    local status=$?
    trap - EXIT
    if [ ${#steps[@]} = 0 ]; then steps=("set-up and build=exit status $status"); fi
    [ -n "${PYTHON:-}" ] || exit "$status"
    "$PYTHON" tests/gpu_record.py --junit "$output/tests.xml" --junit "$output/fla.xml" \
        --benchmark "$output/benchmark.json" --sanitizer "$output" "${steps[@]/#/--step=}" || exit 1
    exit 0
}

# Runs a step, its output on the screen and in a log, and notes how it ended.
run_step() {
    local name=$1 started=$SECONDS status
    shift
    "$@" 2>&1 | tee "$output/$name.log"
    status=${PIPESTATUS[0]}
    echo "$name: exit status $status, $((SECONDS - started)) s"
    if [ "$status" = 0 ]; then steps+=("$name=ok"); else steps+=("$name=exit status $status"); fi
}

run_sanitizer() {
    local tool=$1 program
    program=$(command -v compute-sanitizer || ls "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer" 2>/dev/null)
    if [ -z "$program" ]; then
        echo missing >"$output/$tool.status"
        return
    fi
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout "$SANITIZER_SECONDS" "$program" --tool "$tool" --error-exitcode 9 \
        "$PYTHON" tests/sanitizer_grid.py >"$output/$tool.log" 2>&1
    echo $? >"$output/$tool.status"
}

run_tests() {
    "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider --tb=short --junitxml="$output/$1.xml" \
        -o junit_family=xunit1 "${@:2}"
}

run_fla_tests() {
    run_tests fla tests/test_fla.py >"$output/fla_tests.log" 2>&1
    echo $? >"$output/fla_tests.exit"
}

report_fla_tests() {
    cat "$output/fla_tests.log"
    return "$(cat "$output/fla_tests.exit")"
}

setup_env gpu
steps+=("set-up and build=ok")
# Beside the tests, whose time does not matter: the sanitizers, most of whose time is PyTorch starting under them, and
# the tests that wait for FLA's tuning.
for tool in $SANITIZER_TOOLS; do run_sanitizer "$tool" & done
run_fla_tests &
run_step tests run_tests tests tests --ignore=tests/test_fla.py
wait
run_step fla report_fla_tests
run_step benchmark "$PYTHON" -m benchmarks.run --seconds "$BENCHMARK_SECONDS" --json "$output/benchmark.json"
# A guard against regressions: the landed results of this device, where there are any. Single runs of a case spread by
# up to 12 %, so that is not what it may trip on.
landed=$("$PYTHON" -c 'import torch; from benchmarks.files import landed; print(landed(torch.cuda.get_device_name()))')
if [ -f "$landed" ]; then
    run_step compare "$PYTHON" -m benchmarks.compare --threshold 1.15 "$landed" "$output/benchmark.json"
fi

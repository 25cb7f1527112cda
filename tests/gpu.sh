#!/usr/bin/env bash
# On a GPU machine: sets up and builds, runs the GPU tests, the benchmark and compute-sanitizer, and writes
# tests/gpu_record.json. Exit status 1, and a record that says so, if anything fails. Logs, plots and raw results:
# tests/output.
set -uo pipefail
SANITIZER_TOOLS="memcheck racecheck"
SANITIZER_SECONDS=90

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
    "$PYTHON" tests/gpu_record.py --junit "$output/tests.xml" --benchmark "$output/benchmark.json" \
        --sanitizer "$output" "${steps[@]/#/--step=}" || exit 1
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

setup_env gpu
steps+=("set-up and build=ok")
# Beside the tests, whose time does not matter, and both at once: most of their time is PyTorch starting under them.
for tool in $SANITIZER_TOOLS; do run_sanitizer "$tool" & done
run_step tests "$PYTHON" -m pytest tests -m gpu -q -p no:cacheprovider --tb=short \
    --junitxml="$output/tests.xml" -o junit_family=xunit1
wait
run_step benchmark "$PYTHON" -m benchmarks.run --json "$output/benchmark.json"

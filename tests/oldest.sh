#!/usr/bin/env bash
# The CPU tests and a build with the oldest versions that pyproject.toml allows, in an environment and a copy of their
# own. Downloads PyTorch 2.4 with its CUDA libraries, some gigabytes.
#
#     bash tests/oldest.sh [FOLDER]      default: build/oldest
#
# FLASH_KDA_PYTHON: a Python that PyTorch 2.4 runs on, 3.10 to 3.12. With nvcc the kernels of FLASH_KDA_CUDA_ARCHS
# (default: 90a) are built, too. The host code is also read with the headers of CUDA 12.9, the oldest toolkit, and every
# kernel compiled with its NVRTC.
set -euo pipefail
unset CDPATH  # by which cd may go elsewhere, and prints where
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=$(realpath -m "${1:-$ROOT/build/oldest}")
python3=${FLASH_KDA_PYTHON:-python3}
if ! "$python3" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))'; then
    echo "oldest: error: $("$python3" -V), and PyTorch 2.4 needs 3.10 to 3.12: set FLASH_KDA_PYTHON" >&2
    exit 2
fi

# NAME>=VERSION in pyproject.toml becomes NAME==VERSION; PyTorch 2.4 was made for NumPy 1.
mapfile -t oldest < <(sed -n '/^\[project.optional-dependencies\]/q; s/"\([a-z0-9-]\+\)>=\([0-9.]*\)"/\n\1==\2.*\n/gp' \
    "$ROOT/pyproject.toml" | grep '==' | sort -u)
[ -x "$folder/venv/bin/python" ] || "$python3" -m venv "$folder/venv"
PYTHON=$folder/venv/bin/python
"$PYTHON" -m pip install -q --disable-pip-version-check "${oldest[@]}" ninja wheel rich "numpy<2" pytest hypothesis
# Apart, since PyTorch 2.4 has its own CUDA runtime.
"$PYTHON" "$ROOT/tests/cuda12.py" --install "$folder/cuda-12.9"
"$PYTHON" -m pip list --disable-pip-version-check | grep -E '^(torch|setuptools|pybind11|nvidia-cutlass|numpy) '

rm -rf "$folder/project"
PYTHONPATH=$ROOT/tests "$PYTHON" -c 'import sys, project_copy; project_copy.copy_project(sys.argv[1])' "$folder/project"
cd "$folder/project"
"$PYTHON" tests/cuda12.py "$folder/cuda-12.9"

export PYTHONPATH=$folder/project
tests=(tests/test_cpu.py tests/test_validation.py tests/test_recurrence.py tests/test_cli.py tests/test_build.py)
tests+=(tests/test_fuzz.py tests/test_hardening.py tests/test_operator.py)
if "$PYTHON" build_config.py "${FLASH_KDA_CUDA_ARCHS:=90a}"; then
    FLASH_KDA_CUDA_ARCHS=$FLASH_KDA_CUDA_ARCHS "$PYTHON" setup.py -q build_ext --inplace >"$folder/build.log" 2>&1 ||
        { tail -n 40 "$folder/build.log"; exit 1; }
    tests+=(tests/test_binary.py)
fi
# How fast the CPU path is depends on PyTorch, and is promised of the current one.
exec "$PYTHON" -m pytest -q -p no:cacheprovider "${tests[@]}" --deselect \
    tests/test_cpu.py::test_at_least_twenty_times_the_recurrence

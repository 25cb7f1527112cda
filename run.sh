#!/usr/bin/env bash
# From a bare machine to the main job: makes or reuses a Python environment, installs what is missing, builds the
# kernels where there is a GPU, and runs `python -m flash_kda`. Arguments go to that program.
set -euo pipefail
caller=$PWD
source "$(dirname "${BASH_SOURCE[0]}")/tests/setup_env.sh"
setup_env run
# Paths among the arguments are the caller's.
cd "$caller"
exec "$PYTHON" -m flash_kda "$@"

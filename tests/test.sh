#!/usr/bin/env bash
# Sets up as run.sh does, then runs every test that this machine can run. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env test
exec "$PYTHON" -m pytest tests -rfEs "$@"

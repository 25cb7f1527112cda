"""Benchmarks of flash_kda.fwd: `python -m benchmarks.run` from the repository's folder."""

import sys
from pathlib import Path

# The input generators and the error measure are those of the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

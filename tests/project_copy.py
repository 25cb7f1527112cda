"""A copy of the project's sources: a test can build or run scripts there without touching the tree it runs from."""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_NOT_SOURCES = shutil.ignore_patterns(
    ".*", "build", "dist", "*.egg-info", "*.so", "__pycache__", "output", "results", "cutlass", "venv"
)


def copy_project(destination: Path) -> Path:
    """Copies what a fresh clone would hold, less the files whose names begin with a dot; returns `destination`."""
    return shutil.copytree(ROOT, destination, ignore=_NOT_SOURCES)

"""Sources are formatted and free of lint, by the tools whose versions pyproject.toml pins."""

import importlib.metadata
import re
import subprocess
import sys

import pytest
from project_copy import ROOT

CPP_SOURCES = sorted(
    path for path in [*ROOT.glob("csrc/**/*"), *ROOT.glob("tests/*")] if path.suffix in {".h", ".cuh", ".cu", ".cpp"}
)


def pinned(name: str) -> None:
    """Skips unless the tool is installed in the pinned version: another one may want another format."""
    version = re.search(rf'"{name}==([\w.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed; pip install {name}=={version}")
    if installed != version:
        pytest.skip(f"{name} {installed} is installed, the format is that of {version}")


def run(*command) -> None:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, (result.stdout + result.stderr)[:4000]


@pytest.mark.parametrize("command", [("check",), ("format", "--check", "--diff")], ids=["lint", "format"])
def test_python(command):
    pinned("ruff")
    run(sys.executable, "-m", "ruff", *command, "--no-cache", ".")


def test_cpp():
    pinned("clang-format")
    import clang_format

    assert CPP_SOURCES
    run(clang_format.get_executable("clang-format"), "--dry-run", "--Werror", *CPP_SOURCES)


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("*/*.md")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_prose_line_length(path):
    """120 columns, except tables and lines that are one link or path."""
    lines = enumerate(path.read_text().splitlines(), start=1)
    assert [
        number for number, line in lines if len(line) > 120 and line[:1] not in "|<![" and " " in line.strip()
    ] == []

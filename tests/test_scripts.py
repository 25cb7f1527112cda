"""README's two commands, the scripts behind them, and the paths and commands that the documents name. No GPU needed."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from project_copy import ROOT, copy_project

SCRIPTS = sorted([*ROOT.glob("*.sh"), *ROOT.glob("tests/*.sh"), ROOT / ".ci" / "run"])
DOCUMENTS = sorted([*ROOT.glob("*.md"), ROOT / "third_party" / "README.md", *ROOT.glob("docs/*.md")])


def code_blocks(path: Path) -> list[str]:
    return re.findall(r"^```(?:bash|sh)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def run(script: Path, *arguments, cwd: Path, **environment) -> subprocess.CompletedProcess:
    inherited = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    return subprocess.run(
        ["bash", script, *arguments],
        cwd=cwd,
        env={**inherited, "FLASH_KDA_CUDA_ARCHS": "none", "FLASH_KDA_PYTHON": sys.executable, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    return copy_project(tmp_path_factory.mktemp("clone") / "a folder with spaces")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_parses(script):
    result = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_readme_opens_with_the_two_commands():
    readme = (ROOT / "README.md").read_text()
    opening = readme.split("\n## ")[0]
    assert "bash run.sh" in opening and "bash tests/test.sh" in opening
    assert re.search(r"exec bash tests/test\.sh$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_documents_exist(document):
    for block in code_blocks(document):
        assert subprocess.run(["bash", "-n"], input=block, text=True).returncode == 0, block
        for script in re.findall(r"\bbash ([\w./-]+\.sh)", block):
            assert (ROOT / script).is_file(), script
        for module in re.findall(r"\bpython3? -m (flash_kda|benchmarks[\w.]*|tests[\w.]*)", block):
            file = ROOT / module.replace(".", "/")
            assert file.with_suffix(".py").is_file() or (file / "__main__.py").is_file(), module


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_in_documents_exist(document):
    """A path is what stands in backticks or in a link and begins with a file or folder name of the repository's top."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    top = {path.name for path in ROOT.iterdir()} | {"csrc", "tests", "benchmarks", "flash_kda", "docs"}
    named = re.findall(r"`([\w.-]+(?:/[\w.-]+)*/?)`", text) + re.findall(r"\]\(([^):#]+)\)", text)
    # Made by a build, a set-up or a checkout of the reader's, so not in a clone.
    made = {".venv", "build", "build/cuda-12.9", ".clangd", "third_party/cutlass", "tests/output"}
    paths = [name for name in named if name.split("/")[0] in top and name.rstrip("/") not in made]
    missing = [name for name in paths if not (ROOT / name).exists() and not (document.parent / name).exists()]
    # flash_kda.fwd and the like are Python names, not paths.
    missing = [name for name in missing if "/" in name or Path(name).suffix in {".md", ".sh", ".py", ".toml"}]
    assert missing == []


def test_run_script_runs_the_main_job_from_any_folder(project, tmp_path):
    (tmp_path / "text.txt").write_text("A paragraph.\n\nAnother, somewhat longer one.\n")
    arguments = ["--device", "cpu", "--heads", "1", "--text", "text.txt", "--json", "result.json"]
    result = run(project / "run.sh", *arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "set-up: FLASH_KDA_CUDA_ARCHS=none: kernels skipped" in result.stdout
    assert "kernels for none" in result.stdout
    assert isinstance(json.loads((tmp_path / "result.json").read_text()), dict)
    assert list(project.glob("flash_kda/*.so")) == [] and not (project / ".venv").exists()


def test_run_script_keeps_the_exit_status_of_the_main_job(project, tmp_path):
    result = run(project / "run.sh", "--text", "missing.txt", cwd=tmp_path)
    assert result.returncode == 2
    assert "missing.txt" in result.stderr and "Traceback" not in result.stderr


def test_test_script_collects_the_tests(project):
    result = run(project / "tests" / "test.sh", "--collect-only", "-q", "-p", "no:cacheprovider", cwd=project.parent)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^\d+ tests collected", result.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"FLASH_KDA_PYTHON": "/nonexistent/python"}, "FLASH_KDA_PYTHON=/nonexistent/python is no program"),
        ({"FLASH_KDA_CUDA_ARCHS": "86"}, "FLASH_KDA_CUDA_ARCHS=86 names the unknown arch '86'"),
    ],
    ids=["no Python", "unknown arch"],
)
def test_set_up_ends_with_one_line_and_status_2(project, tmp_path, environment, message):
    result = run(project / "run.sh", cwd=tmp_path, **environment)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1 and message in result.stderr


def test_under_a_cdpath(project):
    """With it `cd` prints where it goes, and may go elsewhere."""
    result = run(Path(project.name, "run.sh"), "--version", cwd=project.parent, CDPATH=".")
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_python_without_torch_is_refused(project, tmp_path):
    """FLASH_KDA_PYTHON names an environment to be used as it is: nothing is installed into one that lacks PyTorch."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    python.chmod(0o755)
    result = run(project / "run.sh", cwd=tmp_path, FLASH_KDA_PYTHON=str(python))
    assert result.returncode == 2
    assert f"FLASH_KDA_PYTHON={python} cannot import torch" in result.stderr


def test_setup_clangd_writes_one_file(project):
    pytest.importorskip("cutlass_library", reason="setup_clangd.sh needs CUTLASS")
    before = {path for path in project.rglob("*") if "__pycache__" not in path.parts}
    result = run(Path(project.name, "setup_clangd.sh"), cwd=project.parent, CDPATH=".")
    if result.returncode != 0 and "nvcc" in result.stderr:
        pytest.skip(f"no CUDA toolkit: {result.stderr.strip()}")
    assert result.returncode == 0, result.stderr
    after = {path for path in project.rglob("*") if "__pycache__" not in path.parts}
    assert after - before == {project / ".clangd"}
    folders = re.findall(r'"-I(.+)"', (project / ".clangd").read_text())
    assert any(Path(folder, "cutlass", "version.h").is_file() for folder in folders)
    assert any(Path(folder, "cuda_runtime.h").is_file() for folder in folders)
    assert all(Path(folder).is_dir() for folder in folders)
    assert importlib.util.find_spec("torch") is None or any("torch" in folder for folder in folders)


FAKE_PYTHON = r"""#!/usr/bin/env bash
# Stands in for the Python of tests/gpu.sh: notes what it is asked to run, and fails where FAIL says.
printf '%s\n' "$*" >>"$CALLS"
case "$*" in
*"sanitizer_grid.py --list"*) echo "portable sm90 segments" ;;
-c*) echo benchmarks/results/nvidia-h200.json ;;
*"fuzz.py"*) echo fuzzing ;;
*"--ignore"*) ;;
*"test_fla.py"*) sleep 0.3 && echo fla tests ;;
*"benchmarks.warm_fla"*) echo kernels compiled ;;
*"benchmarks.run"*) echo "FLA_CACHE_RESULTS=$FLA_CACHE_RESULTS" >>"$CALLS" ;;
esac
[ -z "${FAIL:-}" ] || case "$*" in *$FAIL*) exit 3 ;; esac
"""


CHECKS = ["set-up and build", "tests", "segments", "streams", "failures", "fla", "fla_packed", "fuzz"]


@pytest.fixture
def gpu_script(tmp_path):
    """tests/gpu.sh with stand-ins for the set-up, Python and compute-sanitizer: gpu_script(FAIL, argument...)."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "nvidia-h200.json").touch()
    (tmp_path / "tests" / "gpu.sh").write_text((ROOT / "tests" / "gpu.sh").read_text())
    (tmp_path / "tests" / "setup_env.sh").write_text(
        f"ROOT={tmp_path}\nsetup_env() {{ cd {tmp_path}; PYTHON={tmp_path}/bin/python; }}\n"
    )
    sanitizer = '#!/bin/sh\nshift 4\nexec "$@"\n'
    for name, text in (("python", FAKE_PYTHON), ("compute-sanitizer", sanitizer)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}

    def start(fail, *arguments):
        return run(tmp_path / "tests" / "gpu.sh", *arguments, cwd=tmp_path, **environment, FAIL=fail)

    return start


@pytest.mark.parametrize(
    ("fail", "step"),
    [
        ("nothing", None),
        ("fuzz.py", "fuzz"),
        ("failures.xml -o", "failures"),
        ("fla.xml -o", "fla"),
        ("fla_packed.xml -o", "fla_packed"),
        ("segments.xml -o", "segments"),
        ("streams.xml -o", "streams"),
        ("tests.xml -o", "tests"),
        ("benchmarks.warm_fla", None),  # no check
        ("benchmarks.run", "benchmark"),
        ("benchmarks.features", "features"),
        ("benchmarks.compare", "compare"),
    ],
)
def test_gpu_script_runs_every_step_and_records_how_it_ended(gpu_script, tmp_path, fail, step):
    result = gpu_script(fail)
    assert result.returncode == 0, result.stdout + result.stderr
    *_, record = (tmp_path / "calls").read_text().splitlines()
    assert record.startswith("tests/gpu_record.py") and result.stdout.count("fla tests") == 2
    assert result.stdout.count("kernels compiled") == 1 and result.stdout.count("racecheck sm90.log:took ") == 1
    assert "FLA_CACHE_RESULTS=0" in (tmp_path / "calls").read_text().splitlines()
    steps = dict(text.split("=", 1) for text in re.findall(r"--step=(.+?=(?:ok|exit status \d+))", record))
    assert list(steps) == [*CHECKS, "benchmark", "features", "compare"]
    for name in set(CHECKS) - {"set-up and build", "fuzz"}:
        assert f"--junit {tmp_path}/tests/output/{name}.xml" in record
    assert {name for name, what in steps.items() if what != "ok"} == ({step} if step else set())
    if step:
        assert steps[step] == "exit status 3"
    statuses = {path.stem: path.read_text().strip() for path in (tmp_path / "tests" / "output").glob("*.status")}
    tools = ("memcheck", "racecheck", "initcheck", "synccheck")
    assert statuses == {f"{tool} {schedule}": "0" for tool in tools for schedule in ("portable", "sm90", "segments")}
    sanitized = {line for line in (tmp_path / "calls").read_text().splitlines() if "sanitizer_grid.py " in line}
    fresh = {"tests/sanitizer_grid.py sm90 short", "tests/sanitizer_grid.py segments short cut"}
    assert fresh < sanitized and {line.rstrip() for line in sanitized - fresh} == {
        f"tests/sanitizer_grid.py {words}" for words in ("--list", "portable", "sm90", "segments")
    }
    for option in ("--junit", "--benchmark", "--features", "--fuzz", "--sanitizer"):
        assert f"{option} {tmp_path}/tests/output" in record


def test_gpu_script_runs_every_test_once(gpu_script, tmp_path):
    """Its runs of pytest, collected for real: together all GPU tests, and none twice."""
    assert gpu_script("nothing", "checks").returncode == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    runs = [line.partition("junit_family=xunit1 ")[2].split() for line in calls if line.startswith("-m pytest ")]

    def collected(arguments):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
        result = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stdout + result.stderr
        return [line for line in result.stdout.splitlines() if "::" in line]

    found = [test for selection in runs for test in collected(selection)]
    assert len(runs) == 6 and sorted(found) == sorted(collected(["tests"]))


def test_gpu_script_in_two_halves_records_both(gpu_script, tmp_path):
    def steps_of_record():
        *_, record = (tmp_path / "calls").read_text().splitlines()
        assert record.startswith("tests/gpu_record.py")
        return re.findall(r"--step=(.+?)=(?:ok|exit status \d+)", record)

    assert gpu_script("fla.xml -o", "checks").returncode == 0 and steps_of_record() == CHECKS
    result = gpu_script("nothing", "times")
    assert result.returncode == 0, result.stdout + result.stderr
    assert steps_of_record() == [*CHECKS, "benchmark", "features", "compare"]
    *_, record = (tmp_path / "calls").read_text().splitlines()
    assert "--step=fla=exit status 3" in record and "--step=compare=ok" in record
    assert (tmp_path / "calls").read_text().count("sanitizer_grid.py --list") == 1


@pytest.mark.parametrize("digest", [None, "of other sources"])
def test_gpu_script_needs_checks_of_these_sources(gpu_script, tmp_path, digest):
    assert gpu_script("nothing", "checks").returncode == 0
    path = tmp_path / "tests" / "output" / "digest"
    if digest is None:
        path.unlink()
    else:
        path.write_text(digest)
    (tmp_path / "calls").unlink()
    result = gpu_script("nothing", "times")
    assert result.returncode == 2 and "no checks of these sources" in result.stderr
    assert "gpu_record.py" not in (tmp_path / "calls").read_text()


def test_gpu_script_knows_its_arguments(gpu_script, tmp_path):
    result = gpu_script("nothing", "all of it")
    assert result.returncode == 2 and "expected checks, times or nothing, got all of it" in result.stderr
    assert not (tmp_path / "calls").exists()

"""The build switches: what they choose, and the one line that each impossible choice ends with. No GPU needed."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from project_copy import ROOT, copy_project

sys.path.insert(0, str(ROOT))

import build_config  # noqa: E402
from build_config import BuildError  # noqa: E402

VERSION = (ROOT / "flash_kda" / "_version.py").read_text().split('"')[1]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for variable in ("FLASH_KDA_CUDA_ARCHS", "CUDA_HOME", "CUDA_PATH", "CUTLASS_PATH", "MAX_JOBS"):
        monkeypatch.delenv(variable, raising=False)


def program(path: Path, output: str, status: int = 0) -> Path:
    """An executable that prints `output`, standing in for nvcc or nvidia-smi."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncat <<'EOF'\n{output}\nEOF\nexit {status}\n")
    path.chmod(0o755)
    return path


def toolkit(home: Path, release: str) -> Path:
    program(home / "bin" / "nvcc", f"Cuda compilation tools, release {release}, V{release}.1")
    (home / "lib64").mkdir()
    (home / "lib64" / "libcudart_static.a").touch()
    return home


def cutlass(home: Path, major: int, minor: int) -> Path:
    header = home / "include" / "cutlass" / "version.h"
    header.parent.mkdir(parents=True)
    header.write_text(f"#define CUTLASS_MAJOR {major}\n#define CUTLASS_MINOR {minor}\n#define CUTLASS_PATCH 0\n")
    return home


def without_torch_device(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


class TestArchs:
    @pytest.mark.parametrize(
        ("value", "archs"),
        [
            ("none", []),
            ("all", ["90a", "100a", "103a", "120a"]),
            ("90a", ["90a"]),
            ("120a, 90a,90a", ["90a", "120a"]),
        ],
    )
    def test_named(self, value, archs):
        assert build_config.parse_archs(value) == archs

    @pytest.mark.parametrize("value", ["90", "sm_90a", "90a,77", "90a,", "ALL", "none,90a"])
    def test_unknown_is_refused(self, value):
        with pytest.raises(BuildError, match=r"unknown arch .*auto, all, none.*90a, 100a, 103a, 120a") as error:
            build_config.parse_archs(value)
        assert f"FLASH_KDA_CUDA_ARCHS={value}" in str(error.value)

    @pytest.mark.parametrize("value", ["", " "])
    def test_empty_is_auto(self, monkeypatch, value):
        monkeypatch.setenv("FLASH_KDA_CUDA_ARCHS", value)
        assert build_config.requested_archs() == "auto"

    def test_auto_asks_torch(self, monkeypatch):
        torch = pytest.importorskip("torch")
        capabilities = [(10, 0), (9, 0), (10, 0)]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
        assert build_config.parse_archs("auto") == ["90a", "100a"]

    @pytest.mark.parametrize(
        ("capability", "arch"), [("9.0", "90a"), ("10.0", "100a"), ("10.3", "103a"), ("12.0", "120a")]
    )
    def test_auto_asks_the_driver_where_torch_sees_nothing(self, monkeypatch, tmp_path, capability, arch):
        without_torch_device(monkeypatch)
        program(tmp_path / "nvidia-smi", f"{capability}\n{capability}")
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        assert build_config.parse_archs("auto") == [arch]

    @pytest.mark.parametrize("capability", ["8.0", "8.9", "11.0", "12.1"])
    def test_auto_refuses_a_device_that_the_kernels_do_not_run_on(self, monkeypatch, tmp_path, capability):
        without_torch_device(monkeypatch)
        program(tmp_path / "nvidia-smi", capability)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        with pytest.raises(BuildError, match=f"compute capability {capability}, .*FLASH_KDA_CUDA_ARCHS=none"):
            build_config.parse_archs("auto")

    @pytest.mark.parametrize("installed", [False, True])
    def test_auto_without_a_device(self, monkeypatch, tmp_path, installed):
        without_torch_device(monkeypatch)
        if installed:
            program(tmp_path / "nvidia-smi", "No devices were found", status=6)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
        with pytest.raises(
            BuildError, match=r"auto found no visible NVIDIA GPU: set FLASH_KDA_CUDA_ARCHS to all, .*none"
        ):
            build_config.parse_archs("auto")


class TestCuda:
    @pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
    def test_from_the_environment(self, monkeypatch, tmp_path, variable):
        monkeypatch.setenv(variable, str(toolkit(tmp_path / "cuda", "12.9")))
        cuda = build_config.find_cuda()
        assert cuda == (tmp_path / "cuda", (12, 9))
        assert cuda.library_dir == tmp_path / "cuda" / "lib64"

    def test_from_the_path(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(toolkit(tmp_path / "cuda", "13.1") / "bin"), prepend=os.pathsep)
        assert build_config.find_cuda() == (tmp_path / "cuda", (13, 1))

    def test_the_toolkit_behind_a_script_on_the_path(self, monkeypatch, tmp_path):
        toolkit(tmp_path / "cuda", "13.0")
        script = tmp_path / "bin" / "nvcc"
        script.parent.mkdir()
        top = tmp_path / "cuda" / "bin" / ".."
        script.write_text(
            f'#!/bin/sh\n[ "$1" != --dryrun ] || exec echo "#$ TOP={top}" >&2\nexec {tmp_path}/cuda/bin/nvcc "$@"\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
        assert build_config.find_cuda() == (tmp_path / "cuda", (13, 0))

    @pytest.mark.parametrize("release", ["11.8", "12.8"])
    def test_too_old(self, monkeypatch, tmp_path, release):
        monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda", release)))
        with pytest.raises(BuildError, match=f"nvcc is CUDA {release}, older than 12.9: set CUDA_HOME"):
            build_config.find_cuda()

    def test_not_an_nvcc(self, monkeypatch, tmp_path):
        program(tmp_path / "bin" / "nvcc", "hello")
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        with pytest.raises(BuildError, match="names no release: set CUDA_HOME"):
            build_config.find_cuda()

    def test_an_nvcc_that_cannot_be_run(self, monkeypatch, tmp_path):
        program(tmp_path / "bin" / "nvcc", "release 13.0").write_bytes(b"\x7fELF")
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        with pytest.raises(BuildError, match="nvcc .* failed .*: set CUDA_HOME to a working CUDA toolkit"):
            build_config.find_cuda()

    def test_home_without_nvcc(self, monkeypatch, tmp_path):
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        with pytest.raises(BuildError, match=f"CUDA_HOME={tmp_path} holds no bin/nvcc: .*FLASH_KDA_CUDA_ARCHS=none"):
            build_config.find_cuda()

    def test_no_nvcc_anywhere(self, monkeypatch):
        monkeypatch.setattr(build_config.shutil, "which", lambda *_, **__: None)
        with pytest.raises(BuildError, match="nvcc was found neither .*install CUDA 12.9 .*FLASH_KDA_CUDA_ARCHS=none"):
            build_config.find_cuda()

    def test_no_static_runtime(self, monkeypatch, tmp_path):
        home = toolkit(tmp_path / "cuda", "13.0")
        (home / "lib64" / "libcudart_static.a").unlink()
        monkeypatch.setenv("CUDA_HOME", str(home))
        with pytest.raises(BuildError, match=f"no libcudart_static.a under {home}"):
            build_config.find_cuda().library_dir  # noqa: B018


class TestCutlass:
    def test_path_then_third_party_then_wheel(self, monkeypatch, tmp_path):
        wheel = tmp_path / "site" / "cutlass_library"
        cutlass(wheel / "source", 4, 2)
        (wheel / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path / "site")
        assert build_config.find_cutlass(tmp_path) == wheel / "source" / "include"
        cutlass(tmp_path / "third_party" / "cutlass", 4, 3)
        assert build_config.find_cutlass(tmp_path) == tmp_path / "third_party" / "cutlass" / "include"
        monkeypatch.setenv("CUTLASS_PATH", str(cutlass(tmp_path / "mine", 5, 0)))
        assert build_config.find_cutlass(tmp_path) == tmp_path / "mine" / "include"

    def test_missing(self, monkeypatch, tmp_path):
        monkeypatch.setattr(build_config.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(BuildError, match=r"neither in CUTLASS_PATH nor .*set CUTLASS_PATH .*'nvidia-cutlass>=4.2'"):
            build_config.find_cutlass(tmp_path)

    def test_path_without_cutlass_is_not_passed_over(self, monkeypatch, tmp_path):
        monkeypatch.setenv("CUTLASS_PATH", str(tmp_path))
        with pytest.raises(BuildError, match=f"CUTLASS_PATH={tmp_path} holds no include/cutlass/version.h"):
            build_config.find_cutlass(tmp_path)

    def test_header_without_a_version(self, monkeypatch, tmp_path):
        header = cutlass(tmp_path, 4, 2) / "include" / "cutlass" / "version.h"
        header.write_text("#define CUTLASS_MAJOR 4\n")
        monkeypatch.setenv("CUTLASS_PATH", str(tmp_path))
        with pytest.raises(BuildError, match=f"^{header} names no version: set CUTLASS_PATH"):
            build_config.find_cutlass(tmp_path)

    @pytest.mark.parametrize(("major", "minor"), [(3, 9), (4, 1)])
    def test_too_old(self, monkeypatch, tmp_path, major, minor):
        monkeypatch.setenv("CUTLASS_PATH", str(cutlass(tmp_path / "old", major, minor)))
        with pytest.raises(BuildError, match=f"is CUTLASS {major}.{minor}, older than 4.2"):
            build_config.find_cutlass(tmp_path)


@pytest.mark.parametrize(
    ("value", "jobs"), [("3", 3), ("0", 1), ("", os.cpu_count()), ("many", os.cpu_count()), ("²", os.cpu_count())]
)
def test_max_jobs(monkeypatch, value, jobs):
    monkeypatch.setenv("MAX_JOBS", value)
    assert build_config.max_jobs() == jobs


def run_setup(tmp_path, *arguments, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "setup.py", *arguments],
        cwd=ROOT,
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        capture_output=True,
        text=True,
        timeout=300,
    )


def assert_one_line(result: subprocess.CompletedProcess, text: str) -> None:
    lines = [line for line in result.stderr.splitlines() if line.startswith("flash_kda: ")]
    assert result.returncode == 1, result.stderr
    assert len(lines) == 1 and text in lines[0], result.stderr
    assert "Traceback" not in result.stderr


class TestSetup:
    """setup.py as a program: the same errors, one line each, before anything is compiled."""

    def build(self, tmp_path, **environment):
        build = ("build_ext", f"--build-temp={tmp_path / 'temp'}", f"--build-lib={tmp_path / 'lib'}")
        result = run_setup(tmp_path, *build, **environment)
        assert not (tmp_path / "temp").exists() and not (tmp_path / "lib").exists()
        return result

    def test_auto_without_a_device(self, tmp_path):
        bin_dir = program(tmp_path / "bin" / "nvidia-smi", "", status=9).parent
        result = self.build(tmp_path, CUDA_VISIBLE_DEVICES="", PATH=f"{bin_dir}{os.pathsep}{os.environ['PATH']}")
        assert_one_line(result, "FLASH_KDA_CUDA_ARCHS=auto found no visible NVIDIA GPU")

    def test_unknown_arch(self, tmp_path):
        assert_one_line(self.build(tmp_path, FLASH_KDA_CUDA_ARCHS="80"), "unknown arch '80'")

    def test_old_nvcc(self, tmp_path):
        home = toolkit(tmp_path / "cuda", "12.4")
        assert_one_line(self.build(tmp_path, FLASH_KDA_CUDA_ARCHS="90a", CUDA_HOME=home), "CUDA 12.4, older than 12.9")

    def test_no_nvcc(self, tmp_path):
        result = self.build(tmp_path, FLASH_KDA_CUDA_ARCHS="90a", CUDA_HOME=tmp_path)
        assert_one_line(result, "holds no bin/nvcc")

    def test_no_cutlass(self, tmp_path):
        home = toolkit(tmp_path / "cuda", "13.0")
        result = self.build(tmp_path, FLASH_KDA_CUDA_ARCHS="90a", CUDA_HOME=home, CUTLASS_PATH=tmp_path)
        assert_one_line(result, "holds no include/cutlass/version.h")

    def test_metadata_needs_no_device(self, tmp_path):
        result = run_setup(tmp_path, "--version", CUDA_VISIBLE_DEVICES="", CUDA_HOME=tmp_path)
        assert result.returncode == 0, result.stderr
        assert result.stdout.split()[-1] == VERSION


def test_cpu_only_wheel_and_sdist(tmp_path):
    """Wheel: pure Python, package and data, nothing else. Sdist: all that a build from it reads."""
    project = copy_project(tmp_path / "project")
    environment = {**os.environ, "FLASH_KDA_CUDA_ARCHS": "none", "CUDA_HOME": "/nonexistent"}
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "-w",
        tmp_path,
        ".",
    ]
    result = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    with zipfile.ZipFile(tmp_path / f"flash_kda-{VERSION}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
    folder = f"flash_kda-{VERSION}.dist-info/"
    package = {path.relative_to(project).as_posix() for path in (project / "flash_kda").rglob("*") if path.is_file()}
    package = {name for name in package if "__pycache__" not in name}
    assert {name for name in names if not name.startswith(folder)} == package
    # setuptools puts the licence into one of two places, by its version.
    assert "flash_kda/data/sample.txt" in names and {f"{folder}licenses/LICENSE", f"{folder}LICENSE"} & names

    command = [sys.executable, "setup.py", "-q", "sdist", f"--dist-dir={tmp_path}"]
    result = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    with tarfile.open(tmp_path / f"flash_kda-{VERSION}.tar.gz") as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    sources = {path.relative_to(project).as_posix() for path in (project / "csrc").rglob("*") if path.is_file()}
    assert sources | package | {"setup.py", "build_config.py", "pyproject.toml", "LICENSE", "README.md"} <= names


def test_unbuildable_package_says_how_through_pip(tmp_path):
    project = copy_project(tmp_path / "project")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "-w",
        tmp_path,
        ".",
    ]
    environment = {**os.environ, "FLASH_KDA_CUDA_ARCHS": "90a,91"}
    result = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode != 0
    assert "flash_kda: FLASH_KDA_CUDA_ARCHS=90a,91 names the unknown arch '91'" in result.stdout + result.stderr


# Raises where this process or a Python that it starts turns to the network.
NO_NETWORK = """
import sys

def refuse(event, arguments):
    if event.startswith(("socket.getaddrinfo", "socket.gethostby", "urllib.Request", "http.client.connect")) or (
        event in ("socket.connect", "socket.sendto") and not isinstance(arguments[1], (str, bytes))
    ):
        raise RuntimeError(f"turned to the network: {event} {arguments}")

sys.addaudithook(refuse)
"""


def test_build_import_and_call_use_no_network(tmp_path):
    """Where the system allows it there is no network at all; everywhere, a Python that turns to it fails."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(NO_NETWORK)
    alone = ["unshare", "--map-root-user", "--net"]
    try:
        separate = subprocess.run([*alone, "true"], capture_output=True).returncode == 0
    except OSError:
        separate = False

    def run(*command, cwd):
        environment = {**os.environ, "FLASH_KDA_CUDA_ARCHS": "none", "CUDA_HOME": "/nonexistent"}
        environment["PYTHONPATH"] = str(tmp_path / "hook")
        command = [*(alone if separate else []), sys.executable, *map(str, command)]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)

    control = run("-c", "import socket; socket.create_connection(('127.0.0.1', 9))", cwd=tmp_path)
    assert "turned to the network" in control.stderr
    project = copy_project(tmp_path / "project")
    wheel = ("-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", tmp_path, ".")
    result = run(*wheel, cwd=project)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = tmp_path.glob("flash_kda-*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "site")
    result = run("-m", "flash_kda", "--heads", "1", "--device", "cpu", cwd=tmp_path / "site")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "recurrence" in result.stdout

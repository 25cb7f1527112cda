"""What setup.py builds: architectures, nvcc and CUTLASS, each checked before anything is compiled.

`python build_config.py [ARCHS]` prints the architectures that a build would hold, or the one line that says why it
cannot be built. ARCHS defaults to the environment's FLASH_KDA_CUDA_ARCHS, and that to `auto`.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

KNOWN_ARCHS = ("90a", "100a", "103a", "120a")
MIN_NVCC = (12, 9)
MIN_CUTLASS = (4, 2)
ARCHS_VARIABLE = "FLASH_KDA_CUDA_ARCHS"


class BuildError(Exception):
    """Why the extension cannot be built: one line that says what was found and what to set."""


class Cuda(NamedTuple):
    home: Path
    version: tuple[int, int]

    @property
    def library_dir(self) -> Path:
        """The folder of the static CUDA runtime, wherever this toolkit's packager put it."""
        for folder in (self.home / "lib64", self.home / "lib", *sorted(self.home.glob("targets/*/lib"))):
            if (folder / "libcudart_static.a").is_file():
                return folder
        raise BuildError(f"no libcudart_static.a under {self.home}: install the CUDA runtime's development files there")


def requested_archs() -> str:
    """The value of FLASH_KDA_CUDA_ARCHS; `auto` where it is unset or empty."""
    return os.environ.get(ARCHS_VARIABLE, "").strip() or "auto"


def parse_archs(value: str) -> list[str]:
    """The architectures that `value` names (`auto`: the visible devices'), in KNOWN_ARCHS' order; [] for `none`.

    Raises BuildError for an unknown name and for `auto` without a device of SM90 or newer.
    """
    if value == "none":
        return []
    if value == "all":
        return list(KNOWN_ARCHS)
    if value == "auto":
        names = {arch_of_device(capability) for capability in visible_capabilities()}
        if not names:
            raise BuildError(
                f"{ARCHS_VARIABLE}=auto found no visible NVIDIA GPU: set {ARCHS_VARIABLE} to all, to a comma list out "
                f"of {', '.join(KNOWN_ARCHS)}, or to none for the CPU-only package"
            )
    else:
        names = {name.strip() for name in value.split(",")}
        unknown = sorted(names - set(KNOWN_ARCHS))
        if unknown:
            raise BuildError(
                f"{ARCHS_VARIABLE}={value} names the unknown arch {', '.join(map(repr, unknown))}: set it to auto, "
                f"all, none, or a comma list out of {', '.join(KNOWN_ARCHS)}"
            )
    return [arch for arch in KNOWN_ARCHS if arch in names]


def arch_of_device(capability: tuple[int, int]) -> str:
    """The arch to compile for a device of this compute capability; BuildError where the kernels cannot run on it."""
    # Code for an `a` target runs on exactly that compute capability: 12.1, say, cannot load what is built for 120a.
    major, minor = capability
    arch = f"{major}{minor}a"
    if arch not in KNOWN_ARCHS:
        raise BuildError(
            f"{ARCHS_VARIABLE}=auto found a GPU of compute capability {major}.{minor}, and the kernels run on 9.0, "
            f"10.0, 10.3 and 12.0: hide it with CUDA_VISIBLE_DEVICES, or set {ARCHS_VARIABLE}=none for the CPU-only "
            "package"
        )
    return arch


def visible_capabilities() -> list[tuple[int, int]]:
    """Compute capabilities of the visible devices: PyTorch's word where it sees one, else the driver tool's."""
    try:
        import torch

        if torch.cuda.is_available():
            return [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    except ImportError:
        pass
    try:
        query = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if query.returncode != 0:
        return []
    return [(int(major), int(minor)) for major, minor in re.findall(r"^(\d+)\.(\d+)$", query.stdout, re.MULTILINE)]


def find_cuda() -> Cuda:
    """The CUDA toolkit from CUDA_HOME, CUDA_PATH, the nvcc on the path, or /usr/local/cuda; at least MIN_NVCC."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            nvcc = Path(os.environ[variable], "bin", "nvcc")
            if not nvcc.is_file():
                raise BuildError(
                    f"{variable}={os.environ[variable]} holds no bin/nvcc: set it to a CUDA toolkit, or set "
                    f"{ARCHS_VARIABLE}=none for the CPU-only package"
                )
            break
    else:
        found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
        if found is None:
            raise BuildError(
                "nvcc was found neither under CUDA_HOME nor on the path: install CUDA "
                f"{version_text(MIN_NVCC)} or newer and set CUDA_HOME, or set {ARCHS_VARIABLE}=none for the CPU-only "
                "package"
            )
        nvcc = Path(found)
    return Cuda(toolkit_of(nvcc), nvcc_version(nvcc))


def ask_nvcc(nvcc: Path, *arguments: str) -> subprocess.CompletedProcess:
    """What this nvcc prints, whatever its exit status; BuildError where it cannot be run or does not end."""
    try:
        return subprocess.run([nvcc, *arguments], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(
            f"{nvcc} {' '.join(arguments)} failed ({error}): set CUDA_HOME to a working CUDA toolkit"
        ) from error


def nvcc_version(nvcc: Path) -> tuple[int, int]:
    """The release that this nvcc says it is; BuildError where that is older than MIN_NVCC or cannot be read."""
    release = re.search(r"release (\d+)\.(\d+)", ask_nvcc(nvcc, "--version").stdout)
    if release is None:
        raise BuildError(f"{nvcc} --version names no release: set CUDA_HOME to a working CUDA toolkit")
    version = (int(release[1]), int(release[2]))
    if version < MIN_NVCC:
        raise BuildError(
            f"{nvcc} is CUDA {version_text(version)}, older than {version_text(MIN_NVCC)}: set CUDA_HOME to a newer "
            "CUDA toolkit"
        )
    return version


def toolkit_of(nvcc: Path) -> Path:
    """The toolkit's folder. The nvcc on a path may be a script or a link that starts one elsewhere, so ask it first."""
    top = re.search(r"^#\$ TOP=(.+)$", ask_nvcc(nvcc, "--dryrun", "-c", "any.cu").stderr, re.MULTILINE)
    return Path(top[1].strip()).resolve() if top else nvcc.resolve().parent.parent


def find_cutlass(root: Path) -> Path:
    """CUTLASS's include folder: CUTLASS_PATH's, third_party/cutlass's or the wheel's, at least MIN_CUTLASS."""
    if os.environ.get("CUTLASS_PATH"):
        origin = f"CUTLASS_PATH={os.environ['CUTLASS_PATH']}"
        include = Path(os.environ["CUTLASS_PATH"], "include")
    elif (root / "third_party" / "cutlass" / "include").is_dir():
        origin = "third_party/cutlass"
        include = root / "third_party" / "cutlass" / "include"
    else:
        wheel = importlib.util.find_spec("cutlass_library")
        if wheel is None or wheel.origin is None:
            raise BuildError(
                "CUTLASS was found neither in CUTLASS_PATH nor in third_party/cutlass nor as a wheel: set CUTLASS_PATH "
                f"to a checkout of {version_text(MIN_CUTLASS)} or newer, or pip install "
                f"'nvidia-cutlass>={version_text(MIN_CUTLASS)}'"
            )
        origin = "the nvidia-cutlass wheel"
        include = Path(wheel.origin).parent / "source" / "include"
    header = include / "cutlass" / "version.h"
    if not header.is_file():
        raise BuildError(f"{origin} holds no include/cutlass/version.h: set CUTLASS_PATH to a checkout of CUTLASS")
    text = header.read_text()
    numbers = [re.search(rf"^#define CUTLASS_{part}\s+(\d+)", text, re.MULTILINE) for part in ("MAJOR", "MINOR")]
    if None in numbers:
        raise BuildError(f"{header} names no version: set CUTLASS_PATH to a checkout of CUTLASS")
    version = tuple(int(number[1]) for number in numbers)
    if version < MIN_CUTLASS:
        raise BuildError(
            f"{origin} is CUTLASS {version_text(version)}, older than {version_text(MIN_CUTLASS)}: set CUTLASS_PATH to "
            f"a newer checkout, or pip install 'nvidia-cutlass>={version_text(MIN_CUTLASS)}'"
        )
    return include


def max_jobs() -> int:
    """How many compilers may run at once: MAX_JOBS, which ninja gets too, or the number of cores."""
    value = os.environ.get("MAX_JOBS", "")
    return max(1, int(value)) if value.isdecimal() else os.cpu_count() or 1


def version_text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def main() -> None:
    archs = parse_archs(sys.argv[1] if len(sys.argv) > 1 else requested_archs())
    if archs:
        find_cuda().library_dir  # noqa: B018 - the look-up is the check
        find_cutlass(Path(__file__).resolve().parent)
    print(",".join(archs) or "none")


if __name__ == "__main__":
    try:
        main()
    except BuildError as error:
        sys.exit(f"flash_kda: {error}")

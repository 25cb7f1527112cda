"""Builds flash_kda and, unless FLASH_KDA_CUDA_ARCHS=none, its CUDA extension flash_kda._C. Downloads nothing.

pyproject.toml holds the metadata, build_config.py the choice of architectures, CUDA toolkit and CUTLASS.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # a build front end does not put this folder on the path

import build_config  # noqa: E402

HOST_FLAGS = ["-O3", "-std=c++20", "-fvisibility=hidden", "-Wall", "-Wextra"]
# No fast math: the tests compare bit for bit. -U undoes the switches by which BuildExtension disables half operators.
NVCC_FLAGS = [
    "-O3",
    "-std=c++20",
    "--expt-relaxed-constexpr",
    "-lineinfo",
    "-Xptxas=-v,--warn-on-spills,--warn-on-local-memory-usage",
    "-Xcompiler=-fvisibility=hidden",
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
]


def sources(pattern: str) -> list[str]:
    """Paths relative to this file, as setuptools wants them."""
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").glob(pattern))


def arch_flags(archs: list[str]) -> list[str]:
    return [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]


def build_command() -> type:
    """PyTorch's BuildExtension, told what to compile when it starts: metadata and sdist need neither GPU nor nvcc."""
    try:
        import ninja
        import pybind11
        from torch.utils import cpp_extension
    except ImportError as error:
        sys.exit(
            f"flash_kda: {error.name} cannot be imported, and building the kernels needs it: install it and use pip's "
            f"--no-build-isolation, or set {build_config.ARCHS_VARIABLE}=none for the CPU-only package"
        )

    # BuildExtension looks for ninja on the path, where an environment that is not activated does not put it.
    os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", "")])

    class BuildKernels(cpp_extension.BuildExtension):
        def build_extensions(self) -> None:
            try:
                archs = build_config.parse_archs(build_config.requested_archs())
                cuda = build_config.find_cuda()
                cutlass_include = build_config.find_cutlass(ROOT)
                library_dir = cuda.library_dir
            except build_config.BuildError as error:
                sys.exit(f"flash_kda: {error}")
            # A CPU-only PyTorch never looks for CUDA, and one built with another CUDA major refuses this nvcc. Neither
            # matters to an extension that shares no CUDA or C++ object with PyTorch.
            cpp_extension.CUDA_HOME = str(cuda.home)
            cpp_extension._check_cuda_version = lambda *_: None

            (extension,) = self.extensions
            kernel_sources = sources("portable/*.cu") + sources("recurrent/*.cu")
            self.sm90_sources = sources("sm90/*.cu") if "90a" in archs else []
            host_flags = [*HOST_FLAGS, f'-DFLASH_KDA_ARCHS="{",".join(archs)}"']
            if self.sm90_sources:
                host_flags.append("-DFLASH_KDA_HAS_SM90")
            # One nvcc compiles all of a file's architectures, since their code has to share one host stub. Ninja runs
            # files side by side; what is left of MAX_JOBS goes to nvcc, for the architectures of its file.
            threads = min(len(archs), max(1, build_config.max_jobs() // max(1, len(kernel_sources))))
            extension.sources = [*sources("api/*.cpp"), *kernel_sources]
            extension.include_dirs = [
                str(ROOT / "csrc"),
                str(cutlass_include),
                str(cuda.home / "include"),
                pybind11.get_include(),
            ]
            extension.depends = sources("**/*.h") + sources("**/*.cuh")
            extension.extra_compile_args = {
                "cxx": host_flags,
                "nvcc": [*NVCC_FLAGS, f"--threads={threads}", *arch_flags(archs)],
            }
            # The static runtime: the wheel then needs a driver and nothing else, whatever CUDA version PyTorch brings.
            extension.library_dirs = [str(library_dir)]
            extension.libraries = ["cudart_static", "dl", "rt", "pthread"]
            super().build_extensions()

        def build_extension(self, extension: Extension) -> None:
            if self.sm90_sources:
                extension.extra_objects = self.compiler.compile(
                    self.sm90_sources,
                    output_dir=str(Path(self.build_temp, "sm90")),
                    include_dirs=extension.include_dirs,
                    extra_postargs={"cxx": [], "nvcc": [*NVCC_FLAGS, *arch_flags(["90a"])]},
                )
            super().build_extension(extension)

    return BuildKernels


if build_config.requested_archs() == "none":
    setup()
else:
    setup(
        ext_modules=[Extension("flash_kda._C", sources("api/*.cpp") + sources("*/*.cu"), language="c++")],
        cmdclass={"build_ext": build_command()},
    )

"""The sources with CUDA 12.9, the oldest toolkit that they are promised to build with.

    python tests/cuda12.py --install FOLDER     # PACKAGES, into a folder of their own
    python tests/cuda12.py FOLDER               # every source with what is in there

No wheel of CUDA 12.9 holds nvcc. Its NVRTC, the same compiler for device code, takes the kernels' files as they are,
their host functions for device functions that nothing calls. The host code is read by the C++ compiler with the headers
of CUDA 12.9. What is not shown is that the nvcc of CUDA 12.9 joins the two.
"""

import argparse
import ctypes
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import build_config  # noqa: E402

VERSION = (12, 9)
PACKAGES = [f"nvidia-cuda-{name}-cu12==12.9.*" for name in ("nvrtc", "runtime", "cccl", "nvcc")]
HOST_SOURCES = sorted((ROOT / "csrc" / "api").glob("*.cpp"))
KERNEL_SOURCES = sorted((ROOT / "csrc").glob("*/fwd*.cu"))

# NVRTC comes without a standard library and without the runtime's host functions. What csrc takes of the former,
# libcu++ has; what it calls of the latter is declared here, or, on the device, defined as the runtime's headers do.
STANDARD = ("array", "atomic", "cstddef", "cstdint", "initializer_list", "type_traits", "utility")
HEADERS = {name: f"#include <cuda/std/{name}>\n" for name in STANDARD}
HEADERS |= {"algorithm": "#include <cuda/std/__algorithm_>\n"}
HEADERS = {name: text + "namespace std { using namespace cuda::std; }\n" for name, text in HEADERS.items()}
HEADERS |= {"stdint.h": "", "stdlib.h": ""}
PRELUDE = """
#include <cuda_runtime.h>
#include <driver_types.h>
#include <cuda/std/cstddef>
#undef offsetof  // that of libcu++ is no constant expression
#define offsetof(type, member) size_t(__INTADDR__(&((type*)0)->member))
__device__ inline void cudaGridDependencySynchronize() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void cudaTriggerProgrammaticLaunchCompletion() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
extern "C" __device__ void* cudaGetParameterBufferV2(void*, dim3, dim3, unsigned);  // for <<<>>>
extern "C" __device__ cudaError_t cudaLaunchDeviceV2(void*, cudaStream_t);
cudaError_t cudaGetLastError();
template <class... Types>
cudaError_t cudaFuncSetAttribute(Types const&...);
template <class... Types>
cudaError_t cudaLaunchKernelEx(Types const&...);
template <class... Types>
cudaError_t cudaOccupancyMaxActiveClusters(Types const&...);
"""


def install(folder):
    """Has pip put PACKAGES into `folder`, all of them or nothing; CalledProcessError if it cannot.

    A folder of their own: no environment is to have them beside those of its PyTorch.
    """
    new = Path(f"{folder}.new")
    shutil.rmtree(new, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--retries", "1", "--no-deps"]
    subprocess.run([*pip, "--target", new, *PACKAGES], check=True)
    new.rename(folder)


def include_folders(folder):
    """Where the headers of CUDA 12.9 are, and CUTLASS's."""
    parts = ("cuda_runtime", "cuda_cccl", "cuda_nvcc")
    return [*(Path(folder, "nvidia", part, "include") for part in parts), build_config.find_cutlass(ROOT)]


class Nvrtc:
    """The NVRTC of CUDA 12.9 in a folder; OSError without one."""

    def __init__(self, folder):
        self.folder = folder
        self.library = ctypes.CDLL(str(Path(folder, "nvidia", "cuda_nvrtc", "lib", "libnvrtc.so.12")))
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        if (major.value, minor.value) != VERSION:
            raise OSError(f"{folder}: expected NVRTC {VERSION}, found {(major.value, minor.value)}")

    def call(self, name, *arguments):
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name}: {self.library.nvrtcGetErrorString(status).decode()}")

    def compile(self, text, name, arch="90a"):
        """What compiler and ptxas -v say of a translation unit; RuntimeError with it where that does not compile."""
        options = [f"-arch=sm_{arch}", "-std=c++20", "-default-device", "--ptxas-options=-v", f"-I{ROOT / 'csrc'}"]
        options += [f"-I{path}" for path in include_folders(self.folder)]

        def strings(values):
            return (ctypes.c_char_p * len(values))(*(value.encode() for value in values))

        program = ctypes.c_void_p()
        headers = strings(list(HEADERS.values())), strings(list(HEADERS))
        source = (PRELUDE + text).encode()
        self.call("nvrtcCreateProgram", ctypes.byref(program), source, name.encode(), len(HEADERS), *headers)
        try:
            status = self.library.nvrtcCompileProgram(program, len(options), strings(options))
            size = ctypes.c_size_t()
            self.call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            self.call("nvrtcGetProgramLog", program, log)
        finally:
            self.call("nvrtcDestroyProgram", ctypes.byref(program))
        if status != 0:
            raise RuntimeError(f"{name}: {log.value.decode()}")
        return log.value.decode()

    def compile_kernels(self, source):
        """How many kernels a file of csrc makes; RuntimeError where one does not compile, or spills."""
        name = str(source.relative_to(ROOT / "csrc"))
        log = self.compile(f'#include "{name}"\n', f"{source.stem} by NVRTC")
        kernels = log.count("Compiling entry function")
        clean = re.findall(r"\b0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", log)
        if kernels == 0 or len(clean) != kernels:
            raise RuntimeError(f"{name}: expected kernels without stack and spills, got\n{log}")
        return kernels


def read_host_code(folder, source):
    """Reads a file of csrc/api with the headers of CUDA 12.9; RuntimeError with what the compiler says against it."""
    import pybind11

    command = [os.environ.get("CXX", "c++"), "-fsyntax-only", "-std=c++20", "-Wall", "-Wextra", "-Werror"]
    command += ['-DFLASH_KDA_ARCHS="90a"', "-DFLASH_KDA_HAS_SM90", f"-I{ROOT / 'csrc'}"]
    for path in (*include_folders(folder), pybind11.get_include(), sysconfig.get_path("include")):
        command += ["-isystem", str(path)]
    result = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{source.name}: {result.stdout}{result.stderr}")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--install", action="store_true", help="fill FOLDER, if it is not there, and end")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the wheels of CUDA 12.9 are")
    options = parser.parse_args(arguments)
    if options.install:
        if not options.folder.exists():
            try:
                install(options.folder)
            except subprocess.CalledProcessError:  # pip has said why
                sys.exit(f"cuda12: pip could not install {', '.join(PACKAGES)}")
        return
    nvrtc = Nvrtc(options.folder)
    for source in HOST_SOURCES:
        read_host_code(options.folder, source)
        print(f"{source.relative_to(ROOT)}: the headers of CUDA 12.9 will do", flush=True)
    for source in KERNEL_SOURCES:
        kernels = nvrtc.compile_kernels(source)
        print(f"{source.relative_to(ROOT)}: {kernels} kernels compiled by NVRTC 12.9", flush=True)


if __name__ == "__main__":
    main()

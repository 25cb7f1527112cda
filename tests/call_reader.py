"""csrc/api/call.cpp, built for tests: what the kernels' quick way reads a call as, on any machine and any device."""

import functools
import importlib.util
import inspect
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

import flash_kda
from flash_kda.interface import numbers_of
from flash_kda.validation import PLAIN, Options

PARAMETERS = inspect.signature(flash_kda.fwd).parameters.values()
ORDER = tuple(x.name for x in PARAMETERS if x.kind is not x.KEYWORD_ONLY)
OPTIONS = tuple(x.name for x in PARAMETERS if x.kind is x.KEYWORD_ONLY)
ROOT = Path(__file__).resolve().parents[1]
COMPILER = os.environ.get("CXX", "c++")


def why_not():
    """Why calls cannot be read here, or None if they can."""
    if not hasattr(torch._C, "_dlpack_exchange_api"):
        return f"PyTorch {torch.__version__} lets nobody read its tensors: that came with 2.10"
    if not shutil.which(COMPILER):
        return f"needs a C++ compiler, and there is no {COMPILER}: set CXX"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "needs Python.h (Debian and Ubuntu: install python3-dev)"
    return None


@functools.cache
def _reader():
    includes = (ROOT / "csrc", Path(torch.__file__).parent / "include", sysconfig.get_path("include"))
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "call_reader.so"
        command = [COMPILER, "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
        command += [flag for folder in includes for flag in ("-isystem" if folder != ROOT / "csrc" else "-I", folder)]
        command += [ROOT / "tests" / "call_reader.cpp", ROOT / "csrc" / "api" / "call.cpp", "-o", library]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"call_reader.cpp does not compile:\n{done.stderr}")
        spec = importlib.util.spec_from_file_location("call_reader", library)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def in_order(call):
    """(the positional arguments, Options or PLAIN) of a call given as a dict."""
    positional = tuple(call.get(name) for name in ORDER)
    chosen = {name: call[name] for name in OPTIONS if name in call}
    return positional, Options(**chosen) if chosen else PLAIN


def read(call):
    """(numbers, whether the call is plain), as `numbers_of` has them, or None for a call that is not taken."""
    positional, options = in_order(call)
    given = positional if options is PLAIN else (*positional, *options)
    torch_parts = (torch._C._dlpack_exchange_api(), torch.Tensor, torch.nn.Parameter, torch.is_grad_enabled)
    return _reader().read(*torch_parts, given)


def expected(call):
    """What `read` gives for a legal call that it takes: the kernels' numbers are fp32."""
    positional, options = in_order(call)
    numbers, plain = numbers_of(*positional, options)
    scale, lower_bound = torch.tensor(numbers[-3:-1], dtype=torch.float32).tolist()
    return (*numbers[:-3], scale, lower_bound, numbers[-1]), plain

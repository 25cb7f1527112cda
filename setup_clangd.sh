#!/usr/bin/env bash
# Writes .clangd in this folder, so that clangd understands the CUDA sources: include folders of the installed CUTLASS,
# CUDA, pybind11, Python and PyTorch, and the flags that nvcc takes and clang does not. It does nothing else.
#
#   bash setup_clangd.sh [ARCH]     ARCH: the arch to read kernels for, 90a by default
#
# The Python whose packages count: FLASH_KDA_PYTHON, else the active virtual environment's, else .venv's, else python3.
set -euo pipefail
unset CDPATH  # by which cd may go elsewhere, and prints where
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ -n "${FLASH_KDA_PYTHON:-}" ]; then
    python=$FLASH_KDA_PYTHON
elif [ -n "${VIRTUAL_ENV:-}" ]; then
    python=$VIRTUAL_ENV/bin/python
elif [ -x "$root/.venv/bin/python" ]; then
    python=$root/.venv/bin/python
else
    python=python3
fi
exec "$python" - "$root" "${1:-90a}" <<'PYTHON'
import importlib.util
import json
import sys
import sysconfig
from pathlib import Path

root, arch = Path(sys.argv[1]), sys.argv[2]
sys.path.insert(0, str(root))
import build_config

HEADER = "# Written by setup_clangd.sh"
try:
    if not build_config.parse_archs(arch):
        raise build_config.BuildError("an arch is needed, not `none`: 90a, 100a, 103a or 120a")
    cuda = build_config.find_cuda()
    includes = [root / "csrc", build_config.find_cutlass(root), cuda.home / "include", cuda.home / "include" / "cccl"]
except build_config.BuildError as error:
    sys.exit(f"setup_clangd.sh: {error}")
includes.append(Path(sysconfig.get_path("include")))
for package, folders in {"pybind11": ["include"], "torch": ["include", "include/torch/csrc/api/include"]}.items():
    spec = importlib.util.find_spec(package)
    if spec is None:
        print(f"setup_clangd.sh: {package} is not installed for {sys.executable}: left out")
        continue
    includes += [Path(spec.origin).parent / folder for folder in folders]

# json.dumps: a JSON string is a YAML string, whatever characters a path holds.
flags = [f"-I{folder}" for folder in includes if folder.is_dir()] + ["-std=c++20", '-DFLASH_KDA_ARCHS="none"']
cuda_flags = ["-xcuda", f"--cuda-path={cuda.home}", f"--cuda-gpu-arch=sm_{arch}", "-Wno-unknown-cuda-version"]
nvcc_flags = ["-gencode*", "-arch*", "--threads*", "--expt-*", "-lineinfo", "-Xptxas*", "-Xcompiler*"]


def listed(flags):
    return "\n".join(f"    - {json.dumps(flag)}" for flag in flags)


text = f"""{HEADER}: run it again when CUDA, CUTLASS or Python move.
CompileFlags:
  Add:
{listed(flags)}
  Remove:
{listed(nvcc_flags)}
---
If:
  PathMatch: [".*\\\\.cu", ".*\\\\.cuh", "csrc/(common|portable|sm90)/.*\\\\.h"]
CompileFlags:
  Add:
{listed(cuda_flags)}
"""
target = root / ".clangd"
if target.exists() and not target.read_text().startswith(HEADER):
    target.rename(root / ".clangd.orig")
    print("setup_clangd.sh: an older .clangd that this script did not write is kept as .clangd.orig")
target.write_text(text)
print(f"setup_clangd.sh: wrote {target}")
PYTHON

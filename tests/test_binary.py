"""The built extension as a file: what it links, what its kernels use, what the compilers said. Needs no GPU.

Skipped where the package holds no kernels, or where a tool that reads them is missing; each skip says which.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from project_copy import ROOT

sys.path.insert(0, str(ROOT))

import build_config  # noqa: E402

SPEC = importlib.util.find_spec("flash_kda._C")
if SPEC is None:
    pytest.skip("flash_kda._C is not built: the package is CPU-only", allow_module_level=True)
EXTENSION = Path(SPEC.origin)


def output_of(*command) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout


def cuda_tool(name: str) -> tuple[Path, dict]:
    """A tool of the CUDA toolkit, the path or a PyPI package, and an environment in which it finds its own helpers."""
    try:
        candidates = [build_config.find_cuda().home / "bin" / name]
    except build_config.BuildError:
        candidates = []
    if shutil.which(name):
        candidates.append(Path(shutil.which(name)))
    candidates += [Path(folder) / "nvidia" / "cu13" / "bin" / name for folder in sys.path]
    for path in candidates:
        if path.is_file():
            return path, {**os.environ, "PATH": os.pathsep.join([str(path.parent), os.environ["PATH"]])}
    pytest.skip(f"no {name}: install the CUDA toolkit's, or pip install '.[binary]'")


def cuobjdump(option: str) -> str:
    tool, environment = cuda_tool("cuobjdump")
    command = [tool, option, EXTENSION]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=600, env=environment).stdout


@pytest.fixture(scope="module")
def build_info() -> dict:
    """build_info() as a Python without PyTorch sees it: the extension must not need torch to be imported."""
    code = (
        "import importlib.util, json, sys\n"
        "spec = importlib.util.spec_from_file_location('flash_kda._C', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "assert not any(name.partition('.')[0] == 'torch' for name in sys.modules)\n"
        "print(json.dumps(module.build_info()))\n"
    )
    return json.loads(output_of(sys.executable, "-I", "-S", "-c", code, EXTENSION))


@pytest.fixture(scope="module")
def kernels() -> dict[tuple[str, str], list[str]]:
    """SASS of each (arch, kernel): the instructions' text, without addresses and encodings."""
    sass: dict[tuple[str, str], list[str]] = {}
    arch = body = None
    for line in cuobjdump("--dump-sass").splitlines():
        if found := re.match(r"\s*code for sm_(\w+)", line):
            arch = found[1]
        elif found := re.match(r"\s*Function : (\S+)", line):
            body = sass.setdefault((arch, found[1]), [])
        elif (found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line)) and body is not None:
            body.append(found[1])
    assert sass and all(sass.values()), "cuobjdump printed no SASS"
    return sass


def opcodes(instructions: list[str]) -> set[str]:
    """Mnemonics without modifiers and without the predicate in front: `@!P0 LDL.64 R2, [R1]` gives LDL."""
    return {re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].partition(".")[0] for text in instructions}


def test_links_neither_torch_nor_the_cuda_runtime():
    """One build serves every PyTorch of one Python, and every CUDA version that PyTorch brings."""
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\]", output_of("readelf", "-dW", EXTENSION))
    assert needed
    allowed = re.compile(r"(libstdc\+\+|libgcc_s|libc|libm|libdl|librt|libpthread|ld-linux[\w-]*)\.so\.\d+")
    assert [name for name in needed if not allowed.fullmatch(name)] == []


def test_uses_no_torch_symbol():
    symbols = output_of("readelf", "--dyn-syms", "-W", EXTENSION).splitlines()
    undefined = [line.split()[-1] for line in symbols if " UND " in line]
    assert any(name.startswith("Py") for name in undefined), "readelf printed no undefined symbols"
    assert [name for name in undefined if re.search(r"torch|c10|N2at|THP", name)] == []


def test_exports_nothing_but_its_entry():
    symbols = output_of("readelf", "--dyn-syms", "-W", EXTENSION).splitlines()
    exported = [line.split()[-1] for line in symbols if re.search(r"(FUNC|OBJECT)\s+GLOBAL\s+DEFAULT\s+\d+ ", line)]
    assert exported == ["PyInit__C"]


def test_build_info_names_the_archs_that_the_binary_holds(build_info, kernels):
    assert sorted(build_info) == ["archs", "cuda"]
    assert sorted(build_info["archs"]) == sorted({arch for arch, _ in kernels})
    assert tuple(map(int, build_info["cuda"].split("."))) >= build_config.MIN_NVCC


def test_binding_takes_the_call_that_the_package_makes():
    """The number and types of its arguments show on any machine: nothing is launched here."""
    from flash_kda import _C

    tensors, addresses, sizes = (0, 0, 0, 0) * 6, (0,) * 5, (16, 1, 1)
    with pytest.raises(ValueError, match="schedule.* auto, pairs, portable, sm90, segments.* got no such schedule"):
        _C.fwd(*tensors, *addresses, *sizes, 1.0, -5.0, True, 0, 0, "no such schedule", 0, 0)
    for name in ("", "Auto", "auto ", "segments:", "segments:8", "segments:064", "segments:-64", "segments:1000000000"):
        with pytest.raises(ValueError, match=f"got {name}$"):
            _C.fwd(*tensors, *addresses, *sizes, 1.0, -5.0, True, 0, 0, name, 0, 0)
    no_sequences = (0, 1, 0)
    plain = (*tensors, *addresses, *no_sequences, 1.0, -5.0, True, 0, 0, "auto", 0, 0)
    assert _C.fwd(*plain) is None
    states, checkpoints = (0, True, 5, 0, 0), (0, 0, 3, 64, False, True)
    assert (
        _C.fwd_general(*states, *checkpoints, 2, "softplus", "twice sigmoid", True, True, False, True, *plain) is None
    )
    for kinds in (("no such gate", "sigmoid"), ("sigmoid", "no such beta")):
        with pytest.raises(ValueError, match="unknown kind: no such"):
            _C.fwd_general(*states, *checkpoints, 2, *kinds, True, True, False, True, *plain)


def test_every_arch_holds_the_portable_kernels(build_info, kernels):
    names = {
        arch: {name for held, name in kernels if held == arch and "portable" in name} for arch in build_info["archs"]
    }
    first, *others = names.values()
    assert first and all(other == first for other in others)


def test_no_stack_and_no_local_memory():
    usage = re.findall(
        r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", cuobjdump("--dump-resource-usage")
    )
    assert usage
    assert [row for row in usage if int(row[1]) > 255 or row[2] != "0" or row[3] != "0"] == []


def test_sass_keeps_registers_out_of_memory(kernels):
    """A spill, or an array that the compiler could not keep in registers, shows as loads and stores of local memory."""
    offenders = {key: opcodes(body) & {"LDL", "STL"} for key, body in kernels.items()}
    assert {key: found for key, found in offenders.items() if found} == {}


def test_sass_knows_where_memory_is(kernels):
    """An access to an unknown address space (LD, ST) takes longer than one to global memory (LDG, STG)."""
    offenders = {key: opcodes(body) & {"LD", "ST"} for key, body in kernels.items()}
    assert {key: names for key, names in offenders.items() if names} == {}


def test_portable_kernels_use_the_tensor_cores(kernels):
    portable = {key: body for key, body in kernels.items() if "portable" in key[1]}
    assert portable
    assert [key for key, body in portable.items() if "HMMA" not in opcodes(body)] == []


def test_sm90_kernels_use_wgmma_tma_and_their_registers_or_cluster(build_info, kernels):
    """Matrix products by wgmma (HGMMA) and loads by TMA (UTMALDG).

    Where a CTA has whole pairs, roles trade registers (USETMAXREG). Where a cluster shares one, registers are plenty,
    and the factors go from CTA to CTA in bulk copies (UBLKCP) between cluster barriers (UCGABAR).
    """
    sm90 = {key: body for key, body in kernels.items() if "4sm90" in key[1]}
    assert {arch for arch, _ in sm90} == {"90a"} & set(build_info["archs"])
    always, whole, split = {"HGMMA", "UTMALDG"}, {"USETMAXREG"}, {"UBLKCP", "UCGABAR_ARV", "UCGABAR_WAIT"}
    for sharing, own in (("7SharingE0E", whole), ("7SharingE1E", split)):  # kWhole and kSplit of csrc/sm90/config.h
        bodies = {key: body for key, body in sm90.items() if sharing in key[1] and "9Segmented" not in key[1]}
        forms = {
            form for form in ("9FwdParams", "13GeneralParams", "14SoftplusParams") for key in bodies if form in key[1]
        }
        assert len(bodies) == len(forms) == (3 if sm90 else 0), "expected one for each form of parameters"
        assert {key: opcodes(body) & (always | whole | split) for key, body in bodies.items()} == {
            key: always | own for key in bodies
        }
    # Segments: what they do to the state, and their forward pass (kSegment), which gets transitions by bulk copies.
    segmented = {"17transition_kernel": always | whole | split, "7SharingE3E": always | whole | {"UBLKCP"}}
    for name, expected in segmented.items():
        bodies = {key: body for key, body in sm90.items() if name in key[1] and "9Segmented" in key[1]}
        assert len(bodies) == (2 if sm90 else 0), "expected one for each form of parameters"
        assert {key: opcodes(body) & (always | whole | split) for key, body in bodies.items()} == {
            key: expected for key in bodies
        }


def build_log() -> list[str]:
    path = os.environ.get("FLASH_KDA_BUILD_LOG")
    if not path or not Path(path).is_file():
        pytest.skip("FLASH_KDA_BUILD_LOG names no file: only a build by tests/test.sh or tests/gpu.sh keeps the log")
    return Path(path).read_text().splitlines()


def test_compilers_had_nothing_to_say():
    """No warning (other than in CUTLASS's own headers), and no remark of ptxas on wgmma or setmaxnreg (C75..)."""
    remarks = re.compile(r"\bwarning\b|\bC75\d\d\b")
    # A compiler's message begins with a file or its own name; command lines that ninja echoes begin with [n/m].
    found = [line for line in build_log() if remarks.search(line) and not line.startswith("[")]
    assert [line for line in found if "/include/cutlass/" not in line and "/include/cute/" not in line] == []


def test_ptxas_reports_no_spill(build_info, kernels):
    text = "\n".join(build_log())
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    assert len(spills) >= len(kernels), "the log lacks ptxas's report of a kernel"
    assert [row for row in spills if row != ("0", "0", "0")] == []


def test_wheel_carries_kernels_package_and_nothing_else(build_info, tmp_path):
    """From the objects that are already compiled, so that this takes seconds; without them it compiles them."""
    objects = ROOT / "build" / sysconfig.get_config_var("SOABI") / "temp"
    # setuptools 61 takes no absolute path here.
    command = [sys.executable, "setup.py", "-q", "egg_info", f"--egg-base={os.path.relpath(tmp_path, ROOT)}"]
    command += ["build", f"--build-base={tmp_path / 'build'}"]
    command += ["build_ext", f"--build-temp={objects if objects.is_dir() else tmp_path / 'temp'}"]
    # Without --skip-build it would build once more, into a folder of its own.
    command += ["bdist_wheel", "--skip-build", f"--dist-dir={tmp_path}", f"--bdist-dir={tmp_path / 'bdist'}"]
    environment = {**os.environ, "FLASH_KDA_CUDA_ARCHS": ",".join(build_info["archs"])}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = tmp_path.glob("*.whl")
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{python}-{python}-linux_" in path.name
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = {file.relative_to(ROOT).as_posix() for file in (ROOT / "flash_kda").rglob("*") if file.is_file()}
    package = {name for name in package if "__pycache__" not in name and not name.endswith(".so")}
    assert names == package | {f"flash_kda/_C.{sysconfig.get_config_var('SOABI')}.so"}

"""CUDA 12.9, the oldest toolkit that is promised: host code with its headers, kernels with its compiler. No GPU needed.

tests/oldest.sh has all of the kernels' files; here are those of the segment schedule, with its two kernels, and of
the portable one.
"""

import cuda12
import pytest

FOLDER = cuda12.ROOT / "build" / "cuda-12.9"


@pytest.fixture(scope="module")
def nvrtc():
    try:
        cuda12.include_folders(FOLDER)
        return cuda12.Nvrtc(FOLDER)
    except cuda12.build_config.BuildError as error:
        pytest.skip(f"no CUTLASS: {error}")
    except OSError as error:
        pytest.skip(f"no NVRTC of CUDA 12.9, which tests/test.sh installs where it builds kernels: {error}")


@pytest.mark.parametrize("source", cuda12.HOST_SOURCES, ids=lambda path: path.name)
def test_host_code(nvrtc, source):
    cuda12.read_host_code(FOLDER, source)


@pytest.mark.parametrize(("name", "kernels"), [("sm90/fwd_segments.cu", 2), ("portable/fwd.cu", 1)])
def test_kernels(nvrtc, name, kernels):
    assert nvrtc.compile_kernels(cuda12.ROOT / "csrc" / name) == kernels


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__global__ void f(int* x) { *x = missing; }", 'identifier "missing" is undefined'),
        ("static_assert(__CUDACC_VER_MAJOR__ != 12 || __CUDACC_VER_MINOR__ != 9, \"it is\");", "it is"),
        ("struct S { int a, b; }; static_assert(offsetof(S, b) != 4, \"it is\");", "it is"),
    ],
)  # fmt: skip
def test_an_error_is_found(nvrtc, text, message):
    with pytest.raises(RuntimeError, match=message):
        nvrtc.compile(text, "text")


def test_what_spills_is_refused(nvrtc, monkeypatch):
    text = "__global__ void f(int* x) { int y[99]; for (int i = 0; i < 99; ++i) y[x[i] % 99] = i; *x = y[x[1] % 99]; }"
    log = nvrtc.compile(text, "text")
    monkeypatch.setattr(nvrtc, "compile", lambda *arguments: log)
    with pytest.raises(RuntimeError, match="without stack and spills"):
        nvrtc.compile_kernels(cuda12.KERNEL_SOURCES[0])


def test_every_file_of_kernels_is_known():
    others = set((cuda12.ROOT / "csrc").rglob("*.cu")) - set(cuda12.KERNEL_SOURCES)
    assert {path.name for path in others} == {"tensor_maps.cu"}  # host code


def test_an_install_that_fails_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(cuda12, "PACKAGES", [str(tmp_path / "missing.whl")])
    with pytest.raises(SystemExit, match="cuda12: pip could not install .*missing.whl"):
        cuda12.main(["--install", str(tmp_path / "folder")])
    assert not (tmp_path / "folder").exists()

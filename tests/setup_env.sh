# Sourced by run.sh, tests/test.sh and tests/gpu.sh, from any directory:  source .../setup_env.sh && setup_env MODE
#
# MODE is run, test or gpu. Changes to the repository's folder, picks a Python, installs what is missing, builds the
# kernels that this machine can use, in place, and leaves behind
#   PYTHON      the interpreter to use; PYTHONPATH is set so that it imports flash_kda from the repository
#   HAVE_GPU    1 if PyTorch sees a GPU that the kernels run on, else 0
#   BUILT_ARCHS what flash_kda._C holds ("none": the CPU-only package)
#   FLASH_KDA_BUILD_LOG (exported) the compilers' output of that build, if there is one
#
# The Python: FLASH_KDA_PYTHON, else the active virtual environment if it has PyTorch, else python3 if it is a virtual
# environment with PyTorch, else .venv in the repository, which is made if need be and sees a system-wide PyTorch if
# there is one. Only what is missing is installed; an installed package, PyTorch above all, is never replaced.

unset CDPATH  # by which cd may go elsewhere, and prints where
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# What a machine without a GPU gets: pinned, because an unpinned PyTorch may bring gigabytes of CUDA libraries.
CPU_TORCH="torch==2.13.0"

say() { printf 'set-up: %s\n' "$*"; }
die() { printf 'set-up: error: %s\n' "$*" >&2; exit 2; }

setup_env() {
    choose_python  # before cd: FLASH_KDA_PYTHON may be relative to the caller's folder
    cd "$ROOT" || die "cannot enter $ROOT"
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
    install_missing run
    choose_archs "$1"
    if [ "$BUILT_ARCHS" != none ]; then
        build_kernels
        if [ "$1" = test ]; then
            has_cuobjdump || install_missing binary
            install_cuda12
        fi
    fi
    if [ "$1" != run ]; then install_missing "$1"; fi
    say "$("$PYTHON" -V), PyTorch $("$PYTHON" -c 'import torch; print(torch.__version__)'), kernels for $BUILT_ARCHS"
}

has_torch() { "$1" -c 'import torch' 2>/dev/null; }

choose_python() {
    if [ -n "${FLASH_KDA_PYTHON:-}" ]; then
        PYTHON=$(command -v "$FLASH_KDA_PYTHON") || die "FLASH_KDA_PYTHON=$FLASH_KDA_PYTHON is no program"
        has_torch "$PYTHON" ||
            die "FLASH_KDA_PYTHON=$FLASH_KDA_PYTHON cannot import torch: install PyTorch there or unset it"
        # An absolute path, yet with links kept: a virtual environment's python is a link.
        PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/$(basename "$PYTHON")
        return
    fi
    if [ -n "${VIRTUAL_ENV:-}" ] && has_torch "$VIRTUAL_ENV/bin/python"; then
        PYTHON=$VIRTUAL_ENV/bin/python
        return
    fi
    local python3
    python3=$(command -v python3) || die "no python3 on the path: install Python 3.10 or newer"
    if has_torch "$python3" && "$python3" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; then
        PYTHON=$python3
        return
    fi
    PYTHON=$ROOT/.venv/bin/python
    if ! "$PYTHON" -c '' 2>/dev/null; then
        "$python3" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
            die "$python3 is $("$python3" -V 2>&1): needed is 3.10 or newer; set FLASH_KDA_PYTHON to one with PyTorch"
        say "making .venv"
        local options=()
        if has_torch "$python3"; then options=(--system-site-packages); fi
        "$python3" -m venv "${options[@]}" "$ROOT/.venv" ||
            die "python3 -m venv failed (Debian and Ubuntu: install python3-venv)"
    fi
    if ! has_torch "$PYTHON"; then
        local torch=$CPU_TORCH
        if nvidia-smi -L 2>/dev/null | grep -q GPU; then torch="torch>=2.4"; fi
        say "installing $torch into .venv"
        # NumPy, because PyTorch warns at every import when there is none.
        "$PYTHON" -m pip install -q --disable-pip-version-check "$torch" numpy || die "pip could not install $torch"
    fi
}

# Prints pyproject.toml's requirements of one group that are not installed, one a line.
missing_requirements() {
    "$PYTHON" - "$1" <<'PYTHON'
import importlib.metadata
import sys

from pip._vendor.packaging.requirements import Requirement

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)
groups = {
    "run": project["project"]["dependencies"],
    "build": project["build-system"]["requires"],
    **project["project"]["optional-dependencies"],
}
for line in groups[sys.argv[1]]:
    name = Requirement(line).name
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        # CUTLASS may come from elsewhere, and the build says so itself when there is none.
        import build_config

        if name == "nvidia-cutlass":
            try:
                build_config.find_cutlass(build_config.Path.cwd())
                continue
            except build_config.BuildError:
                pass
        print(line)
PYTHON
}

install_missing() {
    local missing
    missing=$(missing_requirements "$1") || die "cannot read the requirements in pyproject.toml with $PYTHON"
    [ -n "$missing" ] || return 0
    mapfile -t missing <<<"$missing"
    say "installing ${missing[*]}"
    "$PYTHON" -m pip install -q --disable-pip-version-check --retries 1 "${missing[@]}" && return
    case $1 in
        run | build) die "pip could not install ${missing[*]} for $PYTHON, and nothing works without" ;;
        *) say "pip could not install ${missing[*]}: the tests that need them are skipped" ;;
    esac
}

# The headers and the NVRTC of CUDA 12.9, the oldest toolkit.
install_cuda12() {
    local folder=build/cuda-12.9
    [ ! -d $folder ] || return 0
    say "installing CUDA 12.9's headers and NVRTC into $folder"
    "$PYTHON" tests/cuda12.py --install $folder || say "the tests that need them are skipped"
}

# Sets HAVE_GPU, and BUILT_ARCHS to what is to be built: what FLASH_KDA_CUDA_ARCHS says, else the GPU's arch, else,
# where tests are to read the kernels' code, every arch. Unless FLASH_KDA_CUDA_ARCHS asks for it, what cannot be built
# is skipped.
choose_archs() {
    local wanted=${FLASH_KDA_CUDA_ARCHS:-} problem
    HAVE_GPU=0
    BUILT_ARCHS=none
    if "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then HAVE_GPU=1; fi
    if [ "$wanted" = none ]; then
        HAVE_GPU=0
        remove_kernels
        say "FLASH_KDA_CUDA_ARCHS=none: kernels skipped"
        return
    elif [ -z "$wanted" ] && [ $HAVE_GPU = 1 ]; then
        wanted=auto
    elif [ -z "$wanted" ] && [ "$1" = test ]; then
        wanted=all
    elif [ -z "$wanted" ]; then
        [ "$1" != gpu ] || die "PyTorch $("$PYTHON" -c 'import torch; print(torch.__version__)') sees no NVIDIA GPU"
        say "no GPU: kernels skipped"
        return
    fi
    problem=$(build_problem "$wanted")
    if [ -z "$problem" ]; then
        install_missing build
        if problem=$("$PYTHON" build_config.py "$wanted" 2>&1); then
            BUILT_ARCHS=${problem##*$'\n'}  # PyTorch may have warned of something first
            [ $HAVE_GPU = 1 ] || say "no GPU: GPU tests skipped; kernels are built, so that tests can read their code"
            return
        fi
    fi
    if [ -n "${FLASH_KDA_CUDA_ARCHS:-}" ] || [ "$1" = gpu ]; then die "$problem"; fi
    HAVE_GPU=0
    say "kernels skipped: $problem"
}

# Prints what forbids a build for these archs, before anything is installed for it; nothing if nothing does.
build_problem() {
    "$PYTHON" - "$1" <<'PYTHON'
import sys

import build_config

try:
    build_config.parse_archs(sys.argv[1])
    build_config.find_cuda().library_dir
except build_config.BuildError as error:
    print(error)
PYTHON
}

has_cuobjdump() {
    command -v cuobjdump >/dev/null ||
        "$PYTHON" -c 'import build_config; (build_config.find_cuda().home / "bin" / "cuobjdump").stat()' 2>/dev/null
}

soabi() { "$PYTHON" -c 'import sysconfig; print(sysconfig.get_config_var("SOABI"))'; }

remove_kernels() { rm -f "flash_kda/_C.$(soabi).so" "build/$(soabi)/stamp"; }

# Builds flash_kda/_C.*.so unless it is there and nothing that goes into it has changed since.
build_kernels() {
    local folder wanted
    folder=build/$(soabi)
    wanted=$(
        {
            echo "$BUILT_ARCHS"
            "$PYTHON" -VV
            "$PYTHON" -c 'from build_config import *; print(find_cuda(), find_cutlass(Path.cwd()))'
            find csrc setup.py build_config.py -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
        } | sha256sum
    )
    export FLASH_KDA_BUILD_LOG=$ROOT/$folder/build.log
    if [ -e "flash_kda/_C.$(soabi).so" ] && [ "$(cat "$folder/stamp" 2>/dev/null)" = "$wanted" ]; then
        say "kernels are up to date"
        return
    fi
    say "building kernels for $BUILT_ARCHS (output: $folder/build.log)"
    # From nothing, so that the log holds what the compilers said of every file.
    remove_kernels
    rm -rf "$folder"
    mkdir -p "$folder"
    local started=$SECONDS
    if ! FLASH_KDA_CUDA_ARCHS=$BUILT_ARCHS "$PYTHON" setup.py build_ext --inplace --build-temp "$folder/temp" \
        >"$FLASH_KDA_BUILD_LOG" 2>&1; then
        tail -n 40 "$FLASH_KDA_BUILD_LOG" >&2
        die "the build failed"
    fi
    printf '%s\n' "$wanted" >"$folder/stamp"
    say "built in $((SECONDS - started)) s"
}

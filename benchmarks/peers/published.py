"""The published FlashKDA kernel, whose package has the name of this one: it is loaded by another, from its folder.

FLASH_KDA_PUBLISHED names the folder that holds its `flash_kda` package and its extension `flash_kda_C`: what `pip
install --no-build-isolation --no-deps --target FOLDER .` in its sources fills.
"""

import functools
import importlib.util
import os
import sys
from pathlib import Path

from benchmarks.peers import ours
from benchmarks.peers.peer import Peer

VARIABLE = "FLASH_KDA_PUBLISHED"
NAME = "published_flash_kda"


@functools.cache
def load(folder):
    """The package in this folder; ImportError says why there is none."""
    path = Path(folder) / "flash_kda" / "__init__.py"
    if not path.is_file():
        raise ImportError(f"{VARIABLE}: expected a folder with flash_kda/__init__.py, got {folder}")
    sys.path.insert(0, folder)
    try:
        importlib.import_module("flash_kda_C")  # without it the package may fall back to PyTorch, which is no peer
        spec = importlib.util.spec_from_file_location(NAME, path, submodule_search_locations=[str(path.parent)])
        package = sys.modules[NAME] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(package)
        except BaseException:
            del sys.modules[NAME]
            raise
    finally:
        sys.path.remove(folder)
    return package


def unavailable():
    folder = os.environ.get(VARIABLE)
    if not folder:
        return f"{VARIABLE} does not name the folder of the published kernel's package"
    try:
        load(folder)
    except ImportError as error:
        return f"the published FlashKDA cannot be imported: {error}"
    return None


def prepare(inputs, cu_seqlens):
    return ours.prepare(inputs, cu_seqlens, load(os.environ[VARIABLE]).fwd)


PEER = Peer("published FlashKDA", {}, ("many heads", "few heads"), unavailable, prepare)

"""Loads NVIDIA's NVML bindings from the zipapp, unpacked to where Python can cache the bytecode.

Compiling them takes most of the time of a reading. They are never imported from a folder that
another user can write to; if there is no safe folder, they are imported from the zipapp, which is
slower.
"""

from __future__ import annotations

import os
import stat
import sys
import zipimport
import zlib
from importlib import import_module
from typing import Any, Optional

NAME = "pynvml"
FILE = f"{NAME}.py"
UNUSED_FOR = 30 * 24 * 3600
"""Seconds without a reading after which another version's bindings are removed, like the zipapps
themselves."""


def load(state: Optional[str]) -> Any:
    """Import the bindings.

    Args:
        state: The node's folder, in which they are cached; None: they are not cached.
    """
    loader = globals().get("__loader__")
    if state is None or not isinstance(loader, zipimport.zipimporter):
        return import_module(NAME)
    try:
        # Asking the importer where the module is would compile it.
        folder = _ensure_unpacked(state, loader.get_data(os.path.join(loader.archive, FILE)))
        return import_module(NAME) if folder is None else _import_from(folder)
    except (OSError, ImportError, EOFError, ValueError, TypeError):
        # a full disk, or bytecode torn by a power loss
        sys.modules.pop(NAME, None)
        return import_module(NAME)


def _import_from(folder: str) -> Any:
    from importlib.util import module_from_spec, spec_from_file_location

    # If these are set in our environment, they must not decide where bytecode is looked for.
    sys.dont_write_bytecode, sys.pycache_prefix = False, None
    spec = spec_from_file_location(NAME, os.path.join(folder, FILE))
    if spec is None or spec.loader is None:
        raise ImportError(NAME)
    module = module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    return module


def _ensure_unpacked(state: str, source: bytes) -> Optional[str]:
    """Return the folder with exactly this source, or None if others could write to it."""
    place = os.path.join(state, NAME)
    try:
        os.mkdir(place, 0o700)
    except FileExistsError:
        pass
    if not (_is_safe(state) and _is_safe(place)):
        return None
    # Named after its content, which is also compared.
    folder = os.path.join(place, f"{len(source)}-{zlib.crc32(source):08x}")
    if not _holds(folder, source):
        _unpack(place, folder, source)
        if not _holds(folder, source):
            return None
    os.utime(folder)
    return folder


def _holds(folder: str, source: bytes) -> bool:
    path, compiled = os.path.join(folder, FILE), os.path.join(folder, "__pycache__")
    try:
        if not (_is_safe(folder) and _is_safe(path)) or (
            os.path.lexists(compiled) and not _is_safe(compiled)
        ):
            return False
        with open(path, "rb") as file:
            return file.read() == source
    except FileNotFoundError:
        return False


def _is_safe(path: str) -> bool:
    """Return whether only this user can write there."""
    status = os.lstat(path)
    plain = stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
    return plain and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _unpack(place: str, folder: str, source: bytes) -> None:
    import shutil
    import tempfile
    import time

    if os.path.islink(folder) or os.path.isfile(folder):
        os.unlink(folder)
    shutil.rmtree(folder, ignore_errors=True)
    partial = tempfile.mkdtemp(dir=place, prefix=".")  # with mode 0700
    try:
        handle = os.open(os.path.join(partial, FILE), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(source)
        os.rename(partial, folder)
    except OSError:
        # another reading was first, or the disk is full: the caller checks what is there
        shutil.rmtree(partial, ignore_errors=True)
    for name in os.listdir(place):
        path = os.path.join(place, name)
        if path != folder and os.lstat(path).st_mtime < time.time() - UNUSED_FOR:
            shutil.rmtree(path, ignore_errors=True)

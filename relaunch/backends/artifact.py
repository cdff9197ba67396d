"""Builds the agent as one file that is named after a hash of its contents. Does not ship or run it.

The file holds each source together with its bytecode for this Python: an agent that has to compile
itself needs 0.4 s more of a core to start, on every connection. A node with another version of
Python ignores the bytecode (its magic number differs) and compiles the source.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import marshal
import os
import stat
import tempfile
import zipfile
from pathlib import Path

_NVML = "pynvml"
"""NVIDIA's bindings (package nvidia-ml-py, BSD licence in its header), as one file: nothing has to
be installed on the nodes."""
_PACKAGE = Path(__file__).resolve().parent.parent
_ENTRY = (
    "import os\nimport sys\n\n"
    "from relaunch.agent.__main__ import main\n\nos._exit(main(sys.argv[1:]))\n"
)
_WHEN = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip file can hold. It makes builds reproducible: the same source gives
the same file, whenever and wherever it is built."""


def _read_bindings() -> bytes:
    found = importlib.util.find_spec(_NVML)
    if found is None or found.origin is None:
        raise RuntimeError(
            f"{_NVML} is not installed;"
            " expected the package nvidia-ml-py, which is shipped to the nodes"
        )
    return Path(found.origin).read_bytes()


_BYTECODE = 2
"""Version of marshal's format: the last that writes the same bytes for the same code, whatever else
this process has imported."""


def _read_sources() -> dict[str, bytes]:
    files = {"__main__.py": _ENTRY.encode(), f"{_NVML}.py": _read_bindings()}
    for path in [_PACKAGE / "__init__.py", *sorted((_PACKAGE / "agent").rglob("*.py"))]:
        files[path.relative_to(_PACKAGE.parent).as_posix()] = path.read_bytes()
    return files


def _name(sources: dict[str, bytes]) -> str:
    digest = hashlib.sha256(importlib.util.MAGIC_NUMBER)
    for name, source in sorted(sources.items()):
        digest.update(b"%s %d\n%s" % (name.encode(), len(source), source))
    return f"{digest.hexdigest()[:16]}.pyz"


def _is_whole(path: Path, sources: dict[str, bytes]) -> bool:
    """Return whether a file holds these sources, and only this user can write it.

    Its bytecode is compared by the hashes of the sources that it names: compiling takes 0.4 s.
    """
    try:
        status = path.lstat()
        is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not is_own or status.st_mode & 0o022:
            return False
        with zipfile.ZipFile(path) as archive:
            compiled = {f"{name}c": name for name in sources if name != f"{_NVML}.py"}
            return (
                archive.testzip() is None
                and sorted(archive.namelist()) == sorted([*sources, *compiled])
                and all(archive.read(name) == source for name, source in sources.items())
                and all(
                    archive.read(name)[:16] == _make_header(sources[of])
                    for name, of in compiled.items()
                )
            )
    except (FileNotFoundError, zipfile.BadZipFile):
        return False


def _make_header(source: bytes) -> bytes:
    unchecked = (1).to_bytes(4, "little")
    return importlib.util.MAGIC_NUMBER + unchecked + importlib.util.source_hash(source)


def _compile(name: str, source: bytes) -> bytes:
    """Return the content of a `.pyc` that Python does not check against its source (PEP 552)."""
    code = compile(source, name, "exec", dont_inherit=True, optimize=0)
    return _make_header(source) + marshal.dumps(code, _BYTECODE)


def _make_archive(sources: dict[str, bytes]) -> bytes:
    files = dict(sources)
    # The bindings have no bytecode here: the node compiles them once (agent.node.bindings). They
    # are large, and most agents never read a GPU.
    files.update(
        (f"{name}c", _compile(name, source))
        for name, source in sources.items()
        if name != f"{_NVML}.py"
    )
    buffer = io.BytesIO()
    # Uncompressed: compression would only slow imports.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, date_time=_WHEN)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, files[name])
    return b"#!/usr/bin/env python3\n" + buffer.getvalue()


def build_agent(folder: Path) -> Path:
    """Write the agent into `folder` as `<16 hex digits>.pyz` unless it is there; return its path.

    The digits are from the SHA-256 of its sources and of the version of this Python's bytecode.
    """
    sources = _read_sources()
    path = folder / _name(sources)
    if _is_whole(path, sources):
        return path
    data = _make_archive(sources)
    folder.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=folder, prefix=".agent-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o755)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
    return path

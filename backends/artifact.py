"""Builds the agent as one file that is named after what is in it. Ships it nowhere, and runs nothing of it."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import tempfile
import zipfile
from pathlib import Path

_NVML = "pynvml"
"""NVIDIA's own bindings (package nvidia-ml-py, BSD licence in its head), as one file: the nodes need install nothing."""
_SOURCE = Path(__file__).resolve().parent.parent / "agent"
_ENTRY = "import os\nimport sys\n\nfrom agent.__main__ import main\n\nos._exit(main(sys.argv[1:]))\n"
_WHEN = (1980, 1, 1, 0, 0, 0)
"""The earliest time a zip file knows: the same source is the same file, whenever and wherever it is built."""


def _bindings() -> bytes:
    found = importlib.util.find_spec(_NVML)
    if found is None or found.origin is None:
        raise RuntimeError(f"{_NVML} is not installed; expected the package nvidia-ml-py, which is shipped to the nodes")
    return Path(found.origin).read_bytes()


def _contents() -> bytes:
    files = {"__main__.py": _ENTRY.encode(), f"{_NVML}.py": _bindings()}
    for path in sorted(_SOURCE.rglob("*.py")):
        files[f"agent/{path.relative_to(_SOURCE).as_posix()}"] = path.read_bytes()
    files.setdefault("agent/__init__.py", b"")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:  # deflated would only be slower to import
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, date_time=_WHEN)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, files[name])
    return b"#!/usr/bin/env python3\n" + buffer.getvalue()


def build_agent(folder: Path) -> Path:
    """Write the agent into `folder` as `<first 16 hex digits of its sha256>.pyz` if need be; return its path."""
    data = _contents()
    path = folder / f"{hashlib.sha256(data).hexdigest()[:16]}.pyz"
    if path.is_file() and path.read_bytes() == data:
        return path
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

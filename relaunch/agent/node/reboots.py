"""The reboots ordered on this node, in a journal that survives them, and whether one is under way.

It does not count them: the controller decides whether there were too many.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import List, Optional

from relaunch.agent.node import kernel_log
from relaunch.agent.protocol import Json, now
from relaunch.agent.state import boot_id, read_json, sync_folder, write_json

JOURNAL = "reboots.jsonl"
UNDER_WAY = "rebooting.json"
TENDED = "tended.json"
NEWEST = 20
"""Number of reboots that are reported: a controller looks back over days, and a node with that many
reboots in days is not rebooted any more."""
TAIL = 64 * 1024
"""Bytes from the journal's end: some hundred entries."""
MAX_REASON = 300


def under_way(state: Path) -> Optional[Json]:
    """Return the reboot ordered on this boot: {"boot_id", "id", "ran": CLOCK_BOOTTIME | null}."""
    known = read_json(state / UNDER_WAY)
    return known if known is not None and known.get("boot_id") == boot_id(state) else None


def _entries(state: Path) -> List[Json]:
    try:
        with open(state / JOURNAL, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    found: List[Json] = []
    for text in lines:
        try:
            entry = json.loads(text)
        except ValueError:  # torn by a power loss, or cut where reading began
            continue
        if not isinstance(entry, dict):
            continue
        if "undone" in entry:
            found = [
                one
                for one in found
                if (one["id"], one["boot_id"]) != (entry.get("id"), entry.get("boot_id"))
            ]
        elif {"at", "id", "reason", "boot_id"} <= set(entry):
            found.append(entry)
    return found


def newest(state: Path) -> List[Json]:
    """Return the newest entries, oldest first, without those whose command failed."""
    try:
        return _entries(state)[-NEWEST:]
    except OSError:
        # a journal that cannot be read cannot be written either, so no reboot is ordered
        return []


def record(state: Path, id: str, reason: str) -> None:
    """Record that this boot is to end, before it is ended; a repeated order makes no second entry.

    Raises:
        OSError: it cannot be recorded; then the reboot must not be done.
    """
    boot = boot_id(state)
    if not any((entry["id"], entry["boot_id"]) == (id, boot) for entry in _entries(state)):
        _append(
            state, {"at": time.time(), "id": id, "reason": reason[:MAX_REASON], "boot_id": boot}
        )
    known = under_way(state)
    if known is None or known.get("id") != id:
        write_json(state / UNDER_WAY, {"boot_id": boot, "id": id, "ran": None})
    tend(state)


def ran(state: Path, id: str) -> None:
    """Record that the command has been run."""
    try:
        write_json(
            state / UNDER_WAY, {"boot_id": boot_id(state), "id": id, "ran": now()}, durable=False
        )
    except OSError:
        # it was run anyway; a repeated order would run it again, on a boot that ends in any case
        pass


def withdraw(state: Path, id: str, reason: str) -> None:
    """Cancel an entry whose command failed: the node runs on, and the entry does not count."""
    (state / UNDER_WAY).unlink()
    _append(
        state,
        {"id": id, "boot_id": boot_id(state), "undone": reason[:MAX_REASON], "at": time.time()},
    )


def _append(state: Path, entry: Json) -> None:
    handle = os.open(state / JOURNAL, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o1600)
    try:
        size = os.fstat(handle).st_size
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        text = (b"\n" if torn else b"") + json.dumps(entry).encode() + b"\n"
        if os.write(handle, text) < len(text):
            raise OSError("the disk is full")
        os.fsync(handle)
    finally:
        os.close(handle)
    sync_folder(state)


def tend(state: Path) -> None:
    """Record the position of a kernel log that is a file, when a repair is ordered.

    Lines from before the repair that have no timestamp then do not count as lines after it.
    """
    mark = kernel_log.mark()
    if mark.handle >= 0:
        os.close(mark.handle)
    try:
        write_json(
            state / TENDED, {**kernel_log.written(mark), "boot_id": boot_id(state), "stamp": now()}
        )
    except OSError:  # old lines then count again, which cannot make a node look healthy
        pass


def tended(state: Path, path: str, since: Optional[float]) -> kernel_log.Mark:
    """Return where to start reading the kernel log for the last `since` seconds (None: all)."""
    uptime = 0.0 if since is None else max(0.0, time.monotonic() - since)
    known = read_json(state / TENDED)
    if known is not None and known["path"] == path:
        of_another_boot = known["boot_id"] != boot_id(state)
        if of_another_boot or (since is not None and known["stamp"] >= now() - since):
            return kernel_log.Mark(path, known["inode"], known["size"], uptime)
    return kernel_log.Mark(path, 0, 0, uptime)

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
from relaunch.agent.state import read_boot_id, read_json, sync_folder, write_json

JOURNAL_FILE = "reboots.jsonl"
CURRENT_FILE = "rebooting.json"
LOG_POSITION_FILE = "kernel_log.json"
MAX_REPORTED = 20
"""Number of reboots that are reported: a controller looks back over days, and a node with that many
reboots in days is not rebooted any more."""
TAIL_BYTES = 64 * 1024
"""Bytes from the journal's end: some hundred entries."""
MAX_REASON = 300


def read_current(state: Path) -> Optional[Json]:
    """Return the reboot ordered on this boot: {"boot_id", "id", "ran": CLOCK_BOOTTIME | null}."""
    recorded = read_json(state / CURRENT_FILE)
    return (
        recorded
        if recorded is not None and recorded.get("boot_id") == read_boot_id(state)
        else None
    )


def _read_entries(state: Path) -> List[Json]:
    try:
        with open(state / JOURNAL_FILE, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    entries: List[Json] = []
    for text in lines:
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError):  # torn by a power loss, or cut where reading began
            continue
        if not isinstance(entry, dict):
            continue
        if "cancelled" in entry:
            entries = [
                candidate
                for candidate in entries
                if (candidate["id"], candidate["boot_id"])
                != (entry.get("id"), entry.get("boot_id"))
            ]
        elif {"at", "id", "reason", "boot_id"} <= set(entry):
            entries.append(entry)
    return entries


def list_newest(state: Path) -> List[Json]:
    """Return the newest entries, oldest first, without those whose command failed."""
    try:
        return _read_entries(state)[-MAX_REPORTED:]
    except OSError:
        # a journal that cannot be read cannot be written either, so no reboot is ordered
        return []


def record(state: Path, id: str, reason: str, by: str = "") -> None:
    """Record that this boot is to end, before it is ended; a repeated order makes no second entry.

    `by` is who ordered it, for people; an older controller does not say that.

    Raises:
        OSError: it cannot be recorded; then the reboot must not be done.
    """
    boot = read_boot_id(state)
    if not any((entry["id"], entry["boot_id"]) == (id, boot) for entry in _read_entries(state)):
        entry = {"at": time.time(), "id": id, "reason": reason[:MAX_REASON], "boot_id": boot}
        _append(state, {**entry, "by": by} if by else entry)
    recorded = read_current(state)
    if recorded is None or recorded.get("id") != id:
        write_json(state / CURRENT_FILE, {"boot_id": boot, "id": id, "ran": None})
    record_log_position(state)


def record_run(state: Path, id: str) -> None:
    """Record that the command has been run."""
    try:
        write_json(
            state / CURRENT_FILE,
            {"boot_id": read_boot_id(state), "id": id, "ran": now()},
            durable=False,
        )
    except OSError:
        # it was run anyway; a repeated order would run it again, on a boot that ends in any case
        pass


def cancel(state: Path, id: str, reason: str) -> None:
    """Cancel an entry whose command failed: the node runs on, and the entry does not count."""
    (state / CURRENT_FILE).unlink()
    _append(
        state,
        {
            "id": id,
            "boot_id": read_boot_id(state),
            "cancelled": reason[:MAX_REASON],
            "at": time.time(),
        },
    )


def _append(state: Path, entry: Json) -> None:
    handle = os.open(state / JOURNAL_FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o1600)
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


def record_log_position(state: Path) -> None:
    """Record the position of a kernel log that is a file, when a repair is ordered.

    Lines from before the repair that have no timestamp then do not count as lines after it.
    """
    mark = kernel_log.record_position()
    if mark.handle >= 0:
        os.close(mark.handle)
    try:
        write_json(
            state / LOG_POSITION_FILE,
            {**kernel_log.serialize_position(mark), "boot_id": read_boot_id(state), "stamp": now()},
        )
    except OSError:  # old lines then count again, which cannot make a node look healthy
        pass


def choose_log_position(state: Path, path: str, since: Optional[float]) -> kernel_log.LogPosition:
    """Return where to start reading the kernel log for the last `since` seconds (None: all)."""
    uptime = 0.0 if since is None else max(0.0, time.monotonic() - since)
    recorded = read_json(state / LOG_POSITION_FILE)
    if recorded is not None and recorded["path"] == path:
        is_from_other_boot = recorded["boot_id"] != read_boot_id(state)
        if is_from_other_boot or (since is not None and recorded["stamp"] >= now() - since):
            return kernel_log.LogPosition(path, recorded["inode"], recorded["size"], uptime)
    return kernel_log.LogPosition(path, 0, 0, uptime)

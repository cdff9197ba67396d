"""The state of this node: boot, load, memory, disks, GPUs, kernel log, jobs, holder, reboots.

It changes nothing except a small file that it writes to test the disk, and does not judge.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from pathlib import Path
from typing import Any, List, Optional, Tuple

from relaunch.agent import tools
from relaunch.agent.node import gpu_users, gpus, hold, kernel_log, reboots
from relaunch.agent.protocol import Fields, Json, now
from relaunch.agent.state import boot_id

KERNEL_LINES = 200
KERNEL_PATIENCE = 1.0
"""Seconds; the whole ring is read in 0.1 s."""
DISK_PATIENCE = 5.0
"""Seconds for a small write to reach the disk: one that needs longer stalls every checkpoint."""
SHARES = (0.5, 0.25)
"""Shares of the given time for NVML and for the disks, if that is less than their own limits. The
other checks never wait."""
_TIMES = re.compile(r"(?:^|kernel: )\[ *(\d+\.\d+)\]")
"""Seconds since boot, as printed by `dmesg` and syslog."""


def probe(state: Path, order: Fields) -> Json:
    within = order.number("within", least=0.1)
    since = None if order.order.get("kernel_since") is None else order.number("kernel_since")
    found: Json = {
        "outcome": "done",
        "boot_id": boot_id(state),
        "stamp": now(),
        "wall": time.time(),
        "load": os.getloadavg()[0],
        "memory": _memory(),
        "disks": _disks(state, min(DISK_PATIENCE, within * SHARES[1])),
        "gpus": gpu_users.told(state, gpus.read(state, min(gpus.WITHIN, within * SHARES[0]))),
        "kernel": _kernel(state, since),
    }
    jobs, _ = hold.living(state)
    found.update(jobs=jobs, held=hold.held(state), reboots=reboots.newest(state))
    return {**found, "answered": time.time()}


def _memory() -> Json:
    try:
        with open("/proc/meminfo") as file:
            lines = dict(text.split(":", 1) for text in file)
        total, available = (
            int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable")
        )
    except (OSError, KeyError, ValueError) as error:
        return {"unreadable": f"/proc/meminfo: {error}"}
    return {"total": total, "available": available}


def _disks(state: Path, within: float) -> List[Json]:
    """Return one row for each file system, the state folder's first."""
    rows = []
    seen = set()
    for path in (state, Path("/"), Path("/dev/shm")):
        answer = tools.bounded(lambda path=path: _disk(path, writes=path == state), within)  # type: ignore[misc]
        if answer is None:
            unknown = {"total": 0, "free": 0, "inodes_free": None}
            rows.append(
                {
                    "path": str(path),
                    **unknown,
                    "writable": False,
                    "reason": f"it did not answer within {within:g} s",
                }
            )
        elif answer["device"] is not None and answer["device"] not in seen:
            seen.add(answer.pop("device"))
            rows.append(answer)
    return rows


def _disk(path: Path, writes: bool) -> Json:
    try:
        device: Optional[int] = os.stat(path).st_dev
        found = os.statvfs(path)
    except FileNotFoundError:
        return {"device": None}
    except OSError as error:
        row = {"device": f"{path}", "path": str(path), "total": 0, "free": 0, "inodes_free": None}
        return {**row, "writable": False, "reason": str(error.strerror)}
    reason = (
        "it is mounted read-only"
        if found.f_flag & os.ST_RDONLY
        else _write(path)
        if writes
        else None
    )
    row = {
        "device": device,
        "path": str(path),
        "total": found.f_blocks * found.f_frsize,
        "free": found.f_bavail * found.f_frsize,
        "inodes_free": found.f_favail if found.f_files else None,
        "writable": reason is None,
    }
    return row if reason is None else {**row, "reason": reason}


def _write(folder: Path) -> Optional[str]:
    """Write a block through to the disk; return why that failed."""
    path = folder / f".probe.{uuid.uuid4().hex}"
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(handle, bytes(4096))
            os.fsync(handle)
        finally:
            os.close(handle)
            os.unlink(path)
    except OSError as error:
        return str(error.strerror)
    return None


def _kernel(state: Path, since: Optional[float]) -> Json:
    path = os.environ.get("RELAUNCH_KERNEL_LOG") or kernel_log.DEVICE
    mark = reboots.tended(state, path, since)
    reading = kernel_log.read(mark, KERNEL_LINES, KERNEL_PATIENCE)
    lines, why = _since(reading["kernel"], mark.uptime), reading["kernel_unreadable"]
    found: Json = {"lines": lines}
    return found if why is None else {"unreadable": why, **found}


def _since(lines: List[str], uptime: float) -> List[str]:
    """Leave out lines of a file with an earlier timestamp; a line without one may be new."""
    timed: List[Tuple[Any, str]] = [(_TIMES.search(text), text) for text in lines]
    return [text for time_of, text in timed if time_of is None or float(time_of.group(1)) >= uptime]

"""The state of this node: boot, load, memory, disks, GPUs, kernel log, jobs, holder, reboots.

It changes nothing except a small file that it writes to test the disk and the record of network
ports, and does not judge.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any, List, Optional, Tuple

from relaunch.agent import tools
from relaunch.agent.node import gpu_users, gpus, hold, kernel_log, links, reboots, resets
from relaunch.agent.protocol import Fields, Json, now
from relaunch.agent.state import read_boot_id

MAX_KERNEL_LINES = 200
KERNEL_TIMEOUT = 1.0
"""Seconds; the whole ring is read in 0.1 s."""
DISK_TIMEOUT = 5.0
"""Seconds for a small write to reach the disk: one that needs longer stalls every checkpoint."""
LOOK_TIMEOUT = 2.0
"""Seconds for the disk in a look at a node. One that needs longer says nothing: it may be writing a
checkpoint."""
TIMEOUT_SHARES = (0.5, 0.25, 0.1)
"""Shares of the given time for NVML, each disk and the network cards, if that is less than their
own limits. The other checks never wait."""
_TIMESTAMP = re.compile(r"(?:^|kernel: )\[ *(\d+\.\d+)\]")
"""Seconds since boot, as printed by `dmesg` and syslog."""


def probe_node(state: Path, order: Fields) -> Json:
    timeout = order.number("within", least=0.1)
    since = None if order.order.get("kernel_since") is None else order.number("kernel_since")
    answer: Json = {
        "outcome": "done",
        "boot_id": read_boot_id(state),
        "stamp": now(),
        "wall": time.time(),
        "load": os.getloadavg()[0],
        "memory": _read_memory(),
        "disks": _check_disks(state, min(DISK_TIMEOUT, timeout * TIMEOUT_SHARES[1])),
        "gpus": gpu_users.add_owners(
            state, gpus.read(state, min(gpus.READ_TIMEOUT, timeout * TIMEOUT_SHARES[0]))
        ),
        "links": links.read_ports(state, min(links.READ_TIMEOUT, timeout * TIMEOUT_SHARES[2])),
        "kernel": _read_kernel_log(state, since),
        "resets": resets.list_resets(state),
    }
    jobs, _ = hold.list_living(state)
    answer.update(jobs=jobs, held=hold.read_holder(state), reboots=reboots.list_newest(state))
    return {**answer, "answered": time.time()}


def look_at_hardware(state: Path) -> Json:
    """Return what of a probe condemns a node without a job's fault: GPUs, disk and network ports.

    It is read every few minutes, so it leaves out what only explains a fault.
    """
    # The GPUs first: it was just seen that no order holds the node.
    gpus_ = gpu_users.add_owners(state, gpus.read(state, inventory_only=True))
    disk = tools.run_bounded(partial(_check_disk, state, writes=True), LOOK_TIMEOUT)
    if disk is None:
        disk = {"unreadable": f"it did not answer within {LOOK_TIMEOUT:g} s"}
    disk.pop("device", None)
    return {"gpus": gpus_, "disks": [disk], "links": links.read_ports(state, counts=False)}


def _read_memory() -> Json:
    try:
        with open("/proc/meminfo") as file:
            lines = dict(text.split(":", 1) for text in file)
        total, available = (
            int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable")
        )
    except (OSError, KeyError, ValueError) as error:
        return {"unreadable": f"/proc/meminfo: {error}"}
    return {"total": total, "available": available}


def _check_disks(state: Path, timeout: float) -> List[Json]:
    """Return one row for each file system, the state folder's first."""
    rows = []
    devices = set()
    for path in (state, Path("/"), Path("/dev/shm")):
        check = partial(_check_disk, path, writes=path == state)
        answer = tools.run_bounded(check, timeout)
        if answer is None:
            unknown = {"total": 0, "free": 0, "inodes_free": None}
            rows.append(
                {
                    "path": str(path),
                    **unknown,
                    "writable": False,
                    "reason": f"it did not answer within {timeout:g} s",
                }
            )
        elif answer["device"] is not None and answer["device"] not in devices:
            devices.add(answer.pop("device"))
            rows.append(answer)
    return rows


def _check_disk(path: Path, writes: bool) -> Json:
    try:
        device: Optional[int] = os.stat(path).st_dev
        usage = os.statvfs(path)
    except FileNotFoundError:
        return {"device": None}
    except OSError as error:
        row = {"device": f"{path}", "path": str(path), "total": 0, "free": 0, "inodes_free": None}
        return {**row, "writable": False, "reason": str(error.strerror)}
    reason = (
        "it is mounted read-only"
        if usage.f_flag & os.ST_RDONLY
        else _test_write(path)
        if writes
        else None
    )
    row = {
        "device": device,
        "path": str(path),
        "total": usage.f_blocks * usage.f_frsize,
        "free": usage.f_bavail * usage.f_frsize,
        "inodes_free": usage.f_favail if usage.f_files else None,
        "writable": reason is None,
    }
    return row if reason is None else {**row, "reason": reason}


def _test_write(folder: Path) -> Optional[str]:
    """Write a block through to the disk; return why that failed."""
    path = folder / f".probe.{uuid.uuid4().hex}"
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.unlink(path)  # first: a process that hangs in the next calls is killed
            os.write(handle, bytes(4096))
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        return str(error.strerror)
    return None


def _read_kernel_log(state: Path, since: Optional[float]) -> Json:
    path = os.environ.get("RELAUNCH_KERNEL_LOG") or kernel_log.DEVICE
    position = reboots.choose_log_position(state, path, since)
    reading = kernel_log.read(position, MAX_KERNEL_LINES, KERNEL_TIMEOUT)
    lines, reason = (
        _drop_earlier_lines(reading["kernel"], position.uptime),
        reading["kernel_unreadable"],
    )
    answer: Json = {"lines": lines}
    return answer if reason is None else {"unreadable": reason, **answer}


def _drop_earlier_lines(lines: List[str], uptime: float) -> List[str]:
    """Leave out lines of a file with an earlier timestamp; a line without one may be new."""
    timed: List[Tuple[Any, str]] = [(_TIMESTAMP.search(text), text) for text in lines]
    return [text for time_of, text in timed if time_of is None or float(time_of.group(1)) >= uptime]

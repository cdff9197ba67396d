"""Reads evidence from the node's kernel log since a generation was prepared.

Evidence is, for example, an Xid, the OOM killer or a lost link. The lines are not judged here, and
nothing is waited for: what cannot be read, or not in time, is reported as unreadable.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Iterable, List

from relaunch.agent.failpoints import reach_failpoint
from relaunch.agent.protocol import Json
from relaunch.agent.state import Generation, read_boot_id, read_json, write_json

DEVICE = "/dev/kmsg"
MAX_LINES = 20
"""Number of newest lines to keep. The first Xid of a fault and its echoes are a handful; each of
sixteen ranks may carry all of them."""
MAX_LINE = 400
"""Characters of a line. The longest Xid texts (NVLink) have about 250."""
READ_TIMEOUT = 0.05
"""Seconds for reading /dev/kmsg, which returns one record per call: about 20,000 records, more than
most rings hold."""
TAIL_BYTES = 1024 * 1024
"""Bytes to read from the end of a file: some 10,000 lines, searched in a few milliseconds."""
MAX_RECORD_BYTES = 8192
"""Bytes: more than the kernel returns per read."""
OVERWRITTEN = "the kernel overwrote messages before they were read"

MARKS = (
    "NVRM: Xid",
    "SXid (",
    "oom-kill:",
    "fallen off the bus",
    "NV_ERR_GPU_IS_LOST",
    "RmInitAdapter",
    "rm_init_adapter",
    "(Fatal)",
    "AER: device recovery failed",
    "soft lockup",
    "hard LOCKUP",
    "health compromised",
    "fatal error state",
    "health recovery failed",
    "insufficient power",
    "Cable error",
    "Cable unplugged",
    "invoked oom-killer",
    "ut of memory",
    "Machine Check",
    "achine check",
    "mce: ",
    "MCE: ",
    "[Hardware Error]",
    "Memory failure: ",
    " UE",
    "Lost carrier",
    "ink is down",
    "ink is Down",
    "ink down",
    "ink Down",
    "definitely down",
    "I/O error",
    "error, dev ",
    "EXT4-fs error",
    "Remounting filesystem read-only",
    "orruption",
    "hutting down filesystem",
    "nvme nvme",
    " not responding",
    " was lost",
    "blocked for more than",
    "NV_ERR_RESET_REQUIRED",
    "GPU reset begin",
    "GPU reset end with",
    "GPU Recovery Failed",
    "error during GPU init",
    "device lost from bus",
    "uncorrectable hardware error",
    "page fault (src_id:",
    "timeout, but soft recovered",
    "timeout, signaled seq",
    "failed to respond to msg",
    "unrecoverable state",
    "Queue preemption time out",
    "qcm fence wait loop",
    "as wedged",
    "Engine reset: engine_class=",
    "GPU HANG: ecode",
    "is NOT usable",
    "BUG: unable to handle",
    "BUG: kernel NULL pointer",
    "Unable to handle kernel",
    "invalid opcode: ",
    "divide error: ",
    "stack segment: ",
    "double fault: ",
    "Internal error: ",
    "Oops: ",
    "general protection fault",
    "kernel BUG at ",
    "Kernel panic",
)
"""Equal to those of the controller's `relaunch/evidence/kernel_log.py`, as a test checks: a line
without any of them is no evidence."""
_MARKS = tuple(each.encode() for each in MARKS)
_CONTROL_CHARACTERS = re.compile(rb"[\x00-\x1f\x7f]")

# Every user of the node can have the kernel log a text of theirs: the name of a file whose program
# crashes, or a path that cannot be mounted. Such a text may read "NVRM: Xid (PCI:0000:65:00): 79".
_CRASH = re.compile(rb"\[\d+\]:? (?:segfault at |trap |general protection|unhandled |bad frame )")
"""Behind the program's name and before the file's (arch/x86/mm/fault.c, arch/x86/kernel/traps.c,
arch/arm64/kernel/traps.c). None of these lines says anything about the hardware."""
_PATHS = (b"overlayfs: ", b"process '", b"audit: ", b"tmpfs: ")
"""How messages begin that quote a path or an argument of a user's."""
_GPU_MARKS = (b"NVRM: Xid", b"SXid (")
_GPU_MESSAGE = re.compile(rb"(?:nvidia-nvswitch\d*: )?(?:NVRM: Xid|SXid \()")
"""How NVIDIA's drivers begin what `_GPU_MARKS` are in."""
_PREFIX = re.compile(
    rb"(?:<\d+>)?(?:kern +:\w+ *: \S+ |(?:[^\[]{0,100}? )?kernel: )?(?:\[[^\]]{1,40}\] ?)?"
)
"""What dmesg and syslog write before a message: facility, date and host, time."""


def _is_evidence(message: bytes) -> bool:
    """Return whether a message of the kernel has a mark, and not by a text of a user's."""
    if not any(each in message for each in _MARKS):
        return False
    if _CRASH.search(message) or message.startswith(_PATHS):
        return False
    is_of_gpu = any(each in message for each in _GPU_MARKS)
    return not is_of_gpu or _GPU_MESSAGE.match(message) is not None


def _is_evidence_line(line: bytes) -> bool:
    """Return the same of a line of a file."""
    prefix = _PREFIX.match(line)
    return _is_evidence(line[prefix.end() if prefix else 0 :])


@dataclass(frozen=True)
class LogPosition:
    """The position of the log when the generation was prepared."""

    path: str
    inode: int
    size: int
    """Size of a file; 0 if it did not exist yet."""
    uptime: float
    """CLOCK_MONOTONIC. The kernel's timestamps use nearly that clock: the two drift apart by
    seconds in weeks."""
    handle: int = -1
    """The device, opened and positioned behind its last record: exact, but it can be read only
    once, and only by a child of the shim."""


def record_position() -> LogPosition:
    """Record the position of the log without reading it.

    A log that does not exist or may not be read is reported when it is to be read.
    """
    path = os.environ.get("RELAUNCH_KERNEL_LOG") or DEVICE
    uptime = time.monotonic()
    try:
        status = os.stat(path)
        if not stat.S_ISCHR(status.st_mode):
            return LogPosition(path, status.st_ino, status.st_size, uptime)
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return LogPosition(path, 0, 0, uptime)
    try:
        os.lseek(handle, 0, os.SEEK_END)
    except OSError:
        os.close(handle)
        handle = -1
    return LogPosition(path, 0, 0, uptime, handle)


def serialize_position(since: LogPosition) -> Json:
    """Return a position as JSON for the launch record, for processes that did not inherit it."""
    return {"path": since.path, "inode": since.inode, "size": since.size, "uptime": since.uptime}


def may_explain(observations: Iterable[Json]) -> bool:
    """Return whether the kernel log may explain any of these observations.

    It does not for a rank that succeeded or that we stopped.
    """
    return any(map(_may_explain_one, observations))


def _may_explain_one(observation: Json) -> bool:
    if observation["kind"] == "RankExited":
        return not observation["stopped"] and observation["exit_code"] != 0
    return observation["kind"] in ("ShimDied", "RanksVanished")


def add_reading(observation: Json, reading: Json | None) -> Json:
    """Add the reading to an observation it may explain, and an empty one to other rank exits."""
    if _may_explain_one(observation) and reading is not None:
        return {**observation, **reading}
    if observation["kind"] == "RankExited":
        return {**observation, "kernel": [], "kernel_unreadable": None}
    return observation


def read_generation(generation: Generation, since: LogPosition | None) -> Json:
    """Return the kernel log lines of a generation: read once and stored, so that all reports agree.

    Args:
        generation: has failed, so all its failures date from one moment: the other ranks are
            stopped by us.
        since: the position that the shim recorded; None in a process that is not its child.
    """
    path = generation.path / "kernel.json"
    stored = read_json(path)
    if stored is not None:
        return stored
    reading = (
        _read_unmarked(generation)
        if since is None
        else read(_drop_shared_handle(generation, since))
    )
    reach_failpoint(generation.state, "kernel.read")
    try:
        write_json(path, reading, durable=False)
    except OSError:
        # for example a full disk: the next caller reads again, and the observation is sent anyway
        pass
    return reading


def _drop_shared_handle(generation: Generation, since: LogPosition) -> LogPosition:
    """Drop the handle if a supervisor that died may have read from it.

    Records that it has read do not come again.
    """
    if since.handle < 0:
        return since
    try:
        os.close(
            os.open(generation.path / "kernel.begun", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        )
    except OSError:
        return replace(since, handle=-1)
    return since


def _read_unmarked(generation: Generation) -> Json:
    started = generation.launch or {}
    if "kernel" not in started:
        return _unreadable("it is not known where the kernel log stood when this generation began")
    record = started["kernel"]
    since = LogPosition(record["path"], record["inode"], record["size"], record["uptime"])
    if since.inode == 0 and started["boot_id"] != read_boot_id(generation.state):
        return _unreadable(f"the node rebooted: what {since.path} held is gone")
    return read(since)


def read(since: LogPosition, limit: int = MAX_LINES, timeout: float = READ_TIMEOUT) -> Json:
    """Return the newest evidence since the position, oldest first, and why lines may be missing."""
    try:
        if since.handle >= 0 or stat.S_ISCHR(os.stat(since.path).st_mode):
            return _read_device(since, limit, timeout)
        return _read_file(since, limit)
    except OSError as error:
        # EPERM is the kernel's own check; without permission on the device file the error is
        # EACCES.
        restricted = " (kernel.dmesg_restrict)" if error.errno == errno.EPERM else ""
        reason = (
            "permission denied"
            if isinstance(error, PermissionError)
            else str(error.strerror).lower()
        )
        return _unreadable(f"{reason}: {since.path}{restricted}")


def _read_device(since: LogPosition, limit: int, timeout: float) -> Json:
    if since.handle >= 0:
        return read_records(since.handle, since.path, 0.0, limit, timeout)
    handle = os.open(since.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        return read_records(handle, since.path, since.uptime, limit, timeout)
    finally:
        os.close(handle)


def read_records(
    handle: int,
    path: str,
    uptime: float = 0.0,
    limit: int = MAX_LINES,
    timeout: float = READ_TIMEOUT,
) -> Json:
    """Read up to the last record, from any writer: fault injection also writes into the device.

    A record is `priority,sequence,microseconds,flags;message`, followed by lines that are left out.
    """
    lines: deque[str] = deque(maxlen=limit)
    lost = None
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            record = os.read(handle, MAX_RECORD_BYTES)
        except BlockingIOError:
            break
        except BrokenPipeError:
            # the ring has wrapped; the next read continues with the oldest record left
            lost = OVERWRITTEN
            continue
        if not record:
            break
        message = record.partition(b"\n")[0].partition(b";")[2]
        if _is_evidence(message):
            at = int(record.split(b",", 3)[2])
            if at >= uptime * 1e6:
                lines.append(_text(b"[%5d.%06d] %s" % (at // 1000000, at % 1000000, message)))
    else:
        lost = f"{path} was not read to its end within {timeout * 1000:g} ms"
    return {"kernel": list(lines), "kernel_unreadable": lost}


def _read_file(since: LogPosition, limit: int) -> Json:
    handle = os.open(since.path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        now = os.fstat(handle)
        # Another file, or a truncated one, was begun after that position: all of it is new.
        begin = since.size if now.st_ino == since.inode and now.st_size >= since.size else 0
        start = max(begin, now.st_size - TAIL_BYTES)
        data = os.pread(handle, min(TAIL_BYTES, now.st_size - start), start)
    finally:
        os.close(handle)
    # The text before the first line break may be cut.
    first = data.find(b"\n") + 1 if start > begin else 0
    lines = [_text(line) for line in _lines_with_marks(data, first, limit)]
    part = start > begin and len(lines) < limit
    lost = (
        f"of {since.path} only the last {TAIL_BYTES // 1024} KiB were read; "
        "more was written since this generation began"
        if part
        else None
    )
    return {"kernel": list(lines), "kernel_unreadable": lost}


def _lines_with_marks(data: bytes, first: int, limit: int) -> List[bytes]:
    """Return the newest lines that are evidence.

    One search through all data for each mark is ten times as fast as testing each line for all
    marks.
    """
    begins = set()
    for each in _MARKS:
        at = data.rfind(each)
        newest = 0
        while at >= first and newest < limit:
            begin = data.rfind(b"\n", 0, at) + 1
            end = data.find(b"\n", at)
            if _is_evidence_line(data[begin : end if end >= 0 else len(data)]):
                begins.add(begin)
                newest += 1
            at = data.rfind(each, 0, max(begin, 0))
    return [data[begin : begin + MAX_LINE].partition(b"\n")[0] for begin in sorted(begins)[-limit:]]


def _text(line: bytes) -> str:
    """Return printable ASCII, so that each character is one byte everywhere."""
    return (
        _CONTROL_CHARACTERS.sub(b" ", line[:MAX_LINE])
        .decode("ascii", "backslashreplace")[:MAX_LINE]
        .strip(" ")
    )


def _unreadable(reason: str) -> Json:
    return {"kernel": [], "kernel_unreadable": reason}

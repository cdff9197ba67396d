"""Reads the Python stacks of a process: with py-spy, else as the process itself has allowed it.

Nothing is stopped or traced: py-spy only reads the memory of the process (`--nonblocking`). A
tracer would let a process that was stopped (SIGSTOP) run on, and would wait without end for a
thread that is blocked in the kernel.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any, List, Union

from relaunch.agent import tools
from relaunch.agent.processes import read_process
from relaunch.agent.protocol import Fields, Json, Refusal, refuse_field

PROGRAM_VARIABLE = "RELAUNCH_PY_SPY"
"""Path of a py-spy that is on the node already, so that none is sent."""
PY_SPY_TIMEOUT = 10.0
MIN_TIMEOUT = 0.2
KILL_DELAY = 1.2
"""Seconds left for killing one that hangs, and for the answer."""
TRIES = 3
"""A process that computes changes its memory while that is read, so one try may fail."""
MAX_OUTPUT_BYTES = 8 * 1024 * 1024
MAX_THREADS = 16
MAX_FRAMES = 64
MAX_FUNCTION, MAX_FILE, MAX_NAME = 256, 512, 200
MAX_REASON = 300
MAX_PROGRAM_BYTES = 64 * 1024 * 1024
MAX_CHUNK_BYTES = 1024 * 1024
UNUSED_FOR = 30 * 24 * 3600
"""Seconds without use after which another version of py-spy is removed."""
DUMP_TIMEOUT = 2.0
DUMP_PAUSE = 0.05
"""Seconds without a new line after which a process has written its stacks."""

Problem = str
"""Why there is none, as a sentence without a full stop."""


# --- the program


def _folder(state: Path) -> Path:
    return state / "tools"


def find(state: Path, order: Fields) -> Union[Path, Problem]:
    """Return the py-spy to use: the one that the order names, the node's own, or why there is none.

    `order`: its field `py_spy` has the `sha256` of one that was received before, or says why none
    was sent (`missing`).
    """
    given = os.environ.get(PROGRAM_VARIABLE)
    if given:
        return Path(given)
    named = order.order.get("py_spy")
    fields = Fields({} if named is None else named, "py_spy.")
    if fields.order.get("sha256") is not None:
        program = _folder(state) / _name(fields)
        if program.exists():
            return program
    on_path = shutil.which("py-spy")
    if on_path is not None:
        return Path(on_path)
    reason = fields.text("missing") if fields.order.get("missing") else "none was sent"
    return f"there is no py-spy on the node: {reason}, and none is on its PATH"


def _name(fields: Fields) -> str:
    sha256 = fields.text("sha256")
    if re.fullmatch("[0-9a-f]{64}", sha256) is None:
        refuse_field(f"{fields.prefix}sha256", sha256, "64 hexadecimal digits")
    return f"py-spy-{sha256[:16]}"


def receive(state: Path, order: Fields) -> Json:
    """Receive py-spy in parts, and answer whether it is complete and how much of it is here.

    Parts that two controllers send at once are the same bytes at the same offsets.
    """
    name, size, machine = _name(order), order.whole("size"), order.text("machine")
    if not 0 < size <= MAX_PROGRAM_BYTES:
        refuse_field("size", size, f"1 to {MAX_PROGRAM_BYTES}")
    if os.environ.get(PROGRAM_VARIABLE):
        return {"outcome": "done", "complete": True}
    if machine != platform.machine():
        reason = f"the controller's py-spy is for {machine}, and the node is {platform.machine()}"
        raise Refusal("other_machine", reason)
    folder = _folder(state)
    path = folder / name
    if path.exists():
        os.utime(path)
        return {"outcome": "done", "complete": True}
    if order.order.get("data") is None:
        return {"outcome": "done", "complete": False}
    offset = order.whole("offset")
    data = _decode(order.text("data"))
    if offset + len(data) > size:
        refuse_field("offset", offset, f"at most {size - len(data)}")
    folder.mkdir(mode=0o700, exist_ok=True)
    part = folder / f".{name}"
    handle = os.open(part, os.O_RDWR | os.O_CREAT, 0o700)
    with open(handle, "r+b") as file:
        file.seek(offset)
        file.write(data)
    if offset + len(data) < size:
        return {"outcome": "done", "complete": False}
    if hashlib.sha256(part.read_bytes()).hexdigest() != order.text("sha256"):
        part.unlink()
        raise Refusal("broken", "py-spy came broken: its sha256 is another one")
    os.replace(part, path)
    _sweep(folder, path)
    return {"outcome": "done", "complete": True}


def _decode(text: str) -> bytes:
    import zlib  # a Python without it can do everything else

    try:
        unpacked = zlib.decompressobj().decompress(
            base64.b64decode(text, validate=True), MAX_CHUNK_BYTES
        )
    except (ValueError, zlib.error):
        refuse_field("data", text[:20], "bytes that zlib has packed, as base64")
    return unpacked


def _sweep(folder: Path, kept: Path) -> None:
    for path in folder.iterdir():
        if path != kept and path.stat().st_mtime < time.time() - UNUSED_FOR:
            path.unlink()


# --- reading a process


def read_threads(pid: int, program: Union[Path, Problem], until: float, stacks_file: Path) -> Json:
    """Return the fields `threads`, `source` and `unreadable` of a process.

    Args:
        pid: Its pid.
        program: py-spy, or why there is none.
        until: CLOCK_MONOTONIC, when the answer must be there.
        stacks_file: Where the process writes its stacks if it has allowed that.
    """
    if not _may_be_python(pid):
        return {"threads": [], "source": None, "unreadable": "it is not a Python program"}
    found = program if isinstance(program, str) else _run(pid, program, until)
    source = "py-spy"
    if isinstance(found, str):
        written = _ask_process(pid, stacks_file, until)
        found, source = (
            (f"{found}; {written}", "")
            if isinstance(written, str)
            else (
                written,
                "faulthandler",
            )
        )
    if isinstance(found, str):
        return {"threads": [], "source": None, "unreadable": found[:MAX_REASON]}
    return {"threads": found, "source": source, "unreadable": None}


def _may_be_python(pid: int) -> bool:
    """Return whether the process has Python in it, or cannot be looked into."""
    try:
        if "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe")):
            return True
        with open(f"/proc/{pid}/maps", "rb") as file:
            return any(b"python" in row for row in file)
    except OSError:
        return True


def _run(pid: int, program: Path, until: float) -> Union[List[Json], Problem]:
    """Run py-spy, and return the threads, the main thread first, or why it cannot read them."""
    reason = "py-spy had no time left"
    for _ in range(TRIES):
        left = min(PY_SPY_TIMEOUT, until - KILL_DELAY - time.monotonic())
        if left < MIN_TIMEOUT:
            return reason
        command = [str(program), "dump", "--nonblocking", "--json", "--pid", str(pid)]
        try:
            result = tools.run(command, left, max_stdout=MAX_OUTPUT_BYTES)
        except OSError as error:
            return f"py-spy cannot be run: {program}: {error.strerror}"
        if result.exit_code is None:
            return f"py-spy did not end within {left:.0f} s"
        found = _parse(pid, result.stdout) if result.exit_code == 0 else None
        if found:
            return found
        reason = f"py-spy: {_shorten_error(result.stderr) or 'it finds no thread'}"
        if "ermission" in reason or not os.path.exists(f"/proc/{pid}"):
            return reason
    return reason


def _shorten_error(text: str) -> str:
    """Return the first line of an error of py-spy, and the first of its causes."""
    text = text.partition("Stack backtrace")[0]
    words = [row.strip() for row in text.splitlines() if row.strip() not in ("", "Caused by:")]
    return "; ".join(words)[:MAX_REASON]


def _parse(pid: int, text: str) -> List[Json]:
    try:
        threads = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if not isinstance(threads, list):
        return []
    rows = []
    for thread in threads:
        frames = [
            make_frame(frame.get("name"), frame.get("filename"), frame.get("line"))
            for frame in thread.get("frames", ())[:MAX_FRAMES]
        ]
        tid = thread.get("os_thread_id")
        name = str(thread.get("thread_name") or "")[:MAX_NAME]
        rows.append({"tid": tid if isinstance(tid, int) else 0, "name": name, "frames": frames})
    rows.sort(key=lambda row: (row["tid"] != pid and row["name"] != "MainThread", row["tid"]))
    return rows[:MAX_THREADS]


def make_frame(function: Any, file: Any, number: Any) -> List[Any]:
    return [
        str(function or "?")[:MAX_FUNCTION],
        str(file or "?")[-MAX_FILE:],
        number if isinstance(number, int) and 0 <= number < 2**31 else 0,
    ]


# --- asking the process (relaunch.callbacks.allow_stacks)


def _ask_process(pid: int, path: Path, until: float) -> Union[List[Json], Problem]:
    """Have a process write its stacks with Python's faulthandler, if it has allowed that."""
    before = _find_permission(pid, path)
    if isinstance(before, str):
        return before
    number, offset = before
    os.kill(pid, number)
    until = min(until, time.monotonic() + DUMP_TIMEOUT)
    size, since = offset, time.monotonic()
    while (now := time.monotonic()) < until:
        time.sleep(DUMP_PAUSE / 5)
        grown = path.stat().st_size
        if grown != size:
            size, since = grown, now
        elif size > offset and now > since + DUMP_PAUSE:
            break
    with open(path, "rb") as file:
        file.seek(offset)
        threads = parse_dump(pid, file.read(1024 * 1024).decode(errors="replace"))
    return threads or "it has not written its stacks when it was asked to"


def _find_permission(pid: int, path: Path) -> Union["tuple[int, int]", Problem]:
    """Return the signal that has the process write its stacks, and the size of their file."""
    refused = "it has not called relaunch.callbacks.allow_stacks()"
    try:
        with open(path, "rb") as file:
            head = json.loads(file.readline(1024))
            offset = file.seek(0, os.SEEK_END)
        number = int(head["signal"])
        process = read_process(pid)
        if process is None or process.started != head["started"]:
            return refused
        with open(f"/proc/{pid}/status", errors="replace") as status:
            masks = dict(row.split(":\t", 1) for row in status if ":\t" in row)
        # A signal that no handler catches would end the process.
        if not int(masks["SigCgt"], 16) >> (number - 1) & 1 or not 0 < number < signal.NSIG:
            return refused
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return refused
    if process.state in "TtDZX":
        return f"it cannot be asked in state {process.state}"
    return number, offset


_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+(?: \[(.*)\])? ")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


def parse_dump(pid: int, text: str) -> List[Json]:
    """Return the threads of what faulthandler wrote, the main thread first.

    faulthandler does not name the threads by their tid. The kernel gives the signal to the main
    thread if it can, which is then the current one; else it is the last, being the oldest.
    """
    rows: List[Json] = []
    main = -1
    for row in text.splitlines():
        thread, frame = _THREAD.match(row), _FRAME.match(row)
        if thread is not None:
            main = len(rows) if row.startswith("Current") else main
            rows.append({"tid": 0, "name": (thread.group(1) or "")[:MAX_NAME], "frames": []})
        elif frame is not None and rows and len(rows[-1]["frames"]) < MAX_FRAMES:
            file, number, function = frame.groups()
            number_or_none = int(number) if number.isdigit() else None
            rows[-1]["frames"].append(make_frame(function, file, number_or_none))
    if rows:
        rows.insert(0, {**rows.pop(main), "tid": pid, "name": "MainThread"})
    return rows[:MAX_THREADS]

"""The order `stacks`: what the processes of ranks do, and where their Python code is.

Changes nothing: no process is stopped or traced while it is read. Whatever may hang in the kernel
(files of /proc that need the memory lock of a process, py-spy) is done by readers: separate
processes, of which one that hangs delays no other. What the answer means is judged elsewhere.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections import deque
from pathlib import Path
from typing import Deque, List, Optional, Tuple, Union

from relaunch.agent import connections, flight_records, processes, py_spy, reports, tools
from relaunch.agent.loop import parse, take_line
from relaunch.agent.protocol import Fields, Json, line, refuse_field
from relaunch.agent.ranks.redact import Redactor
from relaunch.agent.state import Generation

WITHIN = 20.0
"""Seconds that reading may take, unless the order says otherwise."""
MAX_WITHIN = 600.0
ANSWER_DELAY = 0.3
"""Seconds before the end at which reading ends, so that the answer is written in time."""
MAX_PROCESSES = 32
"""Most processes of one rank: itself and, say, the workers of its data loader."""
MAX_TASKS = 1024
"""Most threads of one process whose state is looked at."""
MAX_COMMAND = 200
MAX_KERNEL_FRAMES = 16
STALL_TIMEOUT = 2.0
"""Seconds after which a reader does not count as busy: it waits for something that needs no CPU,
and another one may begin."""
MAX_READERS = 64
MAX_ANSWER_BYTES = 5_000_000
"""Most bytes of an answer. A line of a session has at most 8 MiB."""
TICKS = os.sysconf("SC_CLK_TCK")


def read_stacks(state: Path, order: Fields) -> Json:
    generation, here = reports.find_generation(state, order)
    launched = generation.launched_ranks
    ranks = [*launched] or here
    if order.order.get("rank") is not None:
        rank = order.whole("rank")
        if rank not in ranks:
            refuse_field("rank", rank, f"one of {ranks}")
        ranks = [rank]
    frames = order.flag("frames", True)
    within = order.number("within", WITHIN, least=1.0)
    if within > MAX_WITHIN:
        refuse_field("within", within, f"at most {MAX_WITHIN:g} s")
    pids, groups = {**generation.pids, **launched}, generation.groups
    if groups:  # otherwise the node has rebooted, and the pids mean nothing
        groups.update(launched.values())
    rows: List[Json] = []
    for rank in ranks:
        pid = pids[rank][0] if rank in pids else None
        row: Json = {"rank": rank, "pid": pid}
        if pid is None or pid not in groups or not processes.is_alive(pid, groups[pid]):
            row["unreadable"] = "the rank does not run"
        rows.append(row)
    program = py_spy.find(state, order) if frames else ""
    until = time.monotonic() + within - ANSWER_DELAY

    def work() -> Json:
        return {"rows": _NodeScan(generation, rows, frames, program, until).run()}

    # In a separate process, whose readers are not children of this one: it may become a shim, and
    # would take a reader that cannot be killed for a rank.
    found = tools.run_bounded(work, within)
    if found is None:
        for row in rows:
            row.setdefault("unreadable", f"not read within {within:g} s")
        return {"outcome": "done", "stacks": rows}
    return {"outcome": "done", "stacks": Redactor.read(generation).redact(found["rows"])}


class _Reader:
    """A process that reads one thing after the other."""

    def __init__(self, generation: Generation, program: Union[Path, str], until: float) -> None:
        reading, self.to_child = os.pipe()
        self.from_child, writing = os.pipe()
        parent = os.getpid()

        def work() -> None:
            processes.die_with(parent)
            processes.close_all_but([reading, writing])
            _serve(reading, writing, generation, program, until)

        self.pid = processes.fork(work)
        os.close(reading)
        os.close(writing)
        self.buffer = bytearray()
        self.task: Optional[_Task] = None
        self.since = 0.0

    def begin(self, task: _Task) -> None:
        self.task, self.since = task, time.monotonic()
        os.write(
            self.to_child,
            line(
                {"kind": task[0], "pid": task[2], "rank": task[3], "request": task[1].get("flight")}
            ),
        )

    def is_busy(self, now: float) -> bool:
        return self.task is not None and now < self.since + STALL_TIMEOUT

    def close(self) -> None:
        os.close(self.to_child)
        os.close(self.from_child)
        os.kill(self.pid, signal.SIGKILL)


_Task = Tuple[str, Json, int, int]
"""What is read, the row that it is for (of a rank, or of a process), the pid, and the rank that has
the process. Read are "look", "ask" (which also asks the rank for its flight record), "frames" and
"flight"."""


class _NodeScan:
    """Looks at all ranks, then reads the Python stacks of each, then those of their descendants."""

    def __init__(
        self,
        generation: Generation,
        rows: List[Json],
        frames: bool,
        program: Union[Path, str],
        until: float,
    ) -> None:
        self.generation = generation
        self.rows = rows
        self.frames = frames
        self.program = program
        self.until = until
        self.slots = max(2, len(os.sched_getaffinity(0)))
        self.readers: List[_Reader] = []
        self.tasks: Deque[_Task] = deque(
            ("ask" if frames else "look", row, row["pid"], row["rank"])
            for row in rows
            if "unreadable" not in row
        )

    def run(self) -> List[Json]:
        self._carry_out()
        if self.frames:
            found = [
                (row, position, process)
                for row in self.rows
                for position, process in enumerate(row.get("processes", ()))
                if process["state"] not in "ZX" and process["unreadable"] is None
            ]
            # The ranks themselves come before what is below them.
            found.sort(key=lambda entry: entry[1] > 0)
            self.tasks.extend(
                ("frames", process, process["pid"], row["rank"]) for row, _, process in found
            )
            # Last, so that dumps were written meanwhile.
            self.tasks.extend(
                ("flight", row, row["pid"], row["rank"]) for row in self.rows if row.get("flight")
            )
            self._carry_out()
        for reader in self.readers:
            reader.close()
        shorten(self.rows)
        return self.rows

    def _carry_out(self) -> None:
        """Carry out the tasks; those that do not end in time say so in their rows."""
        while True:
            now = time.monotonic()
            if now >= self.until:
                break
            self._hand_out(now)
            under_way = [reader for reader in self.readers if reader.task is not None]
            if not under_way:
                return
            # A reader that stalls makes room for another, so look again then.
            wait = min(STALL_TIMEOUT / 4, self.until - now)
            handles = {reader.from_child: reader for reader in under_way}
            ready, _, _ = select.select([*handles], [], [], wait)
            for handle in ready:
                self._receive(handles[handle])
        left = [*self.tasks, *(reader.task for reader in self.readers if reader.task is not None)]
        self.tasks.clear()
        for reader in self.readers:
            reader.task = None
        for task in left:
            _give_up(task, "it was not read in time")

    def _hand_out(self, now: float) -> None:
        busy = sum(reader.is_busy(now) for reader in self.readers)
        idle = [reader for reader in self.readers if reader.task is None]
        while self.tasks and busy < self.slots:
            if not idle and len(self.readers) >= MAX_READERS:
                return
            reader = idle.pop() if idle else self._start()
            reader.begin(self.tasks.popleft())
            busy += 1

    def _start(self) -> _Reader:
        reader = _Reader(self.generation, self.program, self.until)
        self.readers.append(reader)
        return reader

    def _receive(self, reader: _Reader) -> None:
        data = os.read(reader.from_child, 1 << 20)
        reader.buffer += data
        text = take_line(reader.buffer)
        task = reader.task
        assert task is not None, "only readers with a task are listened to"
        if text is not None:
            task[1].update(parse(text) or {})
            reader.task = None
        elif not data:
            _give_up(task, "its reader ended")
            reader.close()
            self.readers.remove(reader)


def _give_up(task: _Task, reason: str) -> None:
    kind, row, pid, _ = task
    if kind == "flight":
        row["flight"] = {"unreadable": reason}
        return
    if kind == "frames":
        row["unreadable"] = reason
        return
    # These files need no lock of the process, so they can be read where a reader hangs.
    seen = _look_at(pid, with_memory=False)
    if seen is None:
        row["unreadable"] = reason
    else:
        row["processes"] = [{**seen, "unreadable": reason}]


def _serve(
    reading: int, writing: int, generation: Generation, program: Union[Path, str], until: float
) -> None:
    buffer = bytearray()
    while data := os.read(reading, 65536):
        buffer += data
        while (text := take_line(buffer)) is not None:
            task = parse(text) or {}
            if task["kind"] in ("look", "ask"):
                answer = _look_at_rank(task["pid"])
                if "processes" in answer:
                    answer["network"] = connections.read_connections(task["pid"])
                if task["kind"] == "ask" and "processes" in answer:
                    answer["flight"] = flight_records.request_dumps(
                        generation, task["rank"], task["pid"]
                    )._asdict()
            elif task["kind"] == "flight":
                request = flight_records.Request(**task["request"])
                answer = {
                    "flight": flight_records.read_flight(
                        generation, task["rank"], task["pid"], request
                    )
                }
            else:
                path = generation.stacks_path(task["rank"], task["pid"])
                answer = py_spy.read_threads(task["pid"], program, until, path)
            tools.write(writing, line(answer))


# --- looking into /proc


def _look_at_rank(pid: int) -> Json:
    """Return what is found of a rank and its descendants, without frames."""
    own = _look_at(pid)
    if own is None:
        return {"unreadable": "the rank does not run"}
    below = sorted(process.pid for process in processes.list_descendants(pid))
    others = (_look_at(one) for one in below[: MAX_PROCESSES - 1])
    return {"processes": [own, *(one for one in others if one is not None)], "flight": None}


def _look_at(pid: int, with_memory: bool = True) -> Optional[Json]:
    """Look at one process; return None if it is gone.

    Args:
        pid: Its pid.
        with_memory: Also read what the kernel takes from its memory, for which it needs the
            memory's lock, and what needs the lock of an exec.
    """
    stat = _read(f"/proc/{pid}/stat")
    fields = stat[stat.rfind(b")") + 2 :].split()
    if len(fields) < 13:
        return None
    name = stat[stat.find(b"(") + 1 : stat.rfind(b")")].decode(errors="replace")
    blocked = _find_blocked(pid)
    at = pid if fields[0] == b"D" or not blocked else blocked[0]
    wchan = _read(f"/proc/{pid}/task/{at}/wchan").decode(errors="replace").strip()
    row: Json = {
        "pid": pid,
        "parent": int(fields[1]),
        "rank": None,
        "command": f"[{name}]",
        "state": fields[0].decode(),
        "blocked": len(blocked),
        "cpu_s": round((int(fields[11]) + int(fields[12])) / TICKS, 2),
        "read_bytes": None,
        "written_bytes": None,
        # 0: the thread is running, or the kernel hides this from the agent's user.
        "wchan": wchan[:MAX_COMMAND] if wchan not in ("", "0") else None,
        "kernel": [],
        "threads": [],
        "source": None,
        "unreadable": None,
    }
    if not with_memory:
        return row
    io = dict(
        text.split(b": ", 1) for text in _read(f"/proc/{pid}/io").splitlines() if b": " in text
    )
    for key, field in (("read_bytes", b"rchar"), ("written_bytes", b"wchar")):
        row[key] = int(io[field]) if field in io else None
    if blocked:
        row["kernel"] = _read_kernel_stack(pid, at)
    command = _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    row["command"] = command[:MAX_COMMAND] or row["command"]
    row["rank"] = _read_rank(pid)
    return row


def _read(path: str, limit: int = 65536) -> bytes:
    """Return the content of a file of /proc; nothing if it cannot be read, or is gone."""
    try:
        with open(path, "rb") as file:
            return file.read(limit)
    except OSError:
        return b""


def _find_blocked(pid: int) -> List[int]:
    """Return the threads of a process that wait in the kernel and cannot be interrupted."""
    try:
        tasks = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))[:MAX_TASKS]
    except OSError:
        return []
    found = []
    for task in tasks:
        stat = _read(f"/proc/{pid}/task/{task}/stat", 512)
        if stat[stat.rfind(b")") + 2 :][:1] == b"D":
            found.append(task)
    return found


def _read_kernel_stack(pid: int, task: int) -> List[str]:
    """Return the functions of the kernel that a thread is in, as root may read them."""
    text = _read(f"/proc/{pid}/task/{task}/stack").decode(errors="replace")
    names = (row.partition("] ")[2].partition("+")[0] for row in text.splitlines())
    return [name[:MAX_COMMAND] for name in names if name][:MAX_KERNEL_FRAMES]


def _read_rank(pid: int) -> Optional[int]:
    for variable in _read(f"/proc/{pid}/environ", 1 << 20).split(b"\0"):
        name, _, value = variable.partition(b"=")
        if name == b"RANK" and value.isdigit() and len(value) < 10:
            return int(value)
    return None


# --- the size of an answer


def shorten(rows: List[Json], limit: int = MAX_ANSWER_BYTES) -> None:
    """Leave out what matters least until the answer is small enough.

    That is the other threads of descendants, then their outer frames, then the other threads of
    ranks, then the outer frames of their main threads, then the descendants.
    """
    for is_own, threads, frames in ((False, 1, 64), (False, 1, 8), (True, 1, 64), (True, 1, 16)):
        if len(line({"": rows})) <= limit:
            return
        for row in rows:
            found = row.get("processes", [])
            for process in found[:1] if is_own else found[1:]:
                process["threads"] = process["threads"][:threads]
                for thread in process["threads"]:
                    thread["frames"] = thread["frames"][:frames]
    if len(line({"": rows})) > limit:
        for row in rows:
            for group in (row.get("flight") or {}).get("last", []):
                group["recent"] = group["recent"][-2:]
            if "processes" in row:
                row["processes"] = row["processes"][:1]

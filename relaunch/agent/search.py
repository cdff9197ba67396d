"""Finds the processes of this node that have a variable of ours in their environment.

To read the environment of a process, the kernel waits for the lock of its memory. One that hangs
may hold that for hours: a page fault on a dead file system and a thread that maps memory are enough
(mmap_read_lock in access_remote_vm, mm/memory.c). So other processes read, and what cannot be read
is named; the search goes on without it.
"""

from __future__ import annotations

import os
import select
import signal
import time
from functools import partial
from pathlib import Path
from typing import Callable, Dict, Iterable, List, NamedTuple, Set, Tuple

from relaunch.agent import processes, tools
from relaunch.agent.folders import list_places
from relaunch.agent.loop import parse
from relaunch.agent.processes import Process
from relaunch.agent.protocol import Json, line

TOKEN_PREFIX = b"RELAUNCH_TOKEN="
HOLD_PREFIX = tools.HOLD_VARIABLE.encode() + b"="
PATIENCE = (0.5, 0.05)
"""Seconds after which a reader that does not run counts as blocked: the first one, and later ones.

Reading takes some microseconds. What hangs seldom hangs alone, and the search is to end soon. A
reader that waits for a processor runs, as /proc shows it.
"""


class SearchResult(NamedTuple):
    processes: List[Process]
    """What lives and matches."""
    unread: List[Process]
    """What lives and may match: its environment cannot be read now. Not to be killed."""
    tokens: Dict[int, str]
    """By pid, the token in the environment of what matches, but for its prefix.

    A process may match without one.
    """


class _Match(NamedTuple):
    started: int
    """The start time of the process, read right after its environment."""
    values: List[str]


def find_by_token(
    prefix: str,
    matches: Callable[[str], bool],
    state: str,
    groups: Dict[int, int],
    without: Iterable[int] = (),
    since: int = 0,
) -> SearchResult:
    """Return every living process on this node that carries a matching token.

    Args:
        prefix: how the token in the environment begins.
        matches: given what follows the prefix, returns whether the token matches.
        state: the state folder that the environment must name as well, or another one of the same
            node: nodes may share a machine.
        groups: pid and start time of known ranks; the members of their groups and sessions match
            too, because a process may have overwritten its environment. To a root agent only root's
            do: where the pid of a dead rank was given to another user's process, so was the group,
            and root may kill it. What a rank of root's starts as another user has its token or is
            in its control group.
        without: pids to leave out.
        since: a start time, in clock ticks, before which nothing that matches was forked. A process
            from before that is not `unread`.
    """
    places = {f"RELAUNCH_NODE_STATE={place}".encode() for place in list_places(state)}
    excluded = {os.getpid(), *without}
    read, blocked = _read_environments(TOKEN_PREFIX + prefix.encode(), places, excluded)
    reused = {
        pid
        for pid, started in groups.items()
        if (leader := processes.read_process(pid)) is not None and leader.started != started
    }

    def is_in_group(process: Process) -> bool:
        return any(
            leader in groups and leader not in reused and process.started >= groups[leader]
            for leader in (process.group, process.session)
        ) and (os.geteuid() != 0 or processes.read_owner(process.pid) == 0)

    found = SearchResult([], [], {})
    for pid in processes.list_pids() if groups else sorted({*read, *blocked}):
        process = processes.read_process(pid) if pid not in excluded else None
        if process is None or not process.is_alive:
            continue
        match = read.get(pid)
        token = None
        if match is not None and match.started == process.started:
            token = next((value for value in match.values if matches(value)), None)
        if token is not None:
            found.tokens[pid] = token
        if token is not None or (groups and is_in_group(process)):
            found.processes.append(process)
        elif pid in blocked and process.started >= since:
            found.unread.append(process)
    return found


def find_leftovers(state: Path) -> List[int]:
    """Return the pids of living processes that were started under a hold of this node.

    Only those of this user: another one can set the same variables, and root would read them. What
    cannot be read is left out: it is hardly a tool's, and would keep a hung node from its reboot.
    """
    place = os.fsencode(f"RELAUNCH_NODE_STATE={state}")
    read, _ = _read_environments(HOLD_PREFIX, {place}, {os.getpid()})
    return [
        pid
        for pid, match in sorted(read.items())
        if processes.is_alive(pid, match.started) and processes.read_owner(pid) == os.geteuid()
    ]


def kill_leftovers(state: Path) -> List[int]:
    """Kill the processes that a dead holder left behind; return those that do not die."""
    deadline = None
    while left := find_leftovers(state):
        if deadline is not None and time.monotonic() > deadline:
            break
        for pid in left:
            process = processes.read_process(pid)
            if process is not None:
                processes.kill(process, signal.SIGKILL)
        deadline = deadline or time.monotonic() + tools.KILL_TIMEOUT
        time.sleep(0.005)
    return left


def _read_environments(
    prefix: bytes, places: Set[bytes], without: Set[int]
) -> Tuple[Dict[int, _Match], Set[int]]:
    """Return what names one of the places and has a variable that begins so; and what blocks."""
    answer = None
    try:
        answer = tools.run_apart(lambda: _read_in_children(prefix, places, without))
    except OSError:
        pass  # no process can be started, or no descriptor is left
    blocked = set(answer["blocked"]) if answer is not None else set()
    if answer is None or answer["read"] is None:
        # Better in this process, without a limit, than not at all.
        return _read(prefix, places, {*without, *blocked}, lambda pid: None), blocked
    return {pid: _Match(started, values) for pid, started, values in answer["read"]}, blocked


def _read_in_children(prefix: bytes, places: Set[bytes], without: Set[int]) -> Json:
    """Read in a child, and while that blocks in another one, without what has blocked.

    Each lists all processes: what a listed one forks before it ends would be missed otherwise.
    """
    parent = os.getpid()
    blocked: List[int] = []
    children: List[int] = []

    def read(writing: int) -> None:
        processes.die_with(parent)
        processes.close_all_but([writing])
        excluded = {*without, *blocked, parent, os.getpid()}
        found = _read(prefix, places, excluded, lambda pid: tools.write(writing, b"%d\n" % pid))
        rows = [(pid, *match) for pid, match in found.items()]
        tools.write(writing, line({"read": rows}))

    try:
        while True:
            reading, writing = os.pipe()
            try:
                children.append(processes.fork(partial(read, writing)))
            finally:
                os.close(writing)
            try:
                last, is_blocked = _follow(reading, children[-1], PATIENCE[min(len(blocked), 1)])
            finally:
                os.close(reading)
            if not is_blocked:
                return {**(parse(last) or {"read": None}), "blocked": blocked}
            blocked.append(int(last))
    except OSError:  # nothing more can be started
        return {"read": None, "blocked": blocked}
    finally:
        _end(children)


def _follow(reading: int, child: int, patience: float) -> Tuple[bytes, bool]:
    """Return the last line that a child has written, and whether it blocks on what that names."""
    text = bytearray()
    while True:
        ready, _, _ = select.select([reading], [], [], patience)
        data = os.read(reading, 65536) if ready else b""
        text += data
        last = text.rpartition(b"\n")[0].rpartition(b"\n")[2]
        if ready and not data:
            return bytes(last), False
        process = None if ready else processes.read_process(child)
        if process is not None and process.state != "R" and last:
            return bytes(last), True


def _end(children: List[int]) -> None:
    """Kill the children, and wait for them for a moment: on old kernels what blocks stays."""
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + tools.KILLED_TIMEOUT
    for pid in children:
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.001)


def _read(
    prefix: bytes, places: Set[bytes], without: Set[int], note: Callable[[int], None]
) -> Dict[int, _Match]:
    """Read the environment of each process of this node; call `note` before each."""
    found = {}
    for pid in processes.list_pids():
        if pid in without:
            continue
        note(pid)
        environment = _read_environment(pid)
        if prefix not in environment:
            continue
        variables = environment.split(b"\0")
        process = None if places.isdisjoint(variables) else processes.read_process(pid)
        if process is None:
            continue
        values = [
            variable[len(prefix) :].decode(errors="replace")
            for variable in variables
            if variable.startswith(prefix)
        ]
        if values:
            found[pid] = _Match(process.started, values)
    return found


def _read_environment(pid: int) -> bytes:
    """Return the environment of a process; empty: it has ended, or belongs to another user."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except OSError:
        return b""

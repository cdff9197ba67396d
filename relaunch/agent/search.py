"""Finds the processes of this node that have a variable of ours in their environment.

To read the environment of a process, the kernel waits for the lock of its memory. One that hangs
may hold that for hours: a page fault on a dead file system and a thread that maps memory are enough
(mmap_read_lock in access_remote_vm, mm/memory.c). So other processes read, and what cannot be read
is named; the search goes on without it.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import signal
import struct
import time
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

from relaunch.agent import processes, tools
from relaunch.agent.folders import list_places
from relaunch.agent.loop import parse
from relaunch.agent.processes import Process
from relaunch.agent.protocol import Json, line

PATIENCE = (0.25, 0.025)
"""Seconds between two looks at a reader: until the first one blocks, and after that.

Where two looks find it at the same process, and not running, it blocks. Reading takes some
microseconds. What hangs seldom hangs alone, and the search is to end soon.
"""
MAX_LISTINGS = 20
"""Maximum number of listings of all processes in one search. On a node that forks all the time each
one has new processes; a rank that forks and ends would have to escape all of them."""
MAX_TRIES = 3
"""Maximum number of tries to have other processes read, which something may kill; and to read an
environment that is empty."""
MOST_READ = 64 << 10
"""Bytes that are read at first: what most environments have at most."""
MAX_ENVIRONMENT = 32 << 20
"""Bytes. A program gets at most 6 MiB (three quarters of _STK_LIM, fs/exec.c), but may make it look
like any size."""

Row = List[Any]
Check = Callable[[int], Optional[Row]]
"""Returns what is to be known of the process with this pid, as JSON, or None. It may block."""


class SearchResult(NamedTuple):
    processes: List[Process]
    """What matched and lived when it was read. It may have ended since, and what it forked live: no
    proof that nothing is left."""
    unread: List[Process]
    """What may match: its environment could not be read. Not to be killed, and no proof either."""
    tokens: Dict[int, str]
    """By pid, the token in the environment of what matches, but for its prefix.

    A process may match without one.
    """


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
        matches: given what follows the prefix, returns whether the token matches. It is called in
            another process.
        state: the state folder that the environment must name as well, or another one of the same
            node: nodes may share a machine.
        groups: pid and start time of known ranks; the members of their groups and sessions match
            too, because a process may have overwritten its environment. To a root agent only root's
            do: where the pid of a dead rank was given to another user's process, so was the group,
            and root may kill it. What a rank of root's starts as another user has its token or is
            in its control group.
        without: pids to leave out.
        since: a start time, in clock ticks since boot, before which nothing that matches was
            forked. A process from before that is not `unread`.
    """
    variable = b"RELAUNCH_TOKEN=" + prefix.encode()
    places = [f"RELAUNCH_NODE_STATE={place}".encode() for place in list_places(state)]
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

    def check(pid: int) -> Optional[Row]:
        token = next(filter(matches, _read_values(pid, variable, places)), None)
        process = processes.read_process(pid) if token is not None or groups else None
        if process is None or not process.is_alive:
            return None
        return [process, token] if token is not None or is_in_group(process) else None

    rows, blocked = check_all(check, without)
    found = SearchResult([Process(*fields) for fields, _ in rows], [], {})
    found.tokens.update((fields[0], token) for fields, token in rows if token is not None)
    for process in blocked:
        if is_in_group(process):
            found.processes.append(process)
        elif process.started >= since:
            found.unread.append(process)
    return found


def find_leftovers(state: Path, since: int) -> Tuple[List[Process], List[Process]]:
    """Return the living processes that were started under a hold of this node.

    And of those that may have been, because they cannot be read, as a tool that hangs in a driver.
    Only those of this user: another one can set the same variables, and root would read them.

    Args:
        since: when the hold was taken, in clock ticks since boot. What is older is no tool of it.
    """
    variable = f"{tools.HOLD_VARIABLE}=".encode()
    place = os.fsencode(f"RELAUNCH_NODE_STATE={state}")

    def check(pid: int) -> Optional[Row]:
        if not _read_values(pid, variable, [place]):
            return None
        process = processes.read_process(pid)
        is_own = processes.read_owner(pid) == os.geteuid()
        return [process] if process is not None and process.is_alive and is_own else None

    rows, blocked = check_all(check)
    return [Process(*fields) for (fields,) in rows], [
        process
        for process in blocked
        if process.started >= since and processes.read_owner(process.pid) == os.geteuid()
    ]


def check_all(check: Check, without: Iterable[int] = ()) -> Tuple[List[Row], List[Process]]:
    """Check all processes of this node, but for the caller; return what is known, and what blocks.

    They are listed until no listing has a new one: what a listed one forks before it ends, unread,
    is checked as well. So if nothing matches, nothing that matches is left, unless it escaped
    `MAX_LISTINGS` of them.
    """
    return _check_apart(check, {os.getpid(), *without}, processes.list_pids)


def check_each(check: Check, pids: List[int]) -> Tuple[List[Row], List[Process]]:
    """Check these processes; return what is known of them, and what blocks."""
    return _check_apart(check, set(), lambda: pids)


def _check_apart(
    check: Check, without: Iterable[int], list_pids: Callable[[], List[int]]
) -> Tuple[List[Row], List[Process]]:
    excluded = set(without)
    blocked: List[Process] = []
    for _ in range(MAX_TRIES):
        try:
            answer = tools.run_apart(lambda: _check_in_children(check, excluded, list_pids))
        except OSError:  # no process can be started, or no descriptor is left
            continue
        if answer is not None:
            blocked += [Process(*fields) for fields in answer["blocked"]]
            excluded.update(process.pid for process in blocked)
            if answer["rows"] is not None:
                return answer["rows"], blocked
    # Better in this process, without a limit, than not at all.
    rows, failed = _check(check, excluded, list_pids, lambda pid: None)
    return rows, blocked + _identify(failed)


def _check_in_children(
    check: Check, without: Iterable[int], list_pids: Callable[[], List[int]]
) -> Json:
    """Check in a child, and while that blocks in another one, without what has blocked."""
    parent = os.getpid()
    blocked: Dict[int, List[Process]] = {}
    children: List[int] = []
    position = mmap.mmap(-1, 8)  # the pid that a child is at

    def work(writing: int) -> None:
        processes.die_with(parent)
        processes.close_all_but([writing])
        excluded = {*without, *blocked, parent, os.getpid()}
        rows, failed = _check(
            check, excluded, list_pids, lambda pid: struct.pack_into("q", position, 0, pid)
        )
        tools.write(writing, line({"rows": rows, "blocked": _identify(failed)}))

    try:
        while True:
            struct.pack_into("q", position, 0, 0)
            reading, writing = os.pipe()
            try:
                children.append(processes.fork(partial(work, writing)))
            finally:
                os.close(writing)
            try:
                answer, at = _await(reading, children[-1], position, PATIENCE[min(len(blocked), 1)])
            finally:
                os.close(reading)
            if at == 0:
                rows, failed = answer.get("rows"), answer.get("blocked", ())
                return {"rows": rows, "blocked": [*failed, *chain(*blocked.values())]}
            blocked[at] = _identify([at])
    except OSError:  # nothing more can be started
        return {"rows": None, "blocked": [*chain(*blocked.values())]}
    finally:
        tools.end_children(children)


def _await(reading: int, child: int, position: mmap.mmap, patience: float) -> Tuple[Json, int]:
    """Return the answer of a child, empty if it fails; or the pid that it blocks at. Kill it."""
    text = bytearray()
    last: Optional[int] = None
    try:
        while True:
            ready, _, _ = select.select([reading], [], [], patience)
            data = os.read(reading, 65536) if ready else b""
            text += data
            if ready and not data:
                return parse(bytes(text)) or {}, 0
            (at,) = struct.unpack_from("q", position, 0)
            process = None if ready else processes.read_process(child)
            if process is None or process.state == "R":
                last = None
            elif at == last:
                return {}, at
            else:
                last = at
    finally:
        os.kill(child, signal.SIGKILL)


def _check(
    check: Check,
    without: Iterable[int],
    list_pids: Callable[[], List[int]],
    note: Callable[[int], None],
) -> Tuple[List[Row], List[int]]:
    """Check each process; return what is known, and the pids of what could not be checked.

    Args:
        note: is called with each pid before its process is checked.
    """
    seen = set(without)
    rows: List[Row] = []
    failed: List[int] = []
    for _ in range(MAX_LISTINGS):
        pids = [pid for pid in list_pids() if pid not in seen]
        for pid in pids:
            note(pid)
            try:
                row = check(pid)
            except OSError:  # no memory or descriptor is left
                failed.append(pid)
                continue
            if row is not None:
                rows.append(row)
        if not pids:
            break
        seen.update(pids)
    return rows, failed


def _identify(pids: Iterable[int]) -> List[Process]:
    """Return those of these processes that this user may read, were they not to block."""
    found = []
    for pid in pids:
        process = processes.read_process(pid)
        # To read the environment of another user's takes root; it waits before that is refused.
        if process is not None and (
            os.geteuid() == 0 or processes.read_owner(pid) in (None, os.geteuid())
        ):
            found.append(process)
    return found


def _read_values(pid: int, variable: bytes, places: Iterable[bytes]) -> List[str]:
    """Return what follows the beginning of a variable, in the environment of a process.

    Empty if the environment names none of the places as well.
    """
    environment = read_environment(pid)
    if variable not in environment:
        return []
    variables = environment.split(b"\0")
    if not any(place in variables for place in places):
        return []
    return [
        text[len(variable) :].decode(errors="replace")
        for text in variables
        if text.startswith(variable)
    ]


def read_environment(pid: int) -> bytes:
    """Return the environment of a process.

    Empty: it has none, has ended, or belongs to another user.

    Raises:
        OSError: it cannot be read for another reason, or the process executes a program just now.
    """
    layout = None
    for attempt in range(MAX_TRIES):
        text = _read_file(f"/proc/{pid}/environ")
        if text:
            return text
        before, layout = layout, None if text is None else processes.read_layout(pid)
        if layout is None or not layout.size:
            break
        if layout.code and before is not None and layout[2:] == before[2:]:
            break  # the same program before and after: its environment is empty, or not in memory
        # It was read between two programs, with the environment of neither.
        time.sleep(0.001 * (attempt + 1))
    else:
        own = processes.read_layout(os.getpid())
        if own is not None and own.code:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    if layout is not None and not layout.size and layout.threads > 1:
        # Its first thread has ended: the others have the environment.
        threads = _list_folder(f"/proc/{pid}/task")
        texts = (_read_file(f"/proc/{pid}/task/{thread}/environ") for thread in threads)
        return next(filter(None, texts), b"")
    return b""


def _read_file(path: str) -> Optional[bytes]:
    """Return the beginning of a file; empty: its process has ended; None: it is another user's."""
    try:
        with open(path, "rb", buffering=0) as file:
            text = file.read(MOST_READ)
            # In one piece: between two, the process may execute another program.
            return text if len(text) < MOST_READ else os.pread(file.fileno(), MAX_ENVIRONMENT, 0)
    except (FileNotFoundError, ProcessLookupError):
        return b""
    except PermissionError:
        return None


def _list_folder(path: str) -> List[str]:
    try:
        return os.listdir(path)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def kill_leftovers(state: Path, since: int) -> List[int]:
    """Kill what a dead holder left behind.

    Return the pids of what does not die, or cannot be read and may be of it.
    """
    deadline = None
    while True:
        left, unread = find_leftovers(state, since)
        is_late = deadline is not None and time.monotonic() > deadline
        if is_late or not (left or unread):
            return [process.pid for process in left + unread]
        for process in left:
            processes.kill(process, signal.SIGKILL)
        deadline = deadline or time.monotonic() + tools.KILL_TIMEOUT
        time.sleep(0.005)

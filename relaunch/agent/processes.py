"""Which processes are there, whose they are, and how they are made to go. Knows nothing of jobs beyond their tokens.

A process is named by its pid *and* its start time, so that a pid which was given to somebody else is never signalled.
"""

from __future__ import annotations

import ctypes
import os
import signal
import traceback
from typing import Callable, Iterable, NamedTuple

from relaunch.agent.folders import list_places

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def fork(work: Callable[[], None]) -> int:
    """Fork a child that does this work and nothing else, and return its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # it must never return into its parent's code
        traceback.print_exc()
    finally:
        os._exit(code)


def set_name(name: str) -> None:
    buffer = ctypes.create_string_buffer(name.encode())
    _libc.prctl(_PR_SET_NAME, buffer, 0, 0, 0)


def adopt_orphans() -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, and go at once if that has already happened."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def reset_signals() -> None:
    """Undo what Python and its parents did to signals: SIGPIPE ignored, SIGHUP ignored by nohup, masks."""
    for number in range(1, signal.NSIG):
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):  # SIGKILL, SIGSTOP and the two that libc keeps for itself
            continue
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def close_all_but(kept: Iterable[int]) -> None:
    """Close every other descriptor above stderr."""
    keep = set(kept)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number not in keep:
            try:
                os.close(number)
            except OSError:  # the descriptor that listed the folder
                continue


class Process(NamedTuple):
    """One line of /proc/<pid>/stat."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    threads: int
    started: int

    @property
    def lives(self) -> bool:
        """A dead leader whose threads are not all gone still holds its GPU: that is how a stuck driver looks."""
        return self.state not in "ZX" or self.threads > 1


def look(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    numbers = [int(fields[index]) for index in (1, 2, 3, 17, 19)]
    return Process(pid, fields[0].decode(), *numbers)


def identify_self() -> Process:
    found = look(os.getpid())
    assert found is not None, "a process that runs is in /proc"
    return found


def lives(pid: int, started: int) -> bool:
    """Whether this very process is alive."""
    found = look(pid)
    return found is not None and found.started == started and found.lives


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


_LISTS_CHILDREN = os.path.exists("/proc/thread-self/children")
"""CONFIG_PROC_CHILDREN: most kernels have it."""


def children() -> list[int]:
    """Return every child that was not reaped yet.

    A list that the kernel makes while children come and go may lack some of them, but not here: the caller has one thread,
    so that none is taken off the list, and what is added is added at its end.
    """
    if not _LISTS_CHILDREN:
        return [found.pid for found in map(look, _all_pids()) if found is not None and found.parent == os.getpid()]
    with open("/proc/thread-self/children", "rb") as file:
        return [int(text) for text in file.read().split()]


def _listed_children(parent: int) -> list[int]:
    pids = []
    try:
        for thread in os.listdir(f"/proc/{parent}/task"):
            with open(f"/proc/{parent}/task/{thread}/children", "rb") as file:
                pids += [int(text) for text in file.read().split()]
    except (FileNotFoundError, ProcessLookupError):  # it ended while we looked: its children are somebody else's by now
        pass
    return pids


def descendants(ancestor: int, without: Iterable[int] = ()) -> list[Process]:
    """Living processes below `ancestor`. For a subreaper that is everything it ever caused to be, setsid or not.

    One that changes its parent meanwhile may be missing, so whoever wants them all gone has to look again.
    """
    left_out = set(without)
    below: list[Process] = []
    if _LISTS_CHILDREN:
        listed = [ancestor]
        while listed:
            for pid in _listed_children(listed.pop()):
                found = None if pid in left_out else look(pid)
                if found is not None:
                    listed.append(pid)
                    if found.lives:
                        below.append(found)
        return below
    table = [found for found in map(look, _all_pids()) if found is not None]
    by_parent: dict[int, list[Process]] = {}
    for process in table:
        by_parent.setdefault(process.parent, []).append(process)
    queue = [ancestor]
    while queue:
        for child in by_parent.get(queue.pop(), ()):
            if child.pid not in left_out:
                queue.append(child.pid)
                if child.lives:
                    below.append(child)
    return below


def list_below(ancestor: Process, without: Iterable[int] = ()) -> list[Process]:
    """Living processes below this very process; none once it is dead.

    Its children then have another parent, which may be the init of the machine: what is below that
    is every process there is. So neither a pid alone nor `os.getppid()` may be asked for this.
    """
    if ancestor.pid <= 1 or not lives(ancestor.pid, ancestor.started):
        return []
    below = descendants(ancestor.pid, without)
    return below if lives(ancestor.pid, ancestor.started) else []


def of_token(prefix: str, wanted: Callable[[str], bool], state: str, groups: dict[int, int], without: Iterable[int] = ()) -> list[Process]:
    """Every living process of a token on this node.

    Args:
        prefix: how the token in the environment begins.
        wanted: given what follows the prefix, whether the token is meant.
        state: the state folder that the environment must name as well, or another one of the same
            node: nodes may share a machine.
        groups: pid and start time of known ranks; the members of their groups and sessions are meant
            too, for a process may have overwritten its environment.
        without: pids that are not meant.
    """
    token = f"RELAUNCH_TOKEN={prefix}".encode()
    places = {f"RELAUNCH_NODE_STATE={place}".encode() for place in list_places(state)}
    left_out = {os.getpid(), *without}
    reused = {pid for pid, started in groups.items() if (leader := look(pid)) is not None and leader.started != started}
    found: list[Process] = []
    for pid in _all_pids():
        if pid in left_out:
            continue
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                environment = file.read()
        except OSError:  # gone meanwhile, or another user's
            environment = b""
        named = False
        if token in environment:
            variables = environment.split(b"\0")
            named = not places.isdisjoint(variables) and any(
                wanted(variable[len(token) :].decode(errors="replace")) for variable in variables if variable.startswith(token)
            )
        if not named and not groups:
            continue
        process = look(pid)
        if process is None or not process.lives:
            continue
        if named or any(
            leader in groups and leader not in reused and process.started >= groups[leader] for leader in (process.group, process.session)
        ):
            found.append(process)
    return found


def with_dying(left: list[Process], killed: list[Process]) -> list[Process]:
    """Return `left` and those of `killed` that are not gone.

    On its way out a process gives its memory back, and so its environment, before it closes its files and devices.
    """
    found = {process.pid for process in left}
    return left + [process for process in killed if process.pid not in found and lives(process.pid, process.started)]


def kill(process: Process, number: int) -> bool:
    """Signal this very process; one that is gone, or whose pid is another's by now, is left alone.

    Returns whether that was permitted: what a rank has started by sudo is root's.
    """
    now = look(process.pid)
    if now is None or now.started != process.started:
        return True
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        pass
    except PermissionError:
        return False
    return True


def can_signal(pid: int) -> bool:
    """Whether this user may signal a process; also true of one that is gone."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return True


def kill_group(leader: int, number: int) -> None:
    """Signal the group of a child that was not reaped yet: until then its number cannot be another's."""
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):  # the latter: by sudo it has become root's, and ends by itself or is left
        pass

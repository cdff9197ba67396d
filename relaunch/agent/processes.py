"""Finding, identifying, forking and signalling processes.

Knows nothing of jobs. A process is identified by its pid *and* its start time, so that a pid which
has been reused is never signalled.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import traceback
from typing import Callable, Iterable, List, NamedTuple

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1).value
CORE_LIMIT_VARIABLE = "RELAUNCH_CORE_LIMIT"
"""Has the limit of core files that a worker's children got before it gave up its own cores."""
TERMINATING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Ask a process to end: when the node shuts down, or its unit, login or container is stopped."""
NO_CORE = 1
"""Bytes. With less than a page the kernel writes no core file. With exactly 1 it hands none to a
program either, which 0 does not prevent: where `core_pattern` is a pipe, limits do not count but
for this one (fs/coredump.c, since Linux 2.6.32)."""
_open_pidfd = getattr(os, "pidfd_open", None)
_send_by_pidfd = getattr(signal, "pidfd_send_signal", None)
"""None before Python 3.9, and in each Python that was built with older headers of the kernel, as
uv's were until July 2026: then a process is signalled by its pid, right after it is compared."""
_core_limits: List[int] = []
"""The soft limit of agents, and that which they were started with; empty: they are one."""


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def fork(work: Callable[[], None]) -> int:
    """Fork a child that runs `work` and then exits; return its pid."""
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
    """Have the kernel kill this process when its parent dies; exit now if it has already died."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def forgo_cores() -> None:
    """Have this process, and what it forks, leave no core: its memory has the secrets of jobs.

    The hard limit stays, so ranks get their own limit back (`list_core_limits`). Not by
    PR_SET_DUMPABLE: /proc of an undumpable process is root's, and this user reads it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if not _core_limits and hard != 0:
        # -1 is no limit, in the variable as in setrlimit(2).
        _core_limits[:] = [NO_CORE, int(os.environ.get(CORE_LIMIT_VARIABLE, soft))]
        resource.setrlimit(resource.RLIMIT_CORE, (NO_CORE, hard))


def list_core_limits() -> List[int]:
    """Return the soft limit that agents have and the one that ranks have; nothing if equal."""
    return list(_core_limits)


def allow_reading() -> None:
    """Let other processes of this user read the memory of this one, also after an exec.

    Where Yama's ptrace_scope is 1 (Ubuntu's default), only ancestors may, and py-spy is none. The
    permission is of this process: its children do not inherit it. Kernels without Yama allow it
    anyway, and do not know the option.
    """
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(_PR_SET_PTRACER_ANY), 0, 0, 0)


def reset_signals() -> None:
    """Reset signal handling changed by Python or parents: SIGPIPE and SIGHUP ignored, masks."""
    for number in range(1, signal.NSIG):
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):  # SIGKILL, SIGSTOP and the two that libc reserves
            continue
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def outlive_terminating_signals() -> None:
    """Have this process go on after the signals that ask it to end.

    They are not ignored, because a program that it executes would ignore them too.
    """
    for number in TERMINATING_SIGNALS:
        signal.signal(number, lambda number, frame: None)


def obey_terminating_signals() -> None:
    """Have the signals that ask this process to end do so again."""
    for number in TERMINATING_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def close_all_but(handles: Iterable[int]) -> None:
    """Close all other descriptors above stderr."""
    kept_handles = set(handles)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number not in kept_handles:
            try:
                os.close(number)
            except OSError:  # the descriptor that listed the folder
                continue


def read_name(pid: int) -> str:
    """Return the name of a process, cut to 15 characters by the kernel; empty: it has ended."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read().decode(errors="replace").rstrip("\n")
    except OSError:  # /proc may also hide it
        return ""


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
    def is_alive(self) -> bool:
        """Whether the process lives, including a dead leader with threads left.

        Such a leader still holds its GPU: a process stuck in a driver looks like this.
        """
        return self.state not in "ZX" or self.threads > 1


def read_memory(pid: int) -> int | None:
    """Return the bytes of a process that are in memory, shared pages included; None: it is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


class Layout(NamedTuple):
    """What /proc/<pid>/stat says of the memory of a process."""

    threads: int
    size: int
    """Bytes of address space: 0 for a kernel thread, and once the first thread has ended."""
    code: int
    """Where its program begins. 0 while a program is being executed: until after it has got its
    environment (load_elf_binary, fs/binfmt_elf.c); and of all in a sandbox that tells no addresses.
    """
    environment: int
    environment_end: int


def read_layout(pid: int) -> Layout | None:
    """Return the layout of a process; None if it has ended, or /proc hides it."""
    fields = _read_stat(pid)
    return Layout(*(int(fields[index]) for index in (17, 20, 23, 47, 48))) if fields else None


def _read_stat(pid: int) -> List[bytes]:
    """Return the fields of /proc/<pid>/stat, from the state on; empty: it has ended, or is hidden.

    So its index is three less than its number in proc(5).
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    return text[text.rindex(b")") + 2 :].split()


HIDDEN = 0
"""In place of the start time of a process that /proc hides from this user (hidepid, proc(5)).

It is another user's, or one of this user that has made itself undumpable or runs a set-uid program.
"""


def read_process(pid: int) -> Process | None:
    """Return a process; None if it has ended, or is another user's and /proc hides it."""
    fields = _read_stat(pid)
    if not fields:
        return None
    numbers = [int(fields[index]) for index in (1, 2, 3, 17, 19)]
    return Process(pid, fields[0].decode(), *numbers)


def read_or_hide(pid: int, parent: int = HIDDEN) -> Process | None:
    """Return a process, also if /proc hides it: it counts as living then. None if it has ended."""
    process = read_process(pid)
    if process is None and exists(pid):
        # It lives, and says nothing else: a rank has started it with sudo, or it is not dumpable.
        return Process(pid, "?", parent, HIDDEN, HIDDEN, 1, HIDDEN)
    return process


_PF_EXITING = 0x4
"""In the flags of /proc/<pid>/stat, from when a process begins to end (include/linux/sched.h)."""


def read_ending(pid: int, started: int) -> str:
    """Return how far a process is: "running", "dumping" core, "exiting" or "ended".

    A process that ends gives back its memory and its GPUs first, and may take long for it.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
        with open(f"/proc/{pid}/status", "rb") as file:
            status = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        # /proc may hide it, because it runs sudo now.
        return "running" if exists(pid) else "ended"
    fields = text[text.rindex(b")") + 2 :].split()
    if int(fields[19]) != started:
        return "ended"
    if b"\nCoreDumping:\t1\n" in status:
        return "dumping"
    is_exiting = fields[0] in (b"Z", b"X") or int(fields[6]) & _PF_EXITING
    return "exiting" if is_exiting else "running"


def identify_self() -> Process:
    process = read_process(os.getpid())
    assert process is not None, "a process that runs is in /proc"
    return process


def read_owner(pid: int) -> int | None:
    """Return the real uid of a process; None if it has ended.

    Not the effective one, which is root's for a set-uid program that another user has called with
    an environment of theirs; nor the owner of /proc/<pid>, which is root for each process that has
    made itself undumpable, as every user can (proc(5)).
    """
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return int(file.read().partition(b"\nUid:")[2].split()[0])
    except (OSError, IndexError):
        return None


def is_alive(pid: int, started: int) -> bool:
    """Return whether the process with this pid and start time is alive.

    One that /proc hides counts as this process, which has executed sudo, whatever its start time.
    """
    process = read_process(pid)
    if process is None:
        return exists(pid)
    return process.started == started and process.is_alive


def was_killed(child: int) -> bool:
    """Return whether SIGKILL has ended a child of this process; it is left to be reaped."""
    try:
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # reaped already
        return False
    killed = 2  # os.CLD_KILLED, which Python 3.8 lacks
    return ended is not None and (ended.si_code, ended.si_status) == (killed, signal.SIGKILL)


def list_pids() -> list[int]:
    """Return the pids of all processes that /proc shows."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


_LISTS_CHILDREN = os.path.exists("/proc/thread-self/children")
"""Requires CONFIG_PROC_CHILDREN, which most kernels have."""


def list_children() -> list[int]:
    """Return all children that were not reaped yet.

    A list that the kernel makes while children come and go may lack some of them, but not here: the
    caller has one thread, so no child is removed from the list, and new ones are appended.
    """
    if not _LISTS_CHILDREN:
        return [
            process.pid
            for process in map(read_process, list_pids())
            if process is not None and process.parent == os.getpid()
        ]
    with open("/proc/thread-self/children", "rb") as file:
        return [int(text) for text in file.read().split()]


def _read_children(parent: int) -> list[int]:
    pids = []
    try:
        for thread in os.listdir(f"/proc/{parent}/task"):
            with open(f"/proc/{parent}/task/{thread}/children", "rb") as file:
                pids += [int(text) for text in file.read().split()]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        # it ended meanwhile, so its children have another parent by now; or /proc hides it
        pass
    return pids


def list_descendants(ancestor: int, without: Iterable[int] = ()) -> list[Process]:
    """Return the living processes below `ancestor`.

    For a subreaper these are all processes it ever caused to start, with or without setsid. A
    process that changes its parent meanwhile may be missing, so a caller that wants all of them
    gone must look again.
    """
    excluded = set(without)
    below: list[Process] = []
    if _LISTS_CHILDREN:
        listed = [ancestor]
        while listed:
            for pid in _read_children(parent := listed.pop()):
                candidate = None if pid in excluded else read_or_hide(pid, parent)
                if candidate is not None:
                    listed.append(pid)
                    if candidate.is_alive:
                        below.append(candidate)
        return below
    table = [candidate for candidate in map(read_process, list_pids()) if candidate is not None]
    by_parent: dict[int, list[Process]] = {}
    for process in table:
        by_parent.setdefault(process.parent, []).append(process)
    queue = [ancestor]
    while queue:
        for child in by_parent.get(queue.pop(), ()):
            if child.pid not in excluded:
                queue.append(child.pid)
                if child.is_alive:
                    below.append(child)
    return below


def list_below(ancestor: Process, without: Iterable[int] = ()) -> list[Process]:
    """Return the living processes below exactly this process; none once it is dead.

    The children of a dead process have another parent, which may be the init of the machine, and
    below that is every process. So neither a pid alone nor `os.getppid()` may be passed for this.
    """
    if ancestor.pid <= 1 or not is_alive(ancestor.pid, ancestor.started):
        return []
    below = list_descendants(ancestor.pid, without)
    return below if is_alive(ancestor.pid, ancestor.started) else []


def find_hidden(groups: dict[int, int], found: Iterable[Process]) -> list[Process]:
    """Return what /proc may hide of the groups of known ranks, as one process for each group.

    A rank has started it with sudo, or has become it. The pid is that of the rank, and may be left
    only as the number of its group. A group counts until it has no member, also no dead one that
    its parent has not reaped, because beside such a one nothing tells of the others. Where another
    user's session has got the number meanwhile, that cannot be told, and it is returned as well.

    Args:
        groups: pid and start time of the ranks; HIDDEN if it was never known.
        found: what is left of them as far as /proc shows it. Their groups are left out.
    """
    if os.geteuid() == 0 or read_process(1) is not None:  # nothing is hidden
        return []
    known_groups = {process.group for process in found}
    hidden = []
    for leader, started in groups.items():
        process = read_process(leader)
        if leader in known_groups or (process is not None and process.started != started):
            continue
        if process is None and exists(leader):
            is_left = started == HIDDEN or _may_lead_session(leader)
        else:
            is_left = _has_members(leader)
        if is_left:
            hidden.append(Process(leader, "?", HIDDEN, leader, HIDDEN, 1, HIDDEN))
    return hidden


def _may_lead_session(pid: int) -> bool:
    """Return whether a process leads a session, as each rank does; also True if unknown."""
    try:
        return os.getsid(pid) == pid
    except OSError:
        return True


def add_dying(left: list[Process], killed: list[Process]) -> list[Process]:
    """Return `left` and those of `killed` that are not gone yet.

    An exiting process releases its memory, and with it its environment, before it closes its files
    and devices.
    """
    pids = {process.pid for process in left}
    return left + [
        process
        for process in killed
        if process.pid not in pids and is_alive(process.pid, process.started)
    ]


def kill(process: Process, number: int) -> bool:
    """Signal exactly this process; return whether that was permitted.

    A process that is gone, or whose pid has been reused, is left alone. It is not permitted for a
    process that a rank has started with sudo, which belongs to root.
    """
    handle = _open(process.pid)
    try:
        now = read_process(process.pid)
        if now is None and process.started != HIDDEN:
            return can_signal(process.pid)
        if now is not None and now.started != process.started:
            return True
        if _send_by_pidfd is not None and handle is not None:
            _send_by_pidfd(handle, number)
        else:
            os.kill(process.pid, number)
    except ProcessLookupError:
        pass
    except PermissionError:
        return False
    finally:
        if handle is not None:
            os.close(handle)
    return True


def _open(pid: int) -> int | None:
    """Return a descriptor of the process that has this pid now, whatever gets the pid later.

    None where Python or the kernel (before Linux 5.3) cannot, or where the process is gone.
    """
    try:
        return _open_pidfd(pid) if _open_pidfd is not None else None
    except OSError:
        return None


def exists(pid: int) -> bool:
    """Return whether there is a process with this pid, also one that /proc hides."""
    return _probe(os.kill, pid) != errno.ESRCH


def can_signal(pid: int) -> bool:
    """Return whether this user may signal a process; also True if it is gone."""
    return _probe(os.kill, pid) != errno.EPERM


def _has_members(leader: int) -> bool:
    """Return whether a group has any member, dead ones that were not reaped included."""
    return _probe(os.killpg, leader) != errno.ESRCH


def can_signal_group(leader: int) -> bool:
    """Return whether this user may signal any process of a group; also True if none is left."""
    return _probe(os.killpg, leader) != errno.EPERM


def _probe(send: Callable[[int, int], None], number: int) -> int:
    """Return the errno with which the kernel refuses to have it signalled; 0: it does not."""
    try:
        send(number, 0)
    except (ProcessLookupError, PermissionError) as error:
        return error.errno or 0
    return 0


def kill_group(leader: int, number: int) -> None:
    """Signal the group of a child that was not reaped yet, so its id cannot have been reused."""
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):
        # the latter: with sudo it has become root's, and ends by itself or is left
        pass

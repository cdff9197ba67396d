"""The node-wide lock: an examination or a repair holds the node exclusively, launches share it.

It is a flock, so that the kernel releases it when the holder dies; processes that a dead holder
left running are ended by the next holder.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

from relaunch.agent import processes, search
from relaunch.agent.locks import wait_for_lock
from relaunch.agent.node import reboots
from relaunch.agent.protocol import Json, Refusal, Token, now, parse_token
from relaunch.agent.ranks import journal
from relaunch.agent.state import Generation, JobState, read_json, write_json

HOLD_TIMEOUT = 2.0
"""Seconds to wait for the hold: longer than a killed holder needs to exit, shorter than any caller
waits for an answer."""
FLEET_LOCK_TIMEOUT = 120.0
"""Seconds to wait for another launch, which holds the lock for a few small reads and writes, the
look-up of an address, and the handover to a standby."""
HOLDER_FILE = "held.json"
LAST_FLEET_FILE = "fleet.json"
SERVER_DIGITS = 8
"""Characters of a server's id in a message."""
MAX_NAMED_PIDS = 8
"""Maximum number of pids in a message."""

_ACTIVITIES = {
    "diagnose": "this node is being examined",
    "reset-gpus": "this node's GPUs are being reset",
    "reboot": "this node is being rebooted",
}


def _open_lock(state: Path) -> int:
    path = state / "node.lock"
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o1600)
    except OSError as error:
        try:
            # a disk that became read-only is a reason to repair, not an obstacle
            return os.open(path, os.O_RDONLY)
        except OSError:
            raise Refusal("cannot_start", f"{path} cannot be opened: {error.strerror}") from error


def _take_lock(state: Path, how: int) -> Optional[int]:
    handle = _open_lock(state)
    deadline = time.monotonic() + HOLD_TIMEOUT
    while True:
        try:
            fcntl.flock(handle, how | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(handle)
                return None
        time.sleep(0.01)


def read_holder(state: Path) -> Optional[Json]:
    """Return the holder of this node, or None.

    The lock decides: the record of a holder that died is ignored.
    """
    if not (state / "node.lock").exists():
        return None
    handle = _open_lock(state)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        record = read_json(state / HOLDER_FILE) or {}
        holder = {
            "by": record.get("by", "unknown"),
            "id": record.get("id", ""),
            "since": record.get("since", now()),
        }
        return {**holder, "fleet": record["fleet"]} if record.get("fleet") else holder
    finally:
        os.close(handle)


def _make_refusal(state: Path, fleet: str) -> Refusal:
    holder = read_holder(state)
    if holder is None:
        return Refusal("held", "a launch is being prepared on this node")
    doing = _ACTIVITIES.get(holder["by"], "this node is held")
    other = holder.get("fleet", "")
    if is_other(other, fleet):
        reason = f"{doing} for {_describe_fleet(other, fleet)} ({holder['by']}, {holder['id']})"
        return Refusal("other_fleet", reason, fleet=other, held=holder)
    return Refusal("held", f"{doing} ({holder['by']}, {holder['id']})", held=holder)


@contextmanager
def hold_shared(state: Path, fleet: str = "") -> Iterator[None]:
    """Share the node with other launches; refuse during examinations, repairs and reboots."""
    handle = _take_lock(state, fcntl.LOCK_SH)
    if handle is None:
        raise _make_refusal(state, fleet)
    try:
        reboot = reboots.read_current(state)
        if reboot is not None:
            raise Refusal(
                "rebooting",
                f"this node was ordered to reboot ({reboot['id']}) and has not yet",
                id=reboot["id"],
            )
        left = _end_leftovers(state)
        if left:
            raise Refusal(
                "stuck",
                f"processes {left[:MAX_NAMED_PIDS]}, it seems of a killed examination, do not end",
                pids=left,
            )
        yield
    finally:
        os.close(handle)


@contextmanager
def hold_exclusive(state: Path, by: str, id: str, fleet: str = "") -> Iterator[List[int]]:
    """Hold the node exclusively; yield the pids of an earlier holder's programs that do not end."""
    handle = _take_lock(state, fcntl.LOCK_EX)
    if handle is None:
        raise _make_refusal(state, fleet)
    since = now()
    try:
        left = _end_leftovers(state)
        if not left:
            try:
                write_json(
                    state / HOLDER_FILE,
                    {"by": by, "id": id, "fleet": fleet, "pid": os.getpid(), "since": since},
                    durable=False,
                )
            except OSError:
                # it serves messages and the sweep; a full disk must not prevent a repair
                pass
        yield left
    finally:
        if not any(search.find_leftovers(state, _count_ticks(since))):
            _remove_record(state)
        os.close(handle)


def _end_leftovers(state: Path) -> List[int]:
    """End what a killed holder left running; return what does not die, or may be of it.

    A holder that ended normally left neither processes nor a file.
    """
    if not (state / HOLDER_FILE).exists():
        return []
    since = (read_json(state / HOLDER_FILE) or {}).get("since", 0.0)
    left = search.kill_leftovers(state, _count_ticks(since))
    if not left:
        _remove_record(state)
    return left


def _count_ticks(seconds: float) -> int:
    """Return a time of CLOCK_BOOTTIME in the unit of start times in /proc, rounded down."""
    return int(seconds * os.sysconf("SC_CLK_TCK"))


def _remove_record(state: Path) -> None:
    try:
        (state / HOLDER_FILE).unlink()
    except OSError:
        pass


# --- living jobs ----------------------------------------------------------------------------------


def _may_run(generation: Generation) -> bool:
    """Return whether the shim has ranks, or may still start some."""
    # Check `prepared_order` first: testing a lock that a launch is about to take would take it.
    if generation.prepared_order is None or not generation.has_live_shim():
        return False
    launch = generation.launch
    if launch is None or (launch["pids"] is None and not launch.get("refused")):
        return True
    if len(journal.list_exited(journal.read(generation.journal))) < len(generation.pids):
        return True
    # what ranks have started may outlive them: with sudo it belongs to another user
    identity = generation.identity("shim")
    shim = processes.read_process(identity[0]) if identity is not None else None
    if identity is None or shim is None or shim.started != identity[1]:
        return False
    helpers = [
        member[0]
        for member in map(generation.identity, ("supervisor", "guard"))
        if member is not None
    ]
    return bool(processes.list_below(shim, without=helpers))


def list_living_ranks(generation: Generation) -> Set[int]:
    """Return the pids of the ranks that live.

    Where /proc hides one, it is a rank that has executed sudo, or another user's process that has
    got the pid of a rank whose exit is in the journal.
    """
    living = {pid for pid, started in generation.groups.items() if processes.is_alive(pid, started)}
    hidden = {pid for pid in living if processes.read_process(pid) is None}
    exited = journal.list_exited(journal.read(generation.journal)) if hidden else set()
    return living - {
        pid for rank, (pid, _) in generation.pids.items() if rank in exited and pid in hidden
    }


def list_living(state: Path, include_doomed: bool = True) -> Tuple[List[Json], List[int]]:
    """Return the generations with ranks here or about to start, and the pids with a token.

    Args:
        doomed_too: include processes for which a SIGKILL is already pending.
    """
    tokens: Dict[Token, None] = {}
    groups: Dict[int, int] = {}
    folder = state / "jobs"
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        highest = read_json(entry / "highest.json")
        if highest is None:
            continue
        job = JobState.from_row(state, highest)
        for generation in job.list_generations():
            if _may_run(generation):
                tokens[Token(job.namespace, job.job, *generation.order, server=job.server)] = None
        for generation in job.list_generations()[-1:]:
            groups.update(generation.groups)
    pids = []
    # What cannot be read does not keep this node from a repair: the repair may be its remedy.
    found = search.find_by_token("", lambda text: True, str(state), groups)
    for process in found.processes:
        if include_doomed or not is_kill_pending(process.pid):
            token = parse_token(found.tokens.get(process.pid, ""))
            if _is_only_claimed(state, process, token, groups):
                continue
            pids.append(process.pid)
            if token is not None:
                tokens[token] = None
    return [_add_fleet(state, token) for token in tokens], sorted(pids)


def _is_only_claimed(
    state: Path, process: processes.Process, token: Optional[Token], groups: Dict[int, int]
) -> bool:
    """Return whether nothing but its environment says that a process belongs to a rank.

    Every user can give a process any environment, and root reads it: without this, a plain user
    could have a node that runs nothing count as busy. It has to name a generation of this node.
    """
    if process.group in groups or process.session in groups:
        return False
    if processes.read_owner(process.pid) == os.geteuid():
        return False
    return token is None or not (
        JobState.from_token(state, token).generation(token.order).path.is_dir()
    )


def _add_fleet(state: Path, token: Token) -> Json:
    fleet = (JobState.from_token(state, token).generation(token.order).prepared_order or {}).get(
        "fleet"
    )
    return {**token.json, "fleet": fleet} if fleet else token.json


def is_kill_pending(pid: int) -> bool:
    """Return whether a SIGKILL is pending for this process.

    Such a process is stuck in a driver, and its node needs a reboot.
    """
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/status", errors="replace") as file:
                if has_kill_pending(file.read()):
                    return True
        except OSError:
            continue
    return False


def has_kill_pending(status: str) -> bool:
    """Return whether the text of a /proc/<pid>/status has SIGKILL pending."""
    pending = 0
    for text in status.splitlines():
        name, _, value = text.partition(":")
        if name in ("SigPnd", "ShdPnd"):
            pending |= int(value, 16)
    return bool(pending & 1 << 8)


def refuse_if_busy(state: Path, include_doomed: bool = True, fleet: str = "") -> None:
    jobs, pids = list_living(state, include_doomed)
    if not jobs and not pids:
        return
    few = f" (pids {', '.join(map(str, pids[:MAX_NAMED_PIDS]))})" if pids else ""
    for each in jobs:
        if is_other(each.get("fleet", ""), fleet):
            raise _make_fleet_refusal(each, fleet, few, jobs=jobs, pids=pids)
    names = (
        ", ".join(f"job {each['job']} generation {each['generation']}" for each in jobs)
        or "something that a rank started"
    )
    raise Refusal("busy", f"{names} runs on this node{few}", jobs=jobs, pids=pids)


# --- one address in two fleets --------------------------------------------------------------------


def is_other(fleet: str, mine: str) -> bool:
    """Return whether these are two different fleets.

    Orders of controllers from before the field existed name none, and conflict with no fleet.
    """
    return bool(fleet and mine and fleet != mine)


def _describe_fleet(other: str, mine: str) -> str:
    """Name the other fleet for people of fleet `mine`.

    The namespace and the server are included if they differ.
    """
    scope, _, name = other.rpartition("/")
    own_scope = mine.rpartition("/")[0]
    if scope == own_scope:
        return f"fleet {name}"
    server, _, namespace = scope.rpartition("/")
    if server == own_scope.rpartition("/")[0]:
        return f"fleet {name} of namespace {namespace}"
    server_name = server[:SERVER_DIGITS] or "its name is unknown"
    return f"fleet {name} of another Temporal server ({server_name}, namespace {namespace})"


def _make_fleet_refusal(row: Json, mine: str, few: str = "", **more: Any) -> Refusal:
    reason = (
        f"ranks of job {row['job']} of {_describe_fleet(row['fleet'], mine)} live on this node{few}"
    )
    return Refusal("other_fleet", reason, fleet=row["fleet"], **more)


@contextmanager
def claim_for_fleet(state: Path, fleet: str, but: Path) -> Iterator[None]:
    """Admit one launch at a time to check for other fleets and record its own.

    If two fleets launch at the same time, the second one sees the first.

    Raises:
        HeldLock: Another launch does not end.
    """
    handle = wait_for_lock(state / "fleet.lock", FLEET_LOCK_TIMEOUT)
    try:
        refuse_other_fleet(state, fleet, but)
        if fleet and _read_last_fleet(state) != fleet:
            write_json(state / LAST_FLEET_FILE, {"fleet": fleet}, durable=False)
        yield
    finally:
        os.close(handle)


def _read_last_fleet(state: Path) -> str:
    return str((read_json(state / LAST_FLEET_FILE) or {}).get("fleet", ""))


def refuse_other_fleet(state: Path, fleet: str, but: Path) -> None:
    """Refuse while ranks of another fleet live here, or may still be started.

    Args:
        state: The node's state folder.
        fleet: The fleet that launches.
        but: The folder of the job to launch; an earlier submission of it may have belonged to
            another fleet, and is stopped in any case.
    """
    # If this fleet launched here last, ranks of no other fleet can live here. Examining all jobs of
    # a year would delay each launch.
    if not fleet or _read_last_fleet(state) == fleet:
        return
    folder = state / "jobs"
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        highest = read_json(entry / "highest.json")
        if highest is None or entry == but:
            continue
        for generation in JobState.from_row(state, highest).list_generations()[-1:]:
            other = (generation.prepared_order or {}).get("fleet", "")
            if is_other(other, fleet) and (_may_run(generation) or list_living_ranks(generation)):
                raise _make_fleet_refusal({"job": highest["job"], "fleet": other}, fleet)

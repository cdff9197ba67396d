"""The node-wide guard: who examines or repairs this node has it alone, and ranks are launched only while nobody does.

A flock, so that a holder that dies lets go by itself; what its dead holder left running is ended by whoever comes next.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Tuple

from agent import journal, processes, reboots, tools
from agent.protocol import Json, Refused, now
from agent.state import Generation, JobState, read_json, write_json

PATIENCE = 2.0
"""Seconds to wait for the hold: longer than a killed holder needs to go, shorter than any caller waits for an answer."""
HELD = "held.json"
NAMED = 8
"""Pids that a sentence names."""

_DOING = {
    "diagnose": "this node is being examined",
    "reset-gpus": "this node's GPUs are being reset",
    "reboot": "this node is being rebooted",
}


def _open(state: Path) -> int:
    path = state / "node.lock"
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        try:
            return os.open(path, os.O_RDONLY)  # a disk that became read-only is a reason to repair, not an obstacle
        except OSError:
            raise Refused("cannot_start", f"{path} cannot be opened: {error.strerror}") from error


def _locked(state: Path, how: int) -> Optional[int]:
    handle = _open(state)
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(handle, how | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(handle)
                return None
        time.sleep(0.01)


def held(state: Path) -> Optional[Json]:
    """Who holds this node. Asks the lock: what is written of a holder that died counts for nothing."""
    if not (state / "node.lock").exists():
        return None
    handle = _open(state)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        known = read_json(state / HELD) or {}
        return {"by": known.get("by", "unknown"), "id": known.get("id", ""), "since": known.get("since", now())}
    finally:
        os.close(handle)


def _refusal(state: Path) -> Refused:
    holder = held(state)
    if holder is None:
        return Refused("held", "a launch is being prepared on this node")
    doing = _DOING.get(holder["by"], "this node is held")
    return Refused("held", f"{doing} ({holder['by']}, {holder['id']})", held=holder)


@contextmanager
def shared(state: Path) -> Iterator[None]:
    """Hold the node together with other launches; refuse while it is examined, repaired or about to go down."""
    handle = _locked(state, fcntl.LOCK_SH)
    if handle is None:
        raise _refusal(state)
    try:
        going = reboots.under_way(state)
        if going is not None:
            raise Refused("rebooting", f"this node was ordered to reboot ({going['id']}) and has not yet", id=going["id"])
        left = _clear(state)
        if left:
            raise Refused("stuck", f"processes {left[:NAMED]} of an examination that was killed do not die", pids=left)
        yield
    finally:
        os.close(handle)


@contextmanager
def exclusive(state: Path, by: str, id: str) -> Iterator[List[int]]:
    """Hold the node alone; gives the pids of an earlier holder's programs that do not die."""
    handle = _locked(state, fcntl.LOCK_EX)
    if handle is None:
        raise _refusal(state)
    try:
        left = _clear(state)
        if not left:
            try:
                write_json(state / HELD, {"by": by, "id": id, "pid": os.getpid(), "since": now()}, durable=False)
            except OSError:  # it is for people and for the sweep; a full disk must not be in the way of a repair
                pass
        yield left
    finally:
        if not tools.left_behind(state):
            _forget(state)
        os.close(handle)


def _clear(state: Path) -> List[int]:
    """End what a holder that was killed left running; a holder that ended by itself left nothing, and no file."""
    if not (state / HELD).exists():
        return []
    left = tools.sweep(state)
    if not left:
        _forget(state)
    return left


def _forget(state: Path) -> None:
    try:
        (state / HELD).unlink()
    except OSError:
        pass


# --- who lives here -------------------------------------------------------------------------------------------------------


def _may_run(generation: Generation) -> bool:
    """Whether the keeper has ranks, or may yet start some."""
    if generation.given is None or not generation.keeper_lives():  # to ask for a lock that a launch is about to take would take it
        return False
    launch = generation.started
    if launch is None or (launch["pids"] is None and not launch.get("refused")):
        return True
    return len(journal.exited(journal.read(generation.journal))) < len(generation.pids)


def living(state: Path, doomed_too: bool = True) -> Tuple[List[Json], List[int]]:
    """Generations that have ranks here or are about to, and the pids of all that carries a token.

    Args:
        doomed_too: count what SIGKILL has been sent to already.
    """
    found: Dict[Tuple[str, str, int, int], None] = {}
    groups: Dict[int, int] = {}
    folder = state / "jobs"
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        highest = read_json(entry / "highest.json")
        if highest is None:
            continue
        job = JobState(state, highest["namespace"], highest["job"])
        for generation in job.generations():
            if _may_run(generation):
                found[(job.namespace, job.job, *generation.order)] = None
        for generation in job.generations()[-1:]:
            groups.update(generation.groups)
    pids = []
    for process in processes.of_token("", lambda rest: True, str(state), groups):
        if doomed_too or not doomed(process.pid):
            pids.append(process.pid)
            token = _token_of(process.pid)
            if token is not None:
                found[token] = None
    names = ("namespace", "job", "submission", "generation")
    return [dict(zip(names, token)) for token in found], sorted(pids)


def _token_of(pid: int) -> Optional[Tuple[str, str, int, int]]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return None
    for variable in variables:
        words = variable.decode(errors="replace").partition("RELAUNCH_TOKEN=")[2].split("/")
        if variable.startswith(b"RELAUNCH_TOKEN=") and len(words) == 4 and words[2].isdigit() and words[3].isdigit():
            return words[0], words[1], int(words[2]), int(words[3])
    return None


def doomed(pid: int) -> bool:
    """Whether SIGKILL waits for this process to leave the kernel: stuck in a driver, it holds a node that needs a reboot."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/status") as file:
                if kill_pending(file.read()):
                    return True
        except OSError:
            continue
    return False


def kill_pending(status: str) -> bool:
    """Read /proc/<pid>/status."""
    pending = 0
    for text in status.splitlines():
        name, _, value = text.partition(":")
        if name in ("SigPnd", "ShdPnd"):
            pending |= int(value, 16)
    return bool(pending & 1 << 8)


def refuse_if_busy(state: Path, doomed_too: bool = True) -> None:
    jobs, pids = living(state, doomed_too)
    if not jobs and not pids:
        return
    names = ", ".join(f"job {each['job']} generation {each['generation']}" for each in jobs) or "something that a rank started"
    few = ", ".join(map(str, pids[:NAMED]))
    raise Refused("busy", f"{names} runs on this node" + (f" (pids {few})" if pids else ""), jobs=jobs, pids=pids)

"""Classifies the processes that NVML lists on this node's GPUs: relaunch's own, and foreign ones.

No other module does this. Nothing is refused here unless asked: an order that needs free GPUs calls
`refuse`, and the controller receives the classified list.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from relaunch.agent import processes, tools
from relaunch.agent.node import hold
from relaunch.agent.protocol import Json, Refused, parse_token
from relaunch.agent.state import Generation, JobState

NAMED_WITHIN = 1.0
"""Seconds for resolving user names: a directory service may not answer."""
LONGEST = 32
"""Characters of a name: enough for people to recognise it, while the names of 2,048 nodes are
stored together."""


def using(reading: Json, living_only: bool = False) -> List[Tuple[int, str]]:
    """Return pid and bus id of each process that uses a GPU, as far as that could be read.

    Args:
        living_only: leave out pids that do not exist, or for which a SIGKILL is pending: only a
            reboot ends those.
    """
    found = []
    for gpu in reading.get("gpus", ()):
        for each in _listed(gpu):
            process = processes.look(each["pid"])
            if not living_only or (
                process is not None and process.lives and not hold.doomed(each["pid"])
            ):
                found.append((each["pid"], gpu["bus_id"]))
    return found


def describe(pids: List[int]) -> str:
    """Name processes for people: pid, user and program of the first few, without arguments.

    Arguments may hold secrets.
    """
    few = pids[: hold.NAMED]
    found = tools.bounded(lambda: {str(pid): _who(pid) for pid in few}, NAMED_WITHIN) or {}
    named = []
    for pid in few:
        who = found.get(str(pid)) or {}
        named.append(
            f"pid {pid} ({who.get('user') or 'user unknown'}, {who.get('program') or 'program unknown'})"
        )
    more = len(pids) - len(few)
    return ", ".join(named) + (f" and {more} more" if more else "")


def refuse(users: List[Tuple[int, str]]) -> None:
    if users:
        reason = ", ".join(f"pid {pid} uses GPU {bus_id}" for pid, bus_id in users[: hold.NAMED])
        raise Refused("busy", reason, pids=sorted({pid for pid, _ in users}))


def told(state: Path, reading: Json) -> Json:
    """Return the reading with `ours` for each process, and user and program if it is foreign."""
    pids = sorted({each["pid"] for gpu in reading.get("gpus", ()) for each in _listed(gpu)})
    if not pids:
        return reading
    mine = ours(state, pids)
    foreign_processes = [pid for pid in pids if pid not in mine]
    names = (
        tools.bounded(lambda: {str(pid): _who(pid) for pid in foreign_processes}, NAMED_WITHIN)
        if foreign_processes
        else {}
    )
    unknown = {"user": None, "program": None}

    def named(each: Json) -> Json:
        pid = each["pid"]
        return (
            {**each, "ours": True}
            if pid in mine
            else {**each, "ours": False, **(names or {}).get(str(pid), unknown)}
        )

    gpus = [
        {**gpu, "processes": [named(each) for each in _listed(gpu)]} if _listed(gpu) else gpu
        for gpu in reading["gpus"]
    ]
    return {**reading, "gpus": gpus}


def _listed(gpu: Json) -> List[Json]:
    listed = gpu.get("processes")
    return listed if isinstance(listed, list) else []


def ours(state: Path, pids: List[int]) -> List[int]:
    """Return which of these pids are ranks of a generation whose shim lives, or tools that we run.

    Processes that a dead shim left behind count as foreign.
    """
    ranks = _ranks(state)
    return [pid for pid in pids if _is_ours(state, pid, ranks)]


def _ranks(state: Path) -> Dict[int, int]:
    """Return pid and start time of the ranks whose shims live."""
    folder = state / "jobs"
    found: Dict[int, int] = {}
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        job = JobState(state, "", "")
        job.path = entry
        for generation in job.generations()[-1:]:
            if _keeps(generation) and generation.groups:
                # otherwise the node has rebooted, and the pids mean nothing
                found.update(generation.groups)
                found.update(generation.launched.values())
    return found


def _keeps(generation: Generation) -> bool:
    return generation.given is not None and generation.shim_lives()


def _is_ours(state: Path, pid: int, ranks: Dict[int, int]) -> bool:
    process = processes.look(pid)
    if process is None:
        return False
    for leader in (process.group, process.session):
        # the process may have overwritten its environment
        known = ranks.get(leader)
        if known is not None and process.started >= known:
            present = processes.look(leader)
            if present is None or present.started == known:
                return True
    variables = _environment(pid)
    place = variables.get("RELAUNCH_NODE_STATE", "")
    if not place:
        return False
    if variables.get(tools.MARK) and place == str(state):
        return True
    token = parse_token(variables.get("RELAUNCH_TOKEN", ""))
    if token is None or not (place == str(state) or _is_own(place)):
        return False
    # Nodes may share a machine, and then its GPUs: a rank of another such node is not foreign.
    return _keeps(JobState.of(Path(place), token).generation(token.order))


def _is_own(place: str) -> bool:
    try:
        return os.stat(place).st_uid == os.geteuid()
    except (OSError, ValueError):
        return False


def _environment(pid: int) -> Dict[str, str]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            text = file.read().decode(errors="replace")
    except OSError:  # it has ended, or belongs to another user
        return {}
    return dict(variable.split("=", 1) for variable in text.split("\0") if "=" in variable)


def _who(pid: int) -> Json:
    return {"user": _user(pid), "program": _program(pid)}


def _user(pid: int) -> Any:
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    try:
        return pwd.getpwuid(uid).pw_name[:LONGEST]
    except KeyError:
        return f"uid {uid}"


def _program(pid: int) -> Optional[str]:
    """Return the name of the program without its arguments, which may hold secrets."""
    for name in ("cmdline", "comm"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                words = file.read(4096).decode(errors="replace").split("\0")
        except OSError:
            return None
        program = os.path.basename(words[0].strip())
        if program:
            return program[:LONGEST]
    return None

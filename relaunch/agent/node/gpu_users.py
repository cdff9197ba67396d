"""Classifies the processes that NVML lists on this node's GPUs: relaunch's own, and foreign ones.

No other module does this. Nothing is refused here unless asked: an order that needs free GPUs calls
`refuse`, and the controller receives the classified list.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from relaunch.agent import processes, search, tools
from relaunch.agent.node import hold
from relaunch.agent.protocol import Json, Refusal, parse_token
from relaunch.agent.state import Generation, JobState

NAMES_TIMEOUT = 1.0
"""Seconds for resolving user names: a directory service may not answer."""
MAX_NAME = 32
"""Characters of a name: enough for people to recognise it, while the names of 2,048 nodes are
stored together."""


def list_users(reading: Json, living_only: bool = False) -> List[Tuple[int, str]]:
    """Return pid and bus id of each process that uses a GPU, as far as that could be read.

    Args:
        living_only: leave out pids that do not exist, or for which a SIGKILL is pending: only a
            reboot ends those.
    """
    users = []
    for gpu in reading.get("gpus", ()):
        for listed in _list_processes(gpu):
            process = processes.read_process(listed["pid"])
            if not living_only or (
                process is not None and process.is_alive and not hold.is_kill_pending(listed["pid"])
            ):
                users.append((listed["pid"], gpu["bus_id"]))
    return users


def describe(pids: List[int]) -> str:
    """Name processes for people: pid, user and program of the first few, without arguments.

    Arguments may hold secrets.
    """
    first = pids[: hold.MAX_NAMED_PIDS]
    names = (
        tools.run_bounded(lambda: {str(pid): _identify(pid) for pid in first}, NAMES_TIMEOUT) or {}
    )
    descriptions = []
    for pid in first:
        process = names.get(str(pid)) or {}
        owner = processes.read_owner(pid)
        user = process.get("user") or ("user unknown" if owner is None else f"uid {owner}")
        # What hangs has no command line to read, and a name.
        program = process.get("program") or processes.read_name(pid) or "program unknown"
        descriptions.append(f"pid {pid} ({user}, {program})")
    others = len(pids) - len(first)
    return ", ".join(descriptions) + (f" and {others} more" if others else "")


def refuse_if_used(users: List[Tuple[int, str]]) -> None:
    if users:
        reason = ", ".join(
            f"pid {pid} uses GPU {bus_id}" for pid, bus_id in users[: hold.MAX_NAMED_PIDS]
        )
        raise Refusal("busy", reason, pids=sorted({pid for pid, _ in users}))


def add_owners(state: Path, reading: Json) -> Json:
    """Return the reading with `ours` for each process, and user and program if it is foreign."""
    pids = sorted({each["pid"] for gpu in reading.get("gpus", ()) for each in _list_processes(gpu)})
    if not pids:
        return reading
    own = select_own(state, pids)
    foreign_processes = [pid for pid in pids if pid not in own]
    names = (
        tools.run_bounded(
            lambda: {str(pid): _identify(pid) for pid in foreign_processes}, NAMES_TIMEOUT
        )
        if foreign_processes
        else {}
    )
    unknown = {"user": None, "program": None}

    def describe_process(each: Json) -> Json:
        pid = each["pid"]
        return (
            {**each, "ours": True}
            if pid in own
            else {**each, "ours": False, **(names or {}).get(str(pid), unknown)}
        )

    gpus = [
        {**gpu, "processes": [describe_process(each) for each in _list_processes(gpu)]}
        if _list_processes(gpu)
        else gpu
        for gpu in reading["gpus"]
    ]
    return {**reading, "gpus": gpus}


def _list_processes(gpu: Json) -> List[Json]:
    listed = gpu.get("processes")
    return listed if isinstance(listed, list) else []


def select_own(state: Path, pids: List[int]) -> List[int]:
    """Return which of these pids are ranks of a generation whose shim lives, or tools that we run.

    Processes that a dead shim left behind count as foreign.
    """
    ranks = _list_ranks(state)
    rows, _ = search.check_each(lambda pid: [pid] if _is_ours(state, pid, ranks) else None, pids)
    return [pid for (pid,) in rows]


def _list_ranks(state: Path) -> Dict[int, int]:
    """Return pid and start time of the ranks whose shims live."""
    folder = state / "jobs"
    ranks: Dict[int, int] = {}
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        job = JobState(state, "", "")
        job.path = entry
        for generation in job.list_generations()[-1:]:
            if _has_live_shim(generation) and generation.groups:
                # otherwise the node has rebooted, and the pids mean nothing
                ranks.update(generation.groups)
                ranks.update(generation.launched_ranks.values())
    return ranks


def _has_live_shim(generation: Generation) -> bool:
    return generation.prepared_order is not None and generation.has_live_shim()


def _is_ours(state: Path, pid: int, ranks: Dict[int, int]) -> bool:
    process = processes.read_process(pid)
    if process is None:
        return False
    for leader in (process.group, process.session):
        # the process may have overwritten its environment
        started = ranks.get(leader)
        if started is not None and process.started >= started:
            process_now = processes.read_process(leader)
            if process_now is None or process_now.started == started:
                return True
    text = search.read_environment(pid).decode(errors="replace")
    variables = dict(variable.split("=", 1) for variable in text.split("\0") if "=" in variable)
    place = variables.get("RELAUNCH_NODE_STATE", "")
    if not place:
        return False
    if variables.get(tools.HOLD_VARIABLE) and place == str(state):
        # Every user can set these variables, and root reads those of all users.
        return processes.read_owner(pid) == os.geteuid()
    token = parse_token(variables.get("RELAUNCH_TOKEN", ""))
    if token is None or not (place == str(state) or _is_own(place)):
        return False
    # Nodes may share a machine, and then its GPUs: a rank of another such node is not foreign.
    return _has_live_shim(JobState.from_token(Path(place), token).generation(token.order))


def _is_own(place: str) -> bool:
    try:
        return os.stat(place).st_uid == os.geteuid()
    except (OSError, ValueError):
        return False


def _identify(pid: int) -> Json:
    return {"user": _read_user(pid), "program": _read_program(pid)}


def _read_user(pid: int) -> Any:
    uid = processes.read_owner(pid)
    if uid is None:
        return None
    try:
        return pwd.getpwuid(uid).pw_name[:MAX_NAME]
    except KeyError:
        return f"uid {uid}"


def _read_program(pid: int) -> Optional[str]:
    """Return the name of the program without its arguments, which may hold secrets."""
    for name in ("cmdline", "comm"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                arguments = file.read(4096).decode(errors="replace").split("\0")
        except OSError:
            return None
        program = os.path.basename(arguments[0].strip())
        if program:
            return program[:MAX_NAME]
    return None

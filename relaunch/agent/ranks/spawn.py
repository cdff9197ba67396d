"""Start ranks: fork, create a new session, arrange to die with the shim, exec.

Where the job's Python is warm, it is what forks, and no exec follows (relaunch.agent.warm).

This module does not decide when to start ranks, and does not reap them.
"""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import select
import signal
import time
from typing import Dict, List, NoReturn, Optional, Tuple

from relaunch.agent import disk, processes
from relaunch.agent.failpoints import reach_failpoint
from relaunch.agent.protocol import Json, Refusal, Token, now
from relaunch.agent.ranks import flight, launched, redact
from relaunch.agent.state import Generation, read_boot_id, write_json
from relaunch.agent.warm.hook import NATIVE_PREFIXES
from relaunch.agent.warm.python import WarmError, WarmPython

EXEC_TIMEOUT = 30.0
"""Timeout in seconds of an exec. A cold network file system takes several seconds."""

Ranks = Dict[int, int]
"""Pid by global rank."""
DEFAULTS = {"PYTHONUNBUFFERED": "1"}
"""Variables that a rank gets unless the job or the node sets them, also to the empty string.

Ranks write into files, so Python would keep up to 8 KiB of their output in memory: seen late, and
lost by SIGKILL.
"""


LIMITS = ("as", "core", "data", "fsize", "memlock", "nofile", "nproc", "stack")
"""Resource limits that an order may set, as limits.conf(5) names them."""


def make_rank_environment(
    base: dict[str, str], order: Json, generation: Generation, token: Token, index: int, rank: int
) -> dict[str, str]:
    inherited = _select_inherited(base, order)
    given = {
        **DEFAULTS,
        **inherited,
        **_select_given(order, inherited),
        **launched.leave_tracker(order["rank_env"][index], inherited),
    }
    return {
        **given,
        **flight.make_environment(generation, given),
        "TORCHELASTIC_ERROR_FILE": str(generation.error_path(rank)),
        "RELAUNCH_PROGRESS_FILE": str(generation.progress_path(rank)),
        "RELAUNCH_TOKEN": token.text,
        "RELAUNCH_NODE_STATE": str(generation.state),
        **({launched.SEPARATE_STDERR: "1"} if order["separate_stderr"] else {}),
    }


def _select_inherited(base: dict[str, str], order: Json) -> dict[str, str]:
    return {
        name: value
        for name, value in base.items()
        if order["inherit_env"] and not name.startswith(("RELAUNCH_", "TORCHELASTIC_"))
    }


def _select_given(order: Json, inherited: dict[str, str]) -> dict[str, str]:
    """Return the job's variables, without those defaults that the node sets itself."""
    defaults = order.get("env_defaults", [])  # the order may be one of a release without them
    return {
        name: value
        for name, value in order["env"].items()
        if name not in defaults or name not in inherited
    }


def make_shared_environment(base: dict[str, str], order: Json) -> dict[str, str]:
    """Return the environment to import with: what all ranks of every generation have.

    And what native code may read in an import, if it is the same in all ranks of this order.
    """
    first, *others = order["rank_env"]
    native = {
        name: value
        for name, value in first.items()
        if name.startswith(NATIVE_PREFIXES) and all(other.get(name) == value for other in others)
    }
    inherited = _select_inherited(base, order)
    return {**DEFAULTS, **inherited, **_select_given(order, inherited), **native}


def make_redaction(order: Json, generation: Generation, token: Token) -> Optional[Json]:
    """Return the record of the values that are replaced in what leaves the node; None: none."""
    names = order.get("redact", [])  # the order may be one of a release without them
    return redact.make_record(
        (
            make_rank_environment(dict(os.environ), order, generation, token, index, 0)
            for index in range(len(order["rank_env"]) if names else 0)
        ),
        names,
    )


def _become(
    order: Json,
    command: list[str],
    environment: dict[str, str],
    outputs: tuple[int, int],
    failure: int,
    shim: int,
    task: Tuple[Generation, Json],
) -> NoReturn:
    """Turn this newly forked process into the rank. An error is written to the pipe `failure`."""
    step = "prepare the process"
    try:
        processes.obey_terminating_signals()  # the shim handles them
        os.setsid()
        processes.die_with(shim)
        processes.allow_reading()
        step = "its record"
        generation, record = task
        _record_task(generation, record, processes.identify_self())
        reach_failpoint(generation.state, "rank.recorded")
        step = "prepare the process"
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(outputs[0], 1)
        os.dup2(outputs[1], 2)
        if order["workdir"] is not None:
            step = "workdir"
            os.chdir(order["workdir"])
        if order["umask"] is not None:
            os.umask(int(order["umask"], 8))
        own_and_given = processes.list_core_limits()
        if own_and_given:
            _set_limit("core", own_and_given[1])
        for name, value in order["limits"].items():
            step = f"limits.{name}"
            _set_limit(name, value)
        step = "exec"
        # SIGPIPE is the only signal that the shim ignores. Exec resets signal handlers.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execvpe(command[0], command, environment)
    except OSError as error:
        report = {"step": step, "errno": error.errno, "text": error.strerror}
    except BaseException as error:  # never continue as a second shim
        report = {"step": step, "errno": None, "text": repr(error)}
    os.write(failure, json.dumps(report).encode())
    os._exit(127)


def _record_task(generation: Generation, task: Json, process: processes.Process) -> None:
    """Record a process as a running rank, before it becomes the rank's command.

    By the boot and the start time in it, an old record differs from that of a rank that runs. On a
    full disk there is none: that is no reason not to train.
    """
    record = {**task, "pid": process.pid, "started": process.started, "at": time.time()}
    try:
        write_json(generation.task_record_path(task["rank"]), record, durable=False)
    except OSError as error:
        if not disk.is_full(error):
            raise
        disk.log(f"the disk is full: rank {task['rank']} has no record in {generation.path}")


def _set_limit(name: str, value: int) -> None:
    """Set a soft limit, and raise the hard limit where that is below it.

    Raises:
        PermissionError: The hard limit is below it, and this is not root.
    """
    kind = getattr(resource, f"RLIMIT_{name.upper()}")
    hard = resource.getrlimit(kind)[1]
    is_above = hard != resource.RLIM_INFINITY and (value == -1 or value > hard)
    try:
        resource.setrlimit(kind, (value, value if is_above else hard))
    except ValueError as error:  # also for EPERM
        wanted = "unlimited" if value == -1 else value
        reason = f"{wanted} is above {hard}, the hard limit of this node's agent"
        raise PermissionError(errno.EPERM, reason if is_above else str(error)) from None


def _make_refusal(order: Json, rank: int, report: Json) -> Refusal:
    program = order["command"][0]
    if report["step"] == "workdir" and report["errno"] in (errno.ENOENT, errno.ENOTDIR):
        return Refusal(
            "workdir_missing", f"workdir {order['workdir']} is not a folder on this node"
        )
    if report["step"] == "exec" and report["errno"] in (errno.ENOENT, errno.ENOTDIR):
        return Refusal(
            "command_not_found", f"the command {program} is not found on this node's PATH"
        )
    subject = {
        "exec": f"the command {program}",
        "workdir": f"workdir {order['workdir']}",
    }.get(report["step"], report["step"])
    return Refusal("cannot_start", f"rank {rank} cannot be started: {subject}: {report['text']}")


def launch(
    generation: Generation,
    token: Token,
    ranks: list[int],
    order: Json,
    started: Ranks,
    warm: Optional[WarmPython] = None,
    valid_until: float = math.inf,
) -> Optional[str]:
    """Start all ranks, and add each to `started` as soon as it is forked.

    Args:
        generation: The generation.
        token: Its token.
        ranks: The numbers of the ranks.
        order: The start order.
        started: Gets the pid of each rank.
        warm: The Python that is to fork the ranks, if there is one.
        valid_until: When the generation's preparation expires, in seconds of CLOCK_BOOTTIME. Later,
            no rank is started, because the controller may have begun another generation: what is
            written in between takes arbitrarily long on a disk that hangs.

    Returns:
        Why ranks were started from nothing although there is a warm Python; None otherwise.

    Raises:
        Refusal: A rank cannot be started, or it is too late. Those in `started` may be running.
    """
    base = dict(os.environ)
    task = {
        "token": token.json,
        "node": order["node"],
        "boot_id": read_boot_id(generation.state),
    }
    own = order.get("launched")
    command = (
        order["command"]
        if own is None
        else [*order["command"], *launched.wrap_command(own["command"], own["env"])]
    )
    reports: dict[int, int] = {}
    if order["env"].get(flight.ASK_VARIABLE) == "1":
        flight.write_dumper(generation)
    environments = [
        make_rank_environment(base, order, generation, token, index, rank)
        for index, rank in enumerate(ranks)
    ]
    obstacle = _find_obstacle(warm, order, command, environments)
    try:
        for index, (rank, environment) in enumerate(zip(ranks, environments)):
            # A launcher is not a rank: its own streams stay together.
            is_separate = order["separate_stderr"] and own is None
            outputs = launched.open_logs(generation, rank, is_separate)
            recorded = generation, {**task, "rank": rank}
            pid = None
            if warm is not None and obstacle is None:
                try:
                    pid, reading = _fork_warm(
                        warm, order, environment, outputs, recorded, started, valid_until
                    )
                except WarmError as error:
                    obstacle = str(error)
            if pid is None:
                _refuse_expired(valid_until)
                pid, reading = _fork_cold(order, command, environment, outputs, recorded)
                started[rank] = pid
            reports[reading] = rank
            for log in set(outputs):
                os.close(log)
            if index == 0:
                reach_failpoint(generation.state, "start.forking")
        _await_exec(order, dict(reports))
    except OSError as error:
        if disk.is_full(error):
            raise disk.make_refusal(generation.state, "ranks cannot be started") from error
        raise Refusal("cannot_start", f"ranks cannot be started: {error.strerror}") from error
    finally:
        for reading in reports:
            os.close(reading)
    return obstacle


def _refuse_expired(valid_until: float) -> None:
    """Refuse to start a rank of a preparation that has expired.

    Raises:
        Refusal: It has.
    """
    late = now() - valid_until
    if late > 0.0:
        raise Refusal("expired", f"its preparation expired {late:.1f} s before a rank was started")


def _find_obstacle(
    warm: Optional[WarmPython], order: Json, command: List[str], environments: List[dict[str, str]]
) -> Optional[str]:
    """Return why this warm Python cannot fork these ranks, or None."""
    if warm is None:
        return None
    try:
        warm.check(order, command, environments)
    except WarmError as error:
        return str(error)
    except OSError as error:
        return f"the folder that ranks run in cannot be found: {error.strerror}"
    return None


def _fork_cold(
    order: Json,
    command: List[str],
    environment: dict[str, str],
    outputs: Tuple[int, int],
    task: Tuple[Generation, Json],
) -> Tuple[int, int]:
    """Fork a rank; return its pid and what an error of its start is read from."""
    shim = os.getpid()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become(order, command, environment, outputs, writing, shim, task)
    os.close(writing)
    return pid, reading


def _fork_warm(
    warm: WarmPython,
    order: Json,
    environment: dict[str, str],
    outputs: Tuple[int, int],
    task: Tuple[Generation, Json],
    started: Ranks,
    valid_until: float,
) -> Tuple[int, int]:
    """Have the warm Python fork a rank, and let it go once it is recorded.

    Raises:
        WarmError: No process of this call is, or becomes, the rank: it did not get the word to go.
        Refusal: It is too late; the same holds.
    """
    generation, record = task
    reading, writing = os.pipe()
    waiting, going = os.pipe()
    try:
        pid = warm.fork(order, environment, outputs, writing, waiting)
        process = processes.read_process(pid)
        if process is None or not process.is_alive:
            raise WarmError("a process that it forked has ended")
        reach_failpoint(generation.state, "warm.forked")
        _record_task(generation, record, process)
        _refuse_expired(valid_until)
        started[record["rank"]] = pid
        os.write(going, b"g")
    except BaseException:
        os.close(reading)
        raise
    finally:
        for handle in (writing, waiting, going):
            os.close(handle)
    return pid, reading


def _await_exec(order: Json, waiting: dict[int, int]) -> None:
    """Wait until exec has closed the pipe of every rank.

    Raises:
        Refusal: A rank reported an error, or no exec succeeded within the timeout.
    """
    deadline = time.monotonic() + EXEC_TIMEOUT
    while waiting:
        poll = select.poll()
        for reading in waiting:
            poll.register(reading, select.POLLIN)
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ready:
            raise Refusal(
                "cannot_start",
                f"the command {order['command'][0]} was not begun within {EXEC_TIMEOUT:g} s",
            )
        for reading, _ in ready:
            report = os.read(reading, 65536)
            rank = waiting.pop(reading)
            if report:
                raise _make_refusal(order, rank, json.loads(report))

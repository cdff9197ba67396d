"""The process that waits beside a running generation, with a Python that has imported its modules.

`start` leaves it behind where the job names modules to import ahead. The next `prepare` gives it
the locks and sockets of the new generation, and it becomes the shim of that one: ranks that its
Python forks are then children of their shim, as all ranks are. Without it, or if it is not ready,
`prepare` becomes the shim itself and the ranks start from nothing.

`warm` starts one on a node that the job may be given next (a spare), and has to repeat its order:
without it, that standby ends.

It holds no token and runs nothing of the job's but the imports. It ends with the generation that
it waits beside, unless that one failed or was stopped, and then KEEP_TIMEOUT later.
"""

from __future__ import annotations

import array
import hashlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, List, NamedTuple, Optional, Tuple

from relaunch.agent import disk, processes
from relaunch.agent.failpoints import reach_failpoint
from relaunch.agent.loop import is_from_this_user
from relaunch.agent.protocol import Json, Refusal, Token, now, parse_token
from relaunch.agent.ranks import journal, redact, shim, spawn
from relaunch.agent.state import Generation, JobState, read_boot_id, read_json, write_json
from relaunch.agent.warm.command import UnsuitableCommand
from relaunch.agent.warm.python import WarmError, WarmInterruption, WarmPython

START_DELAY = 10.0
"""Seconds after a launch before its Python is started: the ranks themselves import first."""
DELAY_VARIABLE = "RELAUNCH_WARM_DELAY"
"""Environment variable of the agent that sets another delay."""
KEEP_TIMEOUT = 120.0
"""Seconds after the end of a generation for the next one to be prepared."""
CHECK_INTERVAL = 1.0
"""Seconds between checks that the generation still runs."""
LOCK_TIMEOUT = 5.0
"""Timeout in seconds for another command on the job when a standby cleans up after itself."""
TAKE_TIMEOUT = 5.0
"""Timeout in seconds for it to take over a generation, which takes milliseconds.

A launch waits for it only if it hangs, which costs less than an import on a busy node.
"""
DEATH_TIMEOUT = 5.0
"""Timeout in seconds for SIGKILL to end it."""
RECORD_TIMEOUT = 2.0
"""Timeout in seconds for a new one to record itself, which takes milliseconds."""
MAX_KEEP = 3600.0
"""Most seconds that one order can keep a standby where no generation of its job was."""
MAX_ON_SPARE = 4
"""Most standbys that are started on a node that runs nothing. Each holds the memory of its
imports, and is of a job that may never come."""
RETRY_INTERVAL = 300.0
"""Seconds until a spare starts another one after one that ended before it was ready."""
MAX_REASON = 300
"""Characters of a reason that are recorded. Agents of other releases read it as it is."""
_MAX_MESSAGE = 1 << 22


class WarmState(NamedTuple):
    """What a standby has recorded of itself."""

    state: str
    """`waiting`, `importing`, `ready`, `ended`, or `cold`: no other one would be ready either.

    `cold` is only by what the program does. One that was killed, or found no memory, process or
    disk, has `ended`, and the next launch starts another.
    """
    reason: str
    """Why it is cold or has ended, or an empty text."""
    process: Optional[processes.Process]
    """The living standby, or None."""


def _folder(job: JobState) -> Path:
    return job.path / "warm"


def _wanted_file(job: JobState) -> Path:
    """Return what says until when a standby is wanted although no generation runs beside it."""
    return _folder(job) / "wanted.json"


def read_state(job: JobState) -> Optional[WarmState]:
    """Return what the last standby of a job has recorded; None if it had none in this boot."""
    record = read_json(_folder(job) / "standby.json")
    if record is None or record.get("boot_id") != read_boot_id(job.state):
        return None
    process = processes.read_process(record["pid"])
    if process is not None and (process.started != record["started"] or not process.is_alive):
        process = None
    return WarmState(record["state"], record["reason"], process)


@contextmanager
def _address(job: JobState) -> Iterator[str]:
    """Yield a short path of the socket: a unix address holds 108 bytes."""
    handle = os.open(_folder(job), os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/sock"
    finally:
        os.close(handle)


def _digest(spec: Json) -> str:
    """Return what tells one standby from another: all but what differs by generation."""
    content = [sys.argv[0], *(spec[name] for name in ("modules", "command", "workdir"))]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# --- the commands' side ---


def _make_spec(order: Json) -> Json:
    """Return with what a standby is started, from an order to start ranks."""
    return {
        "modules": order["warm"],
        "command": order["command"],
        "workdir": order["workdir"],
        "environment": spawn.make_shared_environment(dict(os.environ), order),
        "redact": order.get("redact", []),
    }


def _make_redactor(spec: Json) -> redact.Redactor:
    """Return what replaces values that an error at an import may have in its text."""
    return redact.Redactor(redact.make_record([spec["environment"]], spec["redact"]))


def leave_behind(job: JobState, order: Json) -> None:
    """Start a standby for the generation after this one, unless a suitable one is there.

    The caller holds the lock of the job, and has started the ranks of `order`.
    """
    spec = _make_spec(order)
    record = read_json(_folder(job) / "standby.json") or {}
    known = read_state(job)
    is_same = record.get("digest") == _digest(spec)
    _wanted_file(job).unlink(missing_ok=True)  # from here on its generation says how long
    if known is not None and is_same:
        is_alive = known.process is not None and known.state != "ended"
        if is_alive or known.state == "cold":
            return
    _start(job, spec, known)


def keep(job: JobState, order: Json, seconds: float) -> Json:
    """Start a standby where no generation of the job runs, or let it live on; return its state.

    The caller holds the lock of the job, and shares the node with launches: an examination that
    comes next finds the record of this standby.

    Args:
        job: The job on this node.
        order: What `start` gets, as far as a standby needs it.
        seconds: When it ends unless this is called again.

    Raises:
        Refusal: There are enough standbys here already.
    """
    spec = _make_spec(order)
    record = read_json(_folder(job) / "standby.json") or {}
    known = read_state(job)
    is_same = record.get("digest") == _digest(spec)
    is_new = known is None or known.process is None or not is_same
    if is_new:
        others = [row for row in list_standbys(job.state) if row["pid"] != record.get("pid")]
        if len(others) >= MAX_ON_SPARE:
            names = ", ".join(sorted(row["job"] for row in others))
            raise Refusal("busy", f"{len(others)} jobs import ahead on this node already: {names}")
    _folder(job).mkdir(mode=0o700, exist_ok=True)
    until = {"until": now() + min(seconds, MAX_KEEP)}
    write_json(_wanted_file(job), until, durable=False)
    if is_new:
        reach_failpoint(job.state, "warm.wanted")
        _start(job, spec, known, wait=True)
        known = read_state(job)
    if known is None or known.process is None:
        return {"state": "ended", "reason": "its process has ended at once"}
    return {"state": known.state, "reason": _make_redactor(spec).redact(known.reason)}


def end(job: JobState) -> None:
    """End the standby of a job, whose lock the caller holds.

    Raises:
        Refusal: It does not die.
    """
    known = read_state(job)
    if known is not None and known.process is not None:
        _kill(known.process)


def _start(job: JobState, spec: Json, known: Optional[WarmState], wait: bool = False) -> None:
    """Start a standby in place of the last one; with `wait`, return once it is on record."""
    if known is not None and known.process is not None:
        _kill(known.process)
    _folder(job).mkdir(mode=0o700, exist_ok=True)
    reading, recorded = os.pipe()
    try:
        # Forked twice, so that the session does not have to reap it.
        middle = processes.fork(lambda: _leave(job, spec, recorded))
        os.waitpid(middle, 0)
        os.close(recorded)
        recorded = -1
        if wait:
            select.select([reading], [], [], RECORD_TIMEOUT)
    finally:
        os.close(reading)
        if recorded >= 0:
            os.close(recorded)


def _leave(job: JobState, spec: Json, recorded: int) -> None:
    processes.fork(lambda: Standby(job, spec).run(recorded))


def list_standbys(state: Path) -> List[Json]:
    """Return the living standbys of this node, with their modules and the memory of their Python.

    `bytes` is what it holds in memory, shared pages included; None: it has not started it.
    """
    rows = []
    for job, record in _list_records(state):
        known = read_state(job)
        if known is None or known.process is None:
            continue
        python = record.get("python")
        rows.append(
            {
                **record["names"],
                "pid": known.process.pid,
                "state": known.state,
                "modules": record["modules"],
                "bytes": processes.read_memory(python) if python is not None else None,
            }
        )
    return rows


def _list_records(state: Path) -> List[Tuple[JobState, Json]]:
    """Return what every standby of this node that has not become a shim has recorded."""
    found = []
    for path in sorted((state / "jobs").glob("*/warm/standby.json")):
        record = read_json(path)
        if record is not None and "names" in record:
            found.append((JobState.from_row(state, record["names"]), record))
    return found


def hand_over(
    job: JobState,
    generation: Generation,
    token: Token,
    record: Json,
    sockets: shim.ShimSockets,
    lock: int,
) -> bool:
    """Have the standby of the job become the shim; return whether it did.

    The caller holds the lock of the job, and keeps its own descriptors open.

    Raises:
        Refusal: It neither answers nor dies.
    """
    known = read_state(job)
    if known is None or known.process is None or known.state != "ready":
        return False
    try:
        folder = os.getcwd()
    except OSError as error:
        _kill(known.process)
        _record_end(job, f"the folder that the agent runs in is gone: {error.strerror}")
        return False
    body = {
        "agent": sys.argv[0],
        "token": token.text,
        "order": list(generation.order),
        "record": record,
        "environment": dict(os.environ),
        "folder": folder,
    }
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
            caller.settimeout(TAKE_TIMEOUT)
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_MESSAGE)
            with _address(job) as address:
                caller.connect(address)
            rights = array.array("i", [*sockets.handles, lock])
            caller.sendmsg(
                [json.dumps(body).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
            )
            answer = json.loads(caller.recv(4096) or b"{}")
    except (OSError, ValueError):
        answer = {}
    if answer.get("taken") is True:
        return True
    # From here on it must never become the shim, whatever it has received.
    _kill(known.process)
    _record_end(job, "its Python did not answer")
    return False


def _record_end(job: JobState, reason: str) -> None:
    """Record why the standby was killed. That is no reason not to launch, on a full disk either."""
    path = _folder(job) / "standby.json"
    record = {**(read_json(path) or {}), "state": "ended", "reason": reason}
    try:
        write_json(path, record, durable=False)
    except OSError as error:
        disk.log(f"{path} cannot be written: {error}")


def _kill(process: processes.Process) -> None:
    """Kill a standby, and with it its Python.

    Raises:
        Refusal: It does not die.
    """
    processes.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + DEATH_TIMEOUT
    while processes.is_alive(process.pid, process.started):
        if time.monotonic() > deadline:
            reason = "the process that imports ahead does not die"
            raise Refusal("stuck", reason, pids=[process.pid])
        time.sleep(0.002)


def end_all(state: Path) -> None:
    """End every standby on this node, before it is examined or repaired.

    The caller holds the node, so none of them is becoming a shim. One that does not die holds no
    GPU, and is left.
    """
    for job, _ in _list_records(state):
        try:
            end(job)
        except Refusal as refused:
            disk.log(f"job {job.job}: {refused.answer['reason']}")


# --- the process itself ---


class Standby:
    def __init__(self, job: JobState, spec: Json) -> None:
        self.job = job
        self.spec = spec
        self.folder = _folder(job)
        self.python: Optional[WarmPython] = None
        self.state, self.reason = "waiting", ""
        delay = os.environ.get(DELAY_VARIABLE, "")
        self.start_at = now() + (float(delay) if delay else START_DELAY)
        self.seen_at = now()
        """When the generation was last seen to run."""
        self.rests_until = 0.0
        """Until when one that has ended keeps a spare from starting another."""

    def run(self, recorded: int) -> None:
        """Run until there is nothing to wait for.

        Args:
            recorded: A descriptor that is closed once this process is on record.
        """
        os.setsid()
        processes.set_name("relaunch-warm")
        log = os.open(
            self.folder / "output.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600
        )
        null = os.open(os.devnull, os.O_RDWR)
        for source, target in ((null, 0), (null, 1), (log, 2)):
            os.dup2(source, target)
        processes.close_all_but([recorded])
        signal.set_wakeup_fd(-1)
        processes.reset_signals()
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        processes.adopt_orphans()
        listener = self._listen()
        self._record()
        os.close(recorded)
        reach_failpoint(self.job.state, "standby.recorded")
        while self._is_wanted():
            self._wait(listener)
            if self.state == "waiting" and now() >= self.start_at:
                self._start_python()
            # Such a one has no process below it. It stays while it would be started again.
            if self.state in ("cold", "ended") and not (self._is_resting() and self._is_renewed()):
                break
        else:
            self.state, self.reason = "ended", "the generation before was fenced, or long ago"
            self._record()
        self._end_python()
        self._remove_unused()

    def _is_resting(self) -> bool:
        return self.state == "cold" or now() < self.rests_until

    def _remove_unused(self) -> None:
        """Remove the folder of a job that was never launched here, unless it is wanted again."""
        if self._was_launched():
            return
        with self.job.hold_lock(LOCK_TIMEOUT):
            record = read_json(self.folder / "standby.json") or {}
            is_own = record.get("pid") == os.getpid()
            if is_own and not self._was_launched() and not self._is_renewed():
                shutil.rmtree(self.job.path)

    def _was_launched(self) -> bool:
        return (self.job.path / "highest.json").exists() or bool(self.job.list_generations())

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        (self.folder / "sock").unlink(missing_ok=True)
        with _address(self.job) as address:
            listener.bind(address)
        listener.listen(4)
        return listener

    def _record(self) -> None:
        own = processes.identify_self()
        record = {
            "pid": own.pid,
            "started": own.started,
            "boot_id": read_boot_id(self.job.state),
            "names": self.job.names,
            "digest": _digest(self.spec),
            "state": self.state,
            "reason": self.reason,
            "modules": self.spec["modules"],
            "python": None
            if self.python is None or self.python.process is None
            else self.python.process.pid,
        }
        write_json(self.folder / "standby.json", record, durable=False)

    def _is_renewed(self) -> bool:
        """Return whether the job still wants a standby here by its orders."""
        wanted = read_json(_wanted_file(self.job))
        return wanted is not None and now() < wanted["until"]

    def _is_wanted(self) -> bool:
        """Return whether a next generation may still be prepared here."""
        if self._is_renewed():
            return True
        launched = [each for each in self.job.list_generations() if each.launch is not None]
        if not launched:
            return False
        newest = launched[-1]
        observations = journal.read(newest.journal)
        kinds = {observation["kind"] for observation in observations}
        if kinds & {"Fenced", "ShimDied"}:
            return False
        codes = [each["exit_code"] for each in observations if each["kind"] == "RankExited"]
        prepared = newest.prepared_order
        ranks = len(prepared["ranks"]) if prepared is not None else 0
        if ranks and len(codes) == ranks and not any(code != 0 for code in codes):
            return False  # the job has succeeded on this node
        identity = newest.identity("shim")
        if identity is not None and processes.is_alive(*identity):
            self.seen_at = now()
            return True
        if len(codes) < ranks:
            return False  # the shim was killed
        return now() < self.seen_at + KEEP_TIMEOUT

    def _wait(self, listener: socket.socket) -> None:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        link = self.python.link if self.python is not None else None
        if link is not None:
            poll.register(link, select.POLLIN)
        until = CHECK_INTERVAL
        if self.state == "waiting":
            until = min(until, max(0.0, self.start_at - now()))
        for handle, _ in poll.poll(until * 1000):
            if handle == listener.fileno():
                self._serve(listener)
            elif self.python is not None:
                try:
                    self.python.take_news()
                    self.state = "ready"
                except WarmError as error:
                    # One that was ready and has ended says nothing about the next one.
                    is_cold = self.state == "importing" and not isinstance(error, WarmInterruption)
                    self._set_reason("cold" if is_cold else "ended", error)
                    self._end_python()
                self._record()

    def _start_python(self) -> None:
        self.state = "importing"
        try:
            self.python = WarmPython(self.spec, self.folder)
            self.python.start()
        except (UnsuitableCommand, WarmInterruption, OSError) as error:
            is_cold = isinstance(error, UnsuitableCommand)
            self._set_reason("cold" if is_cold else "ended", error)
            self._end_python()
        self._record()

    def _set_reason(self, state: str, error: Exception) -> None:
        if self.state == "importing":
            self.rests_until = now() + RETRY_INTERVAL
        self.state = state
        text = _make_redactor(self.spec).redact(str(error))
        self.reason = " ".join(text.split())[:MAX_REASON]

    def _end_python(self) -> None:
        if self.python is not None:
            self.python.kill()
            self.python = None

    def _serve(self, listener: socket.socket) -> None:
        caller, _ = listener.accept()
        with caller:
            caller.settimeout(TAKE_TIMEOUT)
            if not is_from_this_user(caller):
                return
            handles = array.array("i")
            try:
                # Ranks that start cold must not inherit them: they would hold the shim's lock, and
                # accept connections in its place, for as long as they outlive it.
                data, extra, _, _ = caller.recvmsg(
                    _MAX_MESSAGE,
                    socket.CMSG_SPACE(8 * handles.itemsize),
                    socket.MSG_CMSG_CLOEXEC,
                )
            except OSError:
                return
            for level, kind, content in extra:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    handles.frombytes(content[: len(content) - len(content) % handles.itemsize])
            order = json.loads(data or b"{}")
            if not order:
                return
            if self.state != "ready" or order["agent"] != sys.argv[0] or len(handles) != 5:
                os._exit(1)  # the caller starts from nothing, and must not have to kill this first
            self._become_shim(caller, listener, order, list(handles))

    def _become_shim(
        self, caller: socket.socket, listener: socket.socket, order: Json, handles: list[int]
    ) -> None:
        token = parse_token(order["token"])
        assert token is not None, "the token of the command that called"
        generation = self.job.generation((order["order"][0], order["order"][1]))
        try:
            os.chdir(order["folder"])
        except OSError:  # it was removed meanwhile
            os._exit(1)  # the caller starts from nothing
        orders, watch, peers, master = (_adopt(handle) for handle in handles[:4])
        sockets = shim.ShimSockets(orders, watch, peers, master)
        shim.record_identity(generation)
        (self.folder / "standby.json").unlink()
        _wanted_file(self.job).unlink(missing_ok=True)
        listener.close()
        caller.send(json.dumps({"taken": True}).encode())
        caller.close()
        reach_failpoint(self.job.state, "prepare.taken")
        os.environ.clear()
        os.environ.update(order["environment"])
        shim.become(generation, token, order["record"], sockets, handles[4], self.python)
        os._exit(0)


def _adopt(handle: int) -> socket.socket:
    adopted = socket.socket(fileno=handle)
    adopted.setblocking(False)
    return adopted

"""The agent inside a rank's container: runs the ranks of one generation and exits as they exit.

    python3 <agent> container [--] COMMAND…

The order is in RELAUNCH_ORDER; without it the command is executed as if there were no agent.
Another component starts and stops the container, so nothing here fences or waits for a watcher.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional

from relaunch.agent import processes
from relaunch.agent.children import Child
from relaunch.agent.container import stdout
from relaunch.agent.loop import parse, take_line
from relaunch.agent.protocol import VERSION, Fields, Json, Refusal
from relaunch.agent.state import JobState, open_state

if TYPE_CHECKING:
    from relaunch.agent.container.port import Listener

STATE = "/var/tmp/relaunch"
"""The state folder, unless RELAUNCH_AGENT_STATE names another; it is removed with the container."""
NEVER = 1e9
"""Seconds (30 years), for a lease that is never renewed."""
LONGEST_GRACE = 25.0
"""Seconds. ECS kills a container 30 s after it has asked it to stop (ECS_CONTAINER_STOP_TIMEOUT),
and the exits must be reported before that."""
STUCK_AFTER = 3.0
VALID_FOR = 60.0
LINGER = 3.0
"""Seconds that the exit waits until a watcher has received the end: a watcher that lost its
connection reconnects within two."""
DRAIN_TIMEOUT = 5.0
AGAIN_AFTER = 1.0
"""Seconds after which what no process was left for is tried again."""
STOP_TIMEOUT = 3.0
"""Seconds in which an order to stop the ranks is tried again; LONGEST_GRACE comes on top."""
BEAT = 3600.0
"""Heartbeat interval of the container's own watch, in seconds; it only waits for exits."""
PASSED_ON = (signal.SIGTERM, signal.SIGINT)
MISUSED, NOT_RUN, NOT_FOUND, KILLED, ASKED_TO_GO = (
    2,
    126,
    127,
    128 + signal.SIGKILL,
    128 + signal.SIGTERM,
)


def main(arguments: List[str]) -> int:
    command = arguments[1:] if arguments[:1] == ["--"] else arguments
    if not command:
        _say("usage: python3 <agent> container [--] COMMAND…")
        return MISUSED
    order = os.environ.get("RELAUNCH_ORDER")
    if order is None:
        return _execute(command)
    processes.forgo_cores()
    # Blocked until handlers are installed: the kernel discards signals to a container's first
    # process that it has no handler for.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)

    def work() -> int:
        return _Container(command).run(order)

    return _first_process(work) if os.getpid() == 1 else work()


def _say(text: str) -> None:
    sys.stderr.write(f"relaunch: {text}\n")
    sys.stderr.flush()


def _execute(command: List[str]) -> int:
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        _say(f"the command {command[0]} is not found on this container's PATH")
        return NOT_FOUND
    except OSError as error:
        _say(f"the command {command[0]} cannot be run: {error.strerror}")
        return NOT_RUN


def _first_process(work: Callable[[], int]) -> int:
    """Run `work` in a child; as a container's first process, reap orphans and forward signals."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = work()
        except BaseException:  # it must never return into its parent's code
            traceback.print_exc()
        finally:
            os._exit(code)
    for number in PASSED_ON:
        signal.signal(number, lambda number, frame: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


class _Container:
    def __init__(self, command: List[str]) -> None:
        self.command = command
        self.ranks: List[int] = []
        self.token: Json = {}
        self.state = Path()
        self.grace = LONGEST_GRACE
        self.watch: Optional[Child] = None
        self.again_at: Optional[float] = None
        """CLOCK_MONOTONIC, when the copier and the watch are begun again; None: both were begun."""
        self.seen = 0
        self.exited: Dict[int, int] = {}
        """Exit codes by rank, in the order of the exits; -1: we stopped it."""
        self.lost = False
        self.copier = 0
        self.drain = -1
        self.door: Optional[Listener] = None
        self.told, self.telling = os.pipe()
        self.woken, self.waking = os.pipe()
        self.asked_to_go = False
        self.until: Optional[float] = None
        """CLOCK_MONOTONIC, when the container exits even if no watcher has received the end."""

    def run(self, text: str) -> int:
        for handle in (self.woken, self.waking):
            os.set_blocking(handle, False)
        signal.set_wakeup_fd(self.waking, warn_on_full_buffer=False)
        for number in (*PASSED_ON, signal.SIGCHLD):
            signal.signal(number, lambda number, frame: None)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        os.environ.setdefault("RELAUNCH_AGENT_STATE", STATE)
        try:
            self._launch(text)
        except Refusal as refused:
            _say(str(refused.answer["reason"]))
            return {"command_not_found": NOT_FOUND, "bad_order": MISUSED}.get(
                refused.answer["why"], NOT_RUN
            )
        self._supervise()
        return self._code()

    def _code(self) -> int:
        failed = next((code for code in self.exited.values() if code > 0), None)
        if failed is not None:
            return failed
        if self.lost:
            return KILLED
        return ASKED_TO_GO if self.asked_to_go else 0

    # --- the launch

    def _launch(self, text: str) -> None:
        value = parse(text.encode())
        if value is None:
            raise Refusal("bad_order", f"RELAUNCH_ORDER is {text[:40]!r}; expected a JSON object")
        order = Fields(value, "RELAUNCH_ORDER.")
        self.token, self.ranks = order.token().json, order.items("ranks")
        number = None
        if order.order.get("port") is not None:
            number = order.whole("port")
        self.grace = min(LONGEST_GRACE, order.number("stop_grace"))
        self.state = open_state()
        if number is not None:
            self.door = _make_listener(number, self.state, self.telling)
        prepared = self._carry_out(
            "prepare",
            ranks=self.ranks,
            address="127.0.0.1",
            lease=NEVER,
            fence_after=NEVER,
            stop_grace=self.grace,
            stuck_after=STUCK_AFTER,
            valid_for=VALID_FOR,
            heartbeat=order.number("heartbeat", least=0.01),
        )
        self._carry_out(
            "start",
            command=self.command,
            workdir=None,
            env=_list_kept_variables(),
            rank_env=order.items("rank_env"),
            peers=[],
            prepared=prepared["stamp"],
            node=order.text("node", os.environ.get("RELAUNCH_NODE") or "container"),
            secret=secrets.token_hex(16),
            fences=False,
            log_pattern=order.get("log_pattern", "a regular expression or null", None),
            redact=order.items("redact", []),
        )

    def _carry_out(self, command: str, /, **order: Any) -> Json:
        try:
            answer = self._ask(command, **order)
        except OSError as error:
            reason = f"the agent could not {command} the ranks: {error.strerror}"
            raise Refusal("cannot_start", reason) from error
        if answer is None:
            raise Refusal("cannot_start", f"the agent could not {command} the ranks")
        if answer["outcome"] != "done":
            raise Refusal(
                answer["why"], f"the agent could not {command} the ranks: {answer['reason']}"
            )
        return answer

    def _begin(self, command: str, /, **order: Any) -> Child:
        child = Child(self.state)
        try:
            child.begin(0, command, {"protocol": VERSION, "token": self.token, **order})
        except OSError:
            child.close()
            os.close(child.from_child)
            raise
        return child

    def _ask(self, command: str, /, **order: Any) -> Optional[Json]:
        child = self._begin(command, **order)
        heard = bytearray()
        text = None
        while text is None:
            data = os.read(child.from_child, 65536)
            if not data:
                break
            heard += data
            text = take_line(heard)
        child.close()
        os.close(child.from_child)
        return None if text is None else parse(text)

    # --- while they run

    def _supervise(self) -> None:
        self._begin_watch()
        while self.until is None or time.monotonic() < self.until:
            if self.again_at is not None and time.monotonic() >= self.again_at:
                self._begin_watch(is_first=False)
            if self.door is not None:
                self.door.open()
            handles: List[Any] = [self.woken]
            if self.until is not None:  # it is not read before
                handles.append(self.told)
            if self.watch is not None:
                handles.append(self.watch.from_child)
            if self.door is not None and self.door.listener is not None:
                handles.append(self.door.listener)
            ready, _, _ = select.select(handles, [], [], self._patience())
            if self.told in ready:
                return
            if self.watch is not None and self.watch.from_child in ready:
                self._hear(self.watch)
            if self.door is not None and self.door.listener in ready:
                self.door.accept()
            if self.woken in ready:
                self._handle_signals(os.read(self.woken, 4096))

    def _begin_watch(self, is_first: bool = True) -> None:
        """Begin the copier and the watch; without a process for them, the ranks run on."""
        self.again_at = None
        try:
            if self.drain < 0:
                self._copy()
            self.watch = self._begin("watch", after_seq=self.seen, heartbeat=BEAT)
        except OSError as error:
            self.again_at = time.monotonic() + AGAIN_AFTER
            if is_first:
                _say(f"the ranks are not watched until it can be tried again: {error.strerror}")

    def _patience(self) -> Optional[float]:
        times = [at for at in (self.until, self.again_at) if at is not None]
        if self.door is not None and self.door.again_at is not None:
            times.append(self.door.again_at)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _handle_signals(self, numbers: bytes) -> None:
        self._reap()
        if any(number in PASSED_ON for number in numbers) and not self.asked_to_go:
            self.asked_to_go = True
            if self.until is None:
                self._stop()
            else:
                self.until = 0.0

    def _reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self.door is not None:
                self.door.forget_connection(pid)
            if pid == self.copier:
                self.copier = 0

    def _stop(self) -> None:
        """Stop the ranks and their shim; watchers then receive the end of the watch."""
        until = time.monotonic() + STOP_TIMEOUT
        answer, reason = None, "no answer"
        while time.monotonic() < until:
            try:
                answer = self._ask("stop", stop_grace=self.grace, stuck_after=STUCK_AFTER)
                break
            except OSError as error:  # no process is left for it
                if reason != error.strerror:
                    reason = str(error.strerror)
                    _say(f"the ranks cannot be stopped yet: {reason}")
                time.sleep(0.1)
        if answer is None or answer["outcome"] != "done":
            _say(f"the ranks could not be stopped: {answer['reason'] if answer else reason}")
            self.until = 0.0

    def _hear(self, watch: Child) -> None:
        data = os.read(watch.from_child, 65536)
        watch.received += data
        while True:
            text = take_line(watch.received)
            if text is None:
                break
            value = parse(text)
            if value is not None and "observation" in value:
                self._handle_observation(value["observation"])
        if self.until is None and (self.lost or len(self.exited) == len(self.ranks)):
            self._over()
        elif not data:  # the watch sent its end, or was killed
            watch.close()
            os.close(watch.from_child)
            self.watch = None
            if self.until is None:
                self._begin_watch()

    def _handle_observation(self, observation: Json) -> None:
        self.seen = observation["seq"]
        if observation["kind"] == "RankExited":
            code = (
                observation["exit_code"]
                if observation["signal"] is None
                else 128 + observation["signal"]
            )
            self.exited[observation["rank"]] = -1 if observation["stopped"] else code
        elif observation["kind"] in ("ShimDied", "RanksVanished"):
            self.lost = True

    def _over(self) -> None:
        if not self.asked_to_go:
            self._stop()
        self._drain()
        if self.until is None:
            # The sender of SIGTERM waits for the exit, and knows its reason.
            lingers = (
                self.door is not None and self.door.listener is not None and not self.asked_to_go
            )
            self.until = time.monotonic() + (LINGER if lingers else 0.0)

    # --- the output of the ranks

    def _copy(self) -> None:
        order = (self.token["submission"], self.token["generation"])
        generation = JobState.from_row(self.state, self.token).generation(order)
        logs = {rank: generation.log_path(rank) for rank in self.ranks}
        over, drain = os.pipe()
        parent = os.getpid()

        def copy() -> None:
            signal.set_wakeup_fd(-1)
            processes.reset_signals()
            processes.die_with(parent)
            processes.set_name("relaunch-copy")
            processes.close_all_but([over])
            stdout.copy_logs(logs, over)

        # A separate process: a log driver that blocks must not block anything else.
        try:
            self.copier = processes.fork(copy)
        except OSError:
            os.close(drain)
            raise
        finally:
            os.close(over)
        self.drain = drain

    def _drain(self) -> None:
        if self.drain < 0:
            return
        os.close(self.drain)
        until = time.monotonic() + DRAIN_TIMEOUT
        while self.copier and time.monotonic() < until:
            self._reap()
            if self.copier:
                select.select([], [], [], 0.01)


def _make_listener(number: int, state: Path, telling: int) -> Optional[Listener]:
    try:
        # Only here: some builds of Python have no ssl, and training must run there, too.
        from relaunch.agent.container.port import Listener
    except ImportError as error:
        _say(f"{error}: no port is opened, and only exit codes are reported")
        return None
    return Listener(number, os.environ.get("RELAUNCH_AGENT_KEY", ""), state, telling, _say)


def _list_kept_variables() -> Dict[str, str]:
    """Return variables of the container that ranks would lose as those of another agent."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("RELAUNCH_", "TORCHELASTIC_"))
        and not name.startswith("RELAUNCH_AGENT_")
        and name != "RELAUNCH_ORDER"
    }

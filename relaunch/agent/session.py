"""The connection to a controller: one or many commands, each in its own child process.

Lines of the children are passed on whole. The children are forked ahead and reused, because a
recovery would have to wait for the fork. A session holds no state: if it fails, the orders in
flight become ambiguous and nothing else is affected.
"""

from __future__ import annotations

import gc
import os
import secrets
import select
import signal
import time
from pathlib import Path
from typing import Any

from relaunch.agent import disk
from relaunch.agent.children import BOUND, Child, write
from relaunch.agent.failpoints import is_cut
from relaunch.agent.loop import parse, take_line
from relaunch.agent.protocol import VERSION, Json, Refusal, line, now, refuse_if_late
from relaunch.agent.state import read_boot_id

ALWAYS_FINISHED = ("prepare", "start", "stop", "warm", "reset-gpus", "reboot")
"""These commands are finished even if the controller has disconnected; the others end."""
CUT_CHECK_INTERVAL = 0.2
"""Seconds between checks whether a cut was lifted."""
MAX_SPARES = 2
"""Children forked ahead: one that `prepare` turns into a shim, one for the `start` that follows."""
MAX_IDLE = MAX_SPARES + 1
"""Idle children that are kept for a while. A command that comes again and again, such as `logs` of
a followed job, gets the same child each time, while the others wait for a launch."""
IDLE_TIMEOUT = 30.0
"""Seconds that the child above MAX_SPARES is kept: twice what one `logs` waits for output."""
SPARE_RETRY_DELAY = 10.0
"""Seconds after a failed fork in which no process is forked but for an order."""
FORK_DELAY = 0.05
"""Seconds without a line before spares are replaced: a fork costs 2 ms, which must not delay a
launch."""


class Session:
    """Relay between a controller and the commands.

    A cut drops messages as a network would. A connection that lost a line cannot continue as if it
    had not, so it closes once the cut is lifted.
    """

    def __init__(self, state: Path, single: str | None = None) -> None:
        self.state = state
        self.single = single
        """The command of a one-shot call, whose lines are not wrapped."""
        self.key = None if single is not None else secrets.token_hex(16)
        """What an order of `BOUND` has to name. It is new for each session, so an order that was
        recorded is worth nothing on another node, nor later on this one."""
        self.children: dict[int, Child] = {}
        """Children that have a command, by the descriptor that they answer on."""
        self.spares: dict[int, Child] = {}
        self.extra_until = 0.0
        """When a child above MAX_SPARES is let go, by the monotonic clock."""
        self.no_spare_until = 0.0
        """When to fork a spare at the earliest, by the monotonic clock, after it was not possible.
        """
        self.unreaped: set[int] = set()
        """Ending children, and shims: they stay children until they or this process end."""
        self.buffer = bytearray()
        self.open = True
        self.cut_directions: set[str] = set()
        """The directions in which a cut has dropped something."""
        self.is_muted = False
        self.code = 0

    def run(self) -> int:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        ended, wake = os.pipe()
        for handle in (ended, wake):
            os.set_blocking(handle, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        gc.collect()
        # Garbage collection in the children skips frozen objects, so shared pages are not copied.
        gc.freeze()
        if self.single is None:
            hello = {
                "protocol": VERSION,
                "boot_id": read_boot_id(self.state),
                "pid": os.getpid(),
                "key": self.key,
                "stamp": now(),
            }
            self._print(line({"session": hello}))
        while self.open or self.children or self.cut_directions:
            handles = [0, ended] if self.open else [ended]
            short = (
                self.single is None
                and self.open
                and len(self.spares) < MAX_SPARES
                and time.monotonic() >= self.no_spare_until
            )
            waiting = CUT_CHECK_INTERVAL if self.cut_directions else FORK_DELAY if short else None
            if waiting is None and len(self.spares) > MAX_SPARES:
                waiting = max(0.0, self.extra_until - time.monotonic())
            ready, _, _ = select.select([*handles, *self.children, *self.spares], [], [], waiting)
            for handle in ready:
                if handle == 0:
                    self._read()
                elif handle == ended:
                    os.read(ended, 4096)
                    self.unreaped = {
                        pid for pid in self.unreaped if os.waitpid(pid, os.WNOHANG)[0] == 0
                    }
                elif handle in self.children:
                    self._relay_output(self.children[handle])
                elif handle in self.spares and not os.read(handle, 1):  # it was killed
                    self._release(self.spares.pop(handle))
            if len(self.spares) > MAX_SPARES and time.monotonic() >= self.extra_until:
                self._release(self.spares.popitem()[1])
            if not ready and short:
                try:
                    spare = Child(self.state)
                except OSError as error:  # none is needed: an order gets one when it comes
                    disk.log(f"no process waits for the next order: {error}")
                    self.no_spare_until = time.monotonic() + SPARE_RETRY_DELAY
                else:
                    self.spares[spare.from_child] = spare
            if self.cut_directions and not any(
                is_cut(self.state, direction) for direction in self.cut_directions
            ):
                self.cut_directions.clear()
                self.is_muted = True
                self._end()
        return self.code

    def _read(self) -> None:
        data = os.read(0, 65536)
        if not data:
            self._end()
            return
        if self._is_cut("controller-in"):
            return
        self.buffer += data
        if self.single is not None and not self.children:
            self._read_single()
            return
        while True:
            text = take_line(self.buffer)
            if text is None:
                return
            if text.strip():
                self._handle_line(parse(text))

    def _read_single(self) -> None:
        """Take the order as soon as it is complete, whether or not more input follows."""
        value = parse(bytes(self.buffer))
        first, newline, rest = bytes(self.buffer).partition(b"\n")
        if value is None and newline and self.single == "watch":
            value = parse(first)
            self.buffer = bytearray(rest)
        elif value is not None:
            self.buffer.clear()
        if value is not None:
            self._begin(None, self.single, value)
            if self.single != "watch":
                self.open = False

    def _handle_line(self, value: Json | None) -> None:
        if self.single is not None:
            if value is not None:
                for child in self.children.values():
                    child.send(value)
            return
        if value is None or "id" not in value:
            refusal = Refusal("bad_order", "a line is not a JSON object with an id").answer
            self._print(line({"id": None, "line": refusal}))
            return
        matches = [
            child
            for child in self.children.values()
            if child.number == value["id"] and not child.answered
        ]
        if "command" in value:
            if matches:
                refusal = Refusal("bad_order", f"id {value['id']} is in use").answer
                self._print(line({"id": value["id"], "line": refusal}))
            else:
                self._begin(value["id"], value["command"], value.get("order"))
        elif matches and isinstance(value.get("send"), dict):
            matches[0].send(value["send"])
        elif matches and value.get("close"):
            matches[0].close()

    def _begin(self, number: Any, command: Any, order: Any) -> None:
        refusal = self._refuse_unbound(command, order)
        if refusal is not None:
            self._print(
                line(refusal)
                if self.single is not None
                else line({"id": number, "line": refusal}) + line({"id": number, "exit": 0})
            )
            self.open = self.open and self.single is None
            return
        while self.spares:
            _, child = self.spares.popitem()
            try:
                child.begin(number, command, order)
            except BrokenPipeError:
                self._release(child)
                continue
            self.children[child.from_child] = child
            return
        try:
            child = Child(self.state)
        except OSError as error:  # this user has no process or descriptor left
            self._refuse_for_want(number, command, error)
            return
        child.begin(number, command, order)
        self.children[child.from_child] = child

    def _refuse_for_want(self, number: Any, command: Any, error: OSError) -> None:
        """End an order for which no process can be forked; the others go on.

        Only a refused `stop` is given again. A refused launch would count as a mistake of the job,
        and a refused watch would mean that its generation is not here: those get no answer.
        """
        if self.single is not None:
            raise error
        reason = f"no process can be started for this {command}: {error.strerror}"
        refusal = line({"id": number, "line": Refusal("cannot_start", reason).answer})
        self._print((refusal if command == "stop" else b"") + line({"id": number, "exit": 1}))

    def _refuse_unbound(self, command: Any, order: Any) -> Json | None:
        """Return the refusal of an order that is not of this session, or that came too late."""
        if command not in BOUND or not isinstance(order, dict):
            return None
        if order.get("session") != self.key:
            return Refusal(
                "other_session",
                f"this {command} is of another session: an order is carried out by the node and in "
                "the session that it was given to, and nowhere else",
            ).answer
        try:
            refuse_if_late(command, order.get("until"))
        except Refusal as refused:
            return refused.answer
        return None

    def _release(self, child: Child) -> None:
        """Forget a child that has closed its pipe; it may live on as a shim."""
        child.close()
        os.close(child.from_child)
        self.unreaped.add(child.pid)

    def _relay_output(self, child: Child) -> None:
        data = os.read(child.from_child, 65536)
        if not data:
            del self.children[child.from_child]
            if child.answered:
                self._release(child)
                return
            _, status = os.waitpid(child.pid, 0)  # its pipe closes when it ends
            child.close()
            os.close(child.from_child)
            self._print(
                self._exit(
                    child,
                    os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status),
                )
            )
            return
        child.received += data
        while True:
            text = take_line(child.received)
            if text is None:
                return
            if not text:
                self._free(child)
                continue
            child.answered = child.command != "watch"  # the other commands print one line only
            self._print(self._wrap(child, text) + (self._exit(child, 0) if child.answered else b""))

    def _free(self, child: Child) -> None:
        """Return a child that is ready for another command to the spares, or let it end."""
        if child.closed or not self.open or len(self.spares) >= MAX_IDLE:
            child.close()
            return
        del self.children[child.from_child]
        self.spares[child.from_child] = child
        self.extra_until = time.monotonic() + IDLE_TIMEOUT

    def _wrap(self, child: Child, text: bytes) -> bytes:
        return (
            text + b"\n"
            if self.single is not None
            else b'{"id":%s,"line":%s}\n' % (_encode(child.number), text)
        )

    def _exit(self, child: Child, code: int) -> bytes:
        if self.single is None:
            return b'{"id":%s,"exit":%d}\n' % (_encode(child.number), code)
        self.code = code
        self.open = False
        return b""

    def _print(self, data: bytes) -> None:
        if self.is_muted:
            return
        if self._is_cut("controller-out"):
            return
        try:
            write(1, data)
        except OSError:  # the controller disconnected; commands in progress are finished
            self.is_muted = True
            self._end()

    def _is_cut(self, direction: str) -> bool:
        """Return whether a message is lost to a cut, or follows a lost one in its direction."""
        if direction not in self.cut_directions and not is_cut(self.state, direction):
            return False
        self.cut_directions.add(direction)
        return True

    def _end(self) -> None:
        """Accept no more orders: watches end, the commands of FINISHED_ALWAYS are finished."""
        if (
            self.single is not None
            and self.open
            and not self.children
            and not self.cut_directions
            and not self.is_muted
        ):
            self._begin(None, self.single, parse(bytes(self.buffer)))
        self.open = False
        for child in self.children.values():
            if child.command not in ALWAYS_FINISHED or child.answered:
                child.close()
        for spare in self.spares.values():
            self._release(spare)
        self.spares.clear()


def _encode(value: Any) -> bytes:
    return line({"": value})[4:-2]

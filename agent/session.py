"""The connection to a controller: one or many commands, each in a child of its own, its lines passed on whole.

Holds no state. What happens to it makes the orders in flight ambiguous and nothing else.
"""

from __future__ import annotations

import gc
import os
import select
import signal
from pathlib import Path
from typing import Any, Callable, Optional

from agent import orders, processes, reports, watch
from agent.faults import cut
from agent.loop import parse, take_line
from agent.protocol import VERSION, Fields, Json, NoAnswer, Refused, check_version, line
from agent.state import boot_id

Command = Callable[[Path, Fields, int, int], Optional[Json]]
COMMANDS: dict[str, Command] = {
    "prepare": lambda state, order, reading, writing: orders.prepare(state, order),
    "start": lambda state, order, reading, writing: orders.start(state, order),
    "stop": lambda state, order, reading, writing: orders.stop(state, order),
    "watch": watch.watch,
    "list": lambda state, order, reading, writing: reports.list_jobs(state, order),
    "logs": lambda state, order, reading, writing: reports.logs(state, order, reading),
    "stacks": lambda state, order, reading, writing: reports.stacks(state, order),
}
FINISHED_ALWAYS = ("prepare", "start", "stop")
"""What is under way is finished although nobody listens any more; the others end."""
HEALED = 0.2
"""Seconds between looks whether a cut was lifted."""


def write(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


def carry_out(state: Path, command: Any, order: Any, reading: int, writing: int) -> None:
    """Do one command and print its lines. NoAnswer and a crash print none."""
    try:
        if command not in COMMANDS:
            raise Refused("bad_order", f"command is {str(command)[:40]!r}; expected one of {', '.join(COMMANDS)}")
        answer = COMMANDS[command](state, check_version(order), reading, writing)
    except Refused as refused:
        answer = refused.answer
    except (NoAnswer, TimeoutError) as error:
        raise SystemExit(f"no answer: {error}") from error
    if answer is not None:
        try:
            write(writing, line(answer))
        except BrokenPipeError:  # whoever ordered went away; the order was carried out all the same
            pass


class Child:
    """One command under way."""

    def __init__(self, state: Path, number: Any, command: Any, order: Any) -> None:
        self.number = number
        self.command = command
        reading, self.to_child = os.pipe()
        self.from_child, writing = os.pipe()
        self.heard = bytearray()

        def work() -> None:
            gc.disable()  # it lives for milliseconds, and a collection would copy its parent's pages
            processes.close_all_but([reading, writing])
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(null, 1)
            os.close(null)
            carry_out(state, command, order, reading, writing)

        self.pid = processes.fork(work)
        os.close(reading)
        os.close(writing)
        os.set_blocking(self.to_child, False)

    def send(self, value: Json) -> None:
        try:
            os.write(self.to_child, line(value))
        except (BrokenPipeError, BlockingIOError, ValueError):  # it ended, or does not listen; a renewal comes again
            pass

    def close(self) -> None:
        if self.to_child >= 0:
            os.close(self.to_child)
            self.to_child = -1

    def reap(self) -> int:
        self.close()
        os.close(self.from_child)
        _, status = os.waitpid(self.pid, 0)
        return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


class Session:
    """Relays between a controller and the commands.

    A cut drops what it would drop on a network. A connection that lost a line cannot go on as if it had not,
    so once the cut is lifted it breaks.
    """

    def __init__(self, state: Path, single: str | None = None) -> None:
        self.state = state
        self.single = single
        """The one command of a one-shot call, whose lines are not wrapped."""
        self.children: dict[int, Child] = {}
        self.buffer = bytearray()
        self.open = True
        self.lost: set[str] = set()
        """The ways in which a cut has swallowed something."""
        self.deaf = False
        self.code = 0

    def run(self) -> int:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        if self.single is None:
            hello = {"protocol": VERSION, "boot_id": boot_id(self.state), "pid": os.getpid()}
            self._print(line({"session": hello}))
        while self.open or self.children or self.lost:
            handles = [0] if self.open else []
            waiting = HEALED if self.lost else None
            ready, _, _ = select.select([*handles, *self.children], [], [], waiting)
            for handle in ready:
                if handle == 0:
                    self._read()
                else:
                    self._relay(self.children[handle])
            if self.lost and not any(cut(self.state, way) for way in self.lost):
                self.lost.clear()
                self.deaf = True
                self._end()
        return self.code

    def _read(self) -> None:
        data = os.read(0, 65536)
        if not data:
            self._end()
            return
        if self._swallows("controller-in"):
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
                self._hear(parse(text))

    def _read_single(self) -> None:
        """Take the order as soon as it is whole, whether or not more will follow."""
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

    def _hear(self, value: Json | None) -> None:
        if self.single is not None:
            if value is not None:
                for child in self.children.values():
                    child.send(value)
            return
        if value is None or "id" not in value:
            refusal = Refused("bad_order", "a line is not a JSON object with an id").answer
            self._print(line({"id": None, "line": refusal}))
            return
        found = [child for child in self.children.values() if child.number == value["id"]]
        if "command" in value:
            if found:
                refusal = Refused("bad_order", f"id {value['id']} is in use").answer
                self._print(line({"id": value["id"], "line": refusal}))
            else:
                self._begin(value["id"], value["command"], value.get("order"))
        elif found and isinstance(value.get("send"), dict):
            found[0].send(value["send"])
        elif found and value.get("close"):
            found[0].close()

    def _begin(self, number: Any, command: Any, order: Any) -> None:
        child = Child(self.state, number, command, order)
        self.children[child.from_child] = child

    def _relay(self, child: Child) -> None:
        data = os.read(child.from_child, 65536)
        if not data:
            del self.children[child.from_child]
            code = child.reap()
            if self.single is not None:
                self.code = code
                self.open = False
            else:
                self._print(b'{"id":%s,"exit":%d}\n' % (_json(child.number), code))
            return
        child.heard += data
        while True:
            text = take_line(child.heard)
            if text is None:
                return
            if self.single is not None:
                self._print(text + b"\n")
            else:
                self._print(b'{"id":%s,"line":%s}\n' % (_json(child.number), text))

    def _print(self, data: bytes) -> None:
        if self.deaf:
            return
        if self._swallows("controller-out"):
            return
        try:
            write(1, data)
        except OSError:  # the controller went away; what is under way is finished
            self.deaf = True
            self._end()

    def _swallows(self, way: str) -> bool:
        """Whether a message goes the way of those before it that were lost."""
        if way not in self.lost and not cut(self.state, way):
            return False
        self.lost.add(way)
        return True

    def _end(self) -> None:
        """No more orders: the watches end, the others finish."""
        if self.single is not None and self.open and not self.children and not self.lost and not self.deaf:
            self._begin(None, self.single, parse(bytes(self.buffer)))
        self.open = False
        for child in self.children.values():
            if child.command not in FINISHED_ALWAYS:
                child.close()


def _json(value: Any) -> bytes:
    return line({"": value})[4:-2]

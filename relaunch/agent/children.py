"""The processes that carry out commands, one at a time each: forked ahead, and serving again if nothing of the last one stuck.

What a command does is for orders, watch and reports; whom its lines go to is for the session.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Callable, Union

from relaunch.agent import disk, processes, reports
from relaunch.agent.loop import parse
from relaunch.agent.node import preflight, probe, repairs
from relaunch.agent.protocol import Becoming, Fields, Json, NoAnswer, Refused, check_version, line
from relaunch.agent.ranks import orders, watch

Command = Callable[[Path, Fields, int, int], Union[Json, Becoming, None]]
COMMANDS: dict[str, Command] = {
    "prepare": lambda state, order, reading, writing: orders.prepare(state, order),
    "start": lambda state, order, reading, writing: orders.start(state, order),
    "stop": lambda state, order, reading, writing: orders.stop(state, order),
    "watch": watch.watch,
    "list": lambda state, order, reading, writing: reports.list_jobs(state, order),
    "logs": lambda state, order, reading, writing: reports.logs(state, order, reading),
    "stacks": lambda state, order, reading, writing: reports.stacks(state, order),
    "probe": lambda state, order, reading, writing: probe.probe(state, order),
    "preflight": lambda state, order, reading, writing: preflight.preflight(state, order),
    "meet": lambda state, order, reading, writing: preflight.meet(state, order),
    "diagnose": lambda state, order, reading, writing: repairs.diagnose(state, order, reading),
    "reset-gpus": lambda state, order, reading, writing: repairs.reset_gpus(state, order),
    "reboot": lambda state, order, reading, writing: repairs.reboot(state, order),
}
SIZE = 4
"""Bytes that tell the length of an order to a child."""
FREE = b"\n"
"""An empty line from a child: it can take another command."""


def write(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


def carry_out(state: Path, command: Any, order: Any, reading: int, writing: int) -> bool:
    """Do one command and print its lines. Return whether it was done, as against refused or a watch.

    NoAnswer and a crash print no line. A `prepare` that was done does not return: its process becomes the keeper.
    """
    answer: Union[Json, Becoming, None]
    try:
        if command not in COMMANDS:
            raise Refused("bad_order", f"command is {str(command)[:40]!r}; expected one of {', '.join(COMMANDS)}")
        answer = COMMANDS[command](state, check_version(order), reading, writing)
    except Refused as refused:
        answer = refused.answer
    except (NoAnswer, TimeoutError) as error:
        raise SystemExit(f"no answer: {error}") from error
    except OSError as error:
        # Who watches connects again, and takes a refusal for the word that nothing of it is here.
        if not disk.is_full(error) or command == "watch":
            raise
        answer = disk.refuse(state, f"{command} was not carried out").answer
    if answer is None:
        return False
    told = answer.answer if isinstance(answer, Becoming) else answer
    try:
        write(writing, line(told))
    except BrokenPipeError:  # whoever ordered went away; the order was carried out all the same
        pass
    if isinstance(answer, Becoming):
        answer.become()
        os._exit(0)
    return bool(told["outcome"] == "done")


def _serve(state: Path, reading: int, writing: int) -> None:
    """Carry out one command after the other.

    Only a process that is as it was before may serve again: done, and nothing left open. A descriptor that stayed could
    be a lock.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    processes.close_all_but([reading, writing])
    clean = os.listdir("/proc/self/fd")
    while True:
        processes.set_name("relaunch-idle")
        order = _take(reading)
        if order is None:
            return
        processes.set_name("relaunch-order")
        if not carry_out(state, order["command"], order["order"], reading, writing) or os.listdir("/proc/self/fd") != clean:
            return
        try:
            write(writing, FREE)
        except BrokenPipeError:
            return


def _take(reading: int) -> Json | None:
    """Read one order exactly: what follows it on the pipe belongs to its command."""
    size = _read_exactly(reading, SIZE)
    text = _read_exactly(reading, int.from_bytes(size, "big")) if size else b""
    return parse(text) if text else None


def _read_exactly(reading: int, size: int) -> bytes:
    """Return so many bytes, or none when the other side has gone."""
    text = b""
    while len(text) < size:
        data = os.read(reading, size - len(text))
        if not data:
            return b""
        text += data
    return text


class Child:
    """A process that waits for a command, or has one under way."""

    def __init__(self, state: Path) -> None:
        reading, self.to_child = os.pipe()
        self.from_child, writing = os.pipe()
        self.number: Any = None
        self.command: Any = None
        self.answered = False
        self.heard = bytearray()
        self.pid = processes.fork(lambda: _serve(state, reading, writing))
        os.close(reading)
        os.close(writing)

    def begin(self, number: Any, command: Any, order: Any) -> None:
        """Give it a command; raise BrokenPipeError if it has died."""
        self.number, self.command, self.answered = number, command, False
        text = line({"command": command, "order": order})
        os.set_blocking(self.to_child, True)  # it is reading, and an order may be larger than a pipe
        write(self.to_child, len(text).to_bytes(SIZE, "big") + text)
        os.set_blocking(self.to_child, False)

    def send(self, value: Json) -> None:
        if self.command != "watch":  # the others listen to nothing but the end
            return
        try:
            os.write(self.to_child, line(value))
        except (BrokenPipeError, BlockingIOError, ValueError):  # it ended, or does not listen; a renewal comes again
            pass

    @property
    def closed(self) -> bool:
        return self.to_child < 0

    def close(self) -> None:
        if not self.closed:
            os.close(self.to_child)
            self.to_child = -1

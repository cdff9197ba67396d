"""The processes that carry out commands, one command at a time each.

They are forked ahead of time and reused if the last command left nothing open. The commands
themselves are in orders, watch and reports; the session decides where their output goes.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Callable, Union

from relaunch.agent import checkpoints, disk, folders, processes, reports
from relaunch.agent.loop import parse
from relaunch.agent.node import preflight, probe, reach, repairs
from relaunch.agent.protocol import (
    Fields,
    Json,
    NoAnswer,
    ProcessHandover,
    Refusal,
    check_version,
    line,
    refuse_if_late,
)
from relaunch.agent.ranks import orders, watch

Command = Callable[[Path, Fields, int, int], Union[Json, ProcessHandover, None]]


def _read_stacks(state: Path, order: Fields) -> Json:
    from relaunch.agent import stacks  # most sessions never need it

    return stacks.read_stacks(state, order)


def _read_last_words(state: Path, order: Fields) -> Json:
    from relaunch.agent import last_words

    return last_words.read_last_words(state, order)


def _receive_py_spy(state: Path, order: Fields) -> Json:
    from relaunch.agent import py_spy

    return py_spy.receive(state, order)


COMMANDS: dict[str, Command] = {
    "prepare": lambda state, order, reading, writing: orders.prepare(state, order),
    "start": lambda state, order, reading, writing: orders.start(state, order),
    "stop": lambda state, order, reading, writing: orders.stop(state, order),
    "warm": lambda state, order, reading, writing: orders.warm(state, order),
    "watch": watch.watch,
    "list": lambda state, order, reading, writing: reports.list_jobs(state, order),
    "logs": lambda state, order, reading, writing: reports.read_logs(state, order, reading),
    "stacks": lambda state, order, reading, writing: _read_stacks(state, order),
    "last-words": lambda state, order, reading, writing: _read_last_words(state, order),
    "py-spy": lambda state, order, reading, writing: _receive_py_spy(state, order),
    "checkpoints": lambda state, order, reading, writing: checkpoints.read_checkpoints(
        state, order
    ),
    "probe": lambda state, order, reading, writing: probe.probe_node(state, order),
    "preflight": lambda state, order, reading, writing: preflight.check_node(state, order),
    "meet": lambda state, order, reading, writing: preflight.meet(state, order),
    "reach": lambda state, order, reading, writing: reach.reach(state, order),
    "diagnose": lambda state, order, reading, writing: repairs.diagnose(state, order, reading),
    "reset-gpus": lambda state, order, reading, writing: repairs.reset_gpus(state, order),
    "reboot": lambda state, order, reading, writing: repairs.reboot(state, order),
}
BOUND = ("prepare", "start", "stop", "warm", "diagnose", "reset-gpus", "reboot")
"""These commands change the node, so each is for one session with it, and may be for a time."""
PREFIX_BYTES = 4
"""Bytes of the length prefix of an order to a child."""
READY_LINE = b"\n"
"""An empty line from a child: it can take another command."""


def write(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


def _restore_state_folder(state: Path) -> None:
    try:
        folders.restore_state_folder(state)
    except folders.FolderError as error:
        raise NoAnswer(str(error)) from error


def carry_out(state: Path, command: Any, order: Any, reading: int, writing: int) -> bool:
    """Carry out one command and print its lines; return whether it was done.

    It was not done if it was refused or is a watch. NoAnswer and a crash print no line. A `prepare`
    that was done does not return: its process becomes the shim.
    """
    answer: Union[Json, ProcessHandover, None]
    try:
        if command not in COMMANDS:
            raise Refusal(
                "bad_order",
                f"command is {str(command)[:40]!r}; expected one of {', '.join(COMMANDS)}",
            )
        fields = check_version(order)
        refuse_if_late(command, fields.order.get("until"))
        if command in BOUND:
            _restore_state_folder(state)
        answer = COMMANDS[command](state, fields, reading, writing)
    except Refusal as refused:
        answer = refused.answer
    except (NoAnswer, TimeoutError) as error:
        raise SystemExit(f"no answer: {error}") from error
    except OSError as error:
        # A watcher reconnects; it would take a refusal to mean that its generation is not on this
        # node.
        if not disk.is_full(error) or command == "watch":
            raise
        answer = disk.make_refusal(state, f"{command} was not carried out").answer
    if answer is None:
        return False
    message = answer.answer if isinstance(answer, ProcessHandover) else answer
    try:
        write(writing, line(message))
    except BrokenPipeError:  # the caller disconnected; the order was carried out all the same
        pass
    if isinstance(answer, ProcessHandover):
        answer.become()
        os._exit(0)
    return bool(message["outcome"] == "done")


def _serve(state: Path, reading: int, writing: int) -> None:
    """Carry out one command after the other.

    A process may serve again only if it is unchanged: the command was done and left no descriptor
    open. A descriptor that stayed open could be a lock.
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
        order = _read_order(reading)
        if order is None:
            return
        processes.set_name("relaunch-order")
        if (
            not carry_out(state, order["command"], order["order"], reading, writing)
            or os.listdir("/proc/self/fd") != clean
        ):
            return
        try:
            write(writing, READY_LINE)
        except BrokenPipeError:
            return


def _read_order(reading: int) -> Json | None:
    """Read exactly one order: what follows it on the pipe belongs to its command."""
    size = _read_exactly(reading, PREFIX_BYTES)
    text = _read_exactly(reading, int.from_bytes(size, "big")) if size else b""
    return parse(text) if text else None


def _read_exactly(reading: int, size: int) -> bytes:
    """Return exactly `size` bytes, or none if the other side has closed."""
    text = b""
    while len(text) < size:
        data = os.read(reading, size - len(text))
        if not data:
            return b""
        text += data
    return text


class Child:
    """A process that waits for a command, or is carrying one out."""

    def __init__(self, state: Path) -> None:
        """Fork it.

        Raises:
            OSError: There is no process or descriptor left for it.
        """
        handles: list[int] = []
        try:
            handles += os.pipe()
            handles += os.pipe()
            reading, self.to_child, self.from_child, writing = handles
            self.pid = processes.fork(lambda: _serve(state, reading, writing))
        except OSError:
            for handle in handles:
                os.close(handle)
            raise
        self.number: Any = None
        self.command: Any = None
        self.answered = False
        self.received = bytearray()
        os.close(reading)
        os.close(writing)

    def begin(self, number: Any, command: Any, order: Any) -> None:
        """Give it a command; raise BrokenPipeError if it has died."""
        self.number, self.command, self.answered = number, command, False
        text = line({"command": command, "order": order})
        # it is reading, and an order may be larger than a pipe
        os.set_blocking(self.to_child, True)
        write(self.to_child, len(text).to_bytes(PREFIX_BYTES, "big") + text)
        os.set_blocking(self.to_child, False)

    def send(self, value: Json) -> None:
        if self.command != "watch":  # the other commands listen only for the end of their input
            return
        try:
            os.write(self.to_child, line(value))
        except (BrokenPipeError, BlockingIOError, ValueError):
            # it ended, or does not read; a renewal will be repeated
            pass

    @property
    def closed(self) -> bool:
        return self.to_child < 0

    def close(self) -> None:
        if not self.closed:
            os.close(self.to_child)
            self.to_child = -1

"""A switch in user space between TAP devices.

Passes Ethernet frames, loses and delays them by rule.

Standard library only. Started by `hosts.py` with the descriptors of the devices:

    switch.py {"ports": {NAME: [NUMBER, DESCRIPTOR], …}, "control": DESCRIPTOR, "seed": N}

A rule holds for one ordered pair of ports ("*": every port) and replaces the one before it. It
comes as one JSON line on the control socket and is answered with `ok`; the switch ends when that
socket closes:

    {"from": "n1", "to": "*", "loss": 0.3, "delay": 2.0, "largest": 300}

loss: share of the frames that get lost; delay: seconds; largest: bytes of the largest frame that
passes, 0 for any.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import sys
import time
from dataclasses import dataclass

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
MAX_FRAME_BYTES = 65536
MAX_BURST = 64
"""Frames that are read from one port before the others have their turn."""


@dataclass(frozen=True)
class Rule:
    loss: float = 0.0
    delay: float = 0.0
    largest: int = 0


def open_tap(name: str) -> int:
    """Make a TAP device in the network namespace of the calling thread; return its descriptor."""
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return handle


def mac(number: int) -> bytes:
    """Return the Ethernet address of a port."""
    return bytes([2, 0, 0, 0, 0, number])


class Switch:
    def __init__(
        self, ports: dict[str, tuple[int, int]], control: socket.socket, seed: int
    ) -> None:
        self._handles = {name: handle for name, (_, handle) in ports.items()}
        self._names = {handle: name for name, handle in self._handles.items()}
        self._by_mac = {mac(number): name for name, (number, _) in ports.items()}
        self._control = control
        self._random = random.Random(seed)
        self._rules: dict[tuple[str, str], Rule] = {}
        self._late: list[tuple[float, int, int, bytes]] = []
        self._count = 0

    def serve(self) -> None:
        """Pass frames until the control socket closes."""
        poll = select.poll()
        for handle in (*self._names, self._control.fileno()):
            poll.register(handle, select.POLLIN)
        pending = b""
        while True:
            wait = 1.0 if not self._late else self._late[0][0] - time.monotonic()
            for handle, _ in poll.poll(max(0.0, wait * 1000)):
                if handle in self._names:
                    self._read(handle)
                    continue
                data = self._control.recv(MAX_FRAME_BYTES)
                if not data:
                    return
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._apply(json.loads(line))
                    self._control.sendall(b"ok\n")
            now = time.monotonic()
            while self._late and self._late[0][0] <= now:
                _, _, handle, frame = heapq.heappop(self._late)
                self._write(handle, frame)

    def _apply(self, line: dict[str, object]) -> None:
        ports = list(self._handles)
        sources = ports if line["from"] == "*" else [line["from"]]
        targets = ports if line["to"] == "*" else [line["to"]]
        rule = Rule(*(line[key] for key in ("loss", "delay", "largest")))  # type: ignore[arg-type]
        self._rules.update({(str(a), str(b)): rule for a in sources for b in targets if a != b})

    def _read(self, handle: int) -> None:
        source = self._names[handle]
        for _ in range(MAX_BURST):
            try:
                frame = os.read(handle, MAX_FRAME_BYTES)
            except OSError:  # nothing is left to read, or the host is gone
                return
            known = self._by_mac.get(frame[:6])
            for target in [known] if known else self._handles:
                if target != source:
                    self._pass(source, target, frame)

    def _pass(self, source: str, target: str, frame: bytes) -> None:
        rule = self._rules.get((source, target), Rule())
        if self._random.random() < rule.loss or 0 < rule.largest < len(frame):
            return
        if rule.delay:
            self._count += 1  # frames of one moment keep their order
            due = time.monotonic() + rule.delay
            heapq.heappush(self._late, (due, self._count, self._handles[target], frame))
        else:
            self._write(self._handles[target], frame)

    @staticmethod
    def _write(handle: int, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # a port that is down loses frames, as a real one does
            os.write(handle, frame)


def main() -> None:
    given = json.loads(sys.argv[1])
    ports = {name: (number, handle) for name, (number, handle) in given["ports"].items()}
    Switch(ports, socket.socket(fileno=given["control"]), given["seed"]).serve()


if __name__ == "__main__":
    main()

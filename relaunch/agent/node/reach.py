"""Check whether nodes of a gang reach each other over the network that their ranks use.

`reach` with `listen` leaves a process that listens for a while at the node's address: on a port as
rank 0 gets one, and on one that the kernel chose, as NCCL and gloo use. To each caller it says a
word in a small packet, and then sends so much that full-size packets follow. `reach` with `peers`
calls such processes of other nodes, all at once. It changes nothing and does not judge.
"""

from __future__ import annotations

import errno
import os
import secrets
import selectors
import signal
import socket
import time
from pathlib import Path
from typing import Dict, List, Optional, Union

from relaunch.agent import processes
from relaunch.agent.protocol import Fields, Json, ProcessHandover, Refusal, refuse_field
from relaunch.agent.ranks.master_port import hold_port
from relaunch.agent.ranks.peers import bind, resolve
from relaunch.agent.state import read_boot_id

MAX_STAY = 120.0
"""Seconds after which the process that listens ends in any case."""
MAX_PEERS = 64
PAYLOAD = b"\n" * (16 * 1024)
"""More than one packet of 9,000 bytes. Where large packets get lost and small ones do not (a wrong
MTU), the word arrives and this does not."""
SEND_BUFFER_BYTES = 64 * 1024
"""What is said fits into it, so the listener waits for no caller."""
BACKLOG = 512
CALL_INTERVAL = 1.0
"""Seconds after which a call is repeated by another connection, beside those that wait. A kernel
repeats a lost packet after 1, 3 and 7 s: on a line that loses a third of all packets one of them
would fail in 14, and five of them, begun every 2 s, in about a thousand calls of half a second."""


def reach(state: Path, order: Fields) -> Union[Json, ProcessHandover]:
    answer: Json = {"outcome": "done", "boot_id": read_boot_id(state)}
    if order.order.get("listen") is not None:
        return _listen(answer, order.text("listen"), min(MAX_STAY, order.number("stay", least=0.1)))
    peers = [Fields(peer, "peers.") for peer in order.items("peers")]
    if len(peers) > MAX_PEERS:
        refuse_field("peers", len(peers), f"at most {MAX_PEERS} of them")
    calls = [_Call(peer, port) for peer in peers for port in _read_ports(peer)]
    _carry_out(calls, order.number("within", least=0.1))
    rows: Dict[str, Json] = {}
    for call in calls:
        row = rows.setdefault(call.node, {"node": call.node, "took": 0.0})
        if call.took is None:
            row.setdefault("cannot", call.describe())
        else:
            row["took"] = max(row["took"], call.took)
    return {**answer, "reached": list(rows.values())}


def _read_ports(peer: Fields) -> List[int]:
    ports = peer.items("ports")
    for port in ports:
        if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
            refuse_field("peers.ports", port, "a port")
    return ports


# --- listening


def _listen(answer: Json, address: str, stay: float) -> Union[Json, ProcessHandover]:
    listeners: List[socket.socket] = []
    try:
        listeners.append(hold_port(address))
        listeners.append(bind(address, 0))
        for listener in listeners:
            listener.listen(BACKLOG)
            listener.setblocking(False)
    except (OSError, Refusal) as error:
        for listener in listeners:
            listener.close()
        reason = (
            error.answer["reason"]
            if isinstance(error, Refusal)
            else f"nothing can listen at {address}: {error.strerror}"
        )
        return {**answer, "cannot": reason}
    word = secrets.token_hex(16)
    ports = [listener.getsockname()[1] for listener in listeners]
    listening = {**answer, "ports": ports, "word": word}
    return ProcessHandover(listening, lambda: _answer_callers(listeners, word, stay))


def _answer_callers(listeners: List[socket.socket], word: str, stay: float) -> None:
    processes.set_name("relaunch-reach")
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(null, target)
    processes.close_all_but([listener.fileno() for listener in listeners])
    processes.reset_signals()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, stay)  # SIGALRM ends it
    with selectors.DefaultSelector() as selector:
        for listener in listeners:
            selector.register(listener, selectors.EVENT_READ, listener)
        while True:
            for key, _ in selector.select():
                _answer_caller(key.data, word)


def _answer_caller(listener: socket.socket, word: str) -> None:
    try:
        caller, _ = listener.accept()
    except OSError:  # the caller disconnected
        return
    with caller:
        try:
            caller.setblocking(False)
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller.send(word.encode() + b"\n")
            caller.send(PAYLOAD)
        except OSError:  # the caller disconnected
            return


# --- calling


class _Call:
    """What is tried to hear the word of one port of a peer: several connections, one after another.

    The first that hears all of it counts.
    """

    def __init__(self, peer: Fields, port: int) -> None:
        self.node, self.address, self.port = peer.text("node"), peer.text("address"), port
        self.word = peer.text("word").encode() + b"\n"
        self.took: Optional[float] = None
        self.heard: Dict[socket.socket, bytes] = {}
        """What each open connection has received."""
        self.error = ""
        self.has_spoken = False
        """Whether the word was heard."""
        self.is_silent = False
        """Whether a connection is made on which nothing was heard."""

    def begin(self, selector: selectors.BaseSelector) -> None:
        """Open one more connection."""
        try:
            family, target = resolve(self.address, self.port)
        except Refusal as refused:
            self.error = refused.answer["reason"]
            return
        caller = socket.socket(family, socket.SOCK_STREAM)
        caller.setblocking(False)
        code = caller.connect_ex(target)
        if code not in (0, errno.EINPROGRESS):
            caller.close()
            self._fail(code)
            return
        self.heard[caller] = b""
        selector.register(caller, selectors.EVENT_READ, self)

    def hear(self, selector: selectors.BaseSelector, caller: socket.socket, took: float) -> None:
        try:
            data = caller.recv(65536)
        except OSError as error:
            self._drop(selector, caller)
            self._fail(error.errno or 0)
            return
        heard = self.heard[caller] = (self.heard[caller] + data)[: len(self.word) + 1]
        if not self.word.startswith(heard[: len(self.word)]):
            self._drop(selector, caller)
            self.error = (
                f"another process answers at {self.address} port {self.port}: two machines have "
                "this address, or something is between"
            )
            return
        self.has_spoken = self.has_spoken or len(heard) >= len(self.word)
        if len(heard) > len(self.word):
            self.took = took
            self.end(selector)
        elif not data:
            self._drop(selector, caller)

    def end(self, selector: selectors.BaseSelector) -> None:
        for caller in list(self.heard):
            self.is_silent = self.is_silent or is_connected(caller)
            self._drop(selector, caller)

    def _drop(self, selector: selectors.BaseSelector, caller: socket.socket) -> None:
        selector.unregister(caller)
        del self.heard[caller]
        caller.close()

    def _fail(self, code: int) -> None:
        self.error = f"{self.address} port {self.port}: {os.strerror(code)}"

    def describe(self) -> str:
        """Return why the peer was not reached."""
        where = f"{self.address} port {self.port}"
        if self.has_spoken:
            return f"{where}: small packets arrive and full-size ones do not, as with a wrong MTU"
        if self.is_silent:
            return f"{where} took the connection, and nothing was heard"
        return self.error or f"no answer from {where}"


def is_connected(caller: socket.socket) -> bool:
    try:
        caller.getpeername()
    except OSError:
        return False
    return True


def _carry_out(calls: List[_Call], within: float) -> None:
    """Repeat each call until it is answered, or the time is over."""
    begun = time.monotonic()
    with selectors.DefaultSelector() as selector:
        due = begun
        while open_calls := [call for call in calls if call.took is None]:
            now = time.monotonic()
            if now >= begun + within:
                break
            if now >= due:
                for call in open_calls:
                    call.begin(selector)
                due += CALL_INTERVAL
            wait = max(0.0, min(due, begun + within) - time.monotonic())
            if not selector.get_map():
                time.sleep(wait)
                continue
            for key, _ in selector.select(wait):
                caller = key.fileobj
                if isinstance(caller, socket.socket) and caller in key.data.heard:
                    key.data.hear(selector, caller, time.monotonic() - begun)
        for call in calls:
            call.end(selector)

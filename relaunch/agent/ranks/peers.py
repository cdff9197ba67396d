"""Questions and answers between the supervisors of one generation.

A supervisor asks its peers whether they are alive and leased, and whether they know of a stop of
this generation or of a higher one. Questions that do not prove knowledge of the generation's secret
are not answered, and answers with a wrong MAC are ignored. What an answer means for the lease is
decided in relaunch/agent/ranks/lease.py.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import math
import os
import secrets
import socket
from dataclasses import dataclass
from typing import Any, Callable

from relaunch.agent.failpoints import is_cut
from relaunch.agent.loop import Channel, Loop
from relaunch.agent.protocol import Fields, Json, Order, Refusal, Token, now
from relaunch.agent.state import JobState

QUESTION_TIMEOUT = 1.0
"""Timeout of one question in seconds.

Peers are in one cluster, and a fence must not wait for a slow one.
"""
MAX_QUESTION_BYTES = 8 * 1024
MAX_CALLERS = 64
"""Limit of concurrent connections: more than 16 peers can have in flight."""


@dataclass(frozen=True)
class Answer:
    node: str
    asked: float
    """When the question was sent. The answer is valid as of this time."""
    superseded: str | None
    """Why this generation must end, if the peer knows of a stop or of a higher one."""
    alive: bool
    leased: bool
    answered: float
    """When the answer was read."""
    stamp: float | None
    """The peer's clock when it answered; None if the peer runs an earlier release."""


def compute_mac(secret: str, *parts: Any) -> str:
    text = "|".join(part if isinstance(part, str) else json.dumps(part) for part in parts)
    # A text of JSON may have half of a surrogate pair, which UTF-8 has not.
    raw = text.encode(errors="surrogatepass")
    return hmac.new(bytes.fromhex(secret), raw, hashlib.sha256).hexdigest()


def is_proven(mac: str, claimed: Any) -> bool:
    """Return whether what a peer sent as the MAC of its message is this one."""
    # compare_digest refuses texts that are not ASCII with an error.
    return isinstance(claimed, str) and claimed.isascii() and hmac.compare_digest(mac, claimed)


def parse_order(value: Any) -> Order | None:
    """Return what a peer sent as submission and generation; None if it is not that."""
    if not isinstance(value, list) or len(value) != 2:
        return None
    if any(type(one) is not int or not 0 <= one < 2**63 for one in value):
        return None
    return value[0], value[1]


def resolve(address: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    # For a host given as str, Python imports its IDNA codec: 4 ms in the middle of a launch.
    host = address.encode() if address.isascii() else address
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        # A resolver that does not answer says nothing about the name.
        is_unready = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
        raise Refusal(
            "address_not_ready" if is_unready else "cannot_start",
            f"the address {address} cannot be resolved: {error}",
        ) from None
    return family, target


def bind(address: str, port: int) -> socket.socket:
    """Return a socket at a port of this node that others reach by the address.

    A node's own name may be a loopback address to the node alone: Debian and Ubuntu write
    `127.0.1.1` and the name into /etc/hosts. Then the port is one of all its addresses.

    Raises:
        Refusal: The address cannot be resolved.
        OSError: The port cannot be bound.
    """
    family, target = resolve(address, port)
    if is_loopback_name(address, target[0]):
        target = ("::" if family is socket.AF_INET6 else "0.0.0.0", port)
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.bind(target)
    except OSError:
        bound.close()
        raise
    return bound


def is_loopback_name(name: str, address: str) -> bool:
    """Return whether a name that does not say so is resolved to a loopback address."""
    is_loopback = address == "::1" or address.startswith("127.")
    return is_loopback and name not in (address, "localhost")


class Peers:
    def __init__(
        self,
        loop: Loop,
        job: JobState,
        token: Token,
        listener: socket.socket,
        vitals: Callable[[], tuple[bool, bool]],
    ) -> None:
        self.loop = loop
        self.vitals = vitals
        """Returns (alive, leased) of this node's part of the generation at this moment."""
        self.job = job
        self.token = token
        self.listener = listener
        self.order: Json | None = None
        self.callers: dict[Channel, float] = {}
        self.questions: dict[str, tuple[Channel, float]] = {}
        """The question in flight to each node, and when it was sent."""
        self.answered_nodes: set[str] = set()
        """Nodes that have answered in the current round of questions."""
        self.known_nodes: set[str] = set()
        """Nodes that have answered this supervisor, in any round."""
        self.refusing_nodes: set[str] = set()
        """Of `known_nodes`, those that refused the connection in the current round.

        Neither the shim nor the supervisor of this generation lives there any more. One that has
        never answered proves nothing: a firewall that rejects refuses as well, and so does a host
        on which the address of its listener is not the one that others know.
        """
        loop.watch(listener.fileno(), lambda events: self._accept())

    def begin(self, order: Json) -> None:
        self.order = order

    def expire(self) -> None:
        """Drop connections on which no answer or question arrived within the timeout."""
        waiting = [*self.callers.items(), *self.questions.values()]
        for channel, since in waiting:
            if now() > since + QUESTION_TIMEOUT:
                channel.drop()

    @property
    def busy(self) -> bool:
        return bool(self.callers or self.questions)

    # --- asking ---

    def ask(self, answered: Callable[[Answer], None]) -> None:
        """Send a question to every peer that has none in flight."""
        if self.order is None or is_cut(self.job.state, "peers"):
            return
        if not self.questions:
            self.answered_nodes.clear()
            self.refusing_nodes.clear()
        for peer in self.order["peers"]:
            if peer["node"] not in self.questions:
                self._ask(peer, self.order, answered)

    def _ask(self, peer: Json, order: Json, answered: Callable[[Answer], None]) -> None:
        family, target = resolve(peer["address"], peer["port"])
        caller = socket.socket(family, socket.SOCK_STREAM)
        caller.setblocking(False)
        refused = caller.connect_ex(target) == errno.ECONNREFUSED
        node, asked, nonce = peer["node"], now(), secrets.token_hex(16)
        channel = Channel(
            self.loop,
            caller.detach(),
            lambda answer: self._hear_answer(node, asked, nonce, answer, answered),
            lambda: self._forget(node),
            MAX_QUESTION_BYTES,
        )
        if refused:
            channel.error = errno.ECONNREFUSED
        self.questions[node] = (channel, asked)
        proof = compute_mac(order["secret"], "ask", self.token.text, order["node"], nonce)
        channel.send(
            {
                "token": self.token.json,
                "from": order["node"],
                "nonce": nonce,
                "clock": True,
                "mac": proof,
            }
        )

    def _forget(self, node: str) -> None:
        question = self.questions.pop(node, None)
        if question is None or node not in self.known_nodes:
            return
        if question[0].error == errno.ECONNREFUSED:
            self.refusing_nodes.add(node)

    @property
    def is_alone(self) -> bool:
        """Return whether the round is over, none answered, and one that had answered refused."""
        return bool(self.refusing_nodes) and not self.answered_nodes and not self.questions

    def _hear_answer(
        self, node: str, asked: float, nonce: str, answer: Json, answered: Callable[[Answer], None]
    ) -> None:
        if node in self.questions:
            self.questions[node][0].drop()
        if (
            self.order is None
            or now() > asked + QUESTION_TIMEOUT
            or is_cut(self.job.state, "peers")
        ):
            return
        highest, stopped, alive, leased = (
            answer.get(name) for name in ("highest", "stopped", "alive", "leased")
        )
        stamp = answer.get("stamp")
        clock = () if stamp is None else (stamp,)
        proof = compute_mac(
            self.order["secret"], "answer", nonce, highest, stopped, alive, leased, *clock
        )
        if not is_proven(proof, answer.get("mac")):
            return
        stop, known = parse_order(stopped), parse_order(highest)
        if (stop is None and stopped is not None) or (known is None and highest is not None):
            return
        self.answered_nodes.add(node)
        self.known_nodes.add(node)
        reason = None
        if stop is not None and stop >= self.token.order:
            reason = f"peer {node} knows that this generation was stopped"
        elif known is not None and known > self.token.order:
            reason = f"peer {node} knows of generation {known[1]} of submission {known[0]}"
        is_clock = isinstance(stamp, float) and math.isfinite(stamp)
        answered(
            Answer(
                node,
                asked,
                reason,
                alive is True,
                leased is True,
                now(),
                stamp if is_clock else None,
            )
        )

    # --- being asked ---

    def _accept(self) -> None:
        try:
            caller, _ = self.listener.accept()
        except OSError:  # the caller hung up before accept
            return
        if len(self.callers) >= MAX_CALLERS:
            caller.close()
            return
        channel = Channel(
            self.loop,
            caller.detach(),
            lambda question: self._hear_question(channel, question),
            lambda: self._remove_caller(channel),
            MAX_QUESTION_BYTES,
        )
        self.callers[channel] = now()

    def _remove_caller(self, channel: Channel) -> None:
        self.callers.pop(channel, None)

    def _hear_question(self, channel: Channel, question: Json) -> None:
        if is_cut(self.job.state, "peers"):
            return
        if self.order is None:  # not started yet: hang up at once, so that the peer can ask again
            channel.drop()
            return
        try:
            fields = Fields(question)
            token, nonce = fields.token(), fields.text("nonce")
            proof = compute_mac(self.order["secret"], "ask", token.text, fields.text("from"), nonce)
            claimed_mac = fields.text("mac")
        except Refusal:
            channel.drop()
            return
        if token.job_path != self.token.job_path or not is_proven(proof, claimed_mac):
            channel.drop()
            return
        highest, stopped = self.job.read_highest()[:2]
        alive, leased = self.vitals()
        # An earlier release does not ask for the clock, and expects a MAC without it.
        clock = (now(),) if question.get("clock") is True else ()
        answer = {
            "highest": highest,
            "stopped": stopped,
            "alive": alive,
            "leased": leased,
            **({"stamp": clock[0]} if clock else {}),
            "mac": compute_mac(
                self.order["secret"], "answer", nonce, highest, stopped, alive, leased, *clock
            ),
        }
        channel.send(answer)
        channel.finish()


def listen(address: str) -> socket.socket:
    """Bind and return a listening socket for questions from peers.

    Raises:
        Refusal: No port can be bound on the address.
    """
    try:
        listener = bind(address, 0)
    except OSError as error:
        # No interface has it, perhaps not yet: the node may just have started.
        is_unready = error.errno == errno.EADDRNOTAVAIL
        raise Refusal(
            "address_not_ready" if is_unready else "cannot_start",
            f"no port can be bound on {address}: {os.strerror(error.errno or 0)}",
        ) from None
    listener.listen(MAX_CALLERS)
    listener.setblocking(False)
    return listener

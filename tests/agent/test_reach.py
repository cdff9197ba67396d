"""Nodes that call each other over their ranks' network: real agents, real sockets."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from real_node import Node, expect_done, read_name, refusal, wait_for

from relaunch.agent.node import reach

HOME = "127.0.0.1"
Json = dict[str, Any]


@pytest.fixture
def listening(node: Node) -> Iterator[Json]:
    yield expect_done(node.order("reach", listen=HOME, stay=60.0))
    for pid in find_listeners(node):
        os.kill(pid, signal.SIGKILL)


def find_listeners(node: Node) -> list[int]:
    """Return the processes that this node has left to listen."""
    return [pid for pid in node.list_processes() if read_name(pid) == "relaunch-reach"]


def peer(answer: Json, **more: Any) -> Json:
    found = {"node": "n1", "address": HOME, "ports": answer["ports"], "word": answer["word"]}
    return {**found, **more}


def call(node: Node, *peers: Json, within: float = 0.5) -> list[Json]:
    rows: list[Json] = expect_done(node.order("reach", peers=list(peers), within=within))["reached"]
    return rows


def test_a_node_that_listens_is_reached_on_both_ports(
    make_node: Callable[..., Node], node: Node, listening: Json
) -> None:
    assert len(set(listening["ports"])) == 2
    (row,) = call(make_node("n2"), peer(listening), within=30.0)
    assert row["node"] == "n1" and row["took"] > 0 and "cannot" not in row
    assert call(make_node("n3"), peer(listening), within=30.0)[0]["node"] == "n1"


def test_what_listens_outlives_the_connection_and_ends(node: Node) -> None:
    answer = expect_done(node.order("reach", listen=HOME, stay=1.0))
    node.end_session()
    wait_for(lambda: not is_open(answer["ports"][0]))


def is_open(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex((HOME, port)) == 0


def test_a_port_that_refuses_is_a_peer_not_reached(node: Node, listening: Json) -> None:
    with socket.create_server((HOME, 0)) as server:
        closed = server.getsockname()[1]
    (row,) = call(node, peer(listening, ports=[*listening["ports"], closed]))
    assert str(closed) in row["cannot"] and os.strerror(errno.ECONNREFUSED) in row["cannot"]
    (row,) = call(node, peer(listening, address="no.such.host.invalid"))
    assert "no.such.host.invalid" in row["cannot"]
    (row,) = call(node, peer(listening, address="255.255.255.255"))
    assert "255.255.255.255" in row["cannot"]


def test_a_port_whose_packets_get_lost_is_a_peer_not_reached(node: Node, listening: Json) -> None:
    """As behind a firewall that drops what comes to some ports: here the kernel drops it."""
    with socket.socket() as server, socket.socket() as first:
        server.bind((HOME, 0))
        server.listen(0)
        port = server.getsockname()[1]
        first.connect((HOME, port))  # the one caller that may wait; packets of others get lost
        (row,) = call(node, peer(listening, ports=[*listening["ports"], port]))
    assert row["cannot"] == f"no answer from {HOME} port {port}"


@pytest.mark.parametrize(
    ("said", "expected"),
    [(b"word\n", "full-size"), (b"other\n", "another process"), (b"", "nothing was heard")],
)
def test_what_answers_otherwise_is_a_peer_not_reached(
    node: Node, said: bytes, expected: str
) -> None:
    callers: list[socket.socket] = []

    def serve(server: socket.socket) -> None:
        while True:
            try:
                caller, _ = server.accept()
            except OSError:
                return
            caller.sendall(said)
            callers.append(caller)

    with socket.create_server((HOME, 0)) as server:
        thread = threading.Thread(target=serve, args=(server,), daemon=True)
        thread.start()
        (row,) = call(
            node,
            {"node": "n1", "address": HOME, "ports": [server.getsockname()[1]], "word": "word"},
        )
        assert expected in row["cannot"]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for caller in callers:
        caller.close()


def test_a_call_that_failed_is_repeated(
    node: Node, listening: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that loses many packets is no broken link."""
    monkeypatch.setattr(reach, "CALL_INTERVAL", 0.01)
    fields = reach.Fields(peer(listening))
    one = reach._Call(fields, listening["ports"][0])
    begin, begun = one.begin, []

    def lose_first(selector: Any) -> None:
        begun.append(True)
        if len(begun) > 3:
            begin(selector)

    one.begin = lose_first  # type: ignore[method-assign]
    reach._carry_out([one], 60.0)
    assert one.took is not None and len(begun) >= 4


def test_an_address_that_is_not_the_node_is_said(node: Node) -> None:
    for address in ("203.0.113.9", "no.such.host.invalid"):
        answer = expect_done(node.order("reach", listen=address, stay=5.0))
        assert address in answer["cannot"] and "ports" not in answer


SENSELESS: list[Json] = [
    {"listen": 7, "stay": 5.0},
    {"listen": HOME, "stay": 0},
    {"within": 1.0},
    {"peers": [{}] * 65, "within": 1.0},
    {"peers": [{"node": "n1", "address": HOME, "ports": [0], "word": "w"}], "within": 1.0},
    {"peers": [{"node": "n1", "address": HOME, "ports": [1]}], "within": 1.0},
]


def test_an_order_that_makes_no_sense_is_refused(node: Node) -> None:
    for order in SENSELESS:
        assert refusal(node.order("reach", **order)) == "bad_order", order

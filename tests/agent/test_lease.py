"""The dead man's handle: who keeps a generation alive, and what ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from real_node import Node, Stream, alive, boottime, eventually, token

from agent.lease import Lease

SHORT = {"lease": 0.6, "fence_after": 0.6, "stop_grace": 0.5}


@contextmanager
def renewing(watch: Stream) -> Iterator[None]:
    done = threading.Event()

    def renew() -> None:
        while not done.wait(0.1):
            watch.renew()

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def fenced(node: Node, generation: int = 1) -> dict[str, Any]:
    return next((seen for seen in node.journal(generation) if seen["kind"] == "Fenced"), {})


def test_never_watched(node: Node) -> None:
    pids = node.run(1, **SHORT)
    eventually(lambda: not any(map(alive, pids.values())))
    assert fenced(node)["why"] == "never_watched"
    kinds = [line["observation"]["kind"] for line in node.watch().rest() if "observation" in line]
    assert kinds == ["Fenced", "RankExited", "RankExited"]


def test_a_renewed_generation_lives_and_an_isolated_one_is_fenced(node: Node) -> None:
    pids = node.run(1, **SHORT)
    watch = node.watch()
    with renewing(watch):
        begin = boottime()
        watch.until("heartbeat", lambda beat: beat["stamp"] > begin + 1.6)
        assert all(map(alive, pids.values()))
    assert watch.observation("Fenced")["why"] == "isolated"
    eventually(lambda: not any(map(alive, pids.values())))


def test_a_stale_renewal_extends_nothing(node: Node) -> None:
    pids = node.run(1, **SHORT)
    stale = boottime() - 2.0
    watch = node.watch()
    for stamp in (stale, stale, boottime() + 100.0):
        watch.renew(stamp)
    assert watch.observation("Fenced")["why"] == "never_watched"
    eventually(lambda: not any(map(alive, pids.values())))


def test_one_node_that_was_watched_once_needs_nobody(node: Node) -> None:
    pids = node.run(1, fences=False, **SHORT)
    watch = node.watch()
    watch.renew()
    begin = boottime()
    beat = watch.until("heartbeat", lambda beat: beat["stamp"] > begin + 1.8)
    assert beat["lease_left"] is None
    assert all(map(alive, pids.values()))
    answer = node.stop()
    assert answer is not None
    assert answer["outcome"] == "done"


def test_one_node_that_nobody_ever_watched_stops(node: Node) -> None:
    node.run(1, fences=False, **SHORT)
    eventually(lambda: fenced(node).get("why") == "never_watched")


def gang(make_node: Callable[..., Node], secrets: tuple[str, str] = ("ab", "ab"), **times: float) -> list[Node]:
    nodes = [make_node("n1"), make_node("n2")]
    times = {**SHORT, "lease": 1.5, **times}
    ports = []
    for index, node in enumerate(nodes):
        prepared = node.prepare(1, [index], **(times if index == 0 else {**times, "lease": 30.0}))
        assert prepared is not None
        ports.append(prepared["peer_port"])
    for index, node in enumerate(nodes):
        other = 1 - index
        peer = {"node": f"n{other + 1}", "address": "127.0.0.1", "port": ports[other]}
        started = node.start(1, ranks=1, peers=[peer], node=f"n{index + 1}", secret=secrets[index])
        assert started is not None
        assert started["outcome"] == "done"
    return nodes


def test_peers_that_know_nothing_better_keep_it_alive(make_node: Callable[..., Node]) -> None:
    first, second = gang(make_node)
    watch = first.watch()
    watch.renew()
    begin = boottime()
    watch.until("heartbeat", lambda beat: beat["stamp"] > begin + 3.2)
    second.cut("peers")
    assert watch.observation("Fenced")["why"] == "isolated"


def test_a_peer_that_knows_of_a_stop_ends_it_at_once(make_node: Callable[..., Node]) -> None:
    first, second = gang(make_node, fence_after=20.0)
    watch = first.watch()
    watch.renew()
    highest = second.folder().parent / "highest.json"
    highest.write_text(highest.read_text().replace('"stopped": null', '"stopped": [1, 1]'))
    seen = watch.observation("Fenced")
    assert seen["why"] == "superseded"
    assert "n2" in seen["because"]


def test_a_peer_that_knows_a_higher_generation_ends_it_although_it_does_not_fence(
    make_node: Callable[..., Node],
) -> None:
    first, second = gang(make_node, fence_after=5.0)
    highest = second.folder().parent / "highest.json"
    highest.write_text(highest.read_text().replace('"prepared": [1, 1]', '"prepared": [1, 2]'))
    watch = first.watch()
    watch.renew()
    assert "generation 2" in watch.observation("Fenced")["because"]


def test_a_peer_with_another_secret_is_no_peer(make_node: Callable[..., Node]) -> None:
    first, _ = gang(make_node, secrets=("ab", "cd"), lease=0.6)
    watch = first.watch()
    watch.renew()
    assert watch.observation("Fenced")["why"] == "isolated"


def test_a_cut_node_is_silent_and_fences_itself(node: Node) -> None:
    pids = node.run(1, **SHORT)
    watch = node.watch()
    with renewing(watch):
        begin = boottime()
        watch.until("heartbeat", lambda beat: beat["stamp"] > begin + 0.8)
        node.cut("controller-in")
        assert watch.observation("Fenced")["why"] == "isolated"
    eventually(lambda: not any(map(alive, pids.values())))
    node.begin("list")
    node.cut()
    node.session_broke()  # it lost lines, so it ends when the network heals
    assert node.order("list") is not None


def test_answers_that_are_cut_do_not_come_but_the_order_is_carried_out(node: Node) -> None:
    node.prepare(1)
    node.cut("controller-out")
    silent = node.begin("prepare", **{**prepare_order(2), "token": token(2)})
    eventually((node.folder(2) / "keeper.json").exists)
    eventually(lambda: not node.commands(), "the order is still under way")
    node.cut()
    assert silent.rest() == []
    node.session_broke()
    assert node.prepare(2) is not None


def prepare_order(generation: int) -> dict[str, Any]:
    times = {
        "lease": 30.0,
        "fence_after": 1.0,
        "stop_grace": 1.0,
        "stuck_after": 3.0,
        "valid_for": 30.0,
        "heartbeat": 1.0,
    }
    return {"token": token(generation), "address": "127.0.0.1", "ranks": [0], **times}


@pytest.mark.parametrize(
    ("fences", "renewals", "asked", "at", "expected"),
    [
        (True, [], None, 9.9, None),
        (True, [], None, 10.1, "never_watched"),
        (True, [(5.0, 6.0)], None, 19.9, None),
        (True, [(5.0, 6.0)], None, 20.1, "isolated"),
        (True, [(5.0, 6.0), (1.0, 7.0)], None, 20.1, "isolated"),
        (True, [(5.0, 4.0)], None, 10.1, "never_watched"),
        (True, [(5.0, 6.0)], 18.0, 22.9, None),
        (True, [(5.0, 6.0)], 18.0, 23.1, "isolated"),
        (True, [], 8.0, 10.1, "never_watched"),
        (False, [], None, 10.1, "never_watched"),
        (False, [(5.0, 6.0)], None, 1e9, None),
    ],
)
def test_the_arithmetic(fences: bool, renewals: list[tuple[float, float]], asked: float | None, at: float, expected: str | None) -> None:
    lease = Lease(started=0.0, lease=10.0, fence_after=5.0, fences=fences)
    for stamp, now in renewals:
        lease.renew(stamp, now)
    if asked is not None:
        lease.peer_answered(asked)
    found = lease.fenced(at)
    assert (found[0] if found else None) == expected

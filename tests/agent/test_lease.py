"""The dead man's handle: who keeps a generation alive, and what ends it."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from real_node import Node, Stream, boottime, expect_done, is_alive, python_command, token, wait_for

from relaunch.agent.ranks.lease import Lease, Vouchers

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


def find_fence(node: Node, generation: int = 1) -> dict[str, Any]:
    return next((seen for seen in node.journal(generation) if seen["kind"] == "Fenced"), {})


def test_never_watched(node: Node) -> None:
    pids = node.run(1, **SHORT)
    wait_for(lambda: not any(map(is_alive, pids.values())))
    # Ranks get their signal before the shim writes why.
    assert wait_for(lambda: find_fence(node))["why"] == "never_watched"
    kinds = [
        line["observation"]["kind"] for line in node.watch().read_rest() if "observation" in line
    ]
    assert kinds == ["Fenced", "RankExited", "RankExited"]


def test_a_renewed_generation_lives_and_an_isolated_one_fences(node: Node) -> None:
    pids = node.run(1, **SHORT)
    watch = node.watch()
    with renewing(watch):
        begin = boottime()
        watch.read_until("heartbeat", lambda beat: beat["stamp"] > begin + 1.6)
        assert all(map(is_alive, pids.values()))
    assert watch.read_observation("Fenced")["why"] == "isolated"
    wait_for(lambda: not any(map(is_alive, pids.values())))


def test_a_stale_renewal_extends_nothing(node: Node) -> None:
    pids = node.run(1, **SHORT)
    stale = boottime() - 2.0
    watch = node.watch()
    for stamp in (stale, stale, boottime() + 100.0):
        watch.renew(stamp)
    assert watch.read_observation("Fenced")["why"] == "never_watched"
    wait_for(lambda: not any(map(is_alive, pids.values())))


def test_one_node_that_was_watched_once_runs_on_unwatched(node: Node) -> None:
    pids = node.run(1, fences=False, **SHORT)
    watch = node.watch()
    watch.renew()
    begin = boottime()
    beat = watch.read_until("heartbeat", lambda beat: beat["stamp"] > begin + 1.8)
    assert beat["lease_left"] is None
    assert all(map(is_alive, pids.values()))
    answer = node.stop()
    assert answer is not None
    assert answer["outcome"] == "done"


def test_ranks_that_are_unwatched_for_too_long_stop(node: Node) -> None:
    pids = node.run(1, fences=False, unwatched=0.5, lease=30.0, stop_grace=0.5)
    watch = node.watch()
    begin = boottime()
    watch.read_until("heartbeat", lambda beat: beat["stamp"] > begin + 1.2)
    assert all(map(is_alive, pids.values()))
    node.end_session()
    wait_for(lambda: find_fence(node).get("why") == "unwatched")
    wait_for(lambda: not any(map(is_alive, pids.values())))


def test_the_time_without_a_watch_begins_with_the_ranks(node: Node) -> None:
    node.prepare(1)
    prepared = node.stamps[1, 1]
    wait_for(lambda: boottime() > prepared + 1.5, "other nodes are prepared more slowly")
    node.start(1, fences=False, unwatched=1.0)
    fence = wait_for(lambda: find_fence(node))
    started = json.loads((node.folder() / "started.json").read_text())["stamp"]
    assert (fence["why"], fence["stamp"] >= started + 1.0) == ("unwatched", True)


def test_one_node_that_was_never_watched_stops(node: Node) -> None:
    node.run(1, fences=False, **SHORT)
    wait_for(lambda: find_fence(node).get("why") == "never_watched")


def launch(
    nodes: list[Node],
    leases: list[float],
    lists: list[list[int]],
    *,
    is_renewed: bool = True,
    **more: Any,
) -> list[Stream]:
    """Run one rank on each node, asking those that it lists.

    Renew each once, if asked, and return the watches.
    """
    times = {name: more.pop(name) for name in list(more) if name in SHORT}
    own = []
    for index, node in enumerate(nodes):
        prepared = node.prepare(1, [index], **{**SHORT, **times, "lease": leases[index]})
        assert prepared is not None
        own.append(prepared["peer_port"])
    secrets = more.pop("secrets", ["ab"] * len(nodes))
    watches = []
    for index, node in enumerate(nodes):
        peers = [
            {"node": f"n{other + 1}", "address": "127.0.0.1", "port": own[other]}
            for other in lists[index]
        ]
        started = node.start(
            1, ranks=1, peers=peers, node=f"n{index + 1}", secret=secrets[index], **more
        )
        assert started is not None
        assert started["outcome"] == "done"
        watches.append(node.watch())
        if is_renewed:
            watches[-1].renew()
    return watches


def goes_on(watch: Stream, seconds: float) -> None:
    """Wait until a heartbeat proves that the ranks lived for so long from now."""
    begin = boottime()
    watch.read_until("heartbeat", lambda beat: beat["stamp"] > begin + seconds and beat["alive"])


def gang(make_node: Callable[..., Node], **more: Any) -> tuple[Node, Node, Stream]:
    """Two nodes that list each other; the second has a lease that outlasts the test."""
    nodes = [make_node("n1"), make_node("n2")]
    times = {"leases": [1.5, 30.0], "lists": [[1], [0]], "fence_after": 1.5}
    watches = launch(nodes, **{**times, **more})
    return nodes[0], nodes[1], watches[0]


EVERYONE = [[1, 2], [0, 2], [0, 1]]


def test_a_gang_that_is_whole_goes_on_without_its_controller(
    make_node: Callable[..., Node],
) -> None:
    nodes = [make_node(name) for name in ("n1", "n2", "n3")]
    watches = launch(nodes, [0.6] * 3, EVERYONE, fence_after=2.0)
    goes_on(watches[0], 4.0)
    assert [find_fence(node) for node in nodes] == [{}, {}, {}]
    assert watches[0].seen[-1]["heartbeat"]["lease_left"] == 0


def test_two_of_three_that_see_only_each_other_fence(make_node: Callable[..., Node]) -> None:
    nodes = [make_node(name) for name in ("n1", "n2", "n3")]
    nodes[2].cut("peers")
    watches = launch(nodes, [0.6, 0.6, 30.0], EVERYONE)
    for watch in watches[:2]:
        assert watch.read_observation("Fenced")["why"] == "isolated"
    assert not find_fence(nodes[2])


def test_one_leased_peer_suffices_while_another_is_silent(make_node: Callable[..., Node]) -> None:
    nodes = [make_node(name) for name in ("n1", "n2", "n3")]
    nodes[2].cut("peers")
    first, second, _ = launch(nodes, [2.0, 2.0, 30.0], EVERYONE, fence_after=2.0)
    with renewing(second):
        goes_on(first, 6.0)
        assert not find_fence(nodes[0])
    assert first.read_observation("Fenced")["why"] == "isolated"
    assert second.read_observation("Fenced")["why"] == "isolated"


def test_a_peer_that_is_stopping_is_not_alive(make_node: Callable[..., Node]) -> None:
    nodes = [make_node("n1"), make_node("n2")]
    first, second = launch(
        nodes,
        [0.6, 30.0],
        [[1], [0]],
        command=python_command(STUBBORN),
        stop_grace=20.0,
        fence_after=2.0,
    )
    goes_on(first, 3.0)
    wait_for(lambda: "up" in nodes[1].log(1))
    nodes[1].begin("stop", token=token(1), stop_grace=20.0, stuck_after=3.0)
    second.read_observation("Stopped")
    assert first.read_observation("Fenced")["reason"]
    assert second.read_until("heartbeat")["alive"] == [1]


STUBBORN = (
    "import signal,time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); "
    "time.sleep(1000)"
)


def test_an_answer_that_was_changed_on_its_way_is_none(make_node: Callable[..., Node]) -> None:
    nodes = [make_node("n1"), make_node("n2")]
    seen: list[dict[str, Any]] = []
    with socket.create_server(("127.0.0.1", 0)) as between:
        real: list[int] = []

        def meddle() -> None:
            while True:
                try:
                    caller, _ = between.accept()
                except OSError:
                    return
                with caller, socket.create_connection(("127.0.0.1", real[0])) as peer:
                    peer.sendall(caller.makefile("rb").readline())
                    answer = json.loads(peer.makefile("rb").readline())
                    seen.append(answer)
                    caller.sendall(json.dumps({**answer, "leased": True}).encode() + b"\n")

        thread = threading.Thread(target=meddle)
        prepared = nodes[1].prepare(1, [1], **{**SHORT, "lease": 30.0})
        assert prepared is not None
        real.append(prepared["peer_port"])
        thread.start()
        nodes[1].start(
            1, ranks=1, node="n2", secret="ab"
        )  # never renewed, so it is alive and not leased
        silent = {"node": "n3", "address": "127.0.0.1", "port": 1}
        meddled = {"node": "n2", "address": "127.0.0.1", "port": between.getsockname()[1]}
        nodes[0].prepare(1, [0], **SHORT)
        nodes[0].start(1, ranks=1, node="n1", secret="ab", peers=[meddled, silent])
        watch = nodes[0].watch()
        watch.renew()
        assert watch.read_observation("Fenced")["why"] == "isolated"
        between.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert {(answer["alive"], answer["leased"]) for answer in seen} == {(True, False)}


def test_a_node_that_wakes_after_its_grace_kills_at_once(node: Node) -> None:
    pids = node.run(1, python_command(STUBBORN), lease=5.0, stop_grace=2.0)
    wait_for(lambda: "up" in node.log(0) and "up" in node.log(1))
    began = boottime()
    helpers = [node.pid(of) for of in ("supervisor", "guard", "shim")]
    for pid in helpers:
        os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: boottime() > began + 7.0)
    assert all(map(is_alive, pids.values()))
    os.kill(helpers[-1], signal.SIGCONT)
    woke = boottime()
    wait_for(lambda: not any(map(is_alive, pids.values())))
    assert boottime() - woke < 1.9, "less than the grace that it slept through"


def test_a_stop_order_gives_no_more_grace_than_the_handle(node: Node) -> None:
    pids = node.run(1, python_command(STUBBORN), lease=1.0, stop_grace=0.5)
    wait_for(lambda: "up" in node.log(0) and "up" in node.log(1))
    began = boottime()
    answer = node.stop(1, stop_grace=20.0)
    assert expect_done(answer)["stopped"] == [[1, 1]]
    assert not any(map(is_alive, pids.values()))
    assert boottime() - began < 5.0


def test_peers_that_know_nothing_better_keep_it_alive(make_node: Callable[..., Node]) -> None:
    _, second, watch = gang(make_node)
    goes_on(watch, 3.2)
    second.cut("peers")
    assert watch.read_observation("Fenced")["why"] == "isolated"


def test_a_peer_that_knows_of_a_stop_ends_it_at_once(make_node: Callable[..., Node]) -> None:
    _, second, watch = gang(make_node, fence_after=20.0)
    highest = second.folder().parent / "highest.json"
    highest.write_text(highest.read_text().replace('"stopped": null', '"stopped": [1, 1]'))
    seen = watch.read_observation("Fenced")
    assert seen["why"] == "superseded"
    assert "n2" in seen["reason"]


def test_a_peer_with_a_higher_generation_ends_it_without_fencing(
    make_node: Callable[..., Node],
) -> None:
    _, second, watch = gang(make_node, fence_after=5.0, fences=False)
    highest = second.folder().parent / "highest.json"
    highest.write_text(highest.read_text().replace('"prepared": [1, 1]', '"prepared": [1, 2]'))
    assert "generation 2" in watch.read_observation("Fenced")["reason"]


def test_a_peer_with_another_secret_is_no_peer(make_node: Callable[..., Node]) -> None:
    _, _, watch = gang(make_node, secrets=["ab", "cd"], leases=[0.6, 30.0])
    assert watch.read_observation("Fenced")["why"] == "isolated"


@pytest.mark.parametrize(
    ("address", "is_for_others"), [("127.1", True), ("127.0.0.1", False), ("localhost", False)]
)
def test_a_name_that_is_loopback_here_is_bound_for_others(
    node: Node, address: str, is_for_others: bool
) -> None:
    """`127.1`, to a resolver, is a name of 127.0.0.1, as /etc/hosts has a host's own name."""
    prepared = node.prepare(1, [0], address=address)
    assert prepared is not None
    with socket.socket() as caller:
        is_reached = caller.connect_ex(("127.0.0.2", prepared["peer_port"])) == 0
    assert is_reached is is_for_others


def test_a_cut_node_is_silent_and_fences_itself(node: Node) -> None:
    pids = node.run(1, **SHORT)
    watch = node.watch()
    with renewing(watch):
        begin = boottime()
        watch.read_until("heartbeat", lambda beat: beat["stamp"] > begin + 0.8)
        node.cut("controller-in")
        assert watch.read_observation("Fenced")["why"] == "isolated"
    wait_for(lambda: not any(map(is_alive, pids.values())))
    node.begin("list")
    node.cut()
    node.await_session_end()  # it lost lines, so it ends when the network heals
    assert node.order("list") is not None


def test_an_order_is_carried_out_although_its_answer_is_cut(node: Node) -> None:
    node.prepare(1)
    node.cut("controller-out")
    silent = node.begin("prepare", **{**prepare_order(2), "token": token(2)})
    wait_for((node.folder(2) / "shim.json").exists)
    wait_for(lambda: not node.list_commands(), "the order is still under way")
    node.cut()
    assert silent.read_rest() == []
    node.await_session_end()
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
        (True, [(5.0, 6.0)], None, 20.0, "isolated"),
        (True, [(5.0, 6.0)], 18.0, 22.9, None),
        (True, [(5.0, 6.0)], 18.0, 23.1, "isolated"),
        (True, [], 8.0, 10.1, "never_watched"),
        (False, [], None, 10.1, "never_watched"),
        (False, [(5.0, 6.0)], None, 1e9, None),
    ],
)
def test_the_arithmetic(
    fences: bool,
    renewals: list[tuple[float, float]],
    asked: float | None,
    at: float,
    expected: str | None,
) -> None:
    lease = Lease(started=0.0, lease=10.0, fence_after=5.0, fences=fences)
    for stamp, now in renewals:
        lease.renew(stamp, now)
    if asked is not None:
        lease.extend(asked)
    found = lease.find_fence_reason(at)
    assert (found[0] if found else None) == expected


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([("a", 1.0, True, True)], 1.0),
        ([("a", 1.0, True, False)], None),
        ([("a", 1.0, True, False), ("b", 2.0, True, False)], 1.0),
        ([("a", 1.0, True, False), ("b", 2.0, True, False), ("a", 3.0, True, False)], 2.0),
        ([("a", 1.0, True, False), ("b", 2.0, False, False)], None),
        ([("a", 1.0, True, False), ("b", 2.0, False, True)], None),
        ([("a", 1.0, True, False), ("a", 2.0, True, False)], None),
        ([("a", 1.0, True, False), ("b", 2.0, True, True)], 2.0),
    ],
)
def test_who_vouches(answers: list[tuple[str, float, bool, bool]], expected: float | None) -> None:
    vouchers = Vouchers(["a", "b"])
    assert [vouchers.record_answer(*answer) for answer in answers][-1] == expected

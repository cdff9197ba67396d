"""A paused machine does not take its lease for longer than it was.

Its clock may have stood still during the pause.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_node import Node, Stream, boottime, expect_done, is_alive, wait_for
from test_lease import find_fence, goes_on, launch, renewing

from relaunch.agent.ranks.lease import (
    CLOCK_WINDOW,
    Lease,
    PeerClocks,
    Standstills,
    Vouchers,
    measure_standstill,
)

LONG = {"lease": 60.0, "fence_after": 60.0}
"""Times that no test waits for."""


@pytest.mark.parametrize(
    ("stamp", "age", "now", "expected"),
    [
        (100.0, 0.0, 100.0, 0.0),
        (100.0, 5.0, 105.1, 0.0),  # the way takes time, and that is time in which the clock went on
        (100.0, 5.0, 104.9, 0.0),
        (100.0, 30.0, 101.0, 29.0),
        (100.0, 1000.0, 999.5 + 100.0, 0.0),  # two clocks that drift
    ],
)
def test_a_standstill_is_measured_by_the_age_of_a_renewal(
    stamp: float, age: float, now: float, expected: float
) -> None:
    assert measure_standstill(stamp, age, now) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([("a", 10.0, 10.1, 500.0), ("a", 12.0, 12.1, 502.0)], 0.0),
        ([("a", 10.0, 10.9, 500.0), ("a", 12.0, 12.1, 502.0)], 0.0),  # the first answer was slow
        ([("a", 10.0, 10.1, 500.0), ("a", 12.0, 12.9, 502.8)], 0.0),  # the second one was
        ([("a", 10.0, 10.0, 500.0), ("a", 12.0, 12.0, 532.0)], 30.0),
        ([("a", 10.0, 10.0, 500.0), ("a", 12.0, 13.0, 532.0)], 29.0),
        ([("a", 10.0, 10.0, 500.0), ("a", 12.0, 12.0, 3.0)], 0.0),  # the peer has rebooted
        ([("a", 10.0, 10.0, 500.0), ("a", 12.0, 12.0, 3.0), ("a", 14.0, 14.0, 35.0)], 30.0),
        (
            [
                ("a", 10.0, 10.0, 500.0),
                ("b", 10.0, 10.0, 7.0),
                ("a", 12.0, 12.0, 502.0),
                ("b", 12.0, 12.0, 39.0),
            ],
            30.0,
        ),
        (
            [("a", 10.0, 10.0, 500.0), ("a", 12.0, 12.0, 532.0), ("a", 14.0, 14.0, 534.0)],
            0.0,
        ),  # counted once
        (
            [
                ("a", 10.0, 10.0, 500.0),
                ("b", 10.0, 10.0, 7.0),
                ("a", 12.0, 12.0, 532.0),
                ("b", 12.0, 12.0, 39.0),
            ],
            0.0,
        ),
        # A clock that runs slow by 3 % is found out although no two answers show it.
        (
            [
                ("a", 10.0 + 0.97 * second, 10.0 + 0.97 * second, 500.0 + second)
                for second in range(0, 10, 2)
            ],
            0.0,
        ),
        (
            [
                ("a", 10.0 + 0.97 * second, 10.0 + 0.97 * second, 500.0 + second)
                for second in range(0, 11, 2)
            ],
            0.3,
        ),
        # What may be drift is forgotten with time, and does not hide a standstill.
        (
            [
                ("a", 0.0, 0.0, 0.0),
                ("a", CLOCK_WINDOW + 1, CLOCK_WINDOW + 1, CLOCK_WINDOW + 1.02),
                ("a", 10 * CLOCK_WINDOW, 10 * CLOCK_WINDOW, 10 * CLOCK_WINDOW + 2.0),
            ],
            1.98,
        ),
    ],
)
def test_a_standstill_is_measured_by_the_clocks_of_peers(
    answers: list[tuple[str, float, float, float]], expected: float
) -> None:
    clocks = PeerClocks()
    assert [clocks.compare(*answer) for answer in answers][-1] == pytest.approx(expected)


def test_time_that_a_clock_stood_still_is_time_of_the_lease() -> None:
    lease = Lease(started=0.0, lease=10.0, fence_after=5.0, fences=True)
    lease.renew(1.0, 1.0)
    lease.shorten(12.0)
    assert (lease.leased_until, lease.ends) == (-1.0, 4.0)
    lease.renew(2.0, 2.5)
    assert (lease.leased_until, lease.ends) == (12.0, 17.0)


def test_a_time_from_before_a_standstill_is_older_than_it_seems() -> None:
    standstills = Standstills()
    standstills.add(100.0, 30.0)
    standstills.add(200.0, 5.0)
    assert [standstills.correct(moment) for moment in (99.0, 150.0, 201.0)] == [64.0, 145.0, 201.0]


def test_answers_from_before_a_standstill_vouch_for_nothing() -> None:
    vouchers = Vouchers(("n2", "n3"))
    vouchers.record_answer("n2", 1.0, True, False)
    vouchers.forget()
    assert vouchers.record_answer("n3", 2.0, True, False) is None
    assert vouchers.record_answer("n2", 3.0, True, False) == 2.0


def renew(watch: Stream, stamp: float, age: float) -> None:
    watch.node.send({"id": watch.number, "send": {"renew": {"stamp": stamp, "age": age}}})


def test_a_renewal_older_than_the_clock_ends_an_expired_lease(node: Node) -> None:
    pids = node.run(1, **LONG)
    watch = node.watch()
    watch.renew()
    stamp = watch.read_until("heartbeat", lambda beat: (beat["lease_left"] or 0) > 55)["stamp"]
    renew(watch, stamp, 200.0)
    seen = watch.read_observation("Fenced")
    assert seen["why"] == "isolated"
    wait_for(lambda: not any(map(is_alive, pids.values())))


def test_renewals_that_waited_through_a_pause_tell_of_it_once(node: Node) -> None:
    """Counted once each, the three would be more than the lease and the fence together."""
    pids = node.run(1, **LONG)
    watch = node.watch()
    watch.renew()
    stamp = watch.read_until("heartbeat", lambda beat: (beat["lease_left"] or 0) > 55)["stamp"]
    for age in (50.0, 60.0, 70.0):
        renew(watch, stamp, age)
    renew(watch, watch.read_until("heartbeat")["stamp"], 0.0)
    watch.read_until("heartbeat", lambda beat: beat["lease_left"] > 50)
    assert all(map(is_alive, pids.values()))


def test_a_renewal_read_after_a_pause_but_sent_before_is_ignored(
    node: Node,
) -> None:
    node.run(1, **LONG)
    watch = node.watch()
    watch.renew()
    stamp = watch.read_until("heartbeat", lambda beat: (beat["lease_left"] or 0) > 55)["stamp"]
    renew(watch, stamp, 40.0)
    watch.read_until("heartbeat", lambda beat: beat["lease_left"] <= 20)
    renew(watch, stamp, 0.1)
    assert watch.read_until("heartbeat")["lease_left"] <= 20
    assert watch.read_until("heartbeat")["lease_left"] <= 20


def test_a_renewal_older_than_the_clock_shortens_the_lease(
    node: Node,
) -> None:
    pids = node.run(1, **LONG)
    watch = node.watch()
    watch.renew()
    stamp = watch.read_until("heartbeat", lambda beat: (beat["lease_left"] or 0) > 50)["stamp"]
    renew(watch, stamp, 40.0)
    watch.read_until("heartbeat", lambda beat: beat["lease_left"] <= 20)
    renew(watch, boottime(), 0.0)
    watch.read_until("heartbeat", lambda beat: beat["lease_left"] > 40)
    assert all(map(is_alive, pids.values()))


@pytest.fixture(scope="session")
def clock_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    library = tmp_path_factory.mktemp("clock") / "shifted_clock.so"
    source = Path(__file__).parent / "shifted_clock.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
    return library


class ShiftedNode(Node):
    """A node whose clock can be moved while it runs."""

    library: Path

    @property
    def environment(self) -> dict[str, str]:
        return {
            **super().environment,
            "LD_PRELOAD": str(self.library),
            "SHIFTED_CLOCK": str(self.clock),
        }

    @property
    def clock(self) -> Path:
        return self.state.parent / f"{self.state.name}.clock"

    def shift_clock(self, seconds: float) -> None:
        """Write in place: a process that has the file mapped sees the new number in it."""
        with self.clock.open("r+b") as file:
            file.write(struct.pack("q", round(seconds * 1e9)))


@pytest.fixture
def make_shifted_node(tmp_path: Path, agent: Path, clock_library: Path) -> Any:
    nodes: list[ShiftedNode] = []

    def make(name: str) -> ShiftedNode:
        node = ShiftedNode(tmp_path / name, agent)
        node.library = clock_library
        node.state.mkdir(mode=0o700)
        node.clock.write_bytes(bytes(8))
        nodes.append(node)
        return node

    yield make
    for node in nodes:
        node.kill_everything()


@pytest.mark.parametrize(("is_renewed", "expected"), [(True, "isolated"), (False, "never_watched")])
def test_a_peer_whose_clock_went_on_shows_that_ours_stood_still(
    make_node: Callable[..., Node], make_shifted_node: Any, is_renewed: bool, expected: str
) -> None:
    """To n1 it is the same whether its own clock stood still or that of n2 went on."""
    first, second = make_node("n1"), make_shifted_node("n2")
    leases = [60.0, 1e8]
    launch([first, second], leases, [[1], [0]], fence_after=60.0, is_renewed=is_renewed)
    shifts = iter(range(300, 10**7, 300))

    def is_fenced_by_now() -> bool:
        second.shift_clock(
            next(shifts)
        )  # again and again: a shift before the first comparison shows nothing
        return bool(find_fence(first))

    began = boottime()
    wait_for(is_fenced_by_now)
    assert boottime() - began < 50.0, "it did not wait for the end of its lease"
    assert find_fence(first)["why"] == expected
    assert not find_fence(second)


@pytest.mark.long
def test_a_paused_node_with_a_stopped_clock_ends_its_ranks_later(
    make_node: Callable[..., Node], make_shifted_node: Any
) -> None:
    times = {"fence_after": 4.0, "stop_grace": 0.3}
    first, second = make_node("n1"), make_shifted_node("n2")
    watches = launch([first, second], [60.0, 4.0], [[1], [0]], **times)
    rank = second.order("list")["jobs"][0]["generations"][0]["ranks"][0]["pid"]
    with renewing(watches[0]):
        goes_on(watches[1], 1.5)
        watches[1].renew()
        processes = second.list_processes()
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        began = boottime()
        wait_for(lambda: boottime() > began + 9.0)
        second.shift_clock(began - boottime())
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
        woke = boottime()
        wait_for(lambda: not is_alive(rank))
        assert boottime() - woke < 4.0, "it went on for what its own clock left of lease and fence"
        assert not find_fence(first)


def test_an_unwatched_node_without_its_gang_fences_while_leased(
    make_node: Callable[..., Node],
) -> None:
    """The state that a paused machine finds when it goes on.

    Its gang was stopped, and the controller watches another generation.
    """
    first, second = make_node("n1"), make_node("n2")
    watches = launch([first, second], [6.0, 60.0], [[1], [0]], fence_after=60.0)
    goes_on(watches[0], 2.5)  # it has asked n2 twice: a lease of 6 s is compared each second
    second.kill_everything()
    goes_on(watches[0], 2.5)
    assert not find_fence(first), "the controller decides while it watches"
    watches[0].close()
    wait_for(lambda: find_fence(first).get("why") == "isolated")
    assert "n2" in find_fence(first)["reason"]


def test_a_refusing_peer_that_never_answered_proves_nothing(node: Node) -> None:
    """As behind a firewall that rejects, or beside a node that listens on loopback only."""
    node.prepare(1, [0], lease=1.5, fence_after=0.8, stop_grace=0.5)
    away = {"node": "n2", "address": "127.0.0.1", "port": 1}
    node.start(1, ranks=1, node="n1", secret="ab", peers=[away])
    watch = node.watch()
    first = watch.read_until("heartbeat")
    watch.renew()
    watch.read_until(
        "heartbeat",
        lambda beat: beat["stamp"] + beat["lease_left"] > first["stamp"] + first["lease_left"],
    )
    watch.close()
    fence = wait_for(lambda: find_fence(node))
    assert (fence["why"], "n2" in fence["reason"]) == ("isolated", False), "only by its own lease"


def test_a_silent_peer_is_no_reason_to_fence_while_leased(make_node: Callable[..., Node]) -> None:
    first, second = make_node("n1"), make_node("n2")
    watches = launch([first, second], [6.0, 60.0], [[1], [0]], fence_after=60.0)
    second.cut("peers")
    watches[0].close()
    begin = boottime()
    wait_for(lambda: boottime() > begin + 2.5)
    assert not find_fence(first)


class Way:
    """A port that leads to a node's port for peers, and is closed as soon as that one is."""

    def __init__(self, port: int) -> None:
        self.to = port
        self.answers: list[bytes] = []
        """What came back to each question; empty where the peer hung up."""
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self._relay)
        self.thread.start()

    def count(self, *, is_answered: bool) -> int:
        return sum(bool(answer) is is_answered for answer in self.answers)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it may be closed already
            self.listener.shutdown(socket.SHUT_RDWR)
        self.thread.join()

    def _relay(self) -> None:
        with self.listener:
            while True:
                try:
                    caller, _ = self.listener.accept()
                except OSError:
                    return
                with caller:
                    try:
                        self.answers.append(self._ask(caller))
                        caller.sendall(self.answers[-1])
                    except ConnectionRefusedError:
                        return
                    except OSError:  # the one that asked is gone
                        continue

    def _ask(self, caller: socket.socket) -> bytes:
        question = caller.makefile("rb").readline()
        with socket.create_connection(("127.0.0.1", self.to)) as peer:
            try:
                peer.sendall(question)
                return peer.makefile("rb").readline()
            except ConnectionError:
                return b""


@pytest.fixture
def make_way() -> Iterator[Callable[[int], Way]]:
    ways: list[Way] = []

    def make(port: int) -> Way:
        ways.append(Way(port))
        return ways[-1]

    yield make
    for way in ways:
        way.close()


def prepare(node: Node, rank: int) -> int:
    """Prepare a rank with times that no test waits for, and return the port for peers."""
    prepared = expect_done(node.prepare(1, [rank], **LONG, valid_for=60.0))
    return int(prepared["peer_port"])


def start(node: Node, number: int, peers: dict[str, int]) -> int:
    """Start the rank on node n<number> with these peers' ports, and return its pid."""
    listed = [{"node": name, "address": "127.0.0.1", "port": port} for name, port in peers.items()]
    started = node.start(1, ranks=1, node=f"n{number}", secret="ab", peers=listed)
    return int(next(iter(expect_done(started)["pids"].values())))


def test_a_machine_paused_before_its_first_renewal_fences(
    make_node: Callable[..., Node], make_way: Callable[[int], Way]
) -> None:
    """By its own clock its first lease has only begun, and its gang was stopped meanwhile."""
    first, second = make_node("n1"), make_node("n2")
    way = make_way(prepare(first, 0))
    own = prepare(second, 1)
    start(first, 1, {"n2": own})
    rank = start(second, 2, {"n1": way.port})
    wait_for(lambda: way.count(is_answered=True), "n2 does not ask before it is renewed")
    paused = second.list_processes()
    for pid in paused:
        os.kill(pid, signal.SIGSTOP)
    expect_done(first.stop())
    for pid in paused:
        os.kill(pid, signal.SIGCONT)
    fence = wait_for(lambda: find_fence(second))
    assert (fence["why"], "lives on n1" in fence["reason"]) == ("never_watched", True)
    wait_for(lambda: not is_alive(rank))


def test_a_peer_that_is_not_started_yet_does_no_harm(
    make_node: Callable[..., Node], make_way: Callable[[int], Way]
) -> None:
    """n2 is prepared and hangs up, n3 refuses, and no controller watches n1 yet."""
    first, second = make_node("n1"), make_node("n2")
    own, way = prepare(first, 0), make_way(prepare(second, 1))
    rank = start(first, 1, {"n2": way.port, "n3": 1})
    wait_for(lambda: way.count(is_answered=False) >= 3)
    assert not way.count(is_answered=True)
    assert not find_fence(first)
    start(second, 2, {"n1": own})
    wait_for(lambda: way.count(is_answered=True) >= 2)
    watch = first.watch()
    watch.renew()
    goes_on(watch, 0.5)
    assert is_alive(rank)
    assert not find_fence(first)


def test_peers_do_not_extend_the_first_lease(make_node: Callable[..., Node]) -> None:
    """Both live, and neither is ever renewed: with a lease of 1 s they ask twice a second."""
    nodes = [make_node("n1"), make_node("n2")]
    launch(nodes, [1.0, 60.0], [[1], [0]], fence_after=60.0, is_renewed=False)
    fence = wait_for(lambda: find_fence(nodes[0]))
    assert (fence["why"], "of its start" in fence["reason"]) == ("never_watched", True)
    assert not find_fence(nodes[1])

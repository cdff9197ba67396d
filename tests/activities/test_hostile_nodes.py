"""One node of a gang sends nonsense.

The watch, the launch and the look go on for the others, and name that node.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from syrupy.assertion import SnapshotAssertion
from temporalio.client import Client

from relaunch.activities import gang as gang_module
from relaunch.activities import watch as watch_module
from relaunch.activities.fleet import FleetActivities, LookInput
from relaunch.activities.launch import MAX_GENERATIONS_AHEAD, LaunchRanksOutput
from relaunch.activities.reports import WatchHeartbeat, WatchReport
from relaunch.backends.base import Preparation, PrepareOrder, Refusal
from relaunch.evidence.observations import RankExited
from relaunch.generation import Token
from relaunch.job.events import FaultObserved, NodeReturned, NodeUnreachable
from tests.activities.harness import Stand, environment, eventually, stand
from tests.fakes.nodes import Exit, Script, SimulatedBackend

pytestmark = pytest.mark.asyncio
NAMED = {"namespace": "default", "job": "llama", "submission": 1000, "generation": 1}
HELLO = {
    "hello": {"token": NAMED, "boot_id": "b", "state": "running", "ranks": [2, 3], "stamp": 1.0}
}
EXITED = {"seq": 1, "kind": "RankExited", "rank": 2, "local_rank": 0, "exit_code": 1}
BEAT = {"stamp": 1.0, "alive": [], "lease_left": 1, "progress": {}}


@dataclass
class Liar:
    """What n2 says in each watch of it, one after the other; the last for ever."""

    says: list[list[Any]]
    watches: int = 0
    renewed: list[float] = field(default_factory=list)

    async def lines(self) -> AsyncIterator[Any]:
        said = self.says[min(self.watches, len(self.says)) - 1]
        for line in said:
            yield line
        await asyncio.sleep(600)

    async def renew(self, stamp: float, age: float = 0.0) -> None:
        self.renewed.append(stamp)


class HostileBackend(SimulatedBackend):
    liar: Liar
    refusal: Refusal | None = None
    listed: Any = None

    def watch(self, node: str, token: Token, after_seq: int, heartbeat: float) -> Any:
        if node != "n2":
            return super().watch(node, token, after_seq, heartbeat)

        @asynccontextmanager
        async def connected() -> AsyncIterator[Liar]:
            self.liar.watches += 1
            yield self.liar

        return connected()

    async def prepare(self, node: str, order: PrepareOrder) -> Preparation | Refusal:
        return (
            self.refusal
            if self.refusal is not None and node == "n2"
            else await super().prepare(node, order)
        )

    async def list(self, node: str, gpus: bool = False) -> Mapping[str, Any]:
        return (
            cast(Mapping[str, Any], self.listed) if node == "n2" else await super().list(node, gpus)
        )


def hostile(
    script: Script | None = None, *says: list[Any], **timeouts: str
) -> tuple[Stand, HostileBackend]:
    fleet = stand(script or Script(then="run"), timeouts=timeouts)
    fleet.backend.__class__ = HostileBackend
    backend = cast(HostileBackend, fleet.backend)
    backend.liar = Liar(list(says))
    return fleet, backend


@pytest.fixture(autouse=True)
def _no_wait_for_cascades(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_module, "CASCADE_GATHER_TIMEOUT_S", 0.0)
    monkeypatch.setattr("relaunch.activities.watch.RECONNECT_DELAYS_S", (0.01, 0.02))


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ([1, 2], "expected an object"),
        ({"heartbeat": {**BEAT, "stamp": "soon"}}, "stamp is 'soon'"),
        ({"heartbeat": {"alive": []}}, "stamp is missing"),
        ({"heartbeat": {**BEAT, "progress": {"zero": {"step": 3}}}}, "progress.zero"),
        ({"heartbeat": {**BEAT, "progress": {"2": {"step": 3, "age": 1e300}}}}, "progress.2.age"),
        (
            {"heartbeat": {**BEAT, "progress": {"0": {"step": 10**15}}}},
            "it reports rank 0, expected 2 to 3",
        ),
        ({"observation": {"kind": "RankExited", "rank": 2}}, "seq is missing"),
        ({"observation": {**EXITED, "exit_code": "boom"}}, "exit_code is 'boom'"),
        ({"observation": {**EXITED, "signal": 9.5}}, "signal is 9.5"),
        ({"observation": {**EXITED, "rank": 77}}, "it reports rank 77, expected 2 to 3"),
        ({"observation": {**EXITED, "rank": 2**63}}, "rank is 9223372036854775808"),
        (
            {"observation": {"seq": 1, "kind": "StoppedByUser", "reason": "evil", "by": "boss"}},
            "what people did",
        ),
        (
            {"hello": {**HELLO["hello"], "token": {**NAMED, "job": "another"}}},
            "expected generation default/llama/1000/1",
        ),
    ],
)
async def test_a_node_that_sends_nonsense_is_lost_and_the_watch_lasts(
    line: Any, named: str
) -> None:
    fleet, backend = hostile(None, [HELLO, {"heartbeat": BEAT}, line])
    await fleet.launch()
    report = await fleet.watch(first_rank=0, world_size=4)
    assert [type(event) for event in report.events] == [NodeUnreachable]
    assert report.events[0].node == "n2" and named in report.events[0].reason
    assert backend.liar.watches > 1  # it was tried again


SENDER = {"token": NAMED, "node": "n2", "shim": {"pid": 7, "started": 70, "boot_id": "b"}}
PROGRESS = {"heartbeat": {**BEAT, "progress": {"2": {"step": 900, "age": 0.1}}}}
FAILED = {"observation": EXITED}
END = {"end": {"seq": 0}}
REFUSED = {"outcome": "refused", "why": "no_such_generation", "reason": "never prepared here"}
ANOTHER = {
    "generation": {**SENDER, "token": {**NAMED, "generation": 2}},
    "submission": {**SENDER, "token": {**NAMED, "submission": 999}},
    "job": {**SENDER, "token": {**NAMED, "job": "other"}},
    "namespace": {**SENDER, "token": {**NAMED, "namespace": "other"}},
    "node": {**SENDER, "node": "n1"},
    "shim": {**SENDER, "shim": {"pid": 8, "started": 80, "boot_id": "b"}},
    "boot": {**SENDER, "shim": {**SENDER["shim"], "boot_id": "c"}},
    "no sender": None,
}


def say(line: dict[str, Any], sender: object = SENDER) -> dict[str, Any]:
    return line if sender is None else {**line, "sender": sender}


@pytest.mark.parametrize(("is_known", "delay"), [(True, 0.3), (False, 1000.0)])
async def test_a_refusal_beside_a_known_fault_is_reported_later(
    is_known: bool, delay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one watch would follow the other without a pause."""
    monkeypatch.setattr(watch_module, "KNOWN_REFUSAL_DELAY_S", delay)
    fleet, _ = hostile(None, [say(REFUSED)])
    await fleet.launch()
    began = time.monotonic()
    report = await fleet.watch(first_rank=0, world_size=4, hang_known=is_known)
    if is_known:
        assert time.monotonic() - began >= delay
    assert "refuses to be watched" in str(report.events[0])


@pytest.mark.parametrize("line", [PROGRESS, FAILED, END], ids=["heartbeat", "observation", "end"])
@pytest.mark.parametrize("another", ANOTHER)
async def test_s2_6_what_another_says_is_no_progress_and_no_end(
    line: dict[str, Any], another: str, snapshot: SnapshotAssertion
) -> None:
    fleet, backend = hostile(None, [say(HELLO), say(line, ANOTHER[another])])
    await fleet.launch()
    report = await fleet.watch(first_rank=0, world_size=4)
    check_is_lost(report, backend)
    assert report.events[0].reason == snapshot


@pytest.mark.parametrize("another", ["generation", "node"])
@pytest.mark.parametrize("line", [HELLO, REFUSED], ids=["hello", "refusal"])
async def test_s2_6_a_watch_that_another_answers_does_not_begin(
    line: dict[str, Any], another: str, snapshot: SnapshotAssertion
) -> None:
    fleet, backend = hostile(None, [say(line, ANOTHER[another]), say(PROGRESS), say(END)])
    await fleet.launch()
    report = await fleet.watch(first_rank=0, world_size=4)
    check_is_lost(report, backend)
    assert report.events[0].reason == snapshot


@pytest.mark.parametrize(
    "said",
    [[PROGRESS], [FAILED], [END], [HELLO, REFUSED]],
    ids=["heartbeat", "observation", "end", "refusal after a hello"],
)
async def test_s2_6_nothing_counts_before_a_hello_or_against_it(
    said: list[dict[str, Any]], snapshot: SnapshotAssertion
) -> None:
    fleet, backend = hostile(None, [say(line) for line in said])
    await fleet.launch()
    report = await fleet.watch(first_rank=0, world_size=4)
    check_is_lost(report, backend)
    assert report.events[0].reason == snapshot


def check_is_lost(report: WatchReport, backend: HostileBackend) -> None:
    """Check that n2 counts as lost: nothing that it said is progress, an exit or an end."""
    assert [type(event) for event in report.events] == [NodeUnreachable]
    assert report.events[0].node == "n2"
    assert (report.after_seq, report.exited, report.all_succeeded) == ({}, {}, False)
    assert backend.liar.watches > 1, "it was not tried again"
    assert backend.liar.renewed == []


async def test_s2_6_the_word_of_an_earlier_agent_counts_by_its_hello() -> None:
    exited = [{"observation": {**EXITED, "exit_code": 7}}]
    fleet, _ = hostile(None, [HELLO, {"heartbeat": BEAT}, *exited])
    await fleet.launch()
    report = await fleet.watch(first_rank=0, world_size=4)
    fault = report.events[0]
    assert isinstance(fault, FaultObserved)
    assert [(one.node, one.exit_code) for one in fault.observations] == [("n2", 7)]


@pytest.mark.parametrize("ahead", [-86400.0, 86400.0], ids=["a day behind", "a day ahead"])
async def test_s2_6_what_nodes_say_is_dated_by_the_receivers_clock(ahead: float) -> None:
    fleet, _ = hostile(
        None, [HELLO, {"observation": {**EXITED, "at": time.time() + ahead, "stamp": ahead}}]
    )
    await fleet.launch()
    before = datetime.now(UTC)
    (fault,) = (await fleet.watch(first_rank=0, world_size=4)).events
    assert isinstance(fault, FaultObserved)
    (exited,) = fault.observations
    assert before <= fault.opened_at == exited.at <= datetime.now(UTC)


async def test_a_fault_of_an_honest_node_is_reported_beside_a_liar() -> None:
    script = Script((Exit(rank=1, exit_code=7, after=1.0),))
    fleet, _ = hostile(
        script, [HELLO, {"observation": {**EXITED, "exit_code": "boom"}}], lost_after="60s"
    )
    await fleet.launch()
    report = await fleet.watch(first_rank=0, world_size=4)
    fault = report.events[0]
    assert isinstance(fault, FaultObserved)
    first = fault.observations[0]
    assert isinstance(first, RankExited) and (first.node, first.rank, first.exit_code) == (
        "n1",
        1,
        7,
    )
    assert {one.node for one in fault.observations} == {"n1"}
    assert [node for node, _ in fault.silent] == ["n2"]


async def test_a_misbehaving_node_is_not_renewed_until_it_makes_sense() -> None:
    beats = [HELLO, *({"heartbeat": {**BEAT, "stamp": float(n)}} for n in range(2, 5))]
    fleet, backend = hostile(
        None, [HELLO, [1]], [HELLO, {"heartbeat": BEAT}, [1]], beats, lost_after="60s"
    )
    await fleet.launch()
    watching = asyncio.create_task(fleet.watch())
    await eventually(lambda: backend.liar.renewed != [], "renewed")
    watching.cancel()
    assert backend.liar.watches == 3
    assert set(backend.liar.renewed) == {4.0}


async def test_a_lost_node_that_goes_on_lying_has_not_returned() -> None:
    fleet, backend = hostile(
        None, [HELLO, [1]], [HELLO, [1]], [HELLO, *({"heartbeat": BEAT} for _ in range(3))]
    )
    await fleet.launch()
    report = await fleet.watch(lost=("n2",))
    assert [type(event) for event in report.events] == [NodeReturned]
    assert backend.liar.watches == 3


async def test_a_flood_of_exits_of_one_rank_is_one_exit() -> None:
    flood = [{"observation": {**EXITED, "seq": n}} for n in range(1, 2000)]
    fleet, _ = hostile(None, [HELLO, *flood])
    await fleet.launch()
    report = await fleet.watch(first_rank=0, world_size=4)
    fault = report.events[0]
    assert isinstance(fault, FaultObserved)
    assert (len(fault.observations), fault.more) == (1, 0)


@pytest.mark.parametrize(
    ("highest", "named"),
    [
        ((1001, 1), "the server has had none after 1000"),
        ((10**15, 1), "the server has had none after 1000"),
        ((1000, 2 + MAX_GENERATIONS_AHEAD), "more than 1000 ahead of it"),
        ((1000, 2**53), "more than 1000 ahead of it"),
        ((999, 5), "which is below it"),
    ],
)
async def test_a_token_higher_than_any_of_the_job_is_a_lie_of_one_node(
    highest: tuple[int, int], named: str
) -> None:
    fleet, backend = hostile()
    backend.refusal = Refusal("n2", "not_above", "seen higher", highest)
    launched: LaunchRanksOutput = await fleet.launch(attempt=3)
    assert (launched.unreachable, launched.refusals) == (("n2",), ())
    assert "node n2" in launched.reason and named in launched.reason


@pytest.mark.parametrize("highest", [(1000, 1), (1000, 2), (1000, 1 + MAX_GENERATIONS_AHEAD), None])
async def test_a_number_that_a_reset_explains_is_believed(highest: tuple[int, int] | None) -> None:
    fleet, backend = hostile()
    backend.refusal = Refusal("n2", "not_above", "seen higher", highest)
    launched: LaunchRanksOutput = await fleet.launch()
    assert [(one.node, one.highest) for one in launched.refusals] == [("n2", highest)]


@pytest.mark.parametrize(
    ("listed", "named"),
    [
        ({"outcome": "done", "boot_id": "b", "jobs": 5}, "jobs is 5"),
        (
            {
                "boot_id": "b",
                "jobs": [
                    {
                        "namespace": "default",
                        "job": "ghost",
                        "generations": [
                            {
                                "submission": "a",
                                "generation": [1],
                                "ranks": [{"rank": 0, "alive": True}],
                            }
                        ],
                    }
                ],
            },
            "jobs.0.generations.0.submission is 'a'",
        ),
        ([1], "expected a valid dictionary"),
        ({"boot_id": "b", "jobs": [], "held": "yes"}, "held"),
    ],
)
async def test_a_node_that_lists_nonsense_is_silent_with_a_sentence(
    listed: Any, named: str
) -> None:
    fleet, backend = hostile()
    backend.listed = listed

    class Server:
        namespace = "default"

    activities = FleetActivities(cast(Any, fleet.fleets), cast(Client, Server()), "queue")
    looks = await environment().run(activities.probe_nodes, LookInput("default", ("n1", "n2")))
    assert [one.node for one in looks] == ["n1", "n2"] and looks[0].silent == ""
    assert "answer to list" in looks[1].silent and named in looks[1].silent


async def test_a_node_with_a_stalled_shim_is_shown_until_it_answers() -> None:
    stalled = [{"heartbeat": {**BEAT, "stamp": 2.0, "shim_silent": 4.1}}]
    fleet, _ = hostile(
        None,
        [HELLO, *stalled, [1]],
        [HELLO, {"heartbeat": {**BEAT, "stamp": 3.0}}],
        lost_after="60s",
    )
    await fleet.launch()
    watching = asyncio.create_task(fleet.watch())

    def has_passed() -> bool:
        shown = [
            details[0].stalled
            for details in fleet.server.beats
            if isinstance(details[0], WatchHeartbeat)
        ]
        return ("n2",) in shown and shown[-1] == ()

    await eventually(has_passed, "shown and gone again")
    watching.cancel()

"""The watch of one shard: what it waits for, what it says, and which leases it renews.

It renews only what the server acknowledged.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

import relaunch.activities.gang
import relaunch.activities.watch
from relaunch.activities.gang import CASCADE_GATHER_TIMEOUT_S, ECHO_LINES, WatchedShard
from relaunch.activities.reports import MissingProgress, WatchHeartbeat
from relaunch.activities.watch import (
    SHOWN_AFTER,
    SupersededWatchError,
    beat_interval,
    heartbeat_timeout,
    renewal_interval,
)
from relaunch.backends.base import Unreachable, WatchStream
from relaunch.evidence.observations import RankExited, RanksVanished
from relaunch.generation import Token
from relaunch.job.diagnose import is_root
from relaunch.job.events import (
    FaultObserved,
    NodeReturned,
    NodeUnreachable,
    ProgressSeen,
    RanksHung,
    StepReached,
)
from relaunch.job.hang import Pace
from relaunch.job.places import StartedPlaces
from relaunch.spec.fleet import FleetNode
from relaunch.spec.policy import HangLimits, Timeouts
from tests.activities.harness import TOKEN, Stand, ago, environment, eventually, stand
from tests.fakes.nodes import (
    Cut,
    Exit,
    Fault,
    Progress,
    Reboot,
    Script,
    ShimDies,
    SimulatedBackend,
    error_file,
)
from tests.recovery.builders import FOREIGN_KILL

CASCADE = (
    "RuntimeError: NCCL communicator was aborted",
    "torch.distributed.DistBackendError: Connection reset by peer",
)


@dataclass
class Elsewhere:
    """A backend whose fleet file has a wrong address for n2, or has no n2."""

    right: SimulatedBackend
    without: str = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.right, name)

    def node(self, name: str) -> FleetNode:
        if name == self.without:
            raise KeyError(name)
        return self.right.node(name)

    def watch(
        self, node: str, token: Token, after_seq: int, heartbeat: float
    ) -> AbstractAsyncContextManager[WatchStream]:
        assert node != self.without, "it is not in the file any more"
        if node == "n2":
            raise Unreachable(node, "nothing listens there")
        return self.right.watch(node, token, after_seq, heartbeat)


async def test_simultaneous_exits_are_one_report_with_the_root_first() -> None:
    fleet = stand(
        Script(
            (
                Exit(rank=0, exit_code=1, log_tail=CASCADE),
                Exit(rank=3, exit_code=1, error=error_file("ValueError: boom")),
            )
        )
    )
    await fleet.launch()
    report = await fleet.watch()
    (fault,) = report.events
    assert isinstance(fault, FaultObserved)
    first = fault.observations[0]
    assert isinstance(first, RankExited)
    assert (first.rank, first.error and first.error.message) == (3, "ValueError: boom")
    assert len(fault.observations) == 4
    # By the clocks of the nodes an echo may have been first: it is still known to be one.
    assert [is_root(one) for one in fault.observations] == [True, False, False, False]
    assert report.after_seq.keys() == {"n1", "n2"}


async def test_each_distinct_echo_keeps_its_last_lines() -> None:
    other = (*(f"NCCL INFO {n}" for n in range(300)), "ConnectionError: Broken pipe")
    fleet = stand(
        Script(
            (
                Exit(rank=0, exit_code=1, log_tail=CASCADE),
                Exit(rank=1, exit_code=1, log_tail=CASCADE),
                Exit(rank=2, exit_code=1, log_tail=other),
                Exit(rank=3, exit_code=1, error=error_file("ValueError: boom")),
            )
        )
    )
    await fleet.launch()
    report = await fleet.watch()
    (fault,) = report.events
    assert isinstance(fault, FaultObserved)
    assert [is_root(one) for one in fault.observations] == [True, False, False, False]
    sent = {one.rank: one.log_tail for one in fault.observations if isinstance(one, RankExited)}
    assert {sent[0], sent[1]} == {CASCADE, ()}
    assert sent[2] == other[-ECHO_LINES:]


async def test_echoes_alone_wait_some_seconds_for_their_root() -> None:
    fleet = stand(Script((Exit(rank=0, exit_code=1, log_tail=CASCADE),)))
    await fleet.launch()
    began = time.monotonic()
    report = await fleet.watch()
    assert time.monotonic() - began >= CASCADE_GATHER_TIMEOUT_S
    assert isinstance(report.events[-1], FaultObserved)


@pytest.mark.parametrize("kernel", [(), FOREIGN_KILL])
async def test_echoes_wait_for_a_root_that_is_slow_to_exit(kernel: tuple[str, ...]) -> None:
    fleet = stand(
        Script(
            (
                Exit(rank=0, exit_code=1, log_tail=CASCADE, kernel=kernel),
                Exit(rank=3, exit_code=1, after=1.5, error=error_file("boom")),
            )
        )
    )
    await fleet.launch()
    report = await fleet.watch()
    fault = report.events[-1]
    assert isinstance(fault, FaultObserved)
    (root,) = [one for one in fault.observations if is_root(one)]
    assert isinstance(root, RankExited) and root.rank == 3


async def test_s1_3_echoes_wait_for_a_root_that_is_reported_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relaunch.activities.gang, "CASCADE_GATHER_TIMEOUT_S", 0.0)
    fleet = stand(
        Script(
            (
                Exit(rank=0, exit_code=1, log_tail=CASCADE),
                Exit(rank=3, exit_code=1, after=1.5, error=error_file("boom")),
            )
        )
    )
    fleet.backend.exit_delay = 3600.0  # type: ignore[attr-defined]
    await fleet.launch()
    (fault,) = (await fleet.watch()).events
    assert isinstance(fault, FaultObserved)
    (root,) = [one for one in fault.observations if is_root(one)]
    assert isinstance(root, RankExited) and root.rank == 3


async def test_echoes_wait_for_a_node_that_has_not_answered_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The failed rank's node is slow: whatever it reports comes 2 s later."""
    monkeypatch.setattr(relaunch.activities.gang, "CASCADE_GATHER_TIMEOUT_S", 0.5)
    fleet = stand(
        Script(
            (
                Cut(node="n2", after=0.5, lasts=2.0),
                Exit(rank=3, exit_code=1, after=0.6, error=error_file("boom")),
                Exit(rank=0, exit_code=1, after=0.6, log_tail=CASCADE),
            )
        ),
        timeouts={"lease": "60s", "lost_after": "60s"},
    )
    await fleet.launch()
    fault = (await fleet.watch()).events[-1]
    assert isinstance(fault, FaultObserved)
    assert [is_root(one) for one in fault.observations] == [True, False, False, False]
    first = fault.observations[0]
    assert isinstance(first, RankExited) and first.rank == 3


@pytest.mark.parametrize("limit", ["lease", "lost_after"])
async def test_echoes_wait_for_a_lost_node_no_longer_than_is_safe(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaunch.activities.gang, "CASCADE_GATHER_TIMEOUT_S", 0.1)
    fleet = stand(ranks=1, timeouts={"lease": "1h", "lost_after": "1h", limit: "2s"})
    gang = WatchedShard(fleet.watch_input(), Pace(ago(1.0), expected=False))
    began = time.monotonic()
    gang.add_observation("n1", RankExited("n1", 0, 0, 1, None, ago(0.0), log_tail=CASCADE))
    fault = (await asyncio.wait_for(gang.report(), 60.0)).events[-1]
    assert time.monotonic() - began >= 1.9
    assert isinstance(fault, FaultObserved)
    assert [node for node, _ in fault.silent] == ["n1", "n2"]


async def test_echoes_wait_for_no_node_that_is_known_to_be_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relaunch.activities.gang, "CASCADE_GATHER_TIMEOUT_S", 0.1)
    echo = Exit(rank=0, exit_code=1, after=0.6, log_tail=CASCADE)
    fleet = stand(
        Script((Cut(node="n2", after=0.2), echo)), timeouts={"lease": "1h", "lost_after": "1h"}
    )
    await fleet.launch()
    await asyncio.sleep(0.5)
    fault = (await fleet.watch(lost=("n2",))).events[-1]
    assert isinstance(fault, FaultObserved)


async def test_echoes_of_all_ranks_wait_for_no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaunch.activities.gang, "CASCADE_GATHER_TIMEOUT_S", 3600.0)
    fleet = stand(Script((Exit(exit_code=1, log_tail=CASCADE),)))
    await fleet.launch()
    (fault,) = (await fleet.watch()).events
    assert isinstance(fault, FaultObserved) and len(fault.observations) == 4


async def test_success_needs_an_exit_with_0_of_every_rank() -> None:
    fleet = stand(Script((Exit(exit_code=0),)))
    await fleet.launch()
    report = await fleet.watch()
    assert report.all_succeeded
    assert report.exited == {"n1": (0, 1), "n2": (2, 3)}
    again = await fleet.watch(after_seq=report.after_seq, exited=report.exited)
    assert again.all_succeeded, "what is behind after_seq comes no more, and is not forgotten"


async def test_a_node_is_lost_after_lost_after_with_its_silence_given() -> None:
    fleet = stand(Script((Cut(node="n2", after=0.2),)), timeouts={"lost_after": "800ms"})
    await fleet.launch()
    began = time.monotonic()
    report = await fleet.watch()
    assert time.monotonic() - began >= 0.8
    (lost,) = report.events
    assert isinstance(lost, NodeUnreachable)
    assert lost.node == "n2"
    assert lost.unheard_for.total_seconds() >= 0.8


async def test_a_short_cut_loses_no_node() -> None:
    fleet = stand(
        Script((Cut(node="n2", after=0.2, lasts=0.3), Exit(exit_code=0, after=2.0))),
        timeouts={"lost_after": "1.5s"},
    )
    await fleet.launch()
    assert (await fleet.watch()).all_succeeded


async def test_a_lost_node_that_answers_again_has_returned() -> None:
    fleet = stand(Script((Cut(node="n2", after=0.2, lasts=1.0),)))
    await fleet.launch()
    report = await fleet.watch(lost=("n2",))
    assert report.events == (NodeReturned(1, "n2"),)


@pytest.mark.parametrize(
    "is_corrected", [True, False], ids=["the file is corrected", "its line is removed"]
)
async def test_a_node_with_a_wrong_line_is_found_by_a_later_fleet_file(
    is_corrected: bool,
) -> None:
    fleet = stand()
    await fleet.launch()
    right = fleet.backend
    fleet.fleets.simulated = Elsewhere(right)  # type: ignore[assignment]
    watching = asyncio.create_task(fleet.watch(lost=("n2",)))
    await asyncio.sleep(0.5)
    assert not watching.done()
    if is_corrected:
        fleet.fleets.simulated = right
        assert (await watching).events == (NodeReturned(1, "n2"),)
        return
    fleet.fleets.simulated = Elsewhere(right, without="n2")  # type: ignore[assignment]
    await asyncio.sleep(0.5)
    assert not watching.done(), "reached as before"
    watching.cancel()


async def test_a_lost_node_returning_with_the_last_exits_ends_the_job() -> None:
    fleet = stand()
    gang = WatchedShard(fleet.watch_input(lost=("n2",)), Pace(ago(1.0), expected=False))
    for rank in range(4):
        node = f"n{1 + rank // 2}"
        gang.process_line(
            node, {"heartbeat": {"stamp": 1.0, "alive": [], "lease_left": 1.0, "progress": {}}}
        )
        gang.add_observation(node, RankExited(node, rank, rank % 2, 0, None, ago(0.0)))
    report = await gang.report()
    assert report.events == (NodeReturned(1, "n2"),)
    assert report.all_succeeded, "no watch follows this one, so nothing would say so later"


async def test_a_node_back_during_a_fault_is_named_but_not_renewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relaunch.activities.gang, "CASCADE_GATHER_TIMEOUT_S", 2.0)
    monkeypatch.setattr(relaunch.activities.watch, "RECONNECT_DELAYS_S", (0.05, 0.1))
    # The fault is an echo, so that the report waits for its root while n2 returns.
    echo = Exit(rank=0, exit_code=1, after=0.3, log_tail=CASCADE)
    fleet = stand(Script((echo,)), ranks=1, timeouts={"lease": "6s", "heartbeat": "100ms"})
    monkeypatch.setattr(relaunch.activities.watch, "renewal_interval", lambda _: 0.1)
    await fleet.launch()
    fleet.backend.cut("n2", "controller-in", "controller-out")
    watching = asyncio.create_task(fleet.watch(lost=("n2",)))
    await eventually(
        lambda: any(life.kind == "ended" and life.node == "n1" for life in fleet.backend.lives),
        "failed",
    )
    fleet.backend.heal("n2")
    report = await watching
    assert report.events[0] == NodeReturned(1, "n2")
    assert isinstance(report.events[-1], FaultObserved)
    assert any(
        call.command == "watch" and call.node == "n2" and call.outcome == "done"
        for call in fleet.backend.calls
    )
    renewed = [call for call in fleet.backend.calls if (call.command, call.node) == ("renew", "n2")]
    assert renewed == [], "the job may go on without n2, and judges it by when it was lost"


async def test_a_fault_says_how_long_lost_nodes_have_been_silent() -> None:
    fleet = stand(
        Script((Exit(rank=0, exit_code=1, after=0.6, error=error_file("boom")),)), ranks=1
    )
    await fleet.launch()
    fleet.backend.cut("n2")
    began = time.monotonic()
    fault = (await fleet.watch(lost=("n2",))).events[-1]
    assert isinstance(fault, FaultObserved)
    ((node, age),) = fault.unheard
    assert (node, fault.silent) == ("n2", ())
    assert 0.3 <= age.total_seconds() <= time.monotonic() - began


async def test_leases_are_renewed_only_after_an_acknowledged_heartbeat() -> None:
    fleet = stand(timeouts={"lease": "600ms", "heartbeat": "100ms"})
    fleet.server.fails = RPCError("no", RPCStatusCode.UNAVAILABLE, b"")
    await _launched(fleet)
    running = environment()
    watching = asyncio.create_task(fleet.watch(running))
    await eventually(lambda: any(c.command == "watch" for c in fleet.backend.calls), "watched")
    await eventually(lambda: fleet.server.refused >= 2, "two heartbeats without an acknowledgement")
    assert fleet.renewals() == 0
    fleet.server.fails = None
    await eventually(lambda: fleet.renewals() > 0, "renewed")
    watching.cancel()
    await asyncio.wait([watching])


async def test_an_attempt_that_was_superseded_ends_and_renews_nothing() -> None:
    fleet = stand()
    await _launched(fleet)
    fleet.server.fails = RPCError("not found", RPCStatusCode.NOT_FOUND, b"")
    with pytest.raises(ExceptionGroup) as ended:
        await fleet.watch()
    assert ended.group_contains(SupersededWatchError)
    assert fleet.renewals() == 0


async def test_a_worker_shutdown_hands_the_watch_over_at_once() -> None:
    fleet = stand()
    await fleet.launch()
    running = environment()
    watching = asyncio.create_task(fleet.watch(running))
    await eventually(lambda: fleet.renewals() > 0, "renewed")
    began = time.monotonic()
    running.worker_shutdown()
    with pytest.raises(ApplicationError) as handed:
        await watching
    assert handed.value.type == "HandOver"
    assert time.monotonic() - began < 10
    assert not [life for life in fleet.backend.lives if life.kind == "ended"]


@pytest.mark.parametrize("plain", [True, False])
async def test_what_was_learned_is_taken_over_from_the_attempt_before(plain: bool) -> None:
    fleet = stand(Script((Progress(steps=((0.0, 7),)), Exit(exit_code=0, after=1.5))))
    await fleet.launch()
    pace = Pace(
        ago(100), expected=True, step=5, advanced_at=ago(50), intervals=(1.0, 2.0), steps=(1, 1)
    )
    before = WatchHeartbeat(1, 5, ago(50), None, {}, 2, (), pace)
    report = await fleet.watch(environment(2, (asdict(before) if plain else before,)))
    assert report.all_succeeded
    beats = [one for beat in fleet.server.beats for one in beat if isinstance(one, WatchHeartbeat)]
    assert beats[0].pace.step is None, "where training stands now, no node has said yet"
    assert all(beat.pace.intervals == (1.0, 2.0) for beat in beats), (
        "the time without a watch is no interval"
    )
    assert beats[-1].pace.step == 7
    assert isinstance(report.events[0], ProgressSeen)
    assert report.events[0].step == 7


@pytest.mark.parametrize("step", [None, 60])
async def test_how_far_training_has_come_outlives_its_attempt(step: int | None) -> None:
    """The rank that printed the steps may end before it prints another."""
    prints = () if step is None else (Progress(steps=((0.0, step),)),)
    fleet = stand(Script((*prints, Exit(exit_code=0, after=0.5))))
    await fleet.launch()
    seen = ago(5)
    pace = Pace(ago(100), expected=True, step=91, highest=91, position=91, advanced_at=seen)
    first = WatchHeartbeat(1, 91, seen, None, {}, 2, (), pace)
    report = await fleet.watch(environment(2, (first,)))
    assert isinstance(report.events[0], ProgressSeen)
    assert report.events[0].step == 91 and report.events[0].at >= seen
    (*_, left) = [one for beat in fleet.server.beats for one in beat]
    assert isinstance(left, WatchHeartbeat) and left.pace.highest == 91 and left.at >= seen


async def test_what_another_generation_left_is_not_taken_over() -> None:
    fleet = stand(Script((Exit(exit_code=0, after=0.5),)))
    await fleet.launch()
    old = WatchHeartbeat(7, 5, ago(50), None, {}, 2, (), Pace(ago(100), expected=True, step=5))
    assert (await fleet.watch(environment(2, (old,)))).events == ()


async def test_passing_the_step_that_was_asked_for_is_reported() -> None:
    fleet = stand(Script((Progress(steps=((0.0, 3), (0.4, 10))),)))
    await fleet.launch()
    report = await fleet.watch(report_at_step=10)
    assert [type(event) for event in report.events] == [ProgressSeen, StepReached]
    assert isinstance(report.events[1], StepReached)
    assert report.events[1].step == 10


async def test_a_flat_step_is_a_hang_and_names_the_slowest_ranks() -> None:
    fleet = stand(Script((Progress(steps=((0.0, 3),)), Progress(rank=2, steps=((0.0, 2),)))))
    await fleet.launch()
    report = await fleet.watch(hang=HangLimits.model_validate({"after": "1s"}))
    hang = report.events[-1]
    assert isinstance(hang, RanksHung)
    assert "has not changed" in hang.reason


RESUMED = tuple(Progress(rank=rank, steps=((0.0, 60),)) for rank in (1, 2, 3))
"""Each rank prints that it resumes at step 60, and only rank 0 prints the steps after that."""


@pytest.mark.parametrize(
    ("gang", "step_s"),
    [
        ("independent", 0.2),
        ("lockstep", 0.2),
        pytest.param("lockstep", 1.2, id="two steps take longer than the limit"),
    ],
)
async def test_a_rank_that_says_a_step_once_stops_no_lockstep_gang(
    gang: str, step_s: float
) -> None:
    steps = tuple((step_s * n, 60 + n) for n in range(round(4.0 / step_s)))
    fleet = stand(Script((*RESUMED, Progress(rank=0, steps=steps), Exit(exit_code=0, after=4.0))))
    await fleet.launch()
    # A limit that the user chose acts as written: no rank is looked at before.
    limits = HangLimits.model_validate({"after": "2s", "at_most": "2s"})
    report = await fleet.watch(hang=limits, in_lockstep=gang == "lockstep")
    hangs = [event for event in report.events if isinstance(event, RanksHung)]
    assert bool(hangs) == (gang == "independent")
    if gang == "lockstep":
        assert report.all_succeeded


async def test_a_new_watch_takes_a_step_said_once_long_ago_for_no_hang() -> None:
    steps = tuple((0.2 * n, 60 + n) for n in range(28))
    fleet = stand(Script((*RESUMED, Progress(rank=0, steps=steps), Exit(exit_code=0, after=5.6))))
    await fleet.launch()
    limits = HangLimits.model_validate({"after": "2s", "first_step": "2s", "at_most": "2s"})
    report = await fleet.watch(hang=limits, report_at_step=73)
    assert isinstance(report.events[-1], StepReached)
    report = await fleet.watch(hang=limits, after_seq=report.after_seq)
    assert report.all_succeeded, report
    assert any(isinstance(one, ProgressSeen) and one.step > 73 for one in report.events)


@pytest.mark.parametrize("answers", [True, False])
def test_a_step_said_once_is_no_interval_to_learn_from(answers: bool) -> None:
    fleet = stand(ranks=1)
    gang = WatchedShard(fleet.watch_input(), Pace(ago(3600.0), expected=True))

    def hear(node: str, rank: int, step: int, age: float) -> None:
        progress = {str(rank): {"step": step, "age": age}}
        line = {"heartbeat": {"stamp": 1.0, "alive": [], "lease_left": 1.0, "progress": progress}}
        gang.process_line(node, line)

    hear("n2", 1, 60, 3000.0)
    for step in range(2000, 2006):
        hear("n1", 0, step, 0.0)
        if answers:
            hear("n2", 1, 60, 3000.0)
        time.sleep(fleet.watch_input().timeouts.heartbeat.total_seconds())
    pace = gang.heartbeat().pace
    assert pace.step == 2005
    assert 0 < len(pace.intervals) < 5 and max(pace.intervals) < 100.0


async def test_a_gang_hangs_also_where_some_ranks_say_a_step_once() -> None:
    advances = Progress(rank=0, steps=((0.0, 60), *((0.2 * n, 60 + n) for n in range(1, 10))))
    fleet = stand(Script((*RESUMED, advances)))
    await fleet.launch()
    report = await fleet.watch(hang=HangLimits.model_validate({"after": "1s"}))
    hang = report.events[-1]
    assert isinstance(hang, RanksHung)
    assert "step 69 has not changed" in hang.reason


async def test_progress_never_reported_or_unreadable_is_no_hang() -> None:
    script = Script((Progress(rank=0, unreadable="not a number"), Exit(exit_code=0, after=1.5)))
    fleet = stand(script)
    await fleet.launch()
    report = await fleet.watch(
        hang=HangLimits.model_validate({"after": "0.3s", "first_step": "0.3s"})
    )
    assert report.all_succeeded


@pytest.mark.parametrize(
    ("went_on", "needed"), [(60.0, (1,)), (-1.0, ())], ids=["it was needed", "the others went on"]
)
async def test_a_fault_names_the_ranks_that_had_finished(
    monkeypatch: pytest.MonkeyPatch, went_on: float, needed: tuple[int, ...]
) -> None:
    monkeypatch.setattr(relaunch.activities.gang, "WENT_ON_S", went_on)
    script = Script(
        (
            Progress(rank=0, rate=20.0),
            Exit(rank=1, exit_code=0, after=0.2),
            Exit(rank=0, exit_code=1, after=0.5, log_tail=("KeyError: 'x'",)),
        )
    )
    fleet = stand(script)
    await fleet.launch()
    fault = (await fleet.watch()).events[-1]
    assert isinstance(fault, FaultObserved)
    assert tuple(one.rank for one in fault.finished) == needed


async def test_s3_5_a_rank_that_stalls_after_another_finished_hangs() -> None:
    script = Script((Exit(rank=0, exit_code=0), Progress(rank=1, steps=((0.0, 4),), hangs=True)))
    fleet = stand(script, timeouts={"exit_barrier": "700ms"})
    await fleet.launch()
    hang = (await fleet.watch()).events[-1]
    assert isinstance(hang, RanksHung)
    assert "0.7 s ago" in hang.reason


async def test_s3_5_ranks_advancing_past_the_exit_barrier_may_succeed() -> None:
    late = tuple(Exit(rank=rank, exit_code=0, after=2.5) for rank in (1, 2, 3))
    script = Script(
        (Exit(rank=0, exit_code=0), *late, *(Progress(rank=rank, rate=10.0) for rank in (1, 2, 3)))
    )
    fleet = stand(script, timeouts={"exit_barrier": "1.2s"})
    await fleet.launch()
    assert (await fleet.watch()).all_succeeded


@pytest.mark.parametrize(
    ("happening", "rebooted"),
    [
        (ShimDies(node="n2"), False),
        (Reboot(node="n2", after=0.3), True),
        (Reboot(node="n2", after=0.3, forgets=True), True),
    ],
)
async def test_ranks_that_vanish_unseen_are_reported_as_vanished(
    happening: ShimDies | Reboot, rebooted: bool
) -> None:
    fleet = stand(Script((happening,)), timeouts={"lost_after": "10s"})
    output = await fleet.launch()
    started = StartedPlaces(TOKEN.submission, TOKEN.generation, output.places)
    fault = (await fleet.watch(places=(started,))).events[-1]
    assert isinstance(fault, FaultObserved)
    (seen,) = fault.observations
    assert isinstance(seen, RanksVanished)
    assert (seen.node, seen.rebooted) == ("n2", rebooted)


async def test_a_broken_watch_goes_on_where_it_left_off() -> None:
    broken = Fault(kind="break", command="watch", lines=2, nth=None)
    fleet = stand(Script((Exit(exit_code=0, after=0.2),), (broken,)))
    await fleet.launch()
    assert (await fleet.watch()).all_succeeded
    assert sum(call.command == "watch" for call in fleet.backend.calls) > 2


async def _launched(fleet: Stand) -> None:
    held, fleet.server.fails = fleet.server.fails, None
    await fleet.launch()
    fleet.server.fails = held


def shard(*reports: tuple[str, dict[str, Any]]) -> WatchHeartbeat:
    """What a watch says after these heartbeats of its nodes: progress, or what was printed."""
    watched = WatchedShard(stand().watch_input(), Pace(ago(100), expected=False))
    for node, report in reports:
        known = {"progress": report} if "lines" not in report else {"unmatched": report}
        watched.process_line(node, {"heartbeat": {"stamp": 1.0, **known}})
    return watched.heartbeat()


def test_a_counter_that_starts_again_advances_while_all_do() -> None:
    last = {"0": {"step": 99}, "1": {"step": 99}}
    one = shard(("n1", last), ("n1", {"0": {"step": 0}, "1": {"step": 99}}))
    assert (one.pace.position, one.pace.intervals) == (99, ()), "rank 1 stands still"
    both = shard(("n1", last), ("n1", {"0": {"step": 4}}), ("n1", {"1": {"step": 3}}))
    assert (both.step, both.pace.highest, both.pace.position) == (3, 99, 100)
    assert both.pace.steps == (1,)


@pytest.mark.parametrize(
    ("steps", "restarts"),
    [
        pytest.param((40, 99, 37), True, id="the next epoch"),
        pytest.param((99, 0, 60), True, id="it is not forgotten"),
        pytest.param((40, 99, 80, 100), False, id="back to a checkpoint"),
        pytest.param((1, 2, 2, 3), False, id="forward"),
    ],
)
async def test_a_report_says_whether_a_counter_starts_again(
    steps: tuple[int, ...], restarts: bool
) -> None:
    watched = WatchedShard(stand().watch_input(), Pace(ago(100), expected=False))
    for one in steps:
        progress = {"0": {"step": one}, "1": {"step": 10**6}}
        watched.process_line("n1", {"heartbeat": {"stamp": 1.0, "progress": progress}})
    for rank in range(4):
        watched.add_observation(f"n{1 + rank // 2}", RankExited("", rank, 0, 0, None, ago(0)))
    report = await watched.report()
    assert isinstance(report.events[0], ProgressSeen)
    assert (report.events[0].restarts, report.events[0].step) == (restarts, max(steps))
    assert watched.heartbeat().pace.restarts == restarts, "its successor knows it as well"


def test_a_watch_says_why_no_step_is_known() -> None:
    printed = {"rank": 3, "lines": ["iter 1: loss 2"]}
    silent = {"rank": 0, "lines": []}
    assert shard().missing is None
    assert shard(("n1", silent), ("n2", printed)).missing == MissingProgress(
        "n2", 3, ("iter 1: loss 2",)
    )
    assert shard(("n1", silent)).missing == MissingProgress("n1", 0)
    unreadable = {"2": {"unreadable": "neither a step nor JSON"}}
    assert shard(("n1", unreadable), ("n2", printed)).missing == MissingProgress(
        "n1", 2, unreadable="neither a step nor JSON"
    )
    assert shard(("n1", {"0": {"step": 1}}), ("n2", printed)).missing is None
    assert shard(("n1", printed), ("n1", {"0": {"step": None, "checkpoint": 4}})).missing is None


SDK_PATIENCE_S = 5.0
"""Seconds after the time-out when the SDK cancels an activity of which it saw no heartbeat."""


@pytest.mark.parametrize("lease", [3, 9, 30, 60, 600])
@pytest.mark.parametrize("watches", [1, 30, 100, 300, 10_000])
def test_heartbeats_fit_into_time_outs_and_leases(lease: int, watches: int) -> None:
    timeouts = Timeouts.model_validate({"lease": f"{lease}s", "fence_after": f"{lease}s"})
    interval, limit = beat_interval(timeouts, watches), heartbeat_timeout(timeouts).total_seconds()
    assert 3 * interval <= limit
    assert limit * SHOWN_AFTER + interval < limit + SDK_PATIENCE_S
    # Each renewal follows a heartbeat: several fit into a lease, also if one is late or lost.
    assert 3 * max(interval, renewal_interval(timeouts)) <= lease


def test_more_watches_send_heartbeats_more_rarely() -> None:
    intervals = [beat_interval(Timeouts(), watches) for watches in (1, 10, 90, 150, 300, 10_000)]
    assert intervals == [3.0, 3.0, 3.0, 5.0, 10.0, 10.0]

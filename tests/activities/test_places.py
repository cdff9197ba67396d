"""An answer from elsewhere is no answer: for a stop, for a launch and for a watch."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from temporalio.activity import ActivityCancellationDetails
from temporalio.exceptions import ApplicationError

from relaunch.activities.launch import LAUNCH_ATTEMPTS, LaunchRanksOutput
from relaunch.activities.stop import StopRanksInput
from relaunch.job.events import NodeUnreachable
from relaunch.job.places import StartedPlaces
from tests.activities.harness import TOKEN, Stand, environment, eventually, stand
from tests.fakes.nodes import Fault, Script

ELSEWHERE = "n2 answers, but from another machine than the one generation 1 was started on"
NEXT = replace(TOKEN, generation=2)


async def launched(fleet: Stand) -> tuple[StartedPlaces, ...]:
    output = await fleet.launch()
    assert isinstance(output, LaunchRanksOutput)
    assert set(output.places) == {"n1", "n2"}
    return (StartedPlaces(TOKEN.submission, TOKEN.generation, output.places),)


def is_alive(fleet: Stand, node: str) -> bool:
    return not any(life.node == node and life.kind == "ended" for life in fleet.backend.lives)


async def test_a_stop_proves_something_only_at_the_place_of_the_launch() -> None:
    fleet = stand()
    places = await launched(fleet)
    order = StopRanksInput(
        TOKEN, "default", ("n1", "n2"), fleet.timeouts, 2, fences=False, once=True, places=places
    )
    fleet.backend.move("n2", 1)
    stopped = await environment().run(fleet.jobs.stop_ranks, order)
    assert (stopped.nodes, stopped.fenced, is_alive(fleet, "n2")) == (("n1",), (), True)
    fleet.backend.move("n2", 0)
    stopped = await environment().run(fleet.jobs.stop_ranks, order)
    assert (set(stopped.nodes), is_alive(fleet, "n2")) == ({"n1", "n2"}, False)


async def test_a_stop_after_a_reboot_of_the_place_is_proof() -> None:
    fleet = stand()
    places = await launched(fleet)
    fleet.backend.lose_power("n2")
    order = StopRanksInput(
        TOKEN, "default", ("n1", "n2"), fleet.timeouts, 2, fences=False, places=places
    )
    stopped = await asyncio.wait_for(environment().run(fleet.jobs.stop_ranks, order), 20)
    assert set(stopped.nodes) == {"n1", "n2"}


async def test_a_launch_that_would_begin_elsewhere_starts_nothing() -> None:
    fleet = stand()
    places = await launched(fleet)
    fleet.backend.move("n2", 1)
    with pytest.raises(ApplicationError, match=ELSEWHERE):
        await fleet.launch(token=NEXT, places=places)
    answer = await fleet.launch(attempt=LAUNCH_ATTEMPTS, token=NEXT, places=places)
    assert (answer.unreachable, answer.elsewhere, answer.start_sent) == (("n2",), ("n2",), False)
    assert answer.reason.startswith(ELSEWHERE)
    assert not any(life.token == NEXT for life in fleet.backend.lives)


async def test_an_attempt_that_cannot_prepare_reports_earlier_starts() -> None:
    """Else a node that was started and is silent now would be left without waiting for it."""
    fleet = stand()
    places = await launched(fleet)
    details = fleet.server.beats[-1]
    fleet.backend.cut("n2")
    answer = await environment(attempt=LAUNCH_ATTEMPTS, details=details).run(
        fleet.jobs.launch_ranks, fleet.launch_input()
    )
    assert (answer.unreachable, answer.start_sent) == (("n2",), True)
    assert answer.places == places[0].by_node


async def test_an_attempt_prepared_elsewhere_reports_earlier_starts() -> None:
    fleet = stand()
    places = await launched(fleet)
    fleet.backend.move("n2", 1)
    answer = await environment(attempt=2, details=fleet.server.beats[-1]).run(
        fleet.jobs.launch_ranks, fleet.launch_input()
    )
    assert [(refusal.node, refusal.why) for refusal in answer.refusals] == [
        ("n2", "prepared_again")
    ]
    assert (answer.start_sent, answer.places) == (True, places[0].by_node)


async def test_a_launch_cancelled_half_way_says_where_ranks_may_live() -> None:
    fleet = stand(
        Script(faults=(Fault(kind="delay", command="prepare", node="n2", nth=2, seconds=25),))
    )
    places = await launched(fleet)
    running = environment(attempt=2, details=fleet.server.beats[-1])
    launching = asyncio.create_task(running.run(fleet.jobs.launch_ranks, fleet.launch_input()))
    prepared = [call for call in fleet.backend.calls if call.command == "prepare"]
    await eventually(lambda: len(fleet.backend.calls) > len(prepared) + 2, "under way")
    running.cancel(ActivityCancellationDetails(cancel_requested=True))
    answer = await asyncio.wait_for(launching, 20)
    assert (answer.start_sent, answer.places) == (True, places[0].by_node)


async def test_a_launch_whose_worker_ends_is_left_to_the_next_one() -> None:
    fleet = stand(Script(faults=(Fault(kind="delay", command="prepare", node="n2", seconds=10),)))
    running = environment()
    launching = asyncio.create_task(running.run(fleet.jobs.launch_ranks, fleet.launch_input()))
    await eventually(lambda: bool(fleet.backend.calls), "under way")
    running.cancel(ActivityCancellationDetails(worker_shutdown=True))
    with pytest.raises(asyncio.CancelledError):
        await launching


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_watch_reports_a_node_that_answers_from_elsewhere_once(is_known: bool) -> None:
    fleet = stand(timeouts={"lost_after": "500ms"})
    places = await launched(fleet)
    fleet.backend.move("n2", 1)
    report = await fleet.watch(places=places, lost=("n2",) if is_known else ())
    (event,) = [one for one in report.events if isinstance(one, NodeUnreachable)]
    assert (event.node, event.is_elsewhere) == ("n2", True)
    assert event.reason.startswith(ELSEWHERE)
    watching = asyncio.create_task(fleet.watch(places=places, lost=("n2",), elsewhere=("n2",)))
    _, pending = await asyncio.wait({watching}, timeout=1.5)
    assert pending, "and a node that is known to be elsewhere is no news"
    fleet.backend.move("n2", 0)
    assert [one.kind for one in (await watching).events] == ["NodeReturned"]


async def test_a_watch_never_renews_what_answers_from_elsewhere() -> None:
    fleet = stand(timeouts={"lost_after": "500ms"})
    places = await launched(fleet)
    fleet.backend.move("n2", 1)
    await fleet.launch(token=TOKEN)  # it has such a generation, too
    await fleet.watch(places=places)
    assert not [
        call for call in fleet.backend.calls if call.command == "renew" and call.node == "n2"
    ]

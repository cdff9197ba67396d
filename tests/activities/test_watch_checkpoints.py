"""A watch that waits for a checkpoint.

Tested is what it calls a new one, and what it forgets of it when it is taken over.
"""

from __future__ import annotations

import errno
import os
from dataclasses import asdict
from typing import Any

import pytest

from relaunch.activities.gang import WatchedShard
from relaunch.activities.reports import WatchedCheckpoints, WatchHeartbeat, WatchReport
from relaunch.backends.base import Refusal, Unreachable
from relaunch.job.events import CheckpointSaved, ProgressSeen, StepReached
from relaunch.job.hang import Pace
from relaunch.spec.policy import HangLimits
from tests.activities.harness import ago, environment, stand
from tests.fakes.nodes import Exit, Progress, Script

PACE = Pace(ago(100), expected=True)


def saves(*checkpoints: tuple[float, int], rank: int = 0) -> Progress:
    return Progress(rank=rank, steps=((0.0, 100),), checkpoints=checkpoints, hangs=True)


async def watched(*happenings: Any, environment: Any = None, **input: Any) -> WatchReport:
    fleet = stand(Script(happenings))
    await fleet.launch()
    return await fleet.watch(environment, **{"report_checkpoint": True, **input})


def step_of(report: WatchReport) -> int:
    event = report.events[-1]
    assert isinstance(event, CheckpointSaved) and event.generation == 1
    return event.step


async def test_only_the_next_finished_checkpoint_ends_the_watch() -> None:
    report = await watched(saves((0.0, 80), (0.6, 100)))
    assert [type(event) for event in report.events] == [ProgressSeen, CheckpointSaved]
    assert step_of(report) == 100


async def test_a_checkpoint_is_finished_when_all_reporters_finished_it() -> None:
    assert (
        step_of(await watched(saves((0.0, 80), (0.3, 100)), saves((0.0, 80), (0.7, 90), rank=3)))
        == 90
    )


async def test_a_rank_that_has_exited_holds_no_checkpoint_back() -> None:
    assert (
        step_of(
            await watched(
                saves((0.0, 80), (0.6, 100)),
                saves((0.0, 80), rank=3),
                Exit(rank=3, exit_code=0, after=0.2),
            )
        )
        == 100
    )


async def test_an_awaited_step_and_a_checkpoint_may_pass_at_once() -> None:
    nodes = Nodes(report_at_step=10)
    for step, saved in ((3, None), (10, 10)):
        for node, ranks in (("n1", "01"), ("n2", "23")):
            progress = {rank: {"step": step, "age": 0.0, "checkpoint": saved} for rank in ranks}
            nodes.gang.process_line(node, {"heartbeat": {"stamp": 1.0, "progress": progress}})
    report = await nodes.gang.report()
    assert [type(event) for event in report.events] == [ProgressSeen, StepReached, CheckpointSaved]


@pytest.mark.parametrize("plain", [True, False])
async def test_a_checkpoint_saved_between_two_attempts_is_new(
    plain: bool,
) -> None:
    before = WatchHeartbeat(
        1, 5, ago(50), None, {}, 2, (), PACE, checkpoint=80, based=True, baseline=80
    )
    left = environment(2, (asdict(before) if plain else before,))
    assert step_of(await watched(saves((0.0, 100)), environment=left)) == 100


# --- what a gang makes of what its nodes say: no node, no time


class Nodes:
    """n1 has the ranks 0 and 1, n2 the ranks 2 and 3."""

    def __init__(self, before: WatchHeartbeat | None = None, **input: Any) -> None:
        given = stand().watch_input(**{"report_checkpoint": True, **input})
        self.gang = WatchedShard(
            given, Pace(given.launched_at, expected=given.progress_expected), before
        )

    def beat(self, node: str, **checkpoints: int | None) -> int | None:
        """The node reports its ranks, `r0=80`; return the checkpoint that the watch reports."""
        progress = {
            rank[1:]: {"step": 100, "age": 0.0, "checkpoint": saved}
            for rank, saved in checkpoints.items()
        }
        self.gang.process_line(node, {"heartbeat": {"stamp": 1.0, "progress": progress}})
        saved = self.gang._find_new_checkpoint()
        return None if saved is None else saved.step


def test_the_first_checkpoint_of_all_is_a_new_one() -> None:
    nodes = Nodes()
    assert (
        nodes.beat("n1", r0=None, r1=None),
        nodes.beat("n2"),
        nodes.beat("n1", r0=20, r1=None),
    ) == (None, None, 20)


def test_no_checkpoint_is_new_before_all_reachable_nodes_spoke() -> None:
    nodes = Nodes()
    assert (nodes.beat("n1", r0=80), nodes.beat("n1", r0=100)) == (None, None)
    assert nodes.gang.heartbeat().based is False
    nodes.gang.note_disconnection("n2", "no route to host")
    assert nodes.beat("n1", r0=100) == 100
    assert (
        nodes.gang.heartbeat().based,
        nodes.gang.heartbeat().baseline,
        nodes.gang.heartbeat().checkpoint,
    ) == (True, 80, 100)


def test_a_node_heard_late_first_reports_what_was_there_before() -> None:
    nodes = Nodes()
    nodes.gang.note_disconnection("n1", "no route to host")
    assert (nodes.beat("n2"), nodes.beat("n1", r0=80), nodes.beat("n1", r0=100)) == (
        None,
        None,
        100,
    )


def test_a_rank_that_tells_only_of_checkpoints_is_heard() -> None:
    nodes = Nodes()
    nodes.beat("n2")
    for saved in (80, 100):
        nodes.gang.process_line(
            "n1",
            {
                "heartbeat": {
                    "stamp": 1.0,
                    "progress": {"0": {"step": None, "checkpoint": saved}, "1": "what"},
                }
            },
        )
    saved = nodes.gang._find_new_checkpoint()
    assert saved is not None and saved.step == 100 and nodes.gang.heartbeat().step is None


def test_an_unasked_watch_shows_checkpoints_and_reports_none() -> None:
    nodes = Nodes(report_checkpoint=False)
    assert [
        nodes.beat(node, r0=saved) for node, saved in (("n1", 80), ("n2", 80), ("n1", 100))
    ] == [None] * 3
    assert nodes.gang.heartbeat().checkpoint == 80, (
        "the rank that n2 tells of has not finished the other one"
    )


@pytest.mark.parametrize(
    ("before", "first", "then"),
    [
        pytest.param(
            WatchHeartbeat(1, 5, ago(50), None, {}, 2, (), PACE, based=True),
            80,
            80,
            id="no watch had reported one",
        ),
        pytest.param(
            WatchHeartbeat(1, 5, ago(50), None, {}, 2, (), PACE, based=True, baseline=60),
            80,
            80,
            id="an older one",
        ),
        pytest.param(
            WatchHeartbeat(1, 5, ago(50), None, {}, 2, (), PACE, based=True, baseline=80),
            None,
            100,
            id="this one",
        ),
        pytest.param(
            WatchHeartbeat(1, 5, ago(50), None, {}, 1, ("n1",), PACE, based=True),
            None,
            100,
            id="n1 was not heard",
        ),
        pytest.param(
            WatchHeartbeat(1, 5, ago(50), None, {}, 0, (), PACE),
            None,
            100,
            id="it had not heard all",
        ),
        pytest.param(None, None, 100, id="there was none"),
    ],
)
def test_what_the_attempt_before_had_heard_stands(
    before: WatchHeartbeat | None, first: int | None, then: int
) -> None:
    nodes = Nodes(before)
    nodes.beat("n2")
    assert (nodes.beat("n1", r0=80), nodes.beat("n1", r0=then)) == (first, then)


def test_a_late_watch_calls_nothing_hung_before_steps_were_heard() -> None:
    """Watches are exchanged for hours while a job runs well, and one node may connect slowly."""
    nodes = Nodes(
        launched_at=ago(36_000),
        progress_expected=True,
        hang=HangLimits.model_validate({"after": "learned"}),
    )
    gang = nodes.gang
    gang.process_line("n2", {"heartbeat": {"stamp": 1.0, "progress": {}}})
    assert gang._find_hang() is None
    gang.note_disconnection("n1", "no route to host")
    assert gang._find_hang() is not None, "there is no node to wait for"
    nodes.beat("n1", r0=80)
    assert gang._find_hang() is None


async def test_leftovers_of_another_generations_watch_are_not_taken() -> None:
    other = WatchHeartbeat(7, 5, ago(50), None, {}, 2, (), PACE, based=True, baseline=3)
    assert (
        step_of(await watched(saves((0.0, 80), (0.6, 100)), environment=environment(2, (other,))))
        == 100
    )


class Folder:
    """Stands for a backend whose node answers so; real nodes do in tests/e2e."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    async def checkpoints(self, *order: Any) -> Any:
        assert order == ("n1", "out", "/home/x", "step_(?P<step>[0-9]+)")
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def make_answer(step: int | None, unreadable: str | None = None) -> dict[str, Any]:
    newest = None if step is None else {"step": step, "age": 1.0}
    return {"newest": newest, "incomplete": [], "unreadable": unreadable}


@pytest.mark.parametrize(
    ("first", "is_new"),
    [
        pytest.param(make_answer(None), True, id="an empty folder"),
        pytest.param(make_answer(None, os.strerror(errno.ENOENT)), True, id="no folder yet"),
        pytest.param(make_answer(10), True, id="an older one"),
        pytest.param(
            make_answer(None, "Input/output error"), False, id="a folder that is not read"
        ),
        pytest.param(Refusal("n1", "still_reading", "slow"), False, id="a folder that hangs"),
        pytest.param(Unreachable("n1", "no answer"), False, id="a node that does not answer"),
    ],
)
async def test_what_was_not_there_before_is_a_new_checkpoint(first: Any, is_new: bool) -> None:
    folder = WatchedCheckpoints("out", "/home/x", "step_(?P<step>[0-9]+)")
    gang = Nodes(checkpoints=folder).gang
    backend: Any = Folder(first, make_answer(20))
    for _ in range(2):
        await gang._read_checkpoints(lambda node: backend, folder)
    figures = gang.heartbeat().figures
    assert figures is not None and figures.checkpoint == 20
    assert figures.checkpoints == int(is_new)
    assert gang.heartbeat().checkpoint == 20

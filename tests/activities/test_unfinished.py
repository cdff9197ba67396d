"""Which rank is the cause where the one that failed ends after its peers, or is stopped first."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

import relaunch.activities.gang
from relaunch.activities.gang import WatchedShard
from relaunch.backends.base import Refusal
from relaunch.evidence.observations import RankExited
from relaunch.job.events import FaultObserved
from relaunch.job.hang import Pace
from tests.activities.harness import Stand, ago, stand
from tests.fakes.nodes import Exit, Progress, Script, Writes, error_file

CASCADE = ("torch.distributed.DistBackendError: Connection reset by peer",)
TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "train.py", line 7, in <module>',
    "    check(loss)",
    "ValueError: the loss is not a number",
)
LOST_PEER = (*TRACEBACK[:-1], *CASCADE)
HANDLED = (*TRACEBACK, "step 12 loss 2.5 lr 0.1")
ECHO = Exit(rank=0, exit_code=1, after=0.3, log_tail=CASCADE)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report as soon as the nodes were asked once."""
    monkeypatch.setattr(relaunch.activities.gang, "CASCADE_GATHER_TIMEOUT_S", 0.0)
    monkeypatch.setattr(relaunch.activities.gang, "WORDS_INTERVAL_S", 0.05)


async def watch(*happenings: Any, nodes: int = 2, **input: Any) -> FaultObserved:
    fleet = make_stand(*happenings, nodes=nodes)
    await fleet.launch()
    return fault_of(await fleet.watch(**input))


def make_stand(*happenings: Any, nodes: int = 2, limit: str = "60s") -> Stand:
    timeouts = {"lease": limit, "lost_after": "60s"}
    return stand(Script((ECHO, *happenings)), ranks=1, nodes=nodes, timeouts=timeouts)


def fault_of(report: Any) -> FaultObserved:
    fault = report.events[-1]
    assert isinstance(fault, FaultObserved)
    return fault


def list_ends(fault: FaultObserved) -> list[tuple[int, str]]:
    return [(one.rank, one.unfinished) for one in fault.observations if isinstance(one, RankExited)]


@pytest.mark.parametrize(
    "words",
    [Writes(rank=1, error=error_file("boom")), Writes(rank=1, log_tail=TRACEBACK)],
    ids=["error file", "log"],
)
async def test_a_rank_that_has_failed_and_not_ended_is_the_root(words: Writes) -> None:
    fault = await watch(words)
    assert list_ends(fault) == [(1, "alive"), (0, "")]
    first = fault.observations[0]
    assert isinstance(first, RankExited)
    assert (first.node, first.exit_code, first.signal) == ("n2", None, None)
    assert (first.error is not None) is (words.error is not None)
    assert first.log_tail == words.log_tail
    assert first.at < fault.observations[1].at, "it is as old as its words"


@pytest.mark.parametrize(
    "words",
    [(), CASCADE, LOST_PEER, HANDLED, ("step 12 loss 2.5",)],
    ids=["none", "a peer", "an exception for a peer", "it went on to train", "training"],
)
async def test_a_living_rank_with_other_words_is_no_root(words: tuple[str, ...]) -> None:
    fault = await watch(Writes(rank=1, log_tail=words))
    assert list_ends(fault) == [(0, "")]


@pytest.mark.parametrize("slack", [0.0, 10.0])
async def test_an_exception_after_which_ranks_advance(
    slack: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In lockstep another rank has advanced, so this one did, too: it handled the exception."""
    monkeypatch.setattr(relaunch.activities.gang, "WORDS_SLACK_S", slack)
    steps = Progress(rank=0, steps=((0.0, 1), (0.2, 2)))
    fault = await watch(steps, Writes(rank=1, error=error_file("boom")), in_lockstep=True)
    assert list_ends(fault) == ([(1, "alive"), (0, "")] if slack else [(0, "")])


async def test_an_old_exception_was_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaunch.activities.gang, "WORDS_LIMIT_S", 0.1)
    assert list_ends(await watch(Writes(rank=1, log_tail=TRACEBACK))) == [(0, "")]
    error = Writes(rank=1, error=error_file("boom"))
    assert list_ends(await watch(error))[0] == (1, "alive"), "only what is uncaught is in the file"


async def test_of_several_that_have_not_ended_the_earliest_is_first() -> None:
    fault = await watch(
        Writes(rank=1, log_tail=TRACEBACK, after=0.2),
        Writes(rank=2, log_tail=TRACEBACK, after=0.1),
        nodes=3,
    )
    assert list_ends(fault) == [(2, "alive"), (1, "alive"), (0, "")]


async def test_an_exit_that_is_a_root_outweighs_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaunch.activities.gang, "CASCADE_GATHER_TIMEOUT_S", 3600.0)
    late = Exit(rank=2, exit_code=1, after=0.6, error=error_file("boom"))
    fault = await watch(Writes(rank=1, log_tail=TRACEBACK), late, nodes=3)
    assert list_ends(fault) == [(2, ""), (0, "")]


async def test_words_of_a_rank_that_has_ended_since_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relaunch.activities.gang, "CASCADE_GATHER_TIMEOUT_S", 3600.0)
    lost = Exit(rank=1, exit_code=1, after=0.8, log_tail=CASCADE)
    assert list_ends(await watch(Writes(rank=1, log_tail=TRACEBACK), lost)) == [(0, ""), (1, "")]


async def test_a_core_dump_is_a_root_if_its_rank_blames_no_peer() -> None:
    assert list_ends(await watch(Writes(rank=1, state="dumping")))[0] == (1, "dumping")
    aborted = Writes(rank=1, state="dumping", log_tail=CASCADE)
    assert list_ends(await watch(aborted)) == [(0, "")]


async def test_the_exit_of_a_rank_that_is_ending_is_waited_for() -> None:
    exits = Exit(rank=1, exit_code=9, after=1.0)
    fault = await watch(Writes(rank=1, state="exiting"), exits)
    assert list_ends(fault) == [(1, ""), (0, "")]


async def test_a_rank_that_is_ending_is_waited_for_within_a_lease() -> None:
    fleet = make_stand(Writes(rank=1, state="exiting"), limit="1s")
    await fleet.launch()
    began = time.monotonic()
    assert list_ends(fault_of(await fleet.watch())) == [(0, "")]
    assert time.monotonic() - began >= 1.0


async def test_a_node_that_does_not_say_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an ECS task, or its agent is in an image and older than the order."""
    fleet = make_stand()

    async def last_words(node: str, token: Any) -> Any:
        return Refusal(node, "bad_order", "command is 'last-words'; expected one of prepare")

    monkeypatch.setattr(fleet.backend, "last_words", last_words)
    await fleet.launch()
    assert list_ends(fault_of(await fleet.watch())) == [(0, "")]


def count_questions(fleet: Stand) -> int:
    return sum(call.command == "last-words" for call in fleet.backend.calls)


async def test_no_node_is_asked_where_an_exit_is_the_root() -> None:
    root = Exit(rank=1, exit_code=1, after=0.2, error=error_file("boom"))
    fleet = make_stand(root, nodes=3)
    await fleet.launch()
    assert list_ends(fault_of(await fleet.watch())) == [(1, "")]
    assert count_questions(fleet) == 0


async def test_launchers_are_not_asked() -> None:
    input = stand().watch_input(first_rank=4, world_size=4)
    gang = WatchedShard(input, Pace(ago(1.0), expected=False))

    def reach(node: str) -> Any:
        raise AssertionError(node)

    await asyncio.wait_for(gang.keep_reading_words(reach), 60.0)


def line(rank: int, **fields: Any) -> dict[str, Any]:
    exited = {"seq": rank + 1, "kind": "RankExited", "rank": rank, "local_rank": rank, "pid": 7}
    return {"observation": {**exited, "exit_code": 1, "signal": None, "stopped": False, **fields}}


@pytest.mark.parametrize(
    ("tail", "failed"), [(TRACEBACK, True), (LOST_PEER, False), ((), False)], ids=str
)
async def test_a_rank_that_was_stopped_may_be_the_root(
    tail: tuple[str, ...], failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is not waited for: no rank is left that could be the root.
    monkeypatch.setattr(relaunch.activities.gang, "CASCADE_GATHER_TIMEOUT_S", 3600.0)
    before = {"error": None, "error_age": None, "log_tail": [*tail], "log_age": 3.0}
    stopped = {"exit_code": None, "signal": 15, "stopped": True, "before_stop": before}
    gang = WatchedShard(stand(nodes=1).watch_input(), Pace(ago(1.0), expected=False))
    gang.process_line("n1", line(0, log_tail=[*CASCADE]))
    gang.process_line("n1", line(1, **stopped))
    fault = fault_of(await asyncio.wait_for(gang.report(), 60.0))
    assert list_ends(fault) == ([(1, "stopped"), (0, "")] if failed else [(0, ""), (1, "")])
    root = fault.observations[0]
    assert isinstance(root, RankExited)
    assert (root.stopped, root.log_tail) == (False, tail if failed else CASCADE)

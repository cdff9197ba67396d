"""Where ranks are at the moment: asked of real nodes, and told so that a person can read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from relaunch.activities.logs import LogActivities, format_stacks
from relaunch.backends.base import Backend, Refusal, Unreachable
from relaunch.messages.logs import ReadStacksInput, Stack
from tests.backends.fleets import RUNS
from tests.backends.test_contract import Make, agent, launch, make, pytest_generate_tests, token

__all__ = ["agent", "make", "pytest_generate_tests"]


class Serves:
    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def backend(self, fleet: str) -> Backend:
        found: Backend = self._backend
        return found


async def ask(
    backend: Any, tmp_path: Path, *places: tuple[str, int], generation: int = 1
) -> tuple[Stack, ...]:
    nodes: Any = Serves(backend)
    of = token(generation)
    order = ReadStacksInput("contract", places, of.namespace, of.job, of.submission, generation)
    return (
        await ActivityEnvironment().run(LogActivities(nodes, tmp_path).read_stacks, order)
    ).stacks


async def test_each_running_rank_is_listed_with_its_pid_and_place(
    make: Make, tmp_path: Path
) -> None:
    fleet = make({1: RUNS})
    started = await launch(fleet)
    found = await ask(fleet.backend, tmp_path, ("n1", 1), ("n1", 0))
    assert [(one.rank, one.node) for one in found] == [(0, "n1"), (1, "n1")]
    for one in found:
        if one.text != "a simulated rank is nowhere":
            assert one.pid == started.pids[one.rank]
            assert "in the kernel:\n1 thread " in one.text, "of `sleep`, which is no Python"


async def test_a_node_says_that_it_does_not_know_a_generation(make: Make, tmp_path: Path) -> None:
    fleet = make({1: RUNS})
    await launch(fleet)
    (found,) = await ask(fleet.backend, tmp_path, ("n1", 0), generation=7)
    assert found.pid is None
    assert "was never prepared" in found.text


class Doubles:
    async def stacks(self, node: str, of: Any, rank: int) -> Any:
        if node == "cut-off":
            raise Unreachable(node, "no answer to stacks within 25 s")
        if node == "reinstalled":
            return Refusal(
                node, "no_such_generation", "generation 1 was never prepared on this node"
            )
        return {
            "outcome": "done",
            "stacks": [
                {
                    "rank": rank,
                    "pid": 7,
                    "threads": [],
                    "py_spy": 'Thread 7 (idle): "MainThread"\n' + "x" * 10**6,
                }
            ],
        }


async def test_a_silent_node_hides_no_other_and_a_deep_stack_is_cut(
    tmp_path: Path,
) -> None:
    found = await ask(
        Doubles(), tmp_path, ("fine", 0), ("cut-off", 1), ("reinstalled", 2), ("fine", 3)
    )
    cut_off, reinstalled = found[1:3]
    assert cut_off.text.startswith("no answer") and reinstalled.text.startswith("generation 1 ")
    assert [(one.rank, one.pid) for one in found] == [(0, 7), (1, None), (2, None), (3, 7)]
    assert sum(len(one.text) for one in found) <= 1_000_000


THREAD = {
    "tid": 7,
    "wchan": "futex_wait_queue",
    "status": "Name:\tpt_main\nState:\tS (sleeping)\n",
    "stack": {"unreadable": "Permission denied"},
}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"unreadable": "the rank does not run"}, "the rank does not run"),
        (
            {"threads": [THREAD], "py_spy": "Process 7: python train.py\n"},
            "Process 7: python train.py",
        ),
        (
            {"threads": [THREAD, THREAD], "py_spy": None},
            "py-spy is not on the node's PATH; in the kernel:\n"
            "2 threads S (sleeping) at futex_wait_queue",
        ),
        (
            {
                "threads": [{**THREAD, "wchan": "0", "stack": "[<0>] nv_ioctl+0x1\n[<0>] x"}],
                "py_spy": {"unreadable": "Error:\nno ptrace"},
            },
            "py-spy: Error: no ptrace; in the kernel:\n"
            "1 thread S (sleeping)\n    [<0>] nv_ioctl+0x1\n    [<0>] x",
        ),
        (
            {"threads": [{"status": {"unreadable": "gone"}}, None], "py_spy": None},
            "py-spy is not on the node's PATH; in the kernel:\n1 thread in no state",
        ),
    ],
)
def test_the_best_known_stack_is_shown(row: dict[str, Any], expected: str) -> None:
    assert format_stacks(row).startswith(expected)

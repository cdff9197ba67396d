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
from tests.backends.test_contract import Make, launch, make, pytest_generate_tests, token

__all__ = ["make", "pytest_generate_tests"]


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
        assert one.pid == started.pids[one.rank]
        assert one.text.startswith(f"Process {one.pid}: ")


async def test_a_node_says_that_it_does_not_know_a_generation(make: Make, tmp_path: Path) -> None:
    fleet = make({1: RUNS})
    await launch(fleet)
    (found,) = await ask(fleet.backend, tmp_path, ("n1", 0), generation=7)
    assert found.pid is None
    assert "was never prepared" in found.text


THREAD = {
    "tid": 7,
    "name": "MainThread",
    "frames": [["forward", "model.py", 30], ["<module>", "train.py", 9]],
}
PROCESS = {
    "pid": 7,
    "parent": 1,
    "rank": 0,
    "command": "python train.py",
    "state": "S",
    "blocked": 0,
    "cpu_s": 12.25,
    "read_bytes": None,
    "written_bytes": None,
    "wchan": None,
    "kernel": [],
    "threads": [THREAD],
    "source": "py-spy",
    "unreadable": None,
}
ROW = {"rank": 0, "pid": 7, "unreadable": None, "processes": [PROCESS], "flight": None}


class Doubles:
    def __init__(self) -> None:
        self.asked: list[tuple[str, int | None]] = []

    async def stacks(self, node: str, of: Any, rank: int | None) -> Any:
        self.asked.append((node, rank))
        if node == "cut-off":
            raise Unreachable(node, "no answer to stacks within 25 s")
        if node == "reinstalled":
            return Refusal(
                node, "no_such_generation", "generation 1 was never prepared on this node"
            )
        deep = {**PROCESS, "threads": [{**THREAD, "frames": [["x" * 10**6, "y.py", 1]]}]}
        rows = [{**ROW, "rank": one, "processes": [deep]} for one in (0, 3)]
        return {"outcome": "done", "stacks": rows}


async def test_each_node_is_asked_once_and_hides_no_other(tmp_path: Path) -> None:
    backend = Doubles()
    found = await ask(
        backend,
        tmp_path,
        ("fine", 0),
        ("cut-off", 1),
        ("reinstalled", 2),
        ("fine", 3),
        ("fine", 4),
    )
    cut_off, reinstalled, *_, other = found[1:]
    assert cut_off.text.startswith("no answer") and reinstalled.text.startswith("generation 1 ")
    assert [(one.rank, one.pid) for one in found] == [
        (0, 7),
        (1, None),
        (2, None),
        (3, 7),
        (4, None),
    ]
    assert other.text == "the node has no such rank"
    assert sum(len(one.text) for one in found) <= 1_000_000, "a deep stack is cut"
    assert sorted(backend.asked, key=str) == [("cut-off", 1), ("fine", None), ("reinstalled", 2)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({**ROW, "unreadable": "the rank does not run"}, ["the rank does not run"]),
        (
            ROW,
            [
                "Process 7: python train.py",
                "state S; 12.2 s of CPU so far",
                "Thread 7: MainThread",
                "    forward (model.py:30)",
                "    <module> (train.py:9)",
            ],
        ),
        (
            {
                **ROW,
                "processes": [
                    {
                        **PROCESS,
                        "state": "D",
                        "wchan": "nv_ioctl",
                        "kernel": ["nv_ioctl", "do_syscall_64"],
                        "threads": [],
                        "unreadable": "no ptrace",
                    }
                ],
            },
            [
                "Process 7: python train.py",
                "state D, in the kernel at nv_ioctl; 12.2 s of CPU so far",
                "    nv_ioctl (kernel)",
                "    do_syscall_64 (kernel)",
                "no Python stack: no ptrace",
            ],
        ),
    ],
)
def test_a_stack_is_shown_as_py_spy_does(row: dict[str, Any], expected: list[str]) -> None:
    assert format_stacks(row).splitlines() == expected

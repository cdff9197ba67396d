"""Jobs whose ranks torchrun or ft_launcher starts.

The rank that failed is named, all are launched again, and each reports its own step.

With a double of torchrun everywhere; with the real ones where there is a Python with torch.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from relaunch.evidence.causes import Cause
from tests.chaos.world import RANK_PROGRAM, ROOT, Job, World, chaos_policy, eventually
from tests.torch_python import PYTHON

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

NEXT_PORT = 'MASTER_PORT=$((MASTER_PORT + 1)) exec "$0" "$@"'
"""The launcher's own store is at MASTER_PORT: these ranks make theirs beside it."""
REAL = [
    pytest.param(launcher, marks=[pytest.mark.long, pytest.mark.needs_module(module)])
    for launcher, module in (
        ("torchrun", "torch.distributed"),
        ("ft_launcher", "nvidia_resiliency_ext.fault_tolerance"),
    )
]


def double(world: World) -> str:
    """A PATH on which torchrun is the double."""
    folder = world.folder / "launchers"
    folder.mkdir(exist_ok=True)
    program = folder / "torchrun"
    program.write_text(
        f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "
        f'{ROOT / "tests/doubles/torchrun.py"} "$@"\n'
    )
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


async def submitted(world: World, name: str, **spec: Any) -> Job:
    rank = [sys.executable, "-S", str(RANK_PROGRAM), str(world.folder / "jobs" / name)]
    return await world.submit(
        name=name,
        nproc=2,
        launcher="torchrun",
        env={"PATH": double(world)},
        command=["sh", "-c", NEXT_PORT, *rank],
        **spec,
    )


async def reported(job: Job, node: str, ranks: tuple[int, ...]) -> None:
    """Each of these ranks, and no other, has reported its progress on a node."""

    async def all_there() -> bool:
        folder = job.generation_folder(node)
        found = sorted(path.name for path in (folder / "progress").iterdir()) if folder else []
        return found == [f"rank_{rank}" for rank in ranks]

    await eventually(all_there, f"{node} does not have the steps of {ranks}")


async def is_named_and_all_go_on(world: World) -> None:
    job = await submitted(world, "below")
    await job.until_phase("RUNNING", generation=1)
    await job.until_watched()
    await reported(job, "n2", (2, 3))
    before = job.step() or 0
    victim = next(start for start in job.starts() if start["rank"] == 3)
    os.kill(victim["pid"], signal.SIGKILL)
    await job.until_phase("RUNNING", generation=2)
    await job.until_steps()
    await reported(job, "n1", (0, 1))
    assert (job.step() or 0) > before
    assert {start["rank"] for start in job.starts()} == {0, 1, 2, 3}
    assert [
        len([start for start in job.starts() if start["token"].endswith(f"/{number}")])
        for number in (1, 2)
    ] == [4, 4]
    incident = (await job.incidents())[0]
    assert "rank 3" in incident.reason and "SIGKILL" in incident.reason
    assert (incident.nodes, incident.ranks) == (("n2",), (3,))
    assert not job.lines("violations")
    job.let_end()
    await job.until_phase("SUCCEEDED")
    await world.tidy(job)


@pytest.mark.long
async def test_a_rank_killed_below_a_launcher_is_named_and_all_resume(
    world: World,
) -> None:
    await is_named_and_all_go_on(world)


@pytest.mark.long
async def test_a_rank_killed_below_its_launcher_over_ssh_is_named(
    tmp_path: Path,
) -> None:
    async with World(tmp_path / "world", 127, spares=0, backend="ssh", answer_within=5.0) as hosts:
        await is_named_and_all_go_on(hosts)


@pytest.mark.long
async def test_a_killed_launcher_takes_its_ranks_along_and_is_named(
    world: World,
) -> None:
    job = await submitted(world, "headless")
    await job.until_phase("RUNNING", generation=1)
    await job.until_watched()
    victim = next(start for start in job.starts() if start["rank"] == 1)
    os.kill(
        int(Path(f"/proc/{victim['pid']}/stat").read_text().rsplit(")", 1)[1].split()[1]),
        signal.SIGKILL,
    )
    await job.until_phase("RUNNING", generation=2)
    await job.until_steps()
    incident = (await job.incidents())[0]
    assert "launcher" in incident.reason and "SIGKILL" in incident.reason
    assert (incident.nodes, incident.ranks) == (("n1",), ())
    assert not job.lines("violations")
    job.let_end()
    await job.until_phase("SUCCEEDED")
    await world.tidy(job)


@pytest.mark.long
async def test_exit_code_93_of_a_rank_is_honoured_through_its_launcher(world: World) -> None:
    command = ["sh", "-c", 'test "$RANK" = 2 && exit 93; exec sleep 1000']
    job = await world.submit(
        name="no-more", nproc=2, launcher="torchrun", env={"PATH": double(world)}, command=command
    )
    await job.until_phase("FAILED")
    state = await job.state()
    assert (state.generation, state.exit_code) == (1, 93)
    await world.tidy(job)


@pytest.mark.parametrize("launcher", REAL)
async def test_ddp_below_a_real_launcher_resumes_after_a_killed_rank(
    world: World, launcher: str
) -> None:
    checkpoint = world.folder / f"{launcher}.pt"
    command = [
        PYTHON,
        str(ROOT / "examples/train_ddp.py"),
        "--checkpoint",
        str(checkpoint),
        "--steps",
        "30",
        "--pause",
        "0.2",
    ]
    # A rank imports torch for seconds before its first step, and an idle machine is not promised.
    policy = chaos_policy(hang={}, times={"stop_grace": "2s"})
    job = await world.submit(
        name=f"ddp-{launcher}".replace("_", "-"),
        nproc=2,
        launcher=launcher,
        command=command,
        policy=policy,
    )
    await job.until_phase("RUNNING", generation=1)

    async def advanced() -> bool:
        return checkpoint.exists()

    await eventually(advanced, "no checkpoint is written", 120.0)
    folder = job.generation_folder("n1")
    assert folder is not None
    rank, pid = next(
        (int(path.stem[5:]), int(path.read_text().partition('"pid": ')[2].partition(",")[0]))
        for path in (folder / "launched").iterdir()
    )
    os.kill(pid, signal.SIGKILL)
    await job.until_phase("SUCCEEDED", patience=200.0)
    state = await job.state()
    assert state.generation == 2
    assert state.progress is not None and state.progress.step == 30
    incident = (await job.incidents())[0]
    assert f"rank {rank}" in incident.reason and "SIGKILL" in incident.reason
    assert incident.cause is not Cause.APPLICATION
    await world.tidy(job)

"""Plays rounds in a world, checks each, and keeps what explains a failure."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import time
import traceback
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from temporalio.service import RPCError

from relaunch.config import ConfigError
from tests.chaos.checks import violations
from tests.chaos.disturbances import ON_CLOCKS, ON_DISKS
from tests.chaos.rounds import Round
from tests.chaos.world import World

Cell = tuple[str, str]
LONGEST_ROUND = 480.0
"""Seconds. A round has at most three waits of a minute; one that takes longer hangs."""

ANSWER_TIMEOUT = {"local": 1.0, "ssh": 2.0}
"""Seconds: a login forks five processes where a local session is one."""


async def end_by_signal(program: Coroutine[Any, Any, int]) -> int:
    """Run a program that leaves no process and no mount behind on SIGINT and SIGTERM."""
    task, loop = asyncio.ensure_future(program), asyncio.get_running_loop()

    def interrupt() -> None:
        if not task.cancelling():  # a second signal would interrupt the tidying up
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        return await task
    except asyncio.CancelledError:
        return 130


@dataclass
class Tally:
    passed: dict[Cell, int] = field(default_factory=lambda: defaultdict(int))
    failed: dict[Cell, int] = field(default_factory=lambda: defaultdict(int))
    reports: list[str] = field(default_factory=list)
    file: Path | None = None
    """Where each round that was played is written down, so that a run that was interrupted goes on.
    """

    def restore(self) -> set[tuple[Cell, int]]:
        """Count the rounds that were played before; return them, by cell and seed."""
        played = set()
        if self.file is not None and self.file.exists():
            for line in self.file.read_text().splitlines():
                phase, victim, seed, report = json.loads(line)
                played.add(((phase, victim), seed))
                self._count((phase, victim), report)
        return played

    def add(self, cell: Cell, seed: int, report: str | None) -> None:
        """Count a round; `report` says why it failed."""
        self._count(cell, report)
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(json.dumps((*cell, seed, report)) + "\n")

    def _count(self, cell: Cell, report: str | None) -> None:
        (self.passed if report is None else self.failed)[cell] += 1
        if report is not None:
            self.reports.append(report)


async def play(world: World, cell: Cell, seed: int, tally: Tally) -> bool:
    """Play one round and check it; say in `tally` what came of it."""
    phase, victim = cell
    round = Round(world, phase, victim, random.Random(seed))
    found: list[str] = []
    try:
        async with asyncio.timeout(LONGEST_ROUND):
            expected = await round.play()
            found = await violations(round.job, expected)
    except (AssertionError, TimeoutError) as error:
        found = [str(error) or f"it took longer than {LONGEST_ROUND:g} s: {traceback.format_exc()}"]
    if not found:
        tally.add(cell, seed, None)
    else:
        kept = await keep(world, round, found, seed)
        name = round.job.name if hasattr(round, "job") else "-"
        tally.add(
            cell,
            seed,
            f"{phase} × {victim}, seed of the round {seed}, job {name}: {'; '.join(found)}\n"
            f"    kept in {kept}",
        )
        print(f"FAILED {tally.reports[-1]}", flush=True)
    if hasattr(round, "job"):
        await world.tidy(round.job)
    return not found


async def keep(world: World, round: Round, found: list[str], seed: int) -> Path:
    """Copy what explains a failure, before the world is tidied."""
    folder = (
        world.folder.parent / "failures" / f"{round.phase}-{round.victim.replace(' ', '-')}-{seed}"
    )
    shutil.rmtree(folder, ignore_errors=True)  # of the same round in a run that was interrupted
    folder.mkdir(parents=True)
    (folder / "round.txt").write_text("\n".join((*round.log, "", *found)) + "\n")
    for name in ("worker.log", "server.log"):
        shutil.copy(world.folder / name, folder / name)
    if not hasattr(round, "job"):
        return folder
    if round.job.folder.exists():
        shutil.copytree(round.job.folder, folder / "job")
    for name in world.names:
        world.places.keep(name, folder / name)
    try:
        async with asyncio.timeout(10):
            history = await world.client.get_workflow_handle(
                f"job/{round.job.name}"
            ).fetch_history()
            (folder / "history.json").write_text(history.to_json())
    except (TimeoutError, RPCError, ConfigError) as error:
        (folder / "history.txt").write_text(f"it cannot be read: {error!r}")
    return folder


async def work(
    number: int,
    folder: Path,
    queue: list[tuple[Cell, int]],
    tally: Tally,
    until: float,
    backend: str = "local",
    apart: bool = False,
    answer_within: float | None = None,
    warm: bool = False,
) -> None:
    """One world that plays rounds until none is left.

    `answer_within`: seconds; None: as the backend's nodes need on an idle machine.
    """
    place, victims = folder / f"world-{number}", {victim for (_, victim), _ in queue}
    shutil.rmtree(place, ignore_errors=True)  # of a run that was interrupted
    needs = {
        "disks": bool(victims & set(ON_DISKS)),
        "clocks": bool(victims & set(ON_CLOCKS)),
    }
    within = answer_within or ANSWER_TIMEOUT[backend]
    async with World(
        place, number, backend=backend, apart=apart, answer_within=within, warm=warm, **needs
    ) as world:
        while queue and time.monotonic() < until:
            cell, seed = queue.pop(0)
            begun = time.monotonic()
            ok = await play(world, cell, seed, tally)
            print(
                f"{'ok    ' if ok else 'FAILED'} {cell[0]} × {cell[1]}  "
                f"{time.monotonic() - begun:.1f} s, {len(queue)} left",
                flush=True,
            )

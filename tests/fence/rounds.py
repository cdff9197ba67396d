"""Plays attacks in worlds, reads violations from the ranks' stamps, and keeps what was played."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from temporalio.service import RPCError

from relaunch.config import ConfigError
from tests.fence import random_faults
from tests.fence.attacks import ATTACKS, Attack, Attempt
from tests.fence.world import FenceWorld

MAX_ROUND_S = 300.0
RANDOM = Attack(
    random_faults.NAME,
    random_faults.play,
    (random_faults.__doc__ or "").strip(),
    random_faults.WORLD,
    True,
    lambda: None,
)
ALL = {**ATTACKS, RANDOM.name: RANDOM}


@dataclass(frozen=True)
class Result:
    attack: str
    round: int
    seed: int
    outcome: str
    """`overlap`, or another fault; `held`: a newer generation was launched and none was beside it,
    or the older ranks ended first; `no launch`: neither, in the time that there was; `not staged`:
    the harm could not be done in time."""
    overlaps: tuple[str, ...]
    seconds: float
    log: tuple[str, ...] = ()

    def __str__(self) -> str:
        line = f"{self.outcome:<10} {self.attack} round {self.round}, {self.seconds:.0f} s"
        return "\n    ".join((line, *self.overlaps[:6]))


class Record:
    """The results of a run, in a file, so that a run that was interrupted goes on where it was."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._file = folder / f"results-{seed}.jsonl"
        self.results: list[Result] = []
        with contextlib.suppress(FileNotFoundError):
            for line in self._file.read_text().splitlines():
                self.results.append(Result(**json.loads(line)))

    def has(self, attack: str, number: int) -> bool:
        return any((one.attack, one.round) == (attack, number) for one in self.results)

    def add(self, result: Result) -> None:
        self.results.append(result)
        with self._file.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def table(self) -> list[str]:
        """Return rows of how often each attack was played, and what came of it."""
        outcomes = ("held", "no launch", "not staged", "overlap")
        wide = max((len(one.attack) for one in self.results), default=6)
        rows = [f"{'attack':<{wide}}  " + "  ".join(f"{outcome:>10}" for outcome in outcomes)]
        for name in dict.fromkeys(one.attack for one in self.results):
            counts = [
                sum((one.attack, one.outcome) == (name, outcome) for one in self.results)
                for outcome in outcomes
            ]
            rows.append(f"{name:<{wide}}  " + "  ".join(f"{count:>10}" for count in counts))
        return rows


def seed_of(seed: int, attack: str, number: int) -> int:
    return random.Random(f"{seed}/{attack}/{number}").getrandbits(32)


async def play(world: FenceWorld, attack: Attack, number: int, seed: int) -> tuple[Result, Attempt]:
    """Play one round; what cannot be brought about in time is no violation."""
    attempt = Attempt(world, random.Random(seed))
    outcome = ""
    try:
        async with asyncio.timeout(MAX_ROUND_S):
            await attack.play(attempt)
    except (AssertionError, TimeoutError, RPCError, ConfigError, OSError, ValueError) as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # The run was interrupted: the round does not count.
            raise asyncio.CancelledError from error
        attempt.note(f"stopped: {error!r}\n{traceback.format_exc()}")
        outcome = "" if attempt.has_launched or attempt.has_ended_first else "not staged"
    overlaps = (*(attempt.job.overlaps() if attempt.job is not None else ()), *attempt.faults)
    outcome = (
        "overlap"
        if overlaps
        else outcome or ("held" if attempt.has_launched or attempt.has_ended_first else "no launch")
    )
    seconds = time.monotonic() - attempt.began
    return Result(
        attack.name, number, seed, outcome, overlaps, round(seconds, 1), tuple(attempt.log)
    ), attempt


def keep(world: FenceWorld, attempt: Attempt, result: Result, folder: Path) -> Path:
    """Copy what explains a result, before the world is tidied."""
    place = folder / "failures" / f"{result.attack}-{result.round}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (place / "round.txt").write_text("\n".join((str(result), "", *attempt.log)) + "\n")
    shutil.copy(world.folder / "worker.log", place)
    if attempt.job is not None:
        shutil.copytree(attempt.job.folder, place / "job")
    for name in world.names:
        world.places.keep(name, place / name)
    return place


@dataclass
class Stage:
    """A world that is made when it is needed.

    And made again when the next attack needs another or it broke.
    """

    folder: Path
    number: int = 0
    world: FenceWorld | None = None
    needs: Mapping[str, Any] = field(default_factory=dict)

    async def enter(self, attack: Attack) -> FenceWorld:
        if self.world is None or self.needs != attack.world or not attack.can_share:
            await self.leave()
            self.number += 1
            place = self.folder / f"world-{self.number}"
            shutil.rmtree(place, ignore_errors=True)
            self.world, self.needs = (
                await FenceWorld(place, **attack.world).__aenter__(),
                attack.world,
            )
        return self.world

    async def leave(self) -> None:
        world, self.world = self.world, None
        if world is not None:
            await world.__aexit__()
            shutil.rmtree(world.folder, ignore_errors=True)


async def work(folder: Path, queue: list[tuple[Attack, int]], seed: int, record: Record) -> None:
    """Play what is in the queue until it is empty."""
    stage = Stage(folder)
    try:
        while queue:
            attack, number = queue.pop(0)
            world = await stage.enter(attack)
            result, attempt = await play(world, attack, number, seed_of(seed, attack.name, number))
            record.add(result)
            print(f"{result}, {len(queue)} left" if not result.overlaps else result, flush=True)
            if result.outcome in ("overlap", "not staged"):
                print(f"    kept in {keep(world, attempt, result, folder)}", flush=True)
            try:
                if attempt.job is not None:
                    async with asyncio.timeout(120):
                        await world.tidy(attempt.job)
            except (AssertionError, TimeoutError, RPCError, OSError) as error:
                print(f"    the world is made again: {error!r}"[:200], flush=True)
                await stage.leave()
            if not attack.can_share:
                await stage.leave()
    finally:
        await stage.leave()

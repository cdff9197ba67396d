"""`python -m tests.chaos.real_cut`: one long cut with the real timeouts of the default policy.

Of two gangs side by side.

Of one the controller alone loses sight: it must go on where it is. The other loses a node for
everybody: it must go on elsewhere.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

from relaunch.backends.local import CUTS, cut, heal
from relaunch.spec.policy import preset
from tests.chaos.checks import violations
from tests.chaos.rounds import LOST, NOTHING, Expected, Tries
from tests.chaos.world import World

MINUTES = 10.0


async def endure(
    world: World, what: tuple[str, ...], freeze: bool, minutes: float, expected: Tries
) -> list[str]:
    async with world:
        job = await world.submit(policy=preset("default"))
        await job.until_phase("RUNNING")
        await job.until_watched()
        began = time.monotonic()
        cut(world.node("n2"), what, freeze_ranks=freeze)
        seen = ""
        while time.monotonic() < began + 60 * minutes:
            phase, generation = await job.phase()
            if (now := f"{phase}, generation {generation}") != seen:
                print(
                    f"{time.monotonic() - began:6.1f} s  {job.name}: {now}, step {job.step()}",
                    flush=True,
                )
                seen = now
            await asyncio.sleep(1.0)
        heal(world.node("n2"))
        print(
            f"{time.monotonic() - began:6.1f} s  {job.name}: healed at step {job.step()}",
            flush=True,
        )
        await job.until_phase("RUNNING")
        await job.until_steps()
        job.let_end()
        await job.until_phase("SUCCEEDED")
        for incident in await job.incidents():
            print(
                f"          {incident.cause}: {'; '.join(d.reason for d in incident.decisions)}; "
                f"{incident.outcome}"
            )
        return await violations(job, Expected((expected,)))


async def main() -> int:
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else MINUTES
    folder = Path(tempfile.mkdtemp(prefix="relaunch-cut-"))
    away = endure(
        World(folder / "controller", 10),
        ("controller-in", "controller-out"),
        False,
        minutes,
        NOTHING,
    )
    dead = endure(World(folder / "everybody", 11), CUTS, True, minutes, LOST)
    found = [*await asyncio.gather(away, dead)]
    print(
        "\n".join(line for lines in found for line in lines)
        or "nothing was lost, doubled or spent without need"
    )
    return 1 if any(found) else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

"""What ranks draw at random that are forked on one node, where each uses the GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.gpu.warm import READY_LIMIT, await_second_generation, await_standby
from tests.programs.service import Service

PROGRAM = Path(__file__).with_name("train") / "draw.py"
MODULES = ("torch,numpy", "torch,transformers", "torch,torch._dynamo,numpy", "torch,cupy")
RANKS = 4
Row = dict[str, Any]


def run_draws(service: Service, modules: str, python: str, work: Path) -> Row:
    name = "draw-" + modules.replace(",", "-").replace(".", "-").replace("_", "")
    folder = work / "seeds" / name
    folder.mkdir(parents=True)
    job = {
        "name": name,
        "fleet": "shared",
        "command": [python, "-u", str(PROGRAM)],
        "workdir": str(folder),
        "nproc_per_node": RANKS,
        "warm": modules.split(","),
        "progress": {"log_pattern": r"step (?P<step>\d+): loss (?P<loss>[\d.]+)"},
        "env": {"HOME": str(folder), **({"CUPY": "1"} if "cupy" in modules else {})},
        "policy": {"max_restarts": 1, "bad_checkpoint_ask": "off"},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    service.call("submit", str(folder / "job.yaml"))
    standby = await_standby(service, name, folder)
    deadline = time.monotonic() + READY_LIMIT
    while len(list(folder.glob("drawn-1-*.json"))) < RANKS and time.monotonic() < deadline:
        time.sleep(0.2)
    show = await_second_generation(service, name, folder)
    cold, forked = (read_draws(folder, generation) for generation in (1, 2))
    repeated = find_repeated(cold + forked)
    seeded = [one["seeded"] for one in cold + forked]
    are_forked = [one["forked"] for one in cold + forked]
    return {
        "seeds": modules,
        "standby": [standby.get("state"), standby.get("reason")],
        "phase": show["phase"],
        "forked": are_forked,
        "drawn twice without a seed": repeated,
        "with a seed": "all the same" if seeded.count(seeded[0]) == len(seeded) else seeded,
        "unseeded": [one["unseeded"] for one in cold + forked],
        "ok": show["phase"] == "SUCCEEDED"
        and are_forked == [False] * RANKS + [True] * RANKS
        and not repeated
        and seeded.count(seeded[0]) == 2 * RANKS,
    }


def read_draws(folder: Path, generation: int) -> list[dict[str, Any]]:
    files = (folder / f"drawn-{generation}-{rank}.json" for rank in range(RANKS))
    return [json.loads(file.read_text()) for file in files]


def find_repeated(draws: list[dict[str, Any]]) -> list[str]:
    """Return what two ranks have drawn alike, of what is drawn without a seed."""
    drawn = [one["unseeded"] for one in draws]
    return [what for what in drawn[0] if len({json.dumps(one[what]) for one in drawn}) < len(drawn)]


def check_seeds(service: Service, python: str, work: Path) -> Iterator[Row]:
    """Ranks draw each its own random numbers without a seed, and the same with one."""
    with ThreadPoolExecutor(len(MODULES)) as pool:
        yield from pool.map(lambda one: run_draws(service, one, python, work), MODULES)

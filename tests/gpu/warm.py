"""Ranks that use the GPU, forked from a Python that has imported ahead (docs/warm.md)."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tests.programs.service import ENDED, Service

PROGRAM = Path(__file__).with_name("train") / "warm.py"
MODULES = (
    "torch",
    "torch,torch.distributed,torch.utils.data",
    "torch,torchvision",
    "torch,transformers",
    "torch,lightning",
    "torch,triton",
    "torch,torch._dynamo,torch._inductor",
    "torch,accelerate,peft",
    "cupy",
    "jax",
)
READY_LIMIT, END_LIMIT = 60.0, 120.0
"""Seconds until a Python is ready, and until the job has ended after the kill."""
Row = dict[str, Any]


def find_standby(service: Service, name: str) -> dict[str, Any]:
    """Return the record of the process that imports ahead for a job; empty if it has none yet."""
    for path in (service.folder / "state" / "nodes").glob("*/jobs/*/warm/standby.json"):
        try:
            record: dict[str, Any] = json.loads(path.read_text())
            if json.loads((path.parents[1] / "highest.json").read_text())["job"] == name:
                return record
        except (FileNotFoundError, ValueError):
            continue
    return {}


def await_standby(service: Service, name: str, folder: Path) -> dict[str, Any]:
    """Wait until the job has a Python that has imported ahead, or never will; return its record."""
    deadline = time.monotonic() + READY_LIMIT
    standby: dict[str, Any] = {}
    while time.monotonic() < deadline and standby.get("state") not in ("ready", "cold", "ended"):
        time.sleep(0.5)
        standby = find_standby(service, name)
        if (folder / "outcome.txt").exists():
            break
    return standby


def await_second_generation(service: Service, name: str, folder: Path) -> dict[str, Any]:
    """Have the program kill itself, and wait for the end of the job; return what is shown of it."""
    (folder / "go").touch()
    deadline = time.monotonic() + END_LIMIT
    while service.read_json("show", name)["phase"] not in ENDED and time.monotonic() < deadline:
        time.sleep(0.5)
    for what in ("show", "history", "logs"):
        (folder / f"{what}.txt").write_text("".join(service.call(what, name)[1:]))
    show: dict[str, Any] = service.read_json("show", name)
    return show


def uses_gpu(pid: int) -> bool:
    """Return whether the driver knows the process, or it has a device of the driver open."""
    query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    known = subprocess.run(query, capture_output=True, text=True).stdout.split()
    handles = Path(f"/proc/{pid}/fd").iterdir()
    targets = [str(path.readlink()) for path in handles if path.is_symlink()]
    return str(pid) in known or any(target.startswith("/dev/nvidia") for target in targets)


def read_memory(pid: int) -> float:
    """Return the proportional memory of a process in MB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return round(int(line.split()[1]) / 1000, 1)
    raise RuntimeError(f"/proc/{pid}/smaps_rollup has no Pss")


def run_warm(service: Service, modules: str, python: str, work: Path) -> Row:
    name = "warm-" + modules.replace(",", "-").replace(".", "-").replace("_", "")
    folder = work / "warm" / name
    folder.mkdir(parents=True)
    job = {
        "name": name,
        "fleet": "shared",
        "command": [python, "-u", str(PROGRAM)],
        "workdir": str(folder),
        "warm": modules.split(","),
        "progress": {"log_pattern": r"step (?P<step>\d+): loss (?P<loss>[\d.]+)"},
        "env": {"HOME": str(folder), **({"COMPILE": "1"} if "inductor" in modules else {})},
        "policy": {"max_restarts": 1, "bad_checkpoint_ask": "off"},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    row: Row = {"warm": modules}
    service.call("submit", str(folder / "job.yaml"))
    standby = await_standby(service, name, folder)
    row["standby"], row["standby's reason"] = standby.get("state"), standby.get("reason")
    if standby.get("state") == "ready":
        row["MB"] = read_memory(standby["python"])
        row["uses the GPU"] = uses_gpu(standby["python"])
    show = await_second_generation(service, name, folder)
    row["phase"], row["reason"] = show["phase"], show["reason"]
    first, second = (read_found(folder, generation) for generation in (1, 2))
    row["cold"], row["forked"] = (
        {key: value for key, value in one.items() if key != "found"} for one in (first, second)
    )
    row["differs"] = {
        key: [value, second.get("found", {}).get(key)]
        for key, value in first.get("found", {}).items()
        if second.get("found", {}).get(key) != value
    }
    row["ok"] = show["phase"] == "SUCCEEDED" and not row["differs"] and not row.get("uses the GPU")
    return row


def read_found(folder: Path, generation: int) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / f"found-{generation}.json").read_text())
    except FileNotFoundError:
        return {}
    return found


def check_warm(service: Service, python: str, work: Path, side_by_side: int) -> Iterator[Row]:
    """Compare what ranks find and compute that were started from nothing, and that were forked."""
    with ThreadPoolExecutor(side_by_side) as pool:
        running = [pool.submit(run_warm, service, one, python, work) for one in MODULES]
        for done in as_completed(running):
            yield done.result()

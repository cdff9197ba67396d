"""A node is examined and its GPU is to be reset while a Python waits there that has imported ahead.

The job runs on another node of the machine and uses no GPU; the Python waits on its spare. The last
command before a reset (`nvidia-smi --gpu-reset`) is intercepted: no GPU is reset.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.programs.service import Service

FLEET, SPARE = "spares", "spare-2"
IDLE = Path(__file__).with_name("train") / "idle.py"
READY_LIMIT, GONE_LIMIT = 90.0, 10.0
"""Seconds until a Python waits, also again: it is ordered every 30 s; and until it has ended."""
Row = dict[str, Any]
Hold = Callable[[], AbstractContextManager[int]]


def write_fleet(work: Path, gpus: int) -> Path:
    """Write a fleet of a node and its spare, and put the interceptor on the spare."""
    nodes = [
        {"name": "spare-1", "address": "127.79.3.1"},
        {"name": SPARE, "address": "127.79.3.2", "gpus": gpus, "spare": True},
    ]
    path = work / f"{FLEET}.yaml"
    fleet = {"name": FLEET, "backend": "local", "repairs": "act", "nodes": nodes}
    path.write_text(json.dumps(fleet))
    programs = work / "service" / "state" / "nodes" / SPARE / "bin"
    programs.mkdir(parents=True)
    source = Path(__file__).with_name("nvidia_smi.py").read_text()
    source = source.replace("@REAL@", str(shutil.which("nvidia-smi")))
    source = source.replace("@CALLS@", str(work / "resets.jsonl"))
    program = programs / "nvidia-smi"
    program.write_text(f"#!{sys.executable} -S\n{source}")
    program.chmod(0o755)
    return path


def read_standby(service: Service) -> dict[str, Any]:
    """Return what the spare's process that imports ahead has recorded, if it lives."""
    for path in (service.folder / "state" / "nodes" / SPARE).glob("jobs/*/warm/standby.json"):
        try:
            record: dict[str, Any] = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            continue
        if is_alive(record["pid"]):
            return record
    return {}


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/exe").exists()


def await_ready(service: Service) -> dict[str, Any]:
    deadline = time.monotonic() + READY_LIMIT
    while (standby := read_standby(service)).get("state") != "ready":
        if time.monotonic() > deadline:
            raise RuntimeError(f"no Python waits on {SPARE}: {standby}")
        time.sleep(0.2)
    return standby


def has_ended(standby: dict[str, Any]) -> bool:
    deadline = time.monotonic() + GONE_LIMIT
    while is_alive(standby["pid"]) or is_alive(standby["python"]):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def check_examination(service: Service, python: str, work: Path, hold: Hold) -> Iterator[Row]:
    """Examine and reset the spare: while a Python waits there, and while the GPU is held, too."""
    folder = work / "examine"
    folder.mkdir()
    job = {
        "name": "idle",
        "fleet": FLEET,
        "command": [python, "-u", str(IDLE)],
        "workdir": str(folder),
        "warm": ["torch"],
        "progress": {"log_pattern": r"step (?P<step>\d+): loss (?P<loss>[\d.]+)"},
        "env": {"HOME": str(folder)},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    service.call("submit", str(folder / "job.yaml"))
    examine = ("nodes", "check", SPARE, "--fleet", FLEET, "--level", "1")
    reset = ("nodes", "repair", SPARE, "--reset-gpus", "--fleet", FLEET, "--level", "1")
    reset = (*reset, "--reason", "a test that resets nothing")
    resets = work / "resets.jsonl"

    def run(what: str, words: tuple[str, ...]) -> Row:
        standby = await_ready(service)
        node = service.call("nodes", "show", SPARE, "--fleet", FLEET)[1]
        before = len(read_lines(resets))
        began = time.monotonic()
        code, out, errors = service.call(*words)
        took = round(time.monotonic() - began, 2)
        with (folder / "pages.txt").open("a") as file:
            file.write(f"{node}\n$ relaunch {' '.join(words)}\n{out}{errors}[exit code {code}]\n\n")
        alive = is_alive(standby["pid"]) and is_alive(standby["python"])
        return {
            "check": f"{' '.join(words[:2])} {what}",
            "found": [code, " ".join((out + errors).split())],
            "seconds": took,
            "standby": standby["pid"],
            "shown before": "imported torch" in node,
            "resets": read_lines(resets)[before:],
            "the Python waits on": alive,
            "it has ended": not alive and has_ended(standby),
        }

    row = run("while a Python waits", examine)
    # Without DCGM nothing is examined, so nothing has to end.
    expected = "it has ended" if shutil.which("dcgmi") else "the Python waits on"
    yield {**row, "ok": row["shown before"] and row[expected]}
    row = run("while a Python waits", reset)
    asked = row["resets"]
    living = [one.pop("alive") for one in asked]
    ok = row["it has ended"] and len(asked) == 1 and not asked[0]["have a device open"]
    yield {**row, "ok": ok and row["standby"] not in living[0]}
    await_ready(service)
    with hold() as pid:
        for words in (examine, reset):
            row = run("while a Python waits and the GPU is held", words)
            named = f"pid {pid}" in row["found"][1]
            yield {**row, "ok": named and row["the Python waits on"] and not row["resets"]}
    (folder / "end").touch()


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

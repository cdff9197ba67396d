"""Plays a case as a job of a running service, and under torchrun or ft_launcher beside it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from temporalio.client import Client

from relaunch.temporal import UP_FILE
from tests.hangs.disturbances import Cut, disturb
from tests.hangs.kinds import LAST_STEP, Case
from tests.programs.service import Service, kill_all_in, plain_environment

TRAIN = Path(__file__).with_name("train") / "train.py"
PROGRESS = {"log_pattern": r"step (?P<step>\d+): loss (?P<loss>[\d.]+)"}
NODES = 2
FLEET_NODES = 8
"""Nodes of each fleet: those that a hang has made suspects may be away for seconds."""
MANY_RANKS = 8
"""From here ranks load their data themselves: this machine has a few cores."""
BEGIN_TIMEOUT = 300.0
"""Seconds for training to come to the step where it happens; it takes a tenth, or a fifth of that
with several jobs at once."""
BEGIN_TIMEOUT_PER_RANK = 15.0
"""Seconds more for each rank: each loads torch, which takes 1.5 s of CPU."""
TORCH_TIMEOUT_S = 1800.0
"""Seconds for which torch's gloo waits for a collective, by default."""
NVRX_HEARTBEAT_TIMEOUT_S = 2700.0
"""Seconds between two heartbeats of a rank that nvidia-resiliency-ext allows, by default."""
DAY_S = 86400.0
FINAL = ("SUCCEEDED", "FAILED", "CANCELLED")

Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What all plays of a run have in common."""

    python: str
    limit: float
    """Seconds from the beginning of a hang until it counts as not seen."""
    pause: float
    """Seconds of a healthy pause."""
    after: str = ""
    """`hang.after` of the policy; empty: the default."""
    recovers: bool = False
    """Whether a job goes on after a hang by the default policy; else it fails at once."""
    stacks: bool = False
    """Whether `relaunch stacks` is timed while the ranks hang."""
    heartbeat: str = ""
    """`timeouts.heartbeat` of the policy, which the times of all rules follow; empty: the default.
    """
    flight_record: bool = False
    """Whether ranks are asked for torch's record while they hang (`flight_record` of the job)."""


def prepare(folder: Path, fleets: int) -> list[str]:
    """Write a fleet of local nodes for each job at a time; return the options of `up`."""
    folder.mkdir(parents=True, exist_ok=True)
    options = []
    for fleet in range(1, fleets + 1):
        nodes = [
            {"name": f"h{fleet}n{number}", "address": f"127.79.{fleet}.{number}"}
            for number in range(1, FLEET_NODES + 1)
        ]
        limits = {"nodes_out": "100%", "repairs_at_once": 4, "reboots_per_hour": 1000}
        spec = {"name": f"h{fleet}", "backend": "local", "repairs": "act", "limits": limits}
        path = folder / f"h{fleet}.yaml"
        path.write_text(json.dumps({**spec, "nodes": nodes}))  # JSON is YAML, too
        options += ["--fleet", str(path)]
    return options


def environment_of(case: Case, settings: Settings) -> dict[str, str]:
    return {
        "HANG": f"{case.kind.name}:{case.step}:{case.rank}:{case.variant}",
        "LOOP": case.loop,
        "PAUSE": str(settings.pause),
        "STEPS": str(LAST_STEP),
        "LOADERS": str(int(case.ranks <= MANY_RANKS)),
    }


def read_mark(folder: Path) -> Row | None:
    """Return what the program wrote at the moment at which it happened."""
    with contextlib.suppress(OSError, ValueError):
        mark: Row = json.loads((folder / "began.json").read_text())
        return mark
    return None


def await_mark(case: Case, folder: Path, has_ended: Any, cut: Cut | None) -> Row | None:
    """Wait until it happens, and cut what is to be cut then; return the mark."""
    deadline = time.monotonic() + BEGIN_TIMEOUT + case.ranks * BEGIN_TIMEOUT_PER_RANK
    while (mark := read_mark(folder)) is None:
        if time.monotonic() > deadline or has_ended():
            return None
        time.sleep(0.1)
    if cut is not None:
        cut()
        mark["at"] = time.time()
    return mark


def play_job(service: Service, fleet: str, case: Case, folder: Path, settings: Settings) -> Row:
    """Play a case as a job, and return what its commands say of it."""
    folder.mkdir(parents=True)
    job = f"{case.name}-{time.time_ns() >> 20 & 0xFFFFFF:06x}"
    with disturb(case, folder) as (env, cut):
        policy: Row = {}
        if not settings.recovers:
            policy = {"max_restarts": 0, "causes": {"HANG": [{"strategy": "FAIL"}]}}
        if settings.after:
            policy["hang"] = {"after": settings.after}
        if settings.heartbeat:
            policy["timeouts"] = {"heartbeat": settings.heartbeat}
        spec = {
            "name": job,
            "fleet": fleet,
            "command": [settings.python, str(TRAIN)],
            "workdir": str(folder),
            "nodes": NODES,
            "nproc_per_node": case.ranks // NODES,
            "progress": PROGRESS,
            "flight_record": settings.flight_record,
            "env": environment_of(case, settings) | env,
            "policy": policy,
        }
        (folder / "job.yaml").write_text(json.dumps(spec))
        return run_job(service, job, case, folder, settings, cut)


def run_job(
    service: Service, job: str, case: Case, folder: Path, settings: Settings, cut: Cut | None
) -> Row:
    """Submit the job of a folder, wait for what becomes of it, and return its row."""
    submitted = time.time()
    code, _, errors = service.call("submit", str(folder / "job.yaml"))
    if code:
        raise RuntimeError(f"{job}: submit exits with {code}: {errors[-500:]}")
    asked = time.monotonic()

    def has_ended() -> bool:
        # A command costs a second of CPU, which the ranks need.
        nonlocal asked
        if time.monotonic() < asked + 20.0:
            return False
        asked = time.monotonic()
        return service.read_json("show", job)["phase"] in FINAL

    mark = await_mark(case, folder, has_ended, cut)
    row: Row = {}
    if settings.stacks and mark is not None and case.kind.hangs:
        begun = time.monotonic()
        _, out, errors = service.call("stacks", job, timeout=1800.0)
        row["stacks_s"] = round(time.monotonic() - begun, 1)
        (folder / "stacks.txt").write_text(out + errors)
    left = settings.limit - (time.time() - mark["at"]) if mark else 0.0
    code, out, errors = service.call("follow", job, timeout=max(1.0, left))
    (folder / "follow.txt").write_text(out + errors)
    if code == -1:
        service.call("cancel", job, "--reason", f"no end {settings.limit:.0f} s after it began")
        service.call("follow", job)
    shown, history = service.read_json("show", job), service.read_json("history", job)
    for name, found in (("show", shown), ("history", history)):
        (folder / f"{name}.json").write_text(json.dumps(found, indent=1))
    ended: Row = {"job": job, "phase": shown["phase"], "generations": shown["generation"]}
    ended["wall_s"] = round(time.time() - submitted, 1)
    return row | ended | judge(mark, history, read_hang_events(service, job))


async def fetch_answers(address: str, job: str) -> list[Any]:
    """Return what activities have answered to the workflow of a job, as JSON."""
    client = await Client.connect(address)
    events = client.get_workflow_handle(f"job/{job}").fetch_history_events()
    return [
        json.loads(payload.data)
        async for event in events
        for payload in event.activity_task_completed_event_attributes.result.payloads
        if payload.metadata["encoding"] == b"json/plain"
    ]


def find_hang_events(value: Any) -> Iterator[Row]:
    """Yield the events `RanksHung` within a value of JSON."""
    if isinstance(value, dict) and value.get("kind") == "RanksHung":
        yield value
        return
    for one in value.values() if isinstance(value, dict) else value:
        if isinstance(one, dict | list):
            yield from find_hang_events(one)


def read_hang_events(service: Service, job: str) -> list[Row]:
    """Return the events `RanksHung` of a job, the oldest first."""
    up = json.loads((Path(service.environment["RELAUNCH_STATE"]) / UP_FILE).read_text())
    return list(find_hang_events(asyncio.run(fetch_answers(up["address"], job))))


def judge(mark: Row | None, history: list[Row], events: Sequence[Row] = ()) -> Row:
    """Return what relaunch made of a case.

    Without `suspects` an incident that accuses no node names no rank: its ranks are then only the
    slowest ones.

    Args:
        mark: What the program wrote as it happened.
        history: The incidents of the job.
        events: Its events `RanksHung`, with `suspects`, `rule` and `groups` where they have them.
    """
    found: Row = {
        "began": mark,
        "rank": mark and mark["rank"],
        "incidents": len(history),
        "cause": None,
        "named": [],
        "named_nodes": [],
        "early": False,
    }
    if not history:
        return found
    first = history[0]
    event = events[0] if events else {}
    suspects = event.get("suspects")
    if suspects:
        named = [one["rank"] for one in suspects]
        nodes = [one["node"] for one in suspects]
    else:
        named, nodes = (first["ranks"] if first["nodes"] else []), first["nodes"]
    decided = datetime.fromisoformat(first["opened"]).timestamp()
    decided += first["times"]["decided"] or 0.0
    return found | {
        "cause": first["cause"],
        "code": first["code"],
        "reason": first["reason"],
        "rule": event.get("rule"),
        "groups": event.get("groups"),
        "where": [one.get("where") for one in suspects or ()],
        "named": sorted(set(named)),
        "named_nodes": sorted(set(nodes)),
        "right_node": bool(mark) and sorted(set(nodes)) == [mark["node"]],
        "listed": first["ranks"],
        "early": mark is not None and decided < mark["at"],
        "seconds": None if mark is None else round(decided - mark["at"], 2),
    }


@dataclass(frozen=True)
class Launcher:
    """Another program that starts ranks and restarts them."""

    name: str
    command: tuple[str, ...]
    default_s: float
    """Seconds for which it, or torch below it, waits by default."""
    scale: float
    """By how much that is divided in this run."""
    env: Mapping[str, str]


def list_launchers(settings: Settings, scale: float, nvrx: str) -> Iterator[Launcher]:
    """Yield torchrun, and ft_launcher where the Python `nvrx` has nvidia-resiliency-ext.

    Args:
        settings: Of the run.
        scale: By how much their time-outs are divided; 1: the defaults.
        nvrx: A Python with nvidia-resiliency-ext, or nothing.
    """
    # The default of a run with the default is not given to torch at all.
    timeout = {} if scale == 1 else {"COLLECTIVE_TIMEOUT_S": str(TORCH_TIMEOUT_S / scale)}
    command = (settings.python, "-m", "torch.distributed.run")
    yield Launcher("torchrun", command, TORCH_TIMEOUT_S, scale, timeout)
    script = nvrx and shutil.which("ft_launcher", path=str(Path(nvrx).parent))
    if script:
        limit = NVRX_HEARTBEAT_TIMEOUT_S / scale
        ft = (f"--ft-rank-heartbeat-timeout={limit}", "--ft-enable-nic-monitor=False")
        # torch's own time-out is left at its default: this is about the heartbeat.
        yield Launcher("nvrx", (nvrx, script, *ft), NVRX_HEARTBEAT_TIMEOUT_S, scale, {})


def play_beside(
    launcher: Launcher, case: Case, folder: Path, settings: Settings, home: Path
) -> Row:
    """Play a case under another launcher with one restart, all ranks on one node."""
    folder.mkdir(parents=True)
    with disturb(case, folder) as (env, cut), (folder / "output.txt").open("wb") as log:
        process = subprocess.Popen(
            [
                *launcher.command,
                "--standalone" if launcher.name == "torchrun" else "--rdzv-backend=c10d",
                *(() if launcher.name == "torchrun" else ("--rdzv-endpoint=localhost:0",)),
                f"--nproc-per-node={case.ranks}",
                "--max-restarts=1",
                str(TRAIN),
            ],
            cwd=folder,
            env=plain_environment(home)
            | environment_of(case, settings)
            | env
            | launcher.env
            | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            mark = await_mark(case, folder, lambda: process.poll() is not None, cut)
            code: int | None = process.wait(settings.limit if mark else 1.0)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            kill_all_in(folder)
            process.wait()
    text = (folder / "output.txt").read_text(errors="replace")
    starts = [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]
    again = [one["at"] for one in starts if one["restart"] > 0]
    decided, named = find_report(text, mark["at"] if mark else 0.0)
    return {
        "exit_code": code,
        "began": mark,
        "seconds": None if mark is None or decided is None else round(decided - mark["at"], 2),
        "restart_s": round(min(again) - mark["at"], 2) if mark and again else None,
        "named": named,
        "default_s": launcher.default_s,
        "scale": launcher.scale,
    }


def find_report(text: str, after: float) -> tuple[float | None, list[int]]:
    """Return when a launcher first reported a failure, and the ranks that the report names.

    Args:
        text: What it wrote, with times of day.
        after: The beginning of the hang, since the epoch; the failure is within a day after it.
    """
    found = re.search(
        r"(\d\d):(\d\d):(\d\d)[.,](\d+).*failed \(exitcode: .*local_rank: (\d+)", text
    )
    if found is None:
        return None, []
    hour, minute, second = (int(one) for one in found.groups()[:3])
    begun = datetime.fromtimestamp(after).astimezone()
    at = begun.replace(hour=hour, minute=minute, second=second, microsecond=0).timestamp()
    at += float(f"0.{found[4]}")
    return (at if at >= after else at + DAY_S), [int(found[5])]

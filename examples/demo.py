#!/usr/bin/env python3
"""Show in a minute what relaunch does: kill a rank, kill the worker, cut a node off.

The disturbed job ends with the same bits as an undisturbed one. All of it is real: Temporal's
server, a worker, agents, two training jobs of 2 nodes x 2 ranks. Only the nodes are folders on
this machine, and timeouts are seconds instead of minutes. Read `demonstrate` to learn the API. At
the end the demo removes all that it made.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from relaunch.interpreter import use_project_python  # noqa: E402

use_project_python()

from rich.console import Console, Group  # noqa: E402
from rich.live import Live  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402
from temporalio.client import Client  # noqa: E402

from relaunch.backends.local import cut, reboot  # noqa: E402
from relaunch.cli import follow, job_views, jobs  # noqa: E402
from relaunch.cli.files import job_from_flags  # noqa: E402
from relaunch.cli.submit import submit  # noqa: E402
from relaunch.config import Settings  # noqa: E402
from relaunch.job.fencing import safe_after  # noqa: E402
from relaunch.job.state import JobState, Phase  # noqa: E402
from relaunch.temporal import connect, find_running_up  # noqa: E402

STEPS = 270
TRAIN = ("--steps", str(STEPS), "--batch", "16", "--checkpoint-every", "20", "--step-time", "0.1")
TIMEOUTS = {
    "heartbeat": "0.5s",
    "lease": "5s",
    "lost_after": "1.5s",
    "fence_after": "2s",
    "stop_grace": "1s",
}
"""Seconds, for people who watch; a cluster has minutes. The worker notices a lost node (3 s) before
that node must have stopped its ranks (7 s)."""
ANSWER_TIMEOUT = timedelta(seconds=2)
"""How long a node may take to answer; a worker that stops ranks asks each node twice."""
FLEETS = {"cluster": ("node-1", "node-2", "node-3"), "elsewhere": ("calm-1", "calm-2")}
PATIENCE = 180.0
"""Seconds for any one thing to happen: ten times what the slowest takes on an idle laptop."""
STYLES = {"incident closed": "green", "incident": "yellow", "Relaunch": "cyan", "Wait": "cyan"}


class Trouble(Exception):
    """The demo did not go as it should."""


class Screen:
    """The story so far and, on a terminal, both jobs as they are below it."""

    def __init__(self, console: Console, ui: str) -> None:
        self.console, self.ui, self.began, self.told = console, ui, time.monotonic(), ""
        self.looks: dict[str, jobs.JobSnapshot] = {}

    def say(self, text: str, style: str | None = None) -> None:
        style = style or next(
            (style for word, style in STYLES.items() if text.startswith(word)), "dim"
        )
        self.console.print(
            f"{time.monotonic() - self.began:5.1f} s  {text}",
            style=style,
            soft_wrap=not self.console.is_terminal,
        )

    def job(self, name: str = "troubled") -> JobState | None:
        return self.looks[name].state if name in self.looks else None

    def step(self, name: str = "troubled") -> int:
        look, job = self.looks.get(name), self.job(name)
        seen = look.watch.step if look and look.watch else None
        return (
            STEPS
            if job and job.phase is Phase.SUCCEEDED
            else seen or (job.furthest_step if job else None) or 0
        )

    async def follow(self, client: Client, name: str) -> None:
        narrator = follow.Narrator(self.say)
        async for now in follow.watch(client, name, follow.LIVE_REFRESH_INTERVAL_S):
            self.looks[name] = now
            if name == "troubled":
                narrator.tell(now)
                if (
                    not self.console.is_terminal
                    and (job := self.job())
                    and (text := self.next(job)).partition(" (")[0] != self.told
                ):
                    self.told = text.partition(" (")[0]
                    self.say(f"next: {text}")

    def next(self, job: JobState) -> str:
        what, at = job.next.what, job.next.at
        if job.lost and job.phase is Phase.LAUNCHING and job.incident:
            # The wait of this demo: by then the lost node must have stopped its own ranks.
            what = (
                f"once {job_views.names(list(job.lost_names))} must have stopped its ranks "
                f"by itself, {what} without it"
            )
            at = safe_after(job, (job.incident.decided or job.incident.opened) + 2 * ANSWER_TIMEOUT)
        return what + (
            f" (in {max(0.0, (at - datetime.now(UTC)).total_seconds()):.0f} s)" if at else ""
        )

    def __rich__(self) -> Group:
        lines = [Text()]
        for name in sorted(self.looks, reverse=True):
            look, job, step = self.looks[name], self.job(name), self.step(name)
            loss = look.watch.values.get("loss") if look.watch else None
            colour = "green" if look.phase in (Phase.RUNNING, Phase.SUCCEEDED) else "yellow"
            bar, steps = (
                f"{'━' * (30 * step // STEPS):<31}",
                f"step {step:>3} of {STEPS} {'' if loss is None else f' loss {loss:.4f}':<14}",
            )
            nodes = job_views.names([slot.node for slot in job.slots]) if job else ""
            where = f" generation {job.generation} on {nodes or 'no nodes yet'}" if job else ""
            lines.append(
                Text.assemble(
                    (f"{name:<9} ", "bold"),
                    (bar, "cyan"),
                    steps,
                    (f"{look.phase:<10}", f"bold {colour}"),
                    where,
                )
            )
        if job := self.job():
            lines += [
                Text.assemble(("now   ", "bold"), job.reason),
                Text.assemble(("next  ", "bold"), self.next(job)),
            ]
        return Group(*lines, Text.assemble(("web   ", "bold"), self.ui))


# --- the demo itself: jobs by the API, faults by hand -----------------------------------------


async def demonstrate(client: Client, state: Path, screen: Screen) -> None:
    """Run two equal jobs, and disturb one of them."""
    screen.say(
        "two equal jobs: troubled will be disturbed, calm will not; "
        "timeouts are seconds here, minutes on a cluster",
        "bold",
    )
    following = []
    for name, fleet in (("troubled", "cluster"), ("calm", "elsewhere")):
        command = [
            sys.executable,
            str(ROOT / "examples" / "train_lm.py"),
            *TRAIN,
            "--checkpoint",
            str(state / name),
        ]
        policy = {"timeouts": TIMEOUTS}
        job = {
            "name": name,
            "command": command,
            "nodes": 2,
            "nproc_per_node": 2,
            "fleet": fleet,
            "policy": policy,
        }
        await submit(client, Settings().task_queue, *job_from_flags(job), reason="the demo")
        following.append(asyncio.create_task(screen.follow(client, name)))

    async def until(what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not holds():
            for task in following:
                if task.done():
                    task.result()  # raises what it met
            if (job := screen.job()) and job.phase.is_final:
                raise Trouble(f"the job ended as {job.phase} before there was {what}: {job.reason}")
            if time.monotonic() > deadline:
                raise Trouble(f"within {PATIENCE:g} s there was not {what}")
            await asyncio.sleep(0.05)

    def recovered(incidents: int) -> bool:
        return (
            (job := screen.job()) is not None
            and job.incident is None
            and len(job.incidents) >= incidents
        )

    try:
        await until("step 45", lambda: screen.step() >= 45)
        (rank,) = processes(state, "RELAUNCH_JOB=troubled", "RANK=3")
        screen.say(f"1. SIGKILL to rank 3 (process {rank})", "bold red")
        os.kill(rank, signal.SIGKILL)
        await until("recovery from the killed rank", lambda: recovered(1))

        begin = screen.step()
        await until("more steps", lambda: screen.step() >= begin + 10)
        (worker,) = workers = processes(state, str(ROOT / "relaunch" / "__main__.py"), "worker")
        before, begin = screen.job(), screen.step()
        screen.say(
            f"2. SIGKILL to the worker (process {worker}), at step {begin}: "
            "the process that decides is gone",
            "bold red",
        )
        os.kill(worker, signal.SIGKILL)
        await until(
            "another worker",
            lambda: (
                processes(state, str(ROOT / "relaunch" / "__main__.py"), "worker")
                not in ([], workers)
            ),
        )
        await until("progress seen by the new worker", lambda: screen.step() > begin + 10)
        now = screen.job()
        if (
            before is None
            or now is None
            or (now.generation, len(now.incidents)) != (before.generation, len(before.incidents))
        ):
            raise Trouble("the ranks did not simply go on while the worker was away")
        screen.say(
            "a new worker watches the same ranks, "
            f"which trained on to step {screen.step()} without one: no incident",
            "green",
        )

        begin = screen.step()
        await until("more steps", lambda: screen.step() >= begin + 10)
        screen.say(
            "3. node-2 is cut off from everybody, its sockets stay open and silent: "
            "is it dead, or does it train on?",
            "bold red",
        )
        cut(state / "nodes" / "node-2", freeze_ranks=True)
        await until("recovery on the spare node", lambda: recovered(2))
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*following)
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)


def conclude(state: Path, screen: Screen) -> bool:
    """Print the incidents, compare the two results bit for bit, and return whether all is well."""
    table = Table(
        "CAUSE",
        "NODE",
        "WHAT HAPPENED",
        "STRATEGY",
        "DECIDED",
        "LAUNCHED",
        "RECOVERED",
        box=None,
        header_style="bold",
        pad_edge=False,
    )
    job = screen.job()
    incidents = [job_views.history_entry(one, job) for one in job.incidents] if job else []
    for entry in incidents:
        strategies = ", ".join(
            dict.fromkeys(d["strategy"] for d in entry["decisions"] if d["strategy"])
        )
        times = (
            f"{entry['times'][name] or 0:.2f} s" for name in ("decided", "launched", "recovered")
        )
        table.add_row(
            entry["cause"], job_views.names(entry["nodes"]), entry["reason"], strategies, *times
        )
    screen.console.print("", table, "")
    results = {
        name: json.loads((state / name / "final.json").read_text()) for name in ("calm", "troubled")
    }
    for name, result in results.items():
        loss, parameters = (
            f"final loss {result['loss']!r} ({result['loss_hex']})",
            f"parameters {result['parameters_sha256'][:12]}…",
        )
        screen.console.print(f"{name:<9} {loss}, {parameters}", soft_wrap=True)
    same = results["calm"] == results["troubled"]
    screen.console.print(
        "the same bits" if same else "NOT the same bits", style="bold green" if same else "bold red"
    )
    return (
        same
        and len(incidents) >= 2
        and all(look.phase == Phase.SUCCEEDED for look in screen.looks.values())
    )


# --- server and worker, and leaving nothing behind --------------------------------------------


@contextlib.contextmanager
def service() -> Iterator[Path]:
    """Run `relaunch up` on a temporary folder; in any case remove its processes and files."""
    state = Path(tempfile.mkdtemp(prefix="relaunch-demo-"))
    command = [
        sys.executable,
        str(ROOT / "starter.py"),
        "up",
        "--attended",
        "--state",
        str(state),
        "--port",
        "0",
        "--ui-port",
        "0",
    ]
    for number, (fleet, names) in enumerate(FLEETS.items()):
        nodes = [
            {"name": name, "address": f"127.78.{number}.{index}"}
            for index, name in enumerate(names, 1)
        ]
        # JSON is YAML, too.
        (state / f"{fleet}.yaml").write_text(
            json.dumps({"name": fleet, "backend": "local", "nodes": nodes})
        )
        command += ["--fleet", str(state / f"{fleet}.yaml")]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RELAUNCH_", "TEMPORAL_"))
    }
    environment["RELAUNCH_ANSWER_WITHIN"] = f"{ANSWER_TIMEOUT.total_seconds():g}"
    with (state / "up.log").open("wb") as log:
        # --attended: `up` ends when its stdin closes, so when we end, for any reason.
        up = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    try:
        yield state
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # a second Ctrl-C must not leave half of it
            signal.signal(number, signal.SIG_IGN)
        up.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            up.wait(20)
        for node in (state / "nodes").glob("*"):
            reboot(node)
        for pid in (left := processes(state)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        up.wait()
        shutil.rmtree(state, ignore_errors=True)
        if left:
            raise Trouble(f"processes {left} were still there at the end, and were killed")


def processes(state: Path, *words: str) -> list[int]:
    """Return processes of this demo that have these words in command line or environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                has = (
                    ((entry / "cmdline").read_bytes() + (entry / "environ").read_bytes())
                    .decode(errors="replace")
                    .split("\0")
                )
                if set(words) <= set(has) and any(str(state) in word for word in has):
                    found.append(int(entry.name))
    return found


async def run(keep: bool, console: Console) -> int:
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, os.kill, os.getpid(), signal.SIGINT
    )
    began = time.monotonic()
    with service() as state:
        console.print("starting Temporal's server and a worker …", style="dim")
        while (up := find_running_up(state)) is None:
            if time.monotonic() > began + PATIENCE:
                raise Trouble(f"there is no server: {(state / 'up.log').read_text().strip()}")
            await asyncio.sleep(0.05)
        console.print(f"web UI, as long as this runs: {up.ui}", soft_wrap=True)
        screen = Screen(console, up.ui)
        with (
            Live(screen, console=console, refresh_per_second=5)
            if console.is_terminal
            else contextlib.nullcontext()
        ):
            await demonstrate(await connect(state, up.address), state, screen)
        passed = conclude(state, screen)
        console.print(
            f"web UI: {up.ui}, until Enter"
            if keep
            else "(--keep leaves the web UI running at the end)",
            style="dim",
            soft_wrap=True,
        )
        if keep:
            with contextlib.suppress(EOFError):
                await asyncio.to_thread(input)
    console.print(f"nothing is left running; it took {time.monotonic() - began:.0f} s", style="dim")
    return 0 if passed else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--keep",
        action="store_true",
        help="at the end leave web UI, server and worker running until Enter",
    )
    options = parser.parse_args()
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)
    try:
        return asyncio.run(run(options.keep, console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("interrupted; nothing is left running")
        return 130
    except Trouble as trouble:
        console.print(f"the demo failed: {trouble}", style="bold red", soft_wrap=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())

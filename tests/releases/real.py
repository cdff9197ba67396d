"""The files of a real service: a server, a worker, and nodes with real agents and ranks."""

from __future__ import annotations

import os
import shutil
import signal
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

from relaunch.agent.node import links, reboots, resets
from relaunch.agent.protocol import now
from relaunch.cli import environment
from relaunch.cli.database import note_writer
from relaunch.cli.service import find_server, write_local_fleet
from relaunch.messages.logs import (
    ReadCheckpointsInput,
    ReadIncidentsInput,
    ReadLogsInput,
    ReadStacksInput,
)
from relaunch.messages.nodes import ExamineNodesInput
from relaunch.messages.notices import SendTestInput
from relaunch.temporal import data_converter, write_up
from tests.chaos.world import FLEET, QUEUE, World, chaos_policy
from tests.e2e.test_launchers import submitted
from tests.releases.files import CONTROLLER, NODE, collect
from tests.releases.recording import Answer

EXAMPLES = Path(__file__).with_name("examples")
INCIDENTS = Path(__file__).parents[2] / "docs" / "incidents"
SCENARIO = "real"
WORLD_NUMBER = 97
"""Its addresses: no test has them."""
CALL_TIMEOUT = timedelta(minutes=2)
PATIENT = chaos_policy({"lease": "90s", "lost_after": "45s", "fence_after": "15s"})
"""On a busy machine a node is late and not lost: its job would leave it, and its files would not
have what is to be recorded."""
NOTIFIES = """\
heartbeat: {url: http://127.0.0.1:9/alive}
notify: [{webhook: http://127.0.0.1:9/hook}]
"""
"""Nothing listens there."""


async def record_service(
    folder: Path, archive: Path
) -> tuple[dict[str, Any], dict[str, str], list[Answer]]:
    """Play a job whose rank is killed, and one below torchrun.

    Return their histories, and the files of a node and of the controller from meanwhile.

    Args:
        folder: An empty folder.
        archive: Of a worker that has archived incidents.
    """
    answers: list[Answer] = []
    async with World(folder / "world", WORLD_NUMBER, nodes=2, spares=0, answer_within=5.0) as world:
        (folder / "checkpoints").mkdir()
        with world.fleet_file.open("a") as file:
            file.write(NOTIFIES)
        await world.worker.end()
        await world.worker.start()
        job = await world.submit(
            nodes=2,
            nproc=2,
            policy=PATIENT,
            checkpoint={"directory": str(folder / "checkpoints"), "pattern": "checkpoint-{step}"},
        )
        await job.until_phase("RUNNING", generation=1)
        await job.until_steps()
        os.kill(job.rank_pids("n1")[0], signal.SIGKILL)
        await job.until_phase("RUNNING", generation=2)
        await job.until_watched()
        below = await submitted(world, "below", policy=PATIENT)
        await below.until_phase("RUNNING")
        await below.until_steps()
        state = await job.state()
        whose: dict[str, Any] = {
            "fleet": FLEET,
            "namespace": "default",
            "job": job.name,
            "submission": state.submission,
            "generation": state.generation,
        }
        nodes = ("n1", "n2")
        for activity, asked in (
            ("read_logs", ReadLogsInput(nodes=nodes, tail=5, **whose)),
            ("read_stacks", ReadStacksInput(places=(("n1", 0),), **whose)),
            (
                "read_checkpoints",
                ReadCheckpointsInput(FLEET, nodes, str(folder / "checkpoints"), None),
            ),
            ("read_incidents", ReadIncidentsInput("default", job.name)),
            (
                "check_nodes",
                ExamineNodesInput(FLEET, ("n1",), "release", 0, timedelta(minutes=1)),
            ),
            ("send_test", SendTestInput(FLEET, "grace")),
            ("read_worker_status", None),
        ):
            answers += await _call(world, activity, asked)
        node = world.node("n1")
        kept = folder / "node"
        shutil.copytree(node, kept, ignore=_skip_sockets, symlinks=True)
        histories = {}
        for each in (job, below):
            each.let_end()
            await each.until_phase("SUCCEEDED")
            handle = world.client.get_workflow_handle(f"job/{each.name}")
            history = await handle.fetch_history()
            histories[f"{SCENARIO} {handle.id} {history.run_id}"] = history.to_json_dict()
    _write_repairs(kept)
    controller = folder / "controller"
    shutil.copytree(EXAMPLES, controller)
    shutil.copytree(INCIDENTS, controller / "events")
    shutil.copytree(archive, controller / "archive")
    write_local_fleet(controller, 2)
    environment.write_file(controller, "llama-7b", {"PATH": "/usr/bin", "NOTE": "two\nlines"})
    write_up(controller, "127.0.0.1:7233", "http://127.0.0.1:8233", {"default": "local"})
    note_writer(controller, find_server())
    return histories, collect(kept, NODE) | collect(controller, CONTROLLER), answers


async def _call(world: World, activity: str, asked: Any) -> list[Answer]:
    """Run an activity as the command line does, and keep what went both ways."""
    converter = data_converter().payload_converter
    args = [] if asked is None else [asked]
    answer = await world.client.execute_activity(
        activity,
        args=args,
        id=f"release-{uuid.uuid4().hex[:8]}",
        task_queue=QUEUE,
        schedule_to_close_timeout=CALL_TIMEOUT,
        result_type=Any,
    )
    return [
        *(
            Answer(f"input of activity {activity}", SCENARIO, converter.from_payload(payload, Any))
            for payload in converter.to_payloads(args)
        ),
        Answer(f"result of activity {activity}", SCENARIO, answer),
    ]


def _write_repairs(node: Path) -> None:
    """Have the agent's own code write what only repairs and network cards make it write."""
    reboots.record(node, "repair/default/n1/1", "Xid 79")
    reboots.cancel(node, "repair/default/n1/1", "sudo asks for a password")
    reboots.record(node, "repair/default/n1/2", "Xid 79")
    reboots.record_run(node, "repair/default/n1/2")
    resets.record_reset(node, "repair/default/n1/3", ["00000000:17:00.0"])
    port = {name: name for name in links.NAMES}
    ports = [{**port, "state": "ACTIVE", "rate": 400.0, "counters": {"link_downed": 2}}]
    links._save_record(node, links._update_record({}, ports, "a boot", now(), True))


def _skip_sockets(folder: str, names: list[str]) -> list[str]:
    return [
        name for name in names if not (Path(folder, name).is_file() or Path(folder, name).is_dir())
    ]

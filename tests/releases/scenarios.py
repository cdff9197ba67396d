"""Whole lives of jobs, fleets and repairs, played on simulated nodes for a release's recording.

Each scenario has its own server, so several can be played at the same time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle
from temporalio.service import RPCError

from relaunch.job.state import Phase
from relaunch.pool.messages import Claim
from relaunch.pool.state import NodeStatus
from tests.fakes.nodes import Exit, Progress, Script, Sick, Stranger, error_file
from tests.fakes.nodes.health import bus_id
from tests.releases.payloads import type_of_workflow
from tests.releases.recording import Answer
from tests.workflows.claimants import until_fleet
from tests.workflows.conftest import dev_server
from tests.workflows.rig import PATIENCE, Job, Rig, policy, rig
from tests.workflows.test_histories import SCENARIOS
from tests.workflows.test_links import parted

SUGGEST_EARLY = "limit.historyCount.suggestContinueAsNew=15"
ASK = {"APPLICATION": [{"strategy": "ASK"}], "UNKNOWN": [{"strategy": "ASK"}]}
RUNS = Progress(rate=20.0, hangs=True)
SAVES = Progress(
    rank=0,
    steps=((0.0, 5),),
    checkpoints=tuple((0.5 * n, 10 * n) for n in range(1, 200)),
    hangs=True,
)
SICK = Sick(node="n2", remap_pending=0, until="reboot", when="running")
FAILS = Exit(generation=1, node="n2", rank=2, exit_code=1, after=0.2)
XID_79 = (
    f"[  100.0] NVRM: Xid (PCI:{bus_id(0)[4:-2]}): 79, pid=4711, name=python, "
    "GPU has fallen off the bus.",
)
Found = TypeVar("Found")


@dataclass
class Stage:
    """Where a scenario is played, and what it leaves."""

    folder: Path
    histories: dict[str, Any] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)

    @asynccontextmanager
    async def play(
        self,
        name: str,
        *happenings: Any,
        short: bool = False,
        script: Script | None = None,
        **more: Any,
    ) -> AsyncIterator[Rig]:
        options = {"nodes": 2, "spares": 1, "gpus": 8, "name": name, **more}
        played = script or Script(happenings, then="run")
        # One server each: a fleet that begins asks jobs of which no fleet is known yet, also those
        # of other scenarios.
        async with dev_server(*((SUGGEST_EARLY,) if short else ())) as client:
            async with rig(client, self.folder / name, played, **options) as one:
                yield one
                await _end(*one.jobs)
            await self._keep_histories(name, client, one)

    async def ask(self, scenario: str, handle: WorkflowHandle[Any, Any], *queries: str) -> None:
        """Keep what a workflow answers now."""
        kind = type_of_workflow(handle.id)
        for query in queries:
            answer = await handle.query(query, result_type=Any)
            self.answers.append(Answer(f"answer of query {query} of {kind}", scenario, answer))

    async def keep_heartbeats(self, scenario: str, job: Job) -> None:
        """Keep the details of the watch's last heartbeat, once there are some."""

        async def read_details() -> bytes:
            described = (await job.handle.describe()).raw_description
            return next(
                (
                    one.heartbeat_details.payloads[0].data
                    for one in described.pending_activities
                    if one.activity_type.name == "watch_ranks" and one.heartbeat_details.payloads
                ),
                b"",
            )

        value = json.loads(await _until(read_details, "a heartbeat"))
        self.answers.append(Answer("heartbeat of activity watch_ranks", scenario, value))

    async def _keep_histories(self, scenario: str, client: Client, played: Rig) -> None:
        expected = {job.handle.id for job in played.jobs} | {played.fleet.id}

        async def list_closed() -> list[tuple[str, str]]:
            found = [one async for one in client.list_workflows(f'TaskQueue = "{played.queue}"')]
            closed = all(one.status is not WorkflowExecutionStatus.RUNNING for one in found)
            is_whole = closed and expected <= {one.id for one in found}
            return sorted((one.id, one.run_id) for one in found) if is_whole else []

        for id_, run_id in await _until(list_closed, "all that was played is listed"):
            handle = client.get_workflow_handle(id_, run_id=run_id)
            history = (await handle.fetch_history()).to_json_dict()
            self.histories[f"{scenario} {id_} {run_id}"] = history


async def _until(look: Callable[[], Awaitable[Found]], what: str) -> Found:
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while not (found := await look()):
        assert asyncio.get_running_loop().time() < deadline, f"never: {what}"
        await asyncio.sleep(0.05)
    return found


async def _end(*jobs: Job) -> None:
    for job in jobs:
        described = await job.handle.describe()
        if described.status is WorkflowExecutionStatus.RUNNING:
            await job.handle.signal("cancel", {"reason": "that is all", "by": "ada"})
            await job.result()


async def play_outcome(stage: Stage, name: str) -> None:
    """Play a job of `SCENARIOS` to its end."""
    script, rules = SCENARIOS[name]
    scenario = name.replace("_", "-")
    async with stage.play(scenario, script=script, gpus=1) as rig_:
        job = await rig_.submit(rules, name=scenario)
        await job.result()
        await stage.ask(scenario, job.handle, "state", "next", "orders")


async def play_fleet(stage: Stage) -> None:
    """A fleet that loses a GPU, is drained, paused, applied, and continues as new meanwhile."""
    name = "fleet"
    falls = Exit(
        generation=1, node="n1", rank=0, exit_code=None, signal=6, after=1.0, kernel=XID_79
    )
    lost = Sick(node="n1", gpu_lost=3, until="reboot", when="running")
    async with stage.play(
        name, falls, SAVES, lost, short=True, nodes=4, limits={"nodes_out": "100%"}
    ) as rig_:
        jobs = [await rig_.submit(gpus_per_node=4, name=f"{name}-{n}") for n in (1, 2)]
        await jobs[0].until_phase(Phase.RUNNING, 2)
        await jobs[1].until_phase(Phase.RUNNING)
        await stage.keep_heartbeats(name, jobs[0])
        await stage.ask(name, rig_.fleet, "state", "next", "counts", "takes_proofs")
        moved = (await jobs[1].state()).slots[0].node
        by: dict[str, str] = {"reason": "a fan", "by": "grace"}
        drained = {"node": moved, "drain": True, "within": "2h", **by}
        await rig_.tell_fleet("quarantine", drained)
        await jobs[1].until(
            lambda s: s.phase is Phase.RUNNING and moved not in {one.node for one in s.slots},
            "drained",
        )
        await rig_.tell_fleet("pause", by)
        await rig_.tell_fleet("resume", by)
        await rig_.tell_fleet("release", {"node": moved, **by})
        await rig_.tell_fleet("apply", by)
        await rig_.tell_fleet("quarantine", {"node": "n4", **by})
        await rig_.tell_fleet("declare_dead", {"node": "n4", **by})
        claim = Claim(f"{name}-3", 1, 1, 1)
        plain = TypeAdapter(Claim).dump_python(claim, mode="json")
        stage.answers.append(Answer("question of query count_free of Fleet", name, plain))
        free = await rig_.fleet.query("count_free", claim, result_type=Any)
        stage.answers.append(Answer("answer of query count_free of Fleet", name, free))
        await stage.ask(name, rig_.fleet, "state", "next")
        await until_fleet(
            rig_,
            lambda state: all(
                one.status is not NodeStatus.REPAIRING for one in state.nodes if one.name == "n1"
            ),
            "n1 repaired",
        )


async def play_queue(stage: Stage) -> None:
    """A job that waits for another, and continues as new while it does."""
    name = "queued"
    async with stage.play(name, RUNS, short=True, spares=0) as rig_:
        first = await rig_.submit(gpus_per_node=8, name=f"{name}-1")
        await first.until_phase(Phase.RUNNING)
        second = await rig_.submit(gpus_per_node=8, name=f"{name}-2", priority=5)
        await second.until(lambda s: s.phase is Phase.QUEUED and bool(s.next.what), "queued")
        for number in range(8):
            await second.handle.signal("report", {"node": "n9", "reason": f"number {number}"})
        await second.until(lambda s: len(s.notices) > 1, "it has taken them")
        await stage.ask(name, second.handle, "state", "next")
        await _end(first)
        await second.until_phase(Phase.RUNNING)


async def play_repair(stage: Stage) -> None:
    """A node that is examined and rebooted, which a person approves."""
    name = "repaired"
    async with stage.play(
        name, RUNS, FAILS, SICK, short=True, gpus=1, spares=0, repairs="ask"
    ) as rig_:
        job = await rig_.submit(policy(extends="ecs-reboot-once"), name=name)
        await job.until(lambda s: s.phase is Phase.REPAIRING and "?" in s.next.what, "asked")
        repair = rig_.client.get_workflow_handle(f"repair/{name}/n2")
        await stage.ask(name, repair, "state", "next", "escalation", "takes_proofs")
        for number in range(8):  # it continues as new, and follows its repair
            await job.handle.signal("report", {"node": "n9", "reason": f"number {number}"})
            await asyncio.sleep(0.05)
        await stage.ask(name, job.handle, "state", "next", "orders")
        approval = {"decision": "approve", "by": "grace", "reason": "no other job is on it"}
        await repair.execute_update("answer", approval)
        await job.until_phase(Phase.RUNNING, 2)
        await stage.ask(name, repair, "state", "next")
        await stage.ask(name, rig_.notifier, "state")


async def play_escalation(stage: Stage) -> None:
    """A node whose health is not known, which a fleet repairs by itself, the weakest way first."""
    name = "escalated"
    sick = Sick(node="n1", gpu_lost=3, until="reboot")
    async with stage.play(
        name, RUNS, sick, nodes=1, spares=0, gpus=4, limits={"nodes_out": "100%"}
    ) as rig_:
        job = await rig_.submit(nodes=1, name=name)
        repair = rig_.client.get_workflow_handle(f"repair/{name}/n1")

        async def is_asked() -> bool:
            try:
                return bool(await repair.query("escalation", result_type=Any))
            except RPCError:
                return False

        await _until(is_asked, "an escalation")
        await stage.ask(name, repair, "state", "next", "escalation")
        await job.until_phase(Phase.RUNNING)


async def play_elastic(stage: Stage) -> None:
    """A job that shrinks when a node is drained, and grows when it is back."""
    name = "elastic"
    async with stage.play(name, RUNS, short=True, nodes=3, spares=0) as rig_:
        job = await rig_.submit(
            policy(grow_after="1s"), nodes={"min": 2, "max": 3}, gpus_per_node=8, name=name
        )
        await job.until_phase(Phase.RUNNING, 1)
        by = {"node": "n2", "reason": "a fan", "by": "grace"}
        await rig_.tell_fleet("quarantine", {**by, "drain": True, "within": "1s"})
        await job.until(lambda s: s.phase is Phase.RUNNING and len(s.slots) == 2, "shrunk")
        await stage.ask(name, job.handle, "state", "next", "orders")
        await rig_.tell_fleet("release", by)
        await job.until(lambda s: s.phase is Phase.RUNNING and len(s.slots) == 3, "grown")


async def play_drain(stage: Stage) -> None:
    """A job that is to leave a node, which its owner denies, and then approves."""
    name = "drained"
    async with stage.play(name, RUNS) as rig_:
        job = await rig_.submit(gpus_per_node=8, name=name)
        await job.until_phase(Phase.RUNNING, 1)
        by = {"reason": "swap its PSU", "by": "carol"}
        await rig_.tell_fleet("quarantine", {"node": "n2", "drain": True, "within": "2h", **by})
        await job.until(lambda s: bool(s.drains), "asked to leave")
        await stage.ask(name, job.handle, "state", "next", "orders")
        answer = {"node": "n2", "by": "alice"}
        await job.handle.execute_update(
            "answer", {"decision": "deny", "reason": "evaluation", **answer}
        )
        await job.handle.execute_update("answer", {"decision": "approve", **answer})
        await job.until_phase(Phase.RUNNING, 2)


async def play_question(stage: Stage) -> None:
    """A job that asks a person, who snoozes and approves; then who denies."""
    name = "asked"
    fails = tuple(Exit(generation=n, rank=0, exit_code=1, after=0.2) for n in (1, 2))
    async with stage.play(name, *fails, short=True) as rig_:
        job = await rig_.submit(policy(causes=ASK), name=name)
        await job.until_phase(Phase.WAITING_FOR_PERSON, 1)
        await stage.ask(name, job.handle, "state", "next", "orders")
        snooze = {"decision": "snooze", "within": "1s", "by": "ada"}
        await job.handle.execute_update("answer", snooze)
        await job.until(lambda s: s.phase is Phase.WAITING_FOR_PERSON, "asked again")
        await job.handle.execute_update("answer", {"decision": "approve", "by": "ada"})
        await job.until(
            lambda s: s.phase is Phase.WAITING_FOR_PERSON and s.generation > 1, "asked once more"
        )
        await job.handle.execute_update(
            "answer", {"decision": "deny", "by": "ada", "reason": "it is the data"}
        )
        await job.result()


async def play_retry(stage: Stage) -> None:
    """A job that fails, is submitted again with its state, retried, changed and cancelled."""
    name = "retried"
    async with stage.play(
        name, Exit(generation=1, rank=0, exit_code=3, after=0.2), nodes=3, spares=0
    ) as rig_:
        job = await rig_.submit(policy(max_restarts=0), name=name)
        failed = await job.result()
        again = await rig_.submit(
            policy(),
            name=name,
            start={
                "previous": failed.state,
                "reason": "driver updated",
                "renew_budgets": True,
                "avoid_nodes": ("n2",),
            },
        )
        state = await again.until_phase(Phase.RUNNING)
        hint = {"what": "task/1", "version": 3, "submission": state.submission}
        await again.handle.signal("hint", {**hint, "generation": state.generation})
        by = {"reason": "faster nodes", "by": "ada"}
        await again.handle.execute_update("change_policy", {"policy": {"max_restarts": 9}, **by})
        await again.handle.signal("force_retry", {**by, "avoid_nodes": ["n2"]})
        await again.until(
            lambda s: s.phase is Phase.RUNNING and s.generation > state.generation, "retried"
        )
        await again.handle.signal("cancel", by)
        await again.result()


async def play_links(stage: Stage) -> None:
    """A gang that loses its connections twice, and gets a spare."""
    name = "links"
    async with stage.play(name, script=parted(("n1", "n2")), gpus=0) as rig_:
        await (await rig_.submit(name=name)).result()


async def play_foreign_process(stage: Stage) -> None:
    """A job leaves a node where a foreign process has taken the memory of its GPU."""
    name = "foreign"
    happenings = (
        Stranger(generation=1, node="n1", gpu=1, when="running"),
        Exit(generation=1, node="n1", error=error_file("CUDA out of memory"), after=0.1),
    )
    script = Script(happenings, then="succeed")
    async with stage.play(name, script=script, nodes=1, spares=1, gpus=2) as rig_:
        await (await rig_.submit(nodes=1, name=name)).result()


async def play_archive(stage: Stage) -> None:
    """A job with so many incidents that the older ones go to the archive."""
    name = "archived"
    faults = 13
    happenings = [Exit(generation=g, rank=0, exit_code=1, after=0.2) for g in range(1, faults + 1)]
    steps = [Progress(generation=g, steps=((0.0, 10 * g),)) for g in range(1, faults + 2)]
    script = Script((*happenings, *steps), then="succeed")
    async with stage.play(name, short=True, script=script) as rig_:
        job = await rig_.submit(name=name)
        await job.result()


async def play_restored_fleet(stage: Stage) -> None:
    """A fleet that is terminated and started again while a job runs, and one that is terminated."""
    name = "restored"
    async with stage.play(name, RUNS) as rig_:
        first = await rig_.submit(nodes=1, gpus_per_node=8, name=f"{name}-1")
        await first.until_phase(Phase.RUNNING)
        await rig_.end_fleet()
        second = await rig_.submit(nodes=1, gpus_per_node=8, name=f"{name}-2")
        await second.until_phase(Phase.RUNNING)
        await first.handle.terminate("a person pressed the wrong button")
        third = await rig_.submit(nodes=1, gpus_per_node=8, name=f"{name}-3")
        await rig_.tell_fleet("apply")
        await third.until_phase(Phase.RUNNING)


async def play_bad_checkpoint(stage: Stage) -> None:
    """A job that resumes twice into the same error, and asks."""
    name = "torn"
    torn = ("RuntimeError: PytorchStreamReader failed finding central directory",)
    script = Script(
        (
            Exit(generation=1, rank=0, exit_code=None, signal=9, after=1.0),
            *(
                Exit(generation=number, rank=0, exit_code=1, after=0.2, log_tail=torn)
                for number in (2, 3)
            ),
            Progress(generation=1, rate=20.0, hangs=True),
        ),
        then="run",
    )
    async with stage.play(name, short=True, script=script) as rig_:
        job = await rig_.submit(name=name)
        state = await job.until_phase(Phase.WAITING_FOR_PERSON, 3)
        assert state.failed_resume is not None and state.failed_resume.count == 2
        await stage.ask(name, job.handle, "state", "next", "orders")
        await job.handle.execute_update("answer", {"decision": "deny", "by": "ada"})
        await job.result()


async def play_watch(stage: Stage) -> None:
    """A fleet whose watch finds a node silent: a round takes a minute."""
    async with stage.play("watched", RUNS) as rig_:
        await rig_.tell_fleet("apply")
        await until_fleet(rig_, lambda state: state.is_probed, "a probe")
        rig_.backend.cut("n2")
        await until_fleet(
            rig_, lambda state: state.nodes[1].silent_since is not None, "that n2 is silent"
        )


PLAYS: dict[str, Callable[[Stage], Awaitable[None]]] = {
    "watch": play_watch,  # first: it waits longest
    **{name: (lambda stage, name=name: play_outcome(stage, name)) for name in SCENARIOS},
    "fleet": play_fleet,
    "queue": play_queue,
    "repair": play_repair,
    "escalation": play_escalation,
    "elastic": play_elastic,
    "drain": play_drain,
    "question": play_question,
    "bad checkpoint": play_bad_checkpoint,
    "retry": play_retry,
    "links": play_links,
    "foreign process": play_foreign_process,
    "archive": play_archive,
    "restored fleet": play_restored_fleet,
}

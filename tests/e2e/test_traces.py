"""One trace for each incident: a real worker, one that is killed, and a collector that hangs."""

from __future__ import annotations

import os
import signal

import pytest

from tests.chaos.world import FLEET, Job, World, chaos_policy, eventually
from tests.receivers import webhook
from tests.traces import list_traces

pytestmark = [
    pytest.mark.long,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
]
VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_TIMEOUT", "RELAUNCH_WEB_UI")


async def fail(job: Job, generation: int) -> None:
    """Kill a rank, and wait until training has recovered."""
    os.kill(job.rank_pids()[0], signal.SIGKILL)
    await job.until_phase("RUNNING", generation=generation + 1)

    async def closed() -> bool:
        return len((await job.state()).incidents) == generation

    await eventually(closed, "the incident does not close", 120)
    await job.until_watched()


async def test_a_killed_worker_and_a_hanging_collector_lose_no_trace(
    world: World,
) -> None:
    with webhook(hangs=True) as received:
        values = (received.url, "600", world.web_ui)
        try:
            world.environment.update(zip(VARIABLES, values, strict=True))
            await world.worker.end(signal.SIGTERM)
            await world.worker.start()
            job = await world.submit(policy=chaos_policy())
            await job.until_phase("RUNNING", generation=1)
            await job.until_watched()
            # The collector takes the first trace and does not answer, for ten minutes: no recovery
            # waits for it, and the worker knows of no trace that it has sent.
            await fail(job, 1)
            await fail(job, 2)

            async def came(count: int) -> bool:
                return len(received.requests) >= count

            await eventually(lambda: came(1), "no trace is sent", 60)
            await world.worker.end()
            received.hangs.clear()
            await world.worker.start()
            await fail(job, 3)
            await eventually(lambda: came(4), "the traces are not sent", 60)
            state = await job.state()
            incidents = state.incidents
            traces = list_traces(received)
            first, again, second, third = (trace[0] for trace in traces)
            assert first.trace == again.trace, "it is the same trace, sent again"
            assert [one.id for one in traces[0]] == [one.id for one in traces[1]]
            assert len({one.trace for one in (first, second, third)}) == 3
            for incident, trace in zip(incidents, traces[1:], strict=True):
                root, *children = trace
                assert {one.parent for one in children} == {root.id}
                assert {one.trace for one in trace} == {root.trace}
                assert (root.begin, root.end) == (incident.opened, incident.recovered)
                assert not root.failed
                expected = {
                    "relaunch.job": job.name,
                    "relaunch.fleet": FLEET,
                    "relaunch.generation": incident.generation,
                    "relaunch.cause": incident.cause.value,
                    "relaunch.strategy": "RESTART_IN_PLACE",
                    "relaunch.nodes": list(incident.nodes),
                    "temporalWorkflowID": f"job/{job.name}",
                    "temporalRunID": job.run_id,
                }
                assert {name: root.attributes[name] for name in expected} == expected
                link = root.attributes["url.full"]
                assert link.startswith(f"{world.web_ui}/namespaces/default/workflows/job%2F")
                assert "fault" in root.events and "decision" in root.events
                names = [one.name for one in children]
                assert names[0] in ("detecting", "stopping") and "launching" in names
                # Each second of the incident is in one child, by the ledger's account.
                assert children[0].begin == root.begin and children[-1].end == root.end
                for one in incident.entries:
                    if one.begin >= incident.opened:
                        found = [(c.begin, c.end) for c in children if c.name == one.account]
                        assert (one.begin, one.end) in found
            assert "traces" not in world.worker.log.read_text(), "nothing has failed"
            job.let_end()
            await job.until_phase("SUCCEEDED")
            await world.tidy(job)
        finally:
            for name in VARIABLES:
                world.environment.pop(name, None)
            await world.worker.end(signal.SIGTERM)
            await world.worker.start()

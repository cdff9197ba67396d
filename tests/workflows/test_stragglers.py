"""A node slower than the others, in the real workflow over simulated nodes."""

from __future__ import annotations

import uuid

import pytest

from relaunch.job.slow_nodes import SLOW_NODE
from relaunch.job.state import Phase
from relaunch.spec.policy import Policy
from tests.fakes.nodes import Progress, Script, Sick
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import policy, replay

pytestmark = pytest.mark.asyncio(loop_scope="session")
SLOW = tuple(
    Progress(node=node, busy=busy, hangs=True, generation=1)
    for node, busy in (("n1", 0.25), ("n2", 0.4), ("n3", 0.25))
)
"""All nodes stay at a step whose work took longer on n2."""


def rules(action: str) -> Policy:
    return policy(
        {"heartbeat": "40ms", "lost_after": "30s"}, stragglers={"action": action, "over": "1s"}
    )


async def test_a_slow_node_is_reported_to_people_once(make_rig: MakeRig) -> None:
    async with make_rig(Script(SLOW), nodes=3) as rig:
        job = await rig.submit(rules("report"), nodes=3)
        state = await job.until(lambda one: bool(one.slow_nodes), "reported")
        await job.until_idle()
        (found,) = state.slow_nodes
        assert (found.slow.node, found.place, found.slow.nodes) == ("n2", 1, 3)
        assert (state.phase, state.generation, state.incident) == (Phase.RUNNING, 1, None)
        assert state.notices[-1].startswith("node n2 is 1.6 times slower")
        await job.handle.signal("cancel")
        assert (await job.result()).phase is Phase.CANCELLED
        ((subject, text),) = rig.backend.told
        assert subject.endswith("has 1 slow node") and "node n2 is 1.6 times slower" in text
        await replay(await job.history())


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize(
    ("action", "is_sick", "spares", "used"),
    [
        ("examine", False, 1, "n2"),
        ("examine", True, 1, "n4"),
        ("replace", False, 1, "n4"),
        ("replace", False, 0, "n2"),
    ],
)
async def test_a_slow_node_is_replaced_by_verdict_or_policy(
    make_rig: MakeRig, action: str, is_sick: bool, spares: int, used: str
) -> None:
    sick = (Sick(node="n2", remap_failed=0, when="running"),) if is_sick else ()
    script = Script((*SLOW, *sick), then="succeed")
    name = f"f-{uuid.uuid4().hex[:8]}"
    async with make_rig(script, nodes=3, spares=spares, gpus=1, name=name) as rig:
        result = await (await rig.submit(rules(action), nodes=3)).result()
    assert (result.phase, result.generation) == (Phase.SUCCEEDED, 2)
    assert rig.launches()[2] == ["n1", used, "n3"]
    (incident,) = result.incidents
    assert incident.code == SLOW_NODE
    assert [one.decision for one in incident.decisions][:2] == ["Examine", "Relaunch"]
    assert [one.node for one in result.state.avoided] == (["n2"] if is_sick else [])


@pytest.mark.long
async def test_a_new_submission_reports_a_slow_node_again(make_rig: MakeRig) -> None:
    async with make_rig(Script(SLOW), nodes=3) as rig:
        name, start = f"job-{uuid.uuid4().hex[:8]}", {}
        for count in (1, 2):
            job = await rig.submit(rules("report"), nodes=3, name=name, start=start)
            state = await job.until(lambda one: bool(one.slow_nodes), "reported")
            assert [one.slow.node for one in state.slow_nodes] == ["n2"]
            await job.until_idle()
            assert len(rig.backend.told) == count
            await job.handle.signal("cancel")
            start = {"previous": (await job.result()).state}

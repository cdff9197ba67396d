"""Links between nodes, checked by the real workflow over simulated nodes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from temporalio.client import WorkflowHistory

from relaunch.evidence.reachability import LINK, NODE_LINK
from relaunch.job.state import Phase
from tests.fakes.nodes import Exit, Script
from tests.workflows.rig import Rig, forget_setting, policy, replay

MakeRig = Callable[..., AbstractAsyncContextManager[Rig]]
LOST = ("RuntimeError: Connection closed by peer [10.0.0.2]:29400",)
FAULTS = tuple(Exit(generation=each, exit_code=1, log_tail=LOST) for each in (1, 2))
"""All ranks lose their connections, in two generations."""


def parted(*pairs: tuple[str, str]) -> Script:
    broken = tuple(both for one, other in pairs for both in ((one, other), (other, one)))
    return Script(FAULTS, broken_links=broken, then="succeed")


async def test_a_pair_that_lost_each_other_gets_a_spare(make_rig: MakeRig) -> None:
    async with make_rig(parted(("n1", "n2")), spares=1) as rig:
        result = await (await rig.submit()).result()
    assert result.phase is Phase.SUCCEEDED
    assert rig.launches() == {1: ["n1", "n2"], 2: ["n1", "n2"], 3: ["n1", "n3"]}
    (incident,) = result.incidents
    assert [(one.cause, one.code) for one in incident.faults[-1:]] == [("NETWORK", LINK)]
    assert (incident.faults[-1].nodes, result.state.avoided) == (("n2",), ())


async def test_a_node_that_a_spare_cannot_reach_is_isolated(make_rig: MakeRig) -> None:
    async with make_rig(parted(("n1", "n2"), ("n1", "n3")), spares=1) as rig:
        result = await (await rig.submit()).result()
    assert rig.launches()[3] == ["n3", "n2"]
    assert [one.node for one in result.state.avoided if one.isolated] == ["n1"]
    assert result.incidents[0].faults[-1].code == NODE_LINK


async def test_a_history_of_before_the_check_is_replayed(make_rig: MakeRig) -> None:
    async with make_rig(parted(("n1", "n2"))) as rig:
        job = await rig.submit(policy(check_links=False))
        assert (await job.result()).phase is Phase.SUCCEEDED
        history = await job.history()
    assert "check_links" not in activities(history)
    forget_setting(history, "check_links")
    await replay(history)


def activities(history: WorkflowHistory) -> list[Any]:
    kind = "activity_task_scheduled_event_attributes"
    return [
        one.activity_task_scheduled_event_attributes.activity_type.name
        for one in history.events
        if one.HasField(kind)
    ]

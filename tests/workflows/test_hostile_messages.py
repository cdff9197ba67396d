"""Messages that anyone who reaches the server can send: none stops a job, its fleet or a worker."""

from __future__ import annotations

import json
import random
import string
import zlib

import pytest
from temporalio.api.common.v1 import Payload, Payloads, WorkflowExecution
from temporalio.api.workflowservice.v1 import SignalWorkflowExecutionRequest
from temporalio.client import Client

from relaunch.job.state import Phase
from relaunch.messages.bounds import MAX_REASON, MAX_VALUES, MessageError, bound_message
from relaunch.messages.fleets import (
    MAX_ID_BYTES,
    claim_fact,
    fault_report_fact,
    read,
    repair_ended_fact,
    repair_wanted_fact,
)
from relaunch.messages.jobs import explain
from relaunch.pool.events import ClaimEvent, FleetFileContent, MalformedMessage
from relaunch.spec.access import Access
from tests.recovery.fleet_builders import Desk
from tests.workflows.claimants import until_fleet
from tests.workflows.conftest import MakeRig

CLAIM = {"job": "llama", "submission": 1, "seq": 1, "nodes": 2}


def random_text(letters: int) -> str:
    """Return a text that does not compress."""
    return "".join(random.Random(letters).choices(string.ascii_letters, k=letters))


def test_texts_are_cut_and_escaped_and_numbers_have_64_bits() -> None:
    given = {"reason": "x" * 1_000_000, "by\x1b": "\x1b[2J\n# y", "n": [10**400, float("inf"), 1.5]}
    assert bound_message(given) == {
        "reason": f"{'x' * (MAX_REASON - 1)}…",
        "by\\x1b": "\\x1b[2J\\n# y",
        "n": [2**64, None, 1.5],
    }
    assert bound_message(True) is True and bound_message(None) is None


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (json.loads("[" * 900 + "]" * 900), "16 levels"),
        ([[0] * 1000] * (MAX_VALUES // 1000), "200,000 values"),
    ],
    ids=["deep", "many"],
)
def test_a_message_without_measure_is_refused(raw: object, says: str) -> None:
    with pytest.raises(MessageError, match=says):
        bound_message(raw)


def test_an_error_about_a_message_is_one_short_line() -> None:
    said = read("claim", {**CLAIM, "nodes": "\x1b" * 1_000_000}, claim_fact)
    assert isinstance(said, MalformedMessage)
    assert len(said.reason) <= MAX_REASON and said.reason.isprintable()
    assert explain(ValueError("a\nb")) == "a\\nb"


def test_an_id_that_no_workflow_can_have_is_refused() -> None:
    assert isinstance(read("claim", CLAIM, claim_fact), ClaimEvent)
    said = read("claim", {**CLAIM, "job": "é" * MAX_ID_BYTES}, claim_fact)
    assert isinstance(said, MalformedMessage) and "more than 500 bytes" in said.reason
    wanted = {
        **{"workflow": "x" * 9999, "run": "r", "seq": 1, "node": "n1", "step": "reset"},
        **{"reason": "r", "asked_at": "2030-01-01T00:00:00Z"},
    }
    assert isinstance(read("repair_wanted", wanted, repair_wanted_fact), MalformedMessage)


BARE = "2020-01-01T00:00:00"
SUSPECT = {"node": "n1", "at": BARE, "generation": 1, "cause": "GPU_FATAL", "reason": "r"}


@pytest.mark.parametrize(
    "more",
    [
        {"keep": ["n1"], "most": 4, "more_at": BARE},
        {"keep": ["n1"], "most": 2**64, "more_at": f"{BARE}Z"},
        {"submission": 2**62},
        {"since": BARE},
        {"suspects": [SUSPECT, {**SUSPECT, "at": f"{BARE}Z", "generation": 2, "isolate": True}]},
    ],
    ids=["more_at", "most", "submission", "since", "suspect"],
)
def test_no_value_in_a_message_stops_a_fleet(more: dict[str, object]) -> None:
    """Some of these failed its workflow task, and each one after it."""
    desk = Desk()
    rules = Access.model_validate({"people": {"ada": {"role": "admin"}}, "others": "admin"})
    desk.go(FleetFileContent("act", desk.specs, desk.limits, access=rules))
    desk.go(read("claim", {**CLAIM, **more}, claim_fact))
    desk.wait(minutes=2)
    report = {"job": "b", "submission": 1, "suspects": [{**SUSPECT, "at": BARE}]}
    desk.go(read("report_fault", report, fault_report_fact))
    assert desk.node("n1").marks
    ended = {"node": "n2", "workflow": "w", "run": "r", "by": "b", "job": ""}
    found = {"outcome": "done", "verdict": "HEALTHY", "reason": "r"}
    healing = {"healing": {"strategy": "RESET_GPU", "at": BARE}}
    desk.go(read("repair_ended", {**ended, **found, **healing}, repair_ended_fact))
    desk.wait(minutes=2)
    assert desk.node("n2").healed


async def send(client: Client, id: str, signal: str, data: bytes, encoding: str = "plain") -> None:
    """Send a signal as a stranger can, with any bytes."""
    payload = Payload(metadata={"encoding": f"json/{encoding}".encode()}, data=data)
    await client.workflow_service.signal_workflow_execution(
        SignalWorkflowExecutionRequest(
            namespace=client.namespace,
            workflow_execution=WorkflowExecution(workflow_id=id),
            signal_name=signal,
            input=Payloads(payloads=[payload]),
        )
    )


@pytest.mark.long
async def test_no_message_stops_a_job_or_its_fleet(make_rig: MakeRig) -> None:
    long = random_text(1_900_000)
    bomb = zlib.compress(b"[" + b"[]," * 20_000_000 + b"1]")
    async with make_rig() as rig:
        job = await rig.submit()
        await job.until_phase(Phase.RUNNING)
        id, fleet = job.handle.id, rig.fleet.id
        for data in (b"[" * 10_000, b"9" * 100_000, b'"\\ud800"', b"\xff", b"[NaN]", b'"\\u0000"'):
            await send(rig.client, id, "report", data)
        await send(rig.client, id, "report", bomb, "zlib")
        await send(rig.client, fleet, "claim", json.dumps({**CLAIM, "job": long}).encode())
        await send(rig.client, fleet, "claim", json.dumps({**CLAIM, "nodes": 10**30}).encode())
        paused = {"reason": long[:900_000], "by": long[900_000:1_800_000]}
        await send(rig.client, fleet, "pause", json.dumps(paused).encode())
        for _ in range(2):
            await send(rig.client, id, "force_retry", json.dumps({"reason": long}).encode())
        state = await job.until(lambda s: s.generation == 3 and s.phase is Phase.RUNNING, "retried")
        assert all(len(one) < 2000 and one.isprintable() for one in (state.reason, *state.notices))
        known = await until_fleet(rig, lambda s: bool(s.breaker.paused), "paused")
        assert len(known.breaker.paused) < 2000
        await job.handle.signal("cancel")
        assert (await job.result()).phase is Phase.CANCELLED

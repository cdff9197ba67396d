"""The page of a job and the page of a repair, as the web UI shows them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Finding, Role, Verdict
from relaunch.evidence.health import Health
from relaunch.job.state import DecisionRecord, FaultRecord, NodeDrain, Phase
from relaunch.repair.escalation import Escalation, ExamineNode, StartStrategy
from relaunch.repair.state import (
    AskPerson,
    FinishRepair,
    LogEntry,
    RebootNode,
    RepairRules,
    RepairState,
)
from relaunch.spec.policy import Strategy
from relaunch.workflows.search_attributes import (
    current_details,
    escalation_details,
    repair_details,
)
from tests.console.fake_job import ENDED, T0, incident, job_state
from tests.pages import sections
from tests.recovery.builders import running

NOW = datetime(2026, 11, 21, 3, 0, tzinfo=UTC)
AGO = NOW - timedelta(minutes=12)
SICK = Health(
    Verdict.UNHEALTHY,
    "Xid 79 on GPU 0000:05:00",
    (Finding("kernel", "Xid 79", Role.ROOT, "the GPU has fallen off the bus", Cause.GPU_FATAL),),
)
LOG = (
    LogEntry(AGO, "probe", "Xid 79 on GPU 0000:05:00"),
    LogEntry(NOW, "reboot", "the node answers and nothing is against it"),
)


def test_the_page_of_a_job_names_wanted_nodes_and_how_to_answer(page: SnapshotAssertion) -> None:
    wanted = NodeDrain("n2", "swap its PSU", "carol", NOW + timedelta(hours=2))
    asked = current_details(replace(running(), drains=(wanted,)), NOW)
    ended = current_details(replace(running(), drains=(wanted,), phase=Phase.FAILED), NOW)
    plain = current_details(running(), NOW)
    assert "`answer llama approve --node n2`" in asked
    next_ = next(line for line in asked.splitlines() if line.startswith("**Next**"))
    assert next_.count("carol wants n2") == 1
    assert ["carol" in text for text in (plain, ended)] == [False, False]
    assert sections({"running": plain, "a node is wanted": asked, "it has ended": ended}) == page


def test_s5_3_the_page_of_a_job_is_its_incident_report(page: SnapshotAssertion) -> None:
    closed = incident(closed=T0, recovered=T0, outcome="training passed step 10")
    notices = ("ada changed the policy (max_restarts): budget",)
    reason = "rank 3 exited with code 1"
    again = {
        "faults": tuple(
            FaultRecord(T0 + timedelta(minutes=n), n + 1, Cause.APPLICATION, reason)
            for n in range(2)
        ),
        "decisions": tuple(
            DecisionRecord(
                T0 + timedelta(minutes=n, seconds=1),
                "Relaunch",
                "RESTART_IN_PLACE",
                f"{reason}; RESTART_IN_PLACE {n + 1} of 2 for APPLICATION",
                True,
            )
            for n in range(2)
        ),
    }
    states = {
        "an open incident": job_state(
            incident=incident(), incidents=(closed,), incidents_archived=3, notices=notices
        ),
        "a person is asked": job_state(phase=Phase.WAITING_FOR_PERSON, incident=incident()),
        "the same fault again": job_state(incident=replace(incident(), **again)),
        "fewer nodes than it takes": job_state(fewer="2 of 4 nodes: n9 is quarantined"),
        "it failed": job_state(
            phase=Phase.FAILED,
            ended_at=ENDED,
            incidents=(closed, incident(closed=ENDED, ranks=(3,), outcome="the job ended: FAILED")),
        ),
    }
    assert sections({title: current_details(one, T0) for title, one in states.items()}) == page


def repair(**changes: Any) -> RepairState:
    rules = RepairRules("ask", 1, 8, timedelta(minutes=5), timedelta(hours=1))
    known = {"reason": "Xid 79 on GPU 0000:05:00", "by": "job llama", "rules": rules}
    times = {"started_at": AGO, "deadline": NOW + timedelta(minutes=13)}
    made = {"id": "r", "fleet": "lab", "node": "n1", "strategy": Strategy.REBOOT_NODE, "gpus": ()}
    return RepairState(**{**made, **known, **times, **changes})


def test_the_page_of_a_repair_says_what_a_person_can_do(
    page: SnapshotAssertion,
) -> None:
    ask = AskPerson("May relaunch reboot n1?", NOW + timedelta(minutes=5), "it is asked")
    order = RebootNode("boot-1", "Xid 79")
    healthy = FinishRepair("done", Verdict.HEALTHY, "n1 was rebooted and is healthy")
    found = repair(health=SICK, boot_id="boot-1")
    pages = {
        "asks": repair_details(found, ask),
        "waits for the fleet": repair_details(
            found, order, waiting_for="the fleet permits 1 repair at once"
        ),
        "ordered": repair_details(replace(found, log=LOG), order),
        "ended": repair_details(replace(found, log=LOG), healthy),
    }
    assert ["`answer`" in text for text in pages.values()] == [True, False, False, False]
    assert ["**Deadline**" in text for text in pages.values()] == [True, True, True, False]
    assert sections(pages) == page


def test_the_page_of_an_escalation_says_what_comes_next(
    page: SnapshotAssertion,
) -> None:
    escalation = Escalation("n1", "no answer from the driver")
    found = replace(escalation, health=SICK, log=LOG)
    reset = StartStrategy(Strategy.RESET_GPU, ("0000:05:00",), "Xid 79 asks for a reset")
    ended = FinishRepair("ambiguous", Verdict.UNHEALTHY, "no strategy is left")
    deadline = NOW + timedelta(minutes=13)
    pages = {
        title: escalation_details(state, decision, "job llama", deadline)
        for title, state, decision in (
            ("examined", escalation, ExamineNode(timedelta(0), "nothing is known of it")),
            ("examined again", found, ExamineNode(timedelta(seconds=30), "it boots")),
            ("a strategy starts", found, reset),
            ("ended", found, ended),
        )
    }
    assert sections(pages) == page

"""Record what a repair waits for, what was seen, and how it ended. Decides nothing."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from relaunch.evidence.fields import text
from relaunch.evidence.findings import Verdict
from relaunch.evidence.health import Health
from relaunch.repair.state import Outcome, RepairState, StepRecord

KEPT_RECORDS = 60
KEPT_FINDINGS = 16


def ended(
    state: RepairState,
    now: datetime,
    outcome: Outcome,
    reason: str,
    verdict: Verdict = Verdict.UNKNOWN,
) -> RepairState:
    state = replace(
        state, outcome=outcome, verdict=verdict, conclusion=text(reason, 600), wait=timedelta(0)
    )
    return noted(state, now, "Ended", f"{outcome}: {reason}")


def again(state: RepairState, wait: timedelta, now: datetime, reason: str) -> RepairState:
    return noted(replace(state, wait=wait, waiting=text(reason)), now, "Waiting", reason)


def noted(state: RepairState, now: datetime, what: str, reason: str) -> RepairState:
    record = StepRecord(now, what, text(reason))
    if any((one.what, one.reason) == (record.what, record.reason) for one in state.log[-2:]):
        return state  # a node that is waited for gives the same answer every few seconds
    log = (*state.log, record)
    return replace(
        state, log=log if len(log) <= KEPT_RECORDS else (log[0], *log[-KEPT_RECORDS + 1 :])
    )


def with_health(state: RepairState, health: Health) -> RepairState:
    kept = replace(
        health, findings=health.findings[:KEPT_FINDINGS], unread=health.unread[:KEPT_FINDINGS]
    )
    return replace(state, health=kept)

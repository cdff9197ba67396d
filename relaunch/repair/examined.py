"""Decide how a repair ends: whether the node is healthy once an order is proven carried out.

A node that has just booted gets some minutes until its driver and DCGM answer. Only HEALTHY is
`done`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, assert_never

from relaunch.evidence.catalog import Catalog
from relaunch.evidence.findings import Verdict
from relaunch.evidence.health import Health, add_diag
from relaunch.repair.explain import done_to
from relaunch.repair.record import again, ended, noted, with_health
from relaunch.repair.state import RepairState, Stage
from relaunch.spec.policy import Strategy

LOOK_AGAIN = timedelta(seconds=5)
DRIVER_AGAIN = timedelta(seconds=10)
DRIVER_WITHIN = timedelta(minutes=3)
"""After a boot: agents answer before the driver has found eight GPUs."""
MAX_EXAMINATIONS = 2


def examined(state: RepairState, health: Health, now: datetime) -> RepairState:
    rules = state.rules
    rebooted = health.boot_id != state.boot_id
    if state.strategy is Strategy.REBOOT_NODE and not rebooted:
        reason = f"{state.node} tells boot id {health.boot_id} again, which had ended"
        return again(replace(state, stage=Stage.PROVING), LOOK_AGAIN, now, reason)
    if state.examined_on and health.boot_id != state.examined_on:
        return _concluded(
            state,
            replace(health, verdict=Verdict.UNKNOWN, reason="it rebooted while it was examined"),
            now,
        )
    state = replace(state, examined_on=health.boot_id)
    if (
        _has_just_booted(state, health, now)
        and rules.expected_gpus
        and (health.working or 0) < rules.expected_gpus
    ):
        shown = (
            "no GPU yet"
            if not health.working
            else f"{health.working} of {rules.expected_gpus} GPUs"
        )
        return again(state, DRIVER_AGAIN, now, f"{state.node} has just booted and shows {shown}")
    if rules.expected_gpus and rules.level and health.verdict is not Verdict.UNHEALTHY:
        return replace(state, stage=Stage.DIAGNOSING)
    return _concluded(state, health, now)


def _has_just_booted(state: RepairState, health: Health, now: datetime) -> bool:
    return (
        health.boot_id != state.boot_id
        and state.proven_at is not None
        and now - state.proven_at < DRIVER_WITHIN
    )


def diagnosed(
    state: RepairState, answer: Mapping[str, Any], catalog: Catalog, now: datetime
) -> RepairState:
    assert state.health is not None  # only a probed node is diagnosed
    health = add_diag(state.health, answer, level=state.rules.level, catalog=catalog)
    state = with_health(noted(state, now, "Diagnosed", health.reason), health)
    if health.verdict is Verdict.UNKNOWN and _has_just_booted(state, health, now):
        # DCGM's own service starts after the driver.
        return again(
            replace(state, stage=Stage.EXAMINING),
            DRIVER_AGAIN,
            now,
            f"{state.node} has just booted: {health.reason}",
        )
    return _concluded(state, health, now)


def not_diagnosed(state: RepairState, reason: str, now: datetime) -> RepairState:
    state = replace(
        state, examinations=state.examinations + 1, silent=reason, stage=Stage.EXAMINING
    )
    said = f"dcgmi diag on {state.node} got no answer: {reason}"
    if state.examinations < MAX_EXAMINATIONS:
        return again(state, LOOK_AGAIN, now, said)
    return ended(
        state,
        now,
        "refused",
        f"{state.node} was {done_to(state)}, but whether it helped is not known: {said}",
    )


def _concluded(state: RepairState, health: Health, now: datetime) -> RepairState:
    did = f"{state.node} was {done_to(state)}"
    match health.verdict:
        case Verdict.HEALTHY:
            return ended(
                state, now, "done", f"{did} and is healthy: {health.reason}", Verdict.HEALTHY
            )
        case Verdict.UNHEALTHY:
            return ended(
                state,
                now,
                "refused",
                f"{did} and is still unhealthy: {health.reason}",
                Verdict.UNHEALTHY,
            )
        case Verdict.UNKNOWN:
            return ended(
                state, now, "refused", f"{did}, but whether it helped is not known: {health.reason}"
            )
        case _:
            assert_never(health.verdict)

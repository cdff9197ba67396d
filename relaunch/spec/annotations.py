"""Translate ModelArts' annotations and variables of a job into changes to a policy.

The preset `modelarts` defines what each recovery does.

Source: support.huaweicloud.com, ModelArts, "Fault recovery of training jobs", 2026-02-06.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from relaunch.evidence.causes import Cause
from relaunch.spec.policy import Policy, Rung, Strategy, state_restarts

PREFIX = "fault-tolerance/"
JOB_RETRIES = f"{PREFIX}job-retry-num"
UNCONDITIONAL = f"{PREFIX}job-unconditional-retry"
HANG_RETRY = f"{PREFIX}hang-retry"
POD_RETRIES = f"{PREFIX}pod-retry-num"
KNOWN = (JOB_RETRIES, UNCONDITIONAL, HANG_RETRY, POD_RETRIES)

MAX_RETRIES = 128
"""ModelArts accepts 1 to 128."""

GRACE_PERIOD = "MA_FAILOVER_TERMINATION_GRACE_PERIOD_SECONDS"
"""A variable of the job, in seconds. ModelArts waits no longer than that for the end of a container
before it goes on rescheduling; -1, its default, is no such limit. It recommends 10 for large jobs.
"""
NO_GRACE_PERIOD = ("", "-1")
MAX_GRACE_DIGITS = 9
"""Three decades, which no stop takes."""

FAIL = (Rung(strategy=Strategy.FAIL),)


def apply_annotations(policy: Policy, annotations: Mapping[str, str]) -> Policy:
    """Return the job's policy with the annotations of its job file applied.

    `job-retry-num` sets `max_restarts` under every policy. The others enable recoveries of the
    preset `modelarts`; a fault whose recovery is not enabled fails the job, as in ModelArts.
    Annotations with another prefix are ignored.

    Raises:
        ValueError: An annotation is malformed, or has no meaning under this policy.
    """
    ours = {key: value for key, value in annotations.items() if key.startswith(PREFIX)}
    if not ours:
        return policy
    for key in ours:
        if key not in KNOWN:
            raise ValueError(f"metadata.annotations: {key} is unknown: one of {', '.join(KNOWN)}")
        if key != JOB_RETRIES and policy.extends != "modelarts":
            raise ValueError(
                f"metadata.annotations: {key} needs policy: modelarts,"
                f" and the policy is {policy.extends}"
            )
    if JOB_RETRIES not in ours:
        raise ValueError(f"metadata.annotations: {next(iter(ours))} needs {JOB_RETRIES} beside it")
    changed = state_restarts(policy, _read_count(ours, JOB_RETRIES))
    return _apply_switches(changed, ours) if policy.extends == "modelarts" else changed


def apply_grace_period(policy: Policy, env: Mapping[str, str]) -> Policy:
    """Return the policy with `timeouts.stop_grace` at most as long as the job's variable says.

    It never makes the policy's own `stop_grace` longer: the variable is there to be faster.

    Raises:
        ValueError: The variable is malformed.
    """
    value = env.get(GRACE_PERIOD, "")
    if value in NO_GRACE_PERIOD:
        return policy
    is_number = value.isascii() and value.isdigit() and len(value) <= MAX_GRACE_DIGITS
    if not is_number or int(value) == 0:
        raise ValueError(
            f"{GRACE_PERIOD} is {value[:40]!r}:"
            " a whole number of seconds from 1, or -1 for no limit"
        )
    limit = timedelta(seconds=int(value))
    if policy.timeouts.stop_grace <= limit:
        return policy
    timeouts = policy.timeouts.model_copy(update={"stop_grace": limit})
    return policy.model_copy(update={"timeouts": timeouts})


def _apply_switches(policy: Policy, ours: Mapping[str, str]) -> Policy:
    causes = dict(policy.causes)
    if not _read_flag(ours, UNCONDITIONAL):
        causes[Cause.UNKNOWN] = FAIL
    if not _read_flag(ours, HANG_RETRY):
        causes[Cause.HANG] = FAIL
    pods = _read_count(ours, POD_RETRIES) if POD_RETRIES in ours else 0
    for cause, ladder in causes.items():
        rungs = (
            rung.model_copy(update={"tries": pods})
            if rung.strategy is Strategy.REPLACE_NODE
            else rung
            for rung in ladder
        )
        causes[cause] = tuple(rung for rung in rungs if rung.tries != 0) or FAIL
    return policy.model_copy(update={"causes": causes})


def _read_count(ours: Mapping[str, str], key: str) -> int:
    value = ours[key]
    if (
        not value.isascii()
        or not value.isdigit()
        or len(value) > 3
        or not 1 <= int(value) <= MAX_RETRIES
    ):
        raise ValueError(
            f"metadata.annotations: {key} is {value!r}:"
            f" a whole number from 1 to {MAX_RETRIES}, in quotes"
        )
    return int(value)


def _read_flag(ours: Mapping[str, str], key: str) -> bool:
    value = ours.get(key, "false")
    if value not in ("true", "false"):
        raise ValueError(f'metadata.annotations: {key} is {value!r}: "true" or "false"')
    return value == "true"

"""ModelArts' annotations of a job file, as changes to a policy. What each recovery means is the preset `modelarts`.

Source: support.huaweicloud.com, ModelArts, "Fault recovery of training jobs", 2026-02-06.
"""

from __future__ import annotations

from collections.abc import Mapping

from relaunch.evidence.causes import Cause
from relaunch.spec.policy import Policy, Rung, Strategy

PREFIX = "fault-tolerance/"
JOB_RETRIES = f"{PREFIX}job-retry-num"
UNCONDITIONAL = f"{PREFIX}job-unconditional-retry"
HANG_RETRY = f"{PREFIX}hang-retry"
POD_RETRIES = f"{PREFIX}pod-retry-num"
KNOWN = (JOB_RETRIES, UNCONDITIONAL, HANG_RETRY, POD_RETRIES)

MOST_RETRIES = 128
"""ModelArts takes 1 to 128."""

FAIL = (Rung(strategy=Strategy.FAIL),)


def annotated(policy: Policy, annotations: Mapping[str, str]) -> Policy:
    """Return the policy that a job file's annotations make of the one it names.

    `job-retry-num` is `max_restarts` under every policy. The others switch recoveries of the preset `modelarts` on; what is not
    switched on fails the job, as it does there. Annotations of others are none of ours.

    Raises:
        ValueError: an annotation that cannot be read, or one that this policy has no meaning for.
    """
    ours = {key: value for key, value in annotations.items() if key.startswith(PREFIX)}
    if not ours:
        return policy
    for key in ours:
        if key not in KNOWN:
            raise ValueError(f"metadata.annotations: {key} is unknown: one of {', '.join(KNOWN)}")
        if key != JOB_RETRIES and policy.extends != "modelarts":
            raise ValueError(f"metadata.annotations: {key} needs policy: modelarts, and the policy is {policy.extends}")
    if JOB_RETRIES not in ours:
        raise ValueError(f"metadata.annotations: {next(iter(ours))} needs {JOB_RETRIES} beside it")
    changed = policy.model_copy(update={"max_restarts": _count(ours, JOB_RETRIES)})
    return _switched(changed, ours) if policy.extends == "modelarts" else changed


def _switched(policy: Policy, ours: Mapping[str, str]) -> Policy:
    causes = dict(policy.causes)
    if not _flag(ours, UNCONDITIONAL):
        causes[Cause.UNKNOWN] = FAIL
    if not _flag(ours, HANG_RETRY):
        causes[Cause.HANG] = FAIL
    pods = _count(ours, POD_RETRIES) if POD_RETRIES in ours else 0
    for cause, ladder in causes.items():
        rungs = (rung.model_copy(update={"tries": pods}) if rung.strategy is Strategy.REPLACE_NODE else rung for rung in ladder)
        causes[cause] = tuple(rung for rung in rungs if rung.tries != 0) or FAIL
    return policy.model_copy(update={"causes": causes})


def _count(ours: Mapping[str, str], key: str) -> int:
    value = ours[key]
    if not value.isascii() or not value.isdigit() or len(value) > 3 or not 1 <= int(value) <= MOST_RETRIES:
        raise ValueError(f"metadata.annotations: {key} is {value!r}: a whole number from 1 to {MOST_RETRIES}, in quotes")
    return int(value)


def _flag(ours: Mapping[str, str], key: str) -> bool:
    value = ours.get(key, "false")
    if value not in ("true", "false"):
        raise ValueError(f'metadata.annotations: {key} is {value!r}: "true" or "false"')
    return value == "true"

"""ModelArts' annotations: what each switches on, the combinations that matter, the sentences."""

from __future__ import annotations

from datetime import timedelta
from itertools import product

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.causes import Cause
from relaunch.spec.annotations import (
    FAIL,
    GRACE_PERIOD,
    HANG_RETRY,
    JOB_RETRIES,
    POD_RETRIES,
    UNCONDITIONAL,
    apply_annotations,
    apply_grace_period,
)
from relaunch.spec.policy import Policy, find_ladder_errors, preset, preset_names, resolve
from tests.recovery.builders import (
    Turn,
    died,
    examine,
    hung,
    lose,
    mended,
    running,
    sick,
    walk,
    xid,
)

MODELARTS = preset("modelarts")
RESET = "RESET_GPU n2 0000:05:00"
POD, WHOLE, WHOLE_ISOLATED = (
    "REPLACE_NODE without n2 avoiding n2",
    "RESCHEDULE_JOB",
    "RESCHEDULE_JOB without n2 avoiding n2",
)
HEALS, FATAL, USERS = xid(95), xid(79), xid(31)


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize(
    "others",
    [
        pytest.param({}, id="none"),
        pytest.param(
            {"jupyter-lab/enable": "true", "job_template": "Template", "fault-tolerance": "yes"},
            id="those of others",
        ),
    ],
)
def test_without_our_annotations_a_policy_stays_as_it_is(name: str, others: dict[str, str]) -> None:
    policy = preset(name)
    assert apply_annotations(policy, others) is policy


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("number", ["1", "8", "128"])
def test_job_retry_num_is_max_restarts_under_every_policy(name: str, number: str) -> None:
    policy = apply_annotations(preset(name), {JOB_RETRIES: number, "jupyter-lab/enable": "true"})
    assert policy.max_restarts == int(number)
    if name != "modelarts":
        assert policy == resolve({"extends": name, "max_restarts": int(number)})


@pytest.mark.parametrize(
    ("name", "annotations"),
    [
        *(
            pytest.param("modelarts", {JOB_RETRIES: value}, id=f"retries {value[:9]!r}")
            for value in (
                "0",
                "129",
                "-1",
                "+3",
                "3.0",
                "",
                " 3",
                "three",
                "٣",
                "²",
                "true",
                "1e2",
                "9" * 5000,
            )
        ),
        *(
            pytest.param(
                "modelarts", {JOB_RETRIES: "3", POD_RETRIES: value}, id=f"pod retries {value!r}"
            )
            for value in ("0", "129", "many")
        ),
        *(
            pytest.param("modelarts", {JOB_RETRIES: "3", key: value}, id=f"{key} {value!r}")
            for key in (UNCONDITIONAL, HANG_RETRY)
            for value in ("True", "yes", "1", "")
        ),
        pytest.param(
            "modelarts",
            {JOB_RETRIES: "3", "fault-tolerance/hang-retries": "true"},
            id="an unknown annotation",
        ),
        *(
            pytest.param("modelarts", {key: value}, id=f"{key} alone")
            for key, value in ((UNCONDITIONAL, "true"), (HANG_RETRY, "true"), (POD_RETRIES, "3"))
        ),
        *(
            pytest.param(name, {JOB_RETRIES: "3", key: value}, id=f"{key} under {name}")
            for name in preset_names()
            if name != "modelarts"
            for key, value in ((UNCONDITIONAL, "true"), (HANG_RETRY, "true"), (POD_RETRIES, "3"))
        ),
    ],
)
def test_an_unreadable_or_void_value_is_refused_with_a_sentence(
    name: str, annotations: dict[str, str], snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(ValueError, match=r"^metadata\.annotations: ") as refusal:
        apply_annotations(preset(name), annotations)
    assert str(refusal.value) == snapshot


def switched(unconditional: bool | None, hangs: bool | None, pods: int | None) -> Policy:
    annotations = {JOB_RETRIES: "8"}
    if unconditional is not None:
        annotations[UNCONDITIONAL] = str(unconditional).lower()
    if hangs is not None:
        annotations[HANG_RETRY] = str(hangs).lower()
    if pods is not None:
        annotations[POD_RETRIES] = str(pods)
    return apply_annotations(MODELARTS, annotations)


COMBINATIONS = [
    pytest.param(
        unconditional, hangs, pods, id=f"unconditional {unconditional}, hang {hangs}, pods {pods}"
    )
    for unconditional, hangs, pods in product(
        (None, False, True), (None, False, True), (None, 1, 3)
    )
]


@pytest.mark.parametrize(("unconditional", "hangs", "pods"), COMBINATIONS)
def test_s4_8_what_every_combination_decides(
    unconditional: bool | None, hangs: bool | None, pods: int | None
) -> None:
    job = running(policy=switched(unconditional, hangs, pods))
    walk(job, (died(1), WHOLE if unconditional else "FAILED 1"))
    walk(job, (hung(), "RESTART_IN_PLACE" if hangs else "FAILED 1"))
    walk(job, (sick(FATAL), POD if pods else WHOLE_ISOLATED))
    # In place recovery is part of the automatic restart;
    # what follows a reset that fails is not always the same.
    walk(job, (sick(HEALS), RESET), (mended("refused"), POD if pods else WHOLE_ISOLATED))
    walk(
        job,
        (sick(USERS), "EXAMINE n2"),
        (examine(n2="UNHEALTHY"), RESET),
        (mended(), "LAUNCH"),
        (sick(USERS), "EXAMINE n2"),
        (examine(n2="HEALTHY"), "RESTART_IN_PLACE"),
        (sick(USERS), WHOLE),
    )
    walk(job, (lose(), "WAIT NODE_LOST"), (hung(), POD if pods else WHOLE_ISOLATED))


@pytest.mark.parametrize(("unconditional", "hangs", "pods"), COMBINATIONS)
def test_s4_8_every_combination_is_a_policy_that_holds_together(
    unconditional: bool | None, hangs: bool | None, pods: int | None
) -> None:
    policy = switched(unconditional, hangs, pods)
    assert Policy.model_validate(policy.model_dump(mode="json")) == policy
    assert [
        sentence for ladder in policy.causes.values() for sentence in find_ladder_errors(ladder)
    ] == []
    assert set(policy.causes) == set(MODELARTS.causes)
    assert (policy.max_restarts, policy.extends) == (8, "modelarts")


@pytest.mark.parametrize(
    ("pods", "turns"),
    [(1, [(sick(FATAL), POD)]), (2, [(sick(FATAL), POD)] * 2), (3, [(sick(FATAL), POD)] * 3)],
)
def test_s4_8_pod_retry_num_counts_moved_pods_for_all_causes(pods: int, turns: list[Turn]) -> None:
    after = walk(running(policy=switched(None, None, pods)), *turns)
    assert after.restarts_spent == 0
    walk(after, (sick(FATAL), WHOLE_ISOLATED))
    walk(after, (sick(HEALS), RESET), (mended("refused"), WHOLE_ISOLATED))
    walk(after, (lose(), "WAIT NODE_LOST"), (hung(), WHOLE_ISOLATED))


def test_s4_8_what_is_said_to_be_off_is_as_what_is_not_said() -> None:
    assert switched(False, False, None) == switched(None, None, None)
    assert (
        switched(None, None, None).causes[Cause.UNKNOWN]
        == switched(None, None, None).causes[Cause.HANG]
        == FAIL
    )


def test_s4_8_everything_on_is_the_preset() -> None:
    assert switched(True, True, 3) == MODELARTS.model_copy(update={"max_restarts": 8})


def test_s4_8_the_preset_itself_is_not_changed() -> None:
    given = preset("modelarts")
    for words in ({JOB_RETRIES: "2"}, {GRACE_PERIOD: "5"}):
        changed = apply_annotations(given, words), apply_grace_period(given, words)
        assert any(one != given for one in changed)
        assert given == preset("modelarts")


def test_s4_8_a_policy_that_extends_modelarts_switches_as_well() -> None:
    mine = resolve({"extends": "modelarts", "timeouts": {"stop_grace": "10s"}})
    assert (
        apply_annotations(mine, {JOB_RETRIES: "2"}).causes
        == apply_annotations(MODELARTS, {JOB_RETRIES: "2"}).causes
    )


def test_s4_8_a_users_ladder_never_becomes_that_of_another_cause() -> None:
    """A ladder that only replaces nodes ends in failure where pods are off, not in UNKNOWN's."""
    mine = resolve(
        {
            "extends": "modelarts",
            "causes": {"GPU_FATAL": [{"strategy": "REPLACE_NODE", "tries": 2}]},
        }
    )
    policy = apply_annotations(mine, {JOB_RETRIES: "3", UNCONDITIONAL: "true"})
    walk(running(policy=policy), (sick(FATAL), "FAILED 1"))


@pytest.mark.parametrize(
    ("stated", "value", "expected"),
    [
        pytest.param("15s", None, 15, id="not set: that of the policy"),
        pytest.param("15s", "-1", 15, id="-1, the default: that of the policy"),
        pytest.param("15s", "", 15, id="empty: that of the policy"),
        pytest.param("15s", "10", 10, id="the variable is shorter"),
        pytest.param("5m", "1", 1, id="the shortest"),
        pytest.param("5s", "10", 5, id="the policy is shorter"),
        pytest.param("10s", "10", 10, id="both are alike"),
        pytest.param("10s", "9" * 9, 10, id="longer than any stop"),
    ],
)
def test_s4_10_the_grace_period_of_the_job_bounds_stop_grace(
    stated: str, value: str | None, expected: int
) -> None:
    policy = resolve({"extends": "modelarts", "timeouts": {"stop_grace": stated}})
    env = {"NCCL_DEBUG": "WARN", **({} if value is None else {GRACE_PERIOD: value})}
    bounded = apply_grace_period(policy, env)
    assert bounded.timeouts.stop_grace == timedelta(seconds=expected)
    same = bounded.timeouts.model_copy(update={"stop_grace": policy.timeouts.stop_grace})
    assert bounded.model_copy(update={"timeouts": same}) == policy, "nothing else has changed"


@pytest.mark.parametrize("value", ["0", "-2", "ten", "10s", "1.5", " 10", "٣", "9" * 5000])
def test_s4_10_an_unreadable_grace_period_is_refused(
    value: str, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(ValueError, match=f"^{GRACE_PERIOD} is ") as refusal:
        apply_grace_period(MODELARTS, {GRACE_PERIOD: value})
    assert str(refusal.value) == snapshot

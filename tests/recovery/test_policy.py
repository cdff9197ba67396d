"""What a policy refuses, each with its sentence, and what `extends` does.

And that every policy survives the way through a workflow.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from pydantic import ValidationError
from syrupy.assertion import SnapshotAssertion

from relaunch.converter import shared_converter
from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Verdict
from relaunch.fields import duration
from relaunch.job.apply import list_changed_keys
from relaunch.messages.jobs import overlay
from relaunch.spec.policy import (
    LATER_KEYS,
    HangLimits,
    Policy,
    Rung,
    Strategy,
    Timeouts,
    find_ladder_errors,
    find_timeout_errors,
    preset,
    preset_names,
    resolve,
    state_restarts,
)

PRESETS = ("default", "ecs-reboot-once", "gputasker", "modelarts", "torchelastic")
EXAMPLE = {
    "extends": "default",
    "max_restarts": 8,
    "no_progress_stop": 3,
    "healthy_for": "1h",
    "causes": {
        "GPU_RESET": [
            {
                "strategy": "RESET_GPU",
                "tries": 3,
                "window": "24h",
                "key": ["node", "gpu", "code"],
                "spends": False,
            },
            {"strategy": "REPLACE_NODE", "when": "UNHEALTHY", "isolate": True},
        ],
        "APPLICATION": [
            {"strategy": "RESTART_IN_PLACE", "tries": 3, "delay": "5s"},
            {
                "strategy": "RESCHEDULE_JOB",
                "tries": 3,
                "consecutive": True,
                "reset_by": ["GPU_FATAL", "NODE_FAULT"],
            },
            {"strategy": "FAIL"},
        ],
    },
    "hang": {"after": "learned", "first_step": "30m", "checkpoint": "20m", "evaluation": "60m"},
    "timeouts": {
        "heartbeat": "10s",
        "lease": "60s",
        "lost_after": "180s",
        "fence_after": "60s",
        "reboot": "25m",
    },
    "strict_lease": False,
}
"""As a user writes it, with most of what can be written."""


def sentence(error: pytest.ExceptionInfo[ValidationError]) -> str:
    return "\n".join(one["msg"].removeprefix("Value error, ") for one in error.value.errors())


# --- a rung ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "written",
    [
        pytest.param({"strategy": "GROW"}, id="GROW"),
        pytest.param({"strategy": "SHRINK", "spends": True}, id="SHRINK that spends"),
        pytest.param({"strategy": "FAIL", "tries": 1}, id="FAIL with tries"),
        pytest.param({"strategy": "ASK", "tries": 2}, id="ASK with tries"),
        pytest.param({"strategy": "FAIL", "delay": "5s"}, id="FAIL with a delay"),
        pytest.param({"strategy": "ASK", "delay": "5s"}, id="ASK with a delay"),
        *(
            pytest.param({"strategy": strategy, "isolate": True}, id=f"{strategy} that isolates")
            for strategy in ("RESTART_IN_PLACE", "RESET_GPU", "REBOOT_NODE", "ASK", "FAIL")
        ),
        pytest.param({"strategy": "RESTART_IN_PLACE", "reset_by": "HANG"}, id="reset_by alone"),
        pytest.param(
            {"strategy": "RESTART_IN_PLACE", "tries": 1, "consecutive": True, "window": "1h"},
            id="consecutive within a window",
        ),
        pytest.param({"strategy": "RESTART_IN_PLACE", "backoff": 2}, id="backoff of nothing"),
        pytest.param({"strategy": "RESTART_IN_PLACE", "key": ["job", "node"]}, id="job and node"),
        pytest.param({"strategy": "RESTART_IN_PLACE", "key": []}, id="no key"),
        pytest.param({"strategy": "RESTART_IN_PLACE", "window": "0s"}, id="a window of nothing"),
    ],
)
def test_a_rung_that_means_nothing_is_refused_with_a_sentence(
    written: dict[str, Any], snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(ValidationError) as error:
        Rung.model_validate(written)
    assert sentence(error) == snapshot


@pytest.mark.parametrize(
    ("written", "where"),
    [
        pytest.param({"strategy": "WAIT"}, "strategy", id="an unknown strategy"),
        pytest.param({}, "strategy", id="no strategy"),
        pytest.param({"strategy": "RESTART_IN_PLACE", "tries": 0}, "tries", id="no tries at all"),
        pytest.param(
            {"strategy": "RESTART_IN_PLACE", "window": 3600},
            "window",
            id="a duration without a unit",
        ),
        pytest.param({"strategy": "RESTART_IN_PLACE", "delay": "soon"}, "delay", id="no duration"),
        pytest.param(
            {"strategy": "RESTART_IN_PLACE", "delay": "5s", "backoff": 0.5},
            "backoff",
            id="a delay that shrinks",
        ),
        pytest.param({"strategy": "RESTART_IN_PLACE", "key": "rack"}, "key", id="an unknown key"),
        pytest.param(
            {"strategy": "RESTART_IN_PLACE", "when": "SICK"}, "when", id="an unknown verdict"
        ),
        pytest.param(
            {"strategy": "RESTART_IN_PLACE", "consecutive": True, "reset_by": "LUCK"},
            "reset_by",
            id="an unknown cause",
        ),
        pytest.param(
            {"strategy": "RESTART_IN_PLACE", "retries": 3}, "retries", id="an unknown word"
        ),
    ],
)
def test_a_rung_with_a_wrong_word_is_refused_where_it_stands(
    written: dict[str, Any], where: str
) -> None:
    with pytest.raises(ValidationError) as error:
        Rung.model_validate(written)
    assert {one["loc"][0] for one in error.value.errors()} == {where}


@pytest.mark.parametrize(
    ("key", "bare", "listed"),
    [
        ("when", "HEALTHY", (Verdict.HEALTHY,)),
        ("key", "code", ("code",)),
        ("codes", "exit 1", ("exit 1",)),
        ("reset_by", "PROGRESS", ("PROGRESS",)),
        ("reset_by", "GPU_FATAL", (Cause.GPU_FATAL,)),
    ],
)
def test_one_bare_word_is_a_list_of_one(key: str, bare: str, listed: tuple[str, ...]) -> None:
    more = {"consecutive": True} if key == "reset_by" else {}
    rung = Rung.model_validate({"strategy": "RESCHEDULE_JOB", key: bare, **more})
    assert getattr(rung, key) == listed
    assert rung == Rung.model_validate({"strategy": "RESCHEDULE_JOB", key: [bare], **more})


@pytest.mark.parametrize(
    ("written", "label"),
    [
        ({"strategy": "REBOOT_NODE"}, "REBOOT_NODE"),
        ({"strategy": "REPLACE_NODE", "when": "UNHEALTHY"}, "REPLACE_NODE when UNHEALTHY"),
        (
            {"strategy": "REPLACE_NODE", "when": ["HEALTHY", "UNKNOWN"]},
            "REPLACE_NODE when HEALTHY or UNKNOWN",
        ),
        (
            {"strategy": "REBOOT_NODE", "codes": ["exit 1", "Xid 79"]},
            "REBOOT_NODE for exit 1, Xid 79",
        ),
        (
            {"strategy": "REBOOT_NODE", "when": "UNHEALTHY", "codes": "exit 1"},
            "REBOOT_NODE when UNHEALTHY for exit 1",
        ),
    ],
)
def test_a_rung_is_called_by_what_it_does_and_when(written: dict[str, Any], label: str) -> None:
    assert Rung.model_validate(written).label == label


# --- a ladder -------------------------------------------------------------------------------------


def ladder(*written: dict[str, Any]) -> tuple[Rung, ...]:
    return tuple(Rung.model_validate(one) for one in written)


RESTART, FAIL = {"strategy": "RESTART_IN_PLACE"}, {"strategy": "FAIL"}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        pytest.param([], 1, id="empty"),
        pytest.param(
            [RESTART, FAIL],
            1,
            id="an endless rung",
        ),
        pytest.param(
            [{**RESTART, "tries": 1}, {"strategy": "ASK"}, FAIL],
            1,
            id="an early end",
        ),
        pytest.param(
            [FAIL, {**RESTART, "tries": 1}, FAIL],
            2,
            id="twice the end",
        ),
        pytest.param(
            [{**RESTART, "tries": 1}, {**RESTART, "tries": 2, "window": "1h"}],
            1,
            id="twice the same",
        ),
        pytest.param(
            [{**RESTART, "tries": 1}, {**RESTART, "when": "HEALTHY", "tries": 1}, FAIL],
            0,
            id="the same, but when",
        ),
        pytest.param(
            [{**RESTART, "codes": "exit 1"}, {**RESTART, "codes": "exit 2"}, FAIL],
            0,
            id="the same, but for whom",
        ),
        pytest.param(
            [{**FAIL, "when": "HEALTHY"}, {**FAIL, "codes": "exit 2"}, RESTART],
            0,
            id="an end on a condition",
        ),
        pytest.param([RESTART], 0, id="one endless rung"),
        *(
            pytest.param(
                [{"strategy": strategy}, {"strategy": "RESCHEDULE_JOB"}],
                0,
                id=f"an endless {strategy} is passed by where it cannot be done",
            )
            for strategy in ("REPLACE_NODE", "RESET_GPU", "REBOOT_NODE")
        ),
    ],
)
def test_what_in_a_ladder_can_never_happen(
    written: list[dict[str, Any]], expected: int, snapshot: SnapshotAssertion
) -> None:
    found = find_ladder_errors(ladder(*written))
    assert len(found) == expected
    if found:
        assert found == snapshot


def test_a_policy_names_the_cause_whose_ladder_is_impossible(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(ValidationError) as error:
        resolve({"causes": {"STORAGE": [RESTART, FAIL]}})
    assert sentence(error) == snapshot


@pytest.mark.parametrize(
    ("cause", "reset_by"),
    [
        pytest.param("HANG", "HANG", id="itself"),
        pytest.param("HANG", ["PROGRESS", "NETWORK", "HANG"], id="itself among others"),
        pytest.param(
            "UNKNOWN",
            ["GPU_FATAL", "STORAGE"],
            id="a cause without its own ladder, which has that of UNKNOWN",
        ),
    ],
)
def test_a_row_that_is_reset_by_the_faults_it_counts_is_refused(
    cause: str, reset_by: Any, snapshot: SnapshotAssertion
) -> None:
    rung = {**RESTART, "tries": 2, "consecutive": True, "reset_by": reset_by}
    with pytest.raises(ValidationError) as error:
        Policy.model_validate(
            {"causes": {"UNKNOWN": [FAIL], "GPU_FATAL": [FAIL], cause: [rung, FAIL]}}
        )
    assert sentence(error) == snapshot


@pytest.mark.parametrize("written", ["default", None, 3, []])
def test_what_is_no_mapping_is_no_policy(written: Any) -> None:
    with pytest.raises(ValidationError) as error:
        Policy.model_validate(written)
    assert error.value.errors()[0]["type"] == "model_type"


def test_a_policy_without_a_ladder_for_unknown_is_refused(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(ValidationError) as error:
        Policy.model_validate({"causes": {"HANG": [FAIL]}})
    assert sentence(error) == snapshot


def test_a_cause_without_its_own_ladder_has_that_of_unknown() -> None:
    gputasker = preset("gputasker")
    assert gputasker.ladder(Cause.STORAGE) is gputasker.causes[Cause.UNKNOWN]
    assert gputasker.ladder(Cause.NODE_LOST) is gputasker.causes[Cause.NODE_LOST]


# --- timeouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("timeouts", "hang", "expected"),
    [
        pytest.param({}, {}, 0, id="as they are by default"),
        pytest.param(
            {"heartbeat": "0s"},
            {},
            1,
            id="no heartbeat",
        ),
        pytest.param(
            {"lease": "29s"},
            {},
            1,
            id="a short lease",
        ),
        pytest.param({"lease": "30s"}, {}, 0, id="the shortest lease"),
        pytest.param(
            {"lost_after": "19s"},
            {},
            1,
            id="lost at once",
        ),
        pytest.param({"lost_after": "20s"}, {}, 0, id="lost as soon as may be"),
        pytest.param(
            {"fence_after": "9s"},
            {},
            1,
            id="fenced at once",
        ),
        pytest.param({"fence_after": "10s"}, {}, 0, id="fenced as soon as may be"),
        pytest.param({"unwatched": "9s"}, {}, 1, id="unwatched between two heartbeats"),
        pytest.param({"unwatched": "10s"}, {}, 0, id="unwatched as short as may be"),
        pytest.param(
            {},
            {"after": "29s"},
            1,
            id="hung between two heartbeats",
        ),
        pytest.param({}, {"after": "30s"}, 0, id="the shortest hang"),
        pytest.param(
            {},
            {"after": "25m"},
            1,
            id="a checkpoint is allowed less than a step",
        ),
        pytest.param(
            {},
            {"after": "learned", "first_step": "29s", "checkpoint": "0s"},
            2,
            id="a learned limit below two heartbeats",
        ),
        pytest.param(
            {},
            {"after": "2h"},
            3,
            id="every long phase is",
        ),
        pytest.param(
            {"collective": "10m"},
            {"after": "10m"},
            1,
            id="stopped before the watchdog speaks",
        ),
        pytest.param({"collective": "10m"}, {"after": "11m"}, 0, id="stopped after it"),
        pytest.param({"collective": "2h"}, {"after": "off"}, 0, id="hangs are not looked for"),
        pytest.param(
            {"collective": "2h"}, {"after": "learned"}, 0, id="a learned limit cannot be compared"
        ),
    ],
)
def test_timeouts_that_cannot_hold_together(
    timeouts: dict[str, str], hang: dict[str, str], expected: int, snapshot: SnapshotAssertion
) -> None:
    found = find_timeout_errors(Timeouts.model_validate(timeouts), HangLimits.model_validate(hang))
    assert len(found) == expected
    if found:
        assert found == snapshot
        with pytest.raises(ValidationError) as error:
            resolve({"timeouts": timeouts, "hang": hang})
        assert sentence(error) == found[0]
    else:
        resolve({"timeouts": timeouts, "hang": hang})


@pytest.mark.parametrize("name", list(Timeouts.model_fields))
def test_no_timeout_is_negative(name: str) -> None:
    with pytest.raises(ValidationError, match="negative"):
        Timeouts.model_validate({name: timedelta(seconds=-1)})


def test_an_order_is_valid_for_as_long_as_the_slowest_node_stops() -> None:
    assert Timeouts.model_validate({"lease": "60s", "stop_grace": "15s"}).valid_for == timedelta(
        seconds=90
    )


# --- what people write ----------------------------------------------------------------------------


def test_budgets_that_every_launch_renews_are_refused(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(ValidationError) as error:
        resolve({"healthy_for": "0s"})
    assert sentence(error) == snapshot


def test_a_bare_off_is_read_as_off() -> None:
    """YAML 1.1 reads it as false."""
    read = resolve({"no_progress_stop": False, "hang": {"after": False}})
    assert (read.no_progress_stop, read.hang.after) == ("off", "off")
    assert read == resolve({"no_progress_stop": "off", "hang": {"after": "off"}})


@pytest.mark.parametrize(
    "written",
    [
        {"no_progress_stop": True},
        {"no_progress_stop": 0},
        {"hang": {"after": True}},
        {"max_restarts": -1},
    ],
)
def test_other_words_for_it_are_refused(written: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        resolve(written)


@pytest.mark.parametrize("extends", ["modelart", "", None, 3, ["default"], "../presets/default"])
def test_extending_what_is_no_preset_is_refused(extends: Any) -> None:
    with pytest.raises(
        ValueError,
        match="is no preset: one of",
    ) as error:
        resolve({"extends": extends})
    assert repr(extends) in str(error.value)
    if isinstance(extends, str):
        with pytest.raises(ValueError, match="is no preset: one of"):
            preset(extends)


def test_the_presets_are_those_that_are_documented() -> None:
    assert preset_names() == PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_policy_and_can_be_extended(name: str) -> None:
    base, extended = preset(name), resolve({"extends": name, "strict_lease": True})
    assert (base.extends, extended.strict_lease) == (name, True)
    assert extended.model_copy(update={"strict_lease": False}) == base
    assert resolve({"extends": name}) == base


@pytest.mark.parametrize("name", PRESETS)
def test_a_policy_from_before_a_key_follows_its_preset(name: str) -> None:
    written = preset(name).model_dump(mode="json")
    for key in LATER_KEYS:
        del written[key]
    assert Policy.model_validate(written) == preset(name)
    stated = Policy.model_validate(written | {"check_foreign_processes": True})
    assert stated.check_foreign_processes


def budget(policy: Policy) -> tuple[int, bool, int | str]:
    return policy.max_restarts, policy.exhaust_restarts, policy.no_progress_stop


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        pytest.param({}, (8, False, 3), id="none stated"),
        pytest.param({"max_restarts": 8}, (8, True, "off"), id="stated"),
        pytest.param(
            {"max_restarts": 9, "no_progress_stop": 3}, (9, True, 3), id="and where to stop"
        ),
        pytest.param(
            {"max_restarts": 9, "exhaust_restarts": False},
            (9, False, 3),
            id="and that a ladder ends first",
        ),
        pytest.param(
            {"extends": "modelarts", "max_restarts": 9},
            (9, False, "off"),
            id="over a preset that copies a system",
        ),
    ],
)
def test_a_stated_budget_is_spent_before_the_job_ends(
    written: dict[str, Any], expected: tuple[int, bool, int | str]
) -> None:
    assert budget(resolve(written)) == expected
    extends, changes = written.get("extends", "default"), {**written}
    changes.pop("extends", None)
    assert budget(overlay(preset(extends), changes)) == expected, "the same by `policy change`"


def test_a_budget_stated_twice_keeps_what_was_said_between() -> None:
    first = overlay(preset("default"), {"max_restarts": 9})
    second = overlay(first, {"no_progress_stop": 3})
    assert budget(overlay(second, {"max_restarts": 12})) == (12, True, 3)
    assert budget(overlay(preset("default"), {"max_restarts": 9, "no_progress_stop": 5}))[2] == 5
    five = overlay(preset("default"), {"no_progress_stop": 5})
    assert budget(overlay(five, {"max_restarts": 9})) == (9, True, 5)


def test_a_budget_beside_a_policy_keeps_what_that_states() -> None:
    """By `run --max-restarts`, an annotation, or a later `policy change`."""

    def later(written: dict[str, Any]) -> tuple[int, bool, int | str]:
        given = state_restarts(resolve(written), 20)
        changed = overlay(resolve(written), {"max_restarts": 20})
        stored = Policy.model_validate(resolve(written).model_dump(mode="json"))
        assert budget(given) == budget(changed) == budget(state_restarts(stored, 20))
        return budget(given)

    assert later({}) == (20, True, "off")
    assert later({"exhaust_restarts": False}) == (20, False, 3)
    assert later({"no_progress_stop": 3}) == (20, True, 3)
    assert later({"no_progress_stop": 3}) == budget(
        resolve({"max_restarts": 20, "no_progress_stop": 3})
    )
    assert later({"max_restarts": 4, "exhaust_restarts": False}) == (20, False, 3)
    changed = overlay(preset("default"), {"exhaust_restarts": False})
    assert budget(overlay(changed, {"max_restarts": 9})) == (9, False, 3)
    assert list_changed_keys(preset("default"), overlay(changed, {"no_progress_stop": 3})) == ()


def test_what_names_no_preset_extends_the_default() -> None:
    assert resolve({}) == preset("default")


def test_a_ladder_is_replaced_as_a_whole_and_mappings_key_by_key() -> None:
    base = preset("modelarts")
    changed = resolve(
        {
            "extends": "modelarts",
            "causes": {"HANG": [FAIL]},
            "timeouts": {"lease": "90s"},
            "hang": {"evaluation": "2h"},
        }
    )
    assert [rung.strategy for rung in changed.causes[Cause.HANG]] == [Strategy.FAIL]
    assert {cause: rungs for cause, rungs in changed.causes.items() if cause is not Cause.HANG} == {
        cause: rungs for cause, rungs in base.causes.items() if cause is not Cause.HANG
    }
    assert changed.timeouts == base.timeouts.model_copy(update={"lease": timedelta(seconds=90)})
    assert changed.hang == base.hang.model_copy(update={"evaluation": timedelta(hours=2)})


def test_laying_keys_over_a_preset_does_not_change_the_preset() -> None:
    before = preset("default")
    resolve({"causes": {"HANG": [FAIL]}, "timeouts": {"lease": "90s"}})
    assert preset("default") == before


def test_a_linter_reads_the_preset_and_its_overrides_together(snapshot: SnapshotAssertion) -> None:
    """The lease suits the default's heartbeat; torchelastic's lost_after does not suit this one."""
    with pytest.raises(ValidationError) as error:
        resolve({"extends": "torchelastic", "timeouts": {"heartbeat": "10s", "lease": "30s"}})
    assert sentence(error) == snapshot


def test_the_policy_of_the_documentation_is_one() -> None:
    read = resolve(EXAMPLE)
    assert [rung.label for rung in read.ladder(Cause.GPU_RESET)] == [
        "RESET_GPU",
        "REPLACE_NODE when UNHEALTHY",
    ]
    assert read.ladder(Cause.APPLICATION)[1].reset_by == (Cause.GPU_FATAL, Cause.NODE_FAULT)
    assert duration(read.timeouts.reboot) == "25m"


@pytest.mark.parametrize("key", ["cause", "strategies", "max_restart"])
def test_an_unknown_key_is_refused(key: str) -> None:
    with pytest.raises(ValidationError) as error:
        resolve({key: {}})
    assert error.value.errors()[0]["loc"] == (key,)


# --- the way through a workflow -------------------------------------------------------------------

WRITTEN = [
    *(pytest.param({"extends": name}, id=name) for name in PRESETS),
    pytest.param(EXAMPLE, id="the example"),
    pytest.param(
        {"no_progress_stop": "off", "hang": {"after": "45s"}, "timeouts": {"collective": "30s"}},
        id="off and a number",
    ),
    pytest.param(
        {
            "causes": {
                "HANG": [
                    {
                        **RESTART,
                        "tries": 2,
                        "consecutive": True,
                        "reset_by": ["PROGRESS", "GPU_FATAL"],
                    },
                    FAIL,
                ]
            }
        },
        id="reset_by",
    ),
    pytest.param(
        {"causes": {"HANG": [{**RESTART, "delay": "1.5s", "backoff": 1.5, "window": "2d12h"}]}},
        id="odd durations",
    ),
]


@pytest.mark.parametrize("written", WRITTEN)
def test_a_policy_is_the_same_after_json(written: dict[str, Any]) -> None:
    policy = resolve(written)
    assert Policy.model_validate(policy.model_dump(mode="json")) == policy
    assert Policy.model_validate_json(policy.model_dump_json()) == policy


@pytest.mark.parametrize("written", WRITTEN)
async def test_a_policy_is_the_same_after_temporal(written: dict[str, Any]) -> None:
    policy = resolve(written)
    payloads = await shared_converter.encode([policy])
    assert await shared_converter.decode(payloads, [Policy]) == [policy]


@pytest.mark.parametrize("written", WRITTEN)
def test_what_a_policy_is_written_as_resolves_to_itself(written: dict[str, Any]) -> None:
    """A job that is submitted again takes its policy from its old state."""
    policy = resolve(written)
    assert resolve(policy.model_dump(mode="json")) == policy

"""What an examined node is called, and why: tables of answers, some that no agent gives."""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.catalog import catalog
from relaunch.evidence.catalog.dcgm_tables import Advice
from relaunch.evidence.catalog.overrides import CatalogOverrides
from relaunch.evidence.causes import Cause
from relaunch.evidence.fields import LONGEST, last_line, text
from relaunch.evidence.findings import Role, Verdict
from relaunch.evidence.health import (
    MAX_FINDINGS,
    Condition,
    Health,
    add_diag,
    read_condition,
    read_health,
)
from relaunch.evidence.nvml import bus_id, short
from tests.recovery.generated import searched
from tests.recovery.nodes import (
    FAULTY,
    NO_NVML,
    PASS,
    UNSUPPORTED,
    WALL,
    bus,
    diag,
    disk,
    gpu,
    journal,
    nvml,
    probe,
    sample,
)

HEALTHS = TypeAdapter(Health)
XID_79 = (
    "[  100.5] NVRM: Xid (PCI:0000:06:00): 79, pid=1234, name=python, GPU has fallen off the bus."
)
XID_31 = (
    "[  100.5] NVRM: Xid (PCI:0000:06:00): 31, pid=1234, name=python, Ch 00000008, "
    "intr 00000000. MMU Fault"
)
NFS = "nfs: server filer01 not responding, timed out"


def read(
    facts: Any, answer: Any = ..., *, gpus: int = 8, level: int = 1, unread: str = ""
) -> Health:
    """By default with a diagnosis that has found nothing."""
    answer = diag() if answer is ... else answer
    return read_health(
        facts, answer, expected_gpus=gpus, level=level, catalog=catalog(), unread=unread
    )


def with_gpu(**changes: Any) -> dict[str, Any]:
    row = {key: value for key, value in gpu(0, **changes).items() if value is not ...}
    return probe(gpus=nvml(row))


def test_a_healthy_node_says_what_was_examined(snapshot: SnapshotAssertion) -> None:
    health = read(probe())
    assert health.verdict is Verdict.HEALTHY
    assert health.reason == snapshot
    assert (health.boot_id, health.busy, health.reboots, health.gpus, health.unread) == (
        "boot-1",
        (),
        (),
        (),
        (),
    )
    assert (
        health.clock == datetime.fromtimestamp(WALL, UTC)
        and health.working == 8
        and health.seen == tuple(map(bus, range(8)))
    )


def test_a_node_without_gpus_is_examined_all_the_same(snapshot: SnapshotAssertion) -> None:
    facts = probe(gpus={"unreadable": "libnvidia-ml.so.1 is not on this node"})
    health = read(facts, None, gpus=0)
    assert health.verdict is Verdict.HEALTHY
    assert health.reason == snapshot
    assert read(probe(gpus=...), None, gpus=0).verdict is Verdict.HEALTHY


def test_gpus_not_in_the_fleet_file_are_judged_but_may_be_unread(
    snapshot: SnapshotAssertion,
) -> None:
    broken = probe(gpus=nvml(gpu(0, remapped={"pending": True, "failed": False}), count=1))
    assert read(broken, None, gpus=0).verdict is Verdict.UNHEALTHY
    unread = read(probe(gpus=nvml(gpu(0, ecc="?"), count=1)), None, gpus=0)
    assert unread.verdict is Verdict.HEALTHY and unread.reason == snapshot


UNHEALTHY = {
    "a GPU is lost": (
        probe(gpus=nvml({"index": 0, "lost": "GPU_IS_LOST", "bus_id": bus(0)})),
        (bus(0),),
    ),
    "a GPU is lost and its address is unknown": (
        probe(gpus=nvml({"index": 0, "lost": None, "bus_id": None})),
        (),
    ),
    "GPUs are missing": (probe(gpus=nvml(count=6)), ()),
    "a row could not be remapped": (
        with_gpu(remapped={"pending": False, "failed": True}),
        (bus(0),),
    ),
    "a row waits to be remapped": (
        with_gpu(remapped={"pending": True, "failed": False}),
        (bus(0),),
    ),
    "a page waits to be retired": (with_gpu(remapped=UNSUPPORTED, retired_pending=True), (bus(0),)),
    "the driver asks for a reboot": (with_gpu(recovery_action=2), (bus(0),)),
    "the kernel log has Xid 79": (probe(kernel={"lines": [XID_79]}), (bus(1),)),
    "the kernel log was read in part": (
        probe(kernel={"unreadable": "cut", "lines": [XID_79]}),
        (bus(1),),
    ),
    "the disk of the agent is read-only": (
        probe(disks=[disk(writable=False, reason="Read-only file system")]),
        (),
    ),
    "the disk of the agent is full": (probe(disks=[disk(free=4096)]), ()),
    "the disk of the agent has no inode": (probe(disks=[disk(inodes_free=0)]), ()),
}


@pytest.mark.parametrize("case", UNHEALTHY)
def test_a_node_is_unhealthy_when(case: str, snapshot: SnapshotAssertion) -> None:
    facts, gpus = UNHEALTHY[case]
    health = read(facts)
    assert health.verdict is Verdict.UNHEALTHY
    assert health.reason == snapshot
    assert health.gpus == gpus
    assert health.findings[0].role is Role.ROOT


def test_dcgm_makes_a_node_unhealthy_and_names_its_gpu_by_bus_id(
    snapshot: SnapshotAssertion,
) -> None:
    health = read(probe(), diag(FAULTY, 205), level=2)
    assert health.verdict is Verdict.UNHEALTHY and health.reason == snapshot
    assert health.gpus == (bus(6),)


def test_an_override_that_makes_an_error_harmless_is_obeyed() -> None:
    before = read(probe(), diag(FAULTY, 205), level=2)
    codes = {
        int(finding.code.split()[-1])
        for finding in before.findings
        if finding.source == "dcgm" and finding.role is Role.ROOT
    }
    mine = catalog(
        CatalogOverrides.model_validate(
            {"dcgm": {code: {"advice": Advice.HEALTHY} for code in codes}}
        )
    )
    after = read_health(probe(), diag(FAULTY, 205), expected_gpus=8, level=2, catalog=mine)
    assert codes and after.verdict is not Verdict.UNHEALTHY


SYMPTOMS = {
    "uncorrected ECC errors": with_gpu(ecc={"volatile_uncorrected": 3, "aggregate_uncorrected": 5}),
    "a hot GPU": with_gpu(throttle=0x48),
    "inactive NVLinks": with_gpu(nvlink_inactive=[3, 4]),
    "little memory": probe(memory={"total": 1 << 40, "available": 1 << 30}),
    "another disk that is full": probe(disks=[disk(), disk("/", free=0)]),
    "a file server that does not answer": probe(kernel={"lines": [NFS]}),
    "a page fault that a program made": probe(kernel={"lines": [XID_31]}),
    "a kernel log that may not be read": probe(
        kernel={"unreadable": "Operation not permitted", "lines": []}
    ),
}


@pytest.mark.parametrize("case", SYMPTOMS)
def test_a_node_is_not_unhealthy_for(case: str, snapshot: SnapshotAssertion) -> None:
    health = read(SYMPTOMS[case])
    assert health.verdict is Verdict.HEALTHY and health.findings
    assert health.reason == snapshot
    assert health.gpus == ()


@pytest.mark.parametrize(
    ("facts", "role"),
    [
        (with_gpu(throttle=0x4), Role.INFORMATION),
        (with_gpu(throttle=0x1), None),
        (with_gpu(throttle=0x20 | 0x80), Role.SYMPTOM),
        (
            probe(disks=[disk(), disk("/", writable=False, reason="Permission denied")]),
            Role.INFORMATION,
        ),
    ],
)
def test_what_is_only_a_setting_is_only_information(
    facts: dict[str, Any], role: Role | None
) -> None:
    health = read(facts)
    assert health.verdict is Verdict.HEALTHY
    assert [finding.role for finding in health.findings] == ([role] if role else [])


UNKNOWN = {
    "the probe had no answer": None,
    "the answer to the probe is none": "no object",
    "NVML does not answer": probe(gpus=NO_NVML),
    "the GPUs are not told": probe(gpus=...),
    "the GPUs are no list": probe(gpus={"gpus": 8}),
    "more GPUs than any node has": probe(gpus=nvml(count=65)),
    "a GPU is no object": probe(gpus=nvml("gpu")),
    "a GPU has no bus id": with_gpu(bus_id="?"),
    "a GPU's errors are not read": with_gpu(ecc={"unreadable": "UNKNOWN"}),
    "a GPU's errors are not told": with_gpu(ecc=...),
    "a GPU's errors are no numbers": with_gpu(
        ecc={"volatile_uncorrected": True, "aggregate_uncorrected": 0}
    ),
    "half of a GPU's errors are not told": with_gpu(ecc={"volatile_uncorrected": 2}),
    "a GPU's remapped rows are half told": with_gpu(remapped={"failed": False}),
    "neither rows nor pages are read": with_gpu(remapped={"unreadable": ""}),
    "pages are not read where rows are not remapped": with_gpu(
        remapped=UNSUPPORTED, retired_pending={"unreadable": "TIMEOUT"}
    ),
    "the recovery action is not told": with_gpu(recovery_action=None),
    "the recovery action is not known": with_gpu(recovery_action=9),
    "the boot id is not told": probe(boot_id=...),
    "the boot id is no word": probe(boot_id="a b"),
    "the memory is not told": probe(memory={"total": 0, "available": 0}),
    "the disks are missing": probe(disks=...),
    "the list of disks is empty": probe(disks=[]),
    "a disk is no object": probe(disks=[7]),
    "a disk's inodes are no number": probe(disks=[disk(inodes_free="many")]),
    "a disk that may be written to is not told": probe(disks=[disk(writable=None)]),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_a_node_is_unknown_when(case: str, snapshot: SnapshotAssertion) -> None:
    health = read(UNKNOWN[case], unread="n2 does not answer")
    assert health.verdict is Verdict.UNKNOWN and health.unread
    assert health.reason == snapshot


NOT_EXAMINED = {
    "it was not run": None,
    "it was refused": {"refused": "busy", "reason": "job llama runs here"},
    "there is no outcome": diag(outcome=...),
    "there is no dcgmi": diag(missing="dcgmi is not on this node's PATH"),
    "what is missing is not said": diag(missing=3),
    "it ran on another boot": diag(boot_id="boot-2"),
    "it was killed": diag(exit_code=None),
    "its end is not told": diag(exit_code=...),
    "its end is no number": diag(exit_code=True),
    "its output is none": diag(stdout=None),
    "its output was cut": diag(cut=True),
    "it printed nothing": diag(stdout=""),
    "a setting was wrong": diag(sample("v4_r1_persistence_mode_fail_8gpu.json"), 226),
}


@pytest.mark.parametrize("case", NOT_EXAMINED)
def test_a_node_is_not_healthy_by_its_diagnosis_when(
    case: str, snapshot: SnapshotAssertion
) -> None:
    health = read(probe(), NOT_EXAMINED[case])
    assert health.verdict is Verdict.UNKNOWN
    assert health.reason == snapshot


def test_a_diagnosis_that_was_not_asked_for_is_not_missing() -> None:
    assert read(probe(), None, level=0).verdict is Verdict.HEALTHY
    assert read(probe(), None, gpus=0, level=2).verdict is Verdict.HEALTHY


def test_output_that_was_cut_still_shows_what_is_broken() -> None:
    assert read(probe(), diag(FAULTY, 205, cut=True), level=2).verdict is Verdict.UNHEALTHY


def test_a_diagnosis_added_later_says_the_same_as_both_at_once() -> None:
    for answer in (
        diag(FAULTY, 205),
        diag(PASS),
        diag(missing="no dcgmi"),
        {"refused": "busy", "reason": "x"},
    ):
        later = add_diag(read(probe(), None), answer, level=2, catalog=catalog())
        assert later == read_health(probe(), answer, expected_gpus=8, level=2, catalog=catalog())


def test_what_a_gpu_does_not_have_is_not_missing() -> None:
    nothing = dict.fromkeys(("ecc", "remapped", "retired_pending", "recovery_action"), UNSUPPORTED)
    assert read(with_gpu(**nothing)).verdict is Verdict.HEALTHY
    assert read(with_gpu(remapped=UNSUPPORTED, retired_pending=False)).verdict is Verdict.HEALTHY
    assert (
        read(with_gpu(remapped={"unreadable": "UNKNOWN"}, retired_pending=False)).verdict
        is Verdict.HEALTHY
    )


def test_the_gravest_comes_first_and_the_rest_is_counted(snapshot: SnapshotAssertion) -> None:
    rows = [gpu(index, remapped={"pending": True, "failed": index == 3}) for index in range(5)]
    health = read(probe(gpus=nvml(*rows), disks=[disk(free=0)]))
    assert health.reason == snapshot
    assert health.gpus == (bus(3), bus(0), bus(1), bus(2), bus(4))


def test_what_is_not_read_is_said_with_the_symptoms(snapshot: SnapshotAssertion) -> None:
    health = read(with_gpu(ecc={"volatile_uncorrected": 2}))
    assert health.reason == snapshot


BUSY = {
    "a job": probe(
        jobs=[{"namespace": "default", "job": "llama", "submission": 1, "generation": 3}]
    ),
    "a job that cannot be read": probe(jobs=[7]),
    "it is unknown": probe(jobs=...),
    "a diagnosis": probe(held={"by": "diagnose", "id": "r7", "since": 3.0}),
    "a hold without words": probe(held={}),
    "a hold that is not told": probe(held=...),
    "a process on a GPU": with_gpu(processes=[{"pid": 4242, "used": 1}, "?"]),
}


@pytest.mark.parametrize("case", BUSY)
def test_a_node_is_held_by(case: str, snapshot: SnapshotAssertion) -> None:
    health = read(BUSY[case])
    assert health.verdict is Verdict.HEALTHY
    assert health.busy == snapshot


def test_many_who_hold_a_node_are_counted(snapshot: SnapshotAssertion) -> None:
    health = read(probe(jobs=[{"job": f"j{number}", "generation": 1} for number in range(10)]))
    assert health.busy[7:] == snapshot


def test_the_holder_of_a_node_is_known_by_id() -> None:
    assert read(probe(held={"by": "reboot", "id": "r7"})).held == "r7"
    assert read(probe(held="?")).held == ""


def test_a_node_that_does_not_answer_is_not_free(snapshot: SnapshotAssertion) -> None:
    health = read(None)
    assert health.busy and health.journal_unread and not health.boot_id
    assert health.reason == snapshot
    assert read({"outcome": "refused", "reason": "protocol 2"}).reason == "protocol 2"


def test_reboots_are_listed_oldest_first() -> None:
    health = read(probe(reboots=journal((60, "r2"), (7200, "r1"))))
    assert [(one.id, one.boot_id, one.reason) for one in health.reboots] == [
        ("r1", "boot-0", "Xid 79"),
        ("r2", "boot-0", "Xid 79"),
    ]
    assert read(probe(reboots=[{"at": 5, "boot_id": 7}])).reboots[0].boot_id == ""


@pytest.mark.parametrize(
    "reboots",
    [
        ...,
        {},
        ["?"],
        [{"at": "now"}],
        [{"at": float("nan")}],
        [{"at": 10**400}],
        [{"at": True}],
        [{"at": -1}],
    ],
)
def test_a_journal_that_cannot_be_read_is_not_an_empty_one(reboots: Any) -> None:
    health = read(probe(reboots=reboots))
    assert health.reboots == () and health.journal_unread


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("5", bus(5)),
        ("12", None),
        ("99999", None),
        ("0000:05:00", bus(0)),
        ("00000000:05:00.0", bus(0)),
        ("0000:ff:00", "00000000:FF:00.0"),
        ("05:00", bus(0)),
        ("GPU-1", None),
    ],
)
def test_a_gpu_is_found_by_whatever_name(name: str, expected: str | None) -> None:
    assert bus_id(name, tuple(map(bus, range(8)))) == expected


def test_gpus_out_of_order_keep_their_indexes() -> None:
    health = read(
        probe(gpus=nvml(gpu(2), {"index": 0, "lost": "gone", "bus_id": None}, count=2)),
        None,
        gpus=2,
    )
    assert health.seen == ("", "", bus(2)) and health.working == 1
    assert bus_id("0", health.seen) is None and short("?") == "?"


def test_texts_are_one_line_that_any_encoder_takes() -> None:
    assert text("a\nb\ud800 c\t") == "a b? c" and text(3) == ""
    assert len(text("x" * 10_000)) == LONGEST
    assert last_line("one\n two \n\n") == "two" and last_line(" \n") == "" and last_line(None) == ""


def test_findings_are_at_most_so_many() -> None:
    lines = [
        f"[{number}.0] NVRM: Xid (PCI:0000:06:00): {600 + number}, something"
        for number in range(300)
    ]
    assert len(read(probe(kernel={"lines": lines})).findings) == MAX_FINDINGS


def test_a_kernel_line_may_hold_anything() -> None:
    line = f"[{'9' * 400}.5] NVRM: Xid (PCI:0000:06:00): 79, pid={'9' * 300}, name=\ud800, gone"
    health = read(probe(kernel={"lines": [line, 7]}))
    assert health.verdict is Verdict.UNHEALTHY
    assert HEALTHS.validate_json(HEALTHS.dump_json(health)) == health


# --- whatever a node answers

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\ud800", 10**400, -1, 2**63, "done"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["unreadable", "lines", "gpus", "at", "id"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [
        *([path] if path else []),
        *(one for key, inner in items for one in paths(inner, (*path, key))),
    ]


def changed(value: Any, path: tuple[Any, ...], junk: Any) -> Any:
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    if junk is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = junk
    return value


SMALL = probe(
    gpus=nvml(gpu(0, processes=[{"pid": 1, "used": 2}]), count=1),
    kernel={"lines": [XID_31]},
    reboots=journal((5, "r1")),
)
NEEDED = {
    "outcome",
    "boot_id",
    "memory",
    "memory.total",
    "memory.available",
    "disks",
    "links.ports",
    *(f"disks.{index}.{key}" for index in (0, 1) for key in ("free", "inodes_free", "writable")),
    "gpus",
    "gpus.gpus",
    "gpus.gpus.0",
    *(f"gpus.gpus.0.{key}" for key in ("bus_id", "ecc", "remapped", "recovery_action")),
    *(
        f"gpus.gpus.0.{key}"
        for key in (
            "ecc.volatile_uncorrected",
            "ecc.aggregate_uncorrected",
            "remapped.pending",
            "remapped.failed",
        )
    ),
}
"""What has to be read before a node is called healthy."""


@searched(300)
@given(st.sampled_from(paths(SMALL)), JUNK | st.just(...))
def test_anything_wrong_in_an_answer_is_no_error_and_can_be_kept(
    path: tuple[Any, ...], junk: Any
) -> None:
    health = read(changed(SMALL, path, junk), gpus=1)
    assert HEALTHS.validate_json(HEALTHS.dump_json(health)) == health


@pytest.mark.parametrize("path", paths(SMALL), ids=lambda path: ".".join(map(str, path)))
@pytest.mark.parametrize("wrong", ["missing", "mistyped"])
def test_no_node_is_healthy_of_which_something_was_not_read(
    path: tuple[Any, ...], wrong: str
) -> None:
    health = read(changed(SMALL, path, ... if wrong == "missing" else "?"), gpus=1)
    name = ".".join(map(str, path))
    needed = name in NEEDED or (name in {"disks.0", "disks.1", "links"} and wrong == "mistyped")
    gone = name == "gpus.gpus.0" and wrong == "missing"
    assert health.verdict is (
        Verdict.UNHEALTHY if gone else Verdict.UNKNOWN if needed else Verdict.HEALTHY
    )


@searched(200)
@given(JUNK, JUNK)
def test_no_answer_at_all_is_ever_healthy(facts: Any, answer: Any) -> None:
    answer = answer if isinstance(answer, dict) else {}
    health = read_health(facts, answer, expected_gpus=1, level=1, catalog=catalog())
    assert health.verdict is Verdict.UNKNOWN
    broken = read(probe(), diag(**{key: answer.get(key, ...) for key in ("stdout", "outcome")}))
    assert broken.verdict is not Verdict.HEALTHY


def test_an_answer_survives_json() -> None:
    health = read(
        json.loads(
            json.dumps(probe(gpus=nvml(gpu(0, recovery_action=1)), reboots=journal((5, "r1"))))
        )
    )
    assert HEALTHS.validate_json(HEALTHS.dump_json(health)) == health


# --- its clock


def read_with_clock(ahead: float, took: float) -> Health:
    """A node whose clock is ahead; its answer took so long beside 3 s of work of the node itself,
    which bound nothing.
    """
    sent = WALL + ahead + took / 2
    exchange = {"sent": WALL, "received": WALL + took + 3.0}
    return read(probe(wall=sent, answered=sent + 3.0, exchange=exchange))


@pytest.mark.parametrize(
    ("ahead", "took", "role"),
    [
        (0.0, 0.2, None),
        (5.0, 0.2, None),
        (5.3, 0.2, Role.INFORMATION),
        (5.3, 2.0, None),
        (-7.0, 0.2, Role.INFORMATION),
        (60.0, 0.2, Role.INFORMATION),
        (73.0, 0.4, Role.SYMPTOM),
        (-3600.0, 40.0, Role.SYMPTOM),
        (70.0, 40.0, Role.INFORMATION),
    ],
)
def test_a_clocks_offset_is_shown_as_far_as_a_round_trip_bounds(
    ahead: float, took: float, role: Role | None
) -> None:
    health = read_with_clock(ahead, took)
    assert health.verdict is Verdict.HEALTHY
    assert [(one.code, one.role) for one in health.findings] == ([("clock", role)] if role else [])
    assert ("clock" in health.reason) is (role is Role.SYMPTOM), health.reason


def test_a_clocks_offset_in_words(snapshot: SnapshotAssertion) -> None:
    assert read_with_clock(73.0, 0.4).findings[0].reason == snapshot(name="ahead")
    assert read_with_clock(-3600.0, 40.0).findings[0].reason == snapshot(name="behind")
    assert read_with_clock(-3600.0, 40.0).reason == snapshot(name="health")


def test_a_clock_is_known_less_well_without_the_answers_time(snapshot: SnapshotAssertion) -> None:
    exchange = {"sent": WALL, "received": WALL + 4.0}
    assert [
        one.reason for one in read(probe(wall=WALL + 90.0, exchange=exchange)).findings
    ] == snapshot


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"exchange": None},
        {"exchange": {"sent": WALL}},
        {"exchange": {"sent": "?", "received": WALL}},
    ]
    + [
        {"wall": wall, "exchange": {"sent": 5.0, "received": 6.0}}
        for wall in (True, -1, 1e300, None, ...)
    ],
)
def test_a_clock_that_was_not_read_is_not_judged(facts: dict[str, Any]) -> None:
    assert [one for one in read(probe(**facts)).findings if one.code == "clock"] == []


@pytest.mark.parametrize(
    ("stamp", "uptime"),
    [(1000.5, 1000.5), (0, 0.0), (True, None), ("?", None), (-1, None), (float("nan"), None)],
)
def test_how_long_a_boot_has_lasted_is_read(stamp: Any, uptime: float | None) -> None:
    assert read(probe(stamp=stamp)).uptime == uptime


# --- a health check that tells by its exit code alone


def unprobed(**changes: Any) -> dict[str, Any]:
    facts = {
        "outcome": "done",
        "unprobed": True,
        "boot_id": "ec2:i-1:100",
        "stamp": 5.0,
        "ecs_gpus": 8,
        "ecs_health": "OK",
    }
    facts |= {"jobs": [], "held": None, "reboots": [], **changes}
    return {key: value for key, value in facts.items() if value is not ...}


def contract(
    word: str, reason: Any = "its task ended with exit code 1", **more: Any
) -> dict[str, Any]:
    return {"outcome": "done", "contract": word, "reason": reason, **more}


CONTRACTS = {
    "it is passed": (unprobed(), contract("healthy"), Verdict.HEALTHY),
    "it is passed on the boot that was looked at": (
        unprobed(),
        contract("healthy", boot_id="ec2:i-1:100"),
        Verdict.HEALTHY,
    ),
    "it is passed on another boot": (
        unprobed(),
        contract("healthy", boot_id="ec2:i-1:200"),
        Verdict.UNKNOWN,
    ),
    "it is failed": (unprobed(), contract("faulty"), Verdict.UNHEALTHY),
    "it says nothing": (unprobed(), contract("inconclusive", 3), Verdict.UNKNOWN),
    "it is of another version": (unprobed(), contract("fine", ""), Verdict.UNKNOWN),
    "it could not be run": (
        unprobed(),
        {"refused": "busy", "reason": "GPUs are taken"},
        Verdict.UNKNOWN,
    ),
    "it was not run": (unprobed(), None, Verdict.UNKNOWN),
    "GPUs are missing": (unprobed(ecs_gpus=7), contract("healthy"), Verdict.UNKNOWN),
    "GPUs are not told": (unprobed(ecs_gpus=...), contract("healthy"), Verdict.UNKNOWN),
    "its boot is not told": (unprobed(boot_id=...), contract("healthy"), Verdict.UNKNOWN),
    "it is impaired by the word of ECS": (
        unprobed(ecs_health="IMPAIRED"),
        contract("healthy"),
        Verdict.HEALTHY,
    ),
    "it was probed as well": (probe(), contract("healthy"), Verdict.HEALTHY),
    "the probe found what it did not": (
        probe(kernel={"lines": [XID_79]}),
        contract("healthy"),
        Verdict.UNHEALTHY,
    ),
}


@pytest.mark.parametrize("case", CONTRACTS)
def test_s1_5_a_health_check_by_exit_code_is_judged_when(
    case: str, snapshot: SnapshotAssertion
) -> None:
    facts, answer, verdict = CONTRACTS[case]
    health = read(facts, answer)
    assert verdict is health.verdict
    assert health.reason == snapshot
    assert [finding.cause for finding in health.findings if finding.code == "health check"] in (
        [],
        [Cause.GPU_FATAL],
    )


def test_a_node_without_ranks_of_ours_says_its_holder_and_uptime(
    snapshot: SnapshotAssertion,
) -> None:
    job = {"namespace": "default", "job": "llama", "submission": 1, "generation": 3}
    health = read(unprobed(jobs=[job], reboots=journal((WALL, "for r1"))), None)
    assert (health.uptime, health.working, len(health.reboots)) == (5.0, 8, 1)
    assert health.busy == snapshot


# --- what a reset has healed

XID_119 = "[  100.5] NVRM: Xid (PCI:0000:06:00): 119, pid=7, name=python, Timeout after 6s of GSP"
XID_48 = "[  100.5] NVRM: Xid (PCI:0000:06:00): 48, pid=7, name=python, DBE"
XID_63 = "[  100.6] NVRM: Xid (PCI:0000:06:00): 63, pid=7, name=python, Row Remapper"
SXID = "[  100.5] nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 11012, Non-fatal, Link 0"
SWITCH_FATAL = "[  100.5] nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 36"
UNTIMED = XID_119.partition("] ")[2]


def reset(*gpus: Any, uptime: Any = 200.0) -> dict[str, Any]:
    return {"uptime": uptime, "id": "repair/lab/n1", "gpus": list(gpus)}


def after_reset(lines: list[str], *resets: Any, **changes: Any) -> Health:
    return read(probe(kernel={"lines": lines}, resets=list(resets), **changes))


def test_what_a_reset_has_healed_no_longer_counts(snapshot: SnapshotAssertion) -> None:
    assert after_reset([XID_119]).verdict is Verdict.UNHEALTHY
    for healed in (reset(bus(1)), reset()):
        health = after_reset([XID_119], healed)
        assert health.verdict is Verdict.HEALTHY
        (finding,) = health.findings
        assert (finding.role, finding.cause) == (Role.INFORMATION, None)
        assert finding.reason == snapshot


@pytest.mark.parametrize(
    ("lines", "healed", "changes"),
    [
        pytest.param([XID_119], reset(bus(0)), {}, id="another GPU was reset"),
        pytest.param([XID_119], reset(bus(1), uptime=100.0), {}, id="it came after the reset"),
        pytest.param([UNTIMED], reset(bus(1)), {}, id="a line without a time"),
        pytest.param([XID_79], reset(bus(1)), {}, id="it needs more than a reset"),
        pytest.param([XID_48], reset(bus(1)), {}, id="a field diagnostic is due"),
        pytest.param([XID_119], reset(bus(1)), {"gpus": NO_NVML}, id="NVML is silent since"),
        pytest.param([XID_119], reset(), {"gpus": NO_NVML}, id="NVML is silent since, of all"),
        pytest.param(
            [XID_119],
            reset(bus(1)),
            {"gpus": nvml(gpu(0), gpu(1, ecc={"unreadable": "UNKNOWN"}))},
            id="the GPU cannot be read in full",
        ),
        pytest.param([SWITCH_FATAL], reset(bus(1)), {}, id="a switch, and one GPU was reset"),
        pytest.param([SWITCH_FATAL], reset(), {"gpus": nvml(gpu(0, ecc="?"))}, id="unread GPUs"),
        pytest.param([XID_119], reset(bus(1), uptime="?"), {}, id="no time"),
        pytest.param([XID_119], reset(3), {}, id="no GPU"),
        pytest.param([XID_119], {"uptime": 200.0}, {}, id="no GPUs"),
        pytest.param([XID_119], "reset", {}, id="no object"),
    ],
)
def test_what_no_reset_has_healed_counts(
    lines: list[str], healed: Any, changes: dict[str, Any]
) -> None:
    assert after_reset(lines, healed, **changes).verdict is Verdict.UNHEALTHY


def test_lines_of_before_a_reset_are_weighed_together() -> None:
    assert after_reset([XID_48, XID_63], reset(bus(1))).verdict is Verdict.HEALTHY
    assert after_reset([SXID, NFS, XID_119], reset()).verdict is Verdict.HEALTHY
    again = after_reset([XID_119, XID_119.replace("100.5", "300.5")], reset(bus(1)))
    assert again.verdict is Verdict.UNHEALTHY and again.gpus == (bus(1),)


def test_resets_that_make_no_sense_heal_nothing() -> None:
    assert read(probe(kernel={"lines": [XID_119]}, resets=3)).verdict is Verdict.UNHEALTHY


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: API mismatch: the client 'dcgm-exporter' (pid 777)",
        "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [rsync:777]",
    ],
)
def test_what_kernels_print_on_good_nodes_leaves_them_healthy(line: str) -> None:
    assert read(probe(kernel={"lines": [line] * 3})).verdict is Verdict.HEALTHY


def test_a_driver_that_nvml_does_not_match_is_a_node_fault() -> None:
    health = read(probe(gpus={"unreadable": "NVML: LIB_RM_VERSION_MISMATCH"}))
    assert health.verdict is Verdict.UNHEALTHY
    assert [(found.code, found.cause) for found in health.findings] == [
        ("driver-mismatch", Cause.NODE_FAULT)
    ]


# --- a look at a node, without a job's fault


DOWN = [
    {
        **{"name": f"mlx5_{index} port 1", "kind": "rdma", "model": "MT_1", "place": "0/1"},
        **{"state": "DOWN" if index == 3 else "ACTIVE", "rate": 400.0, "enabled": True},
    }
    for index in range(8)
]


BOND = [DOWN[3], DOWN[0]]
BEFORE = {"ago": 60, "rate": 400.0, "counters": {"symbol_error": 0}, "seconds": 3600}


def look(*rows: Any, **changes: Any) -> dict[str, Any]:
    """What an agent answers to `list` with `gpus`."""
    return {"gpus": nvml(*rows), "disks": [disk()], "links": {"ports": []}, **changes}


def remapped(**changes: Any) -> dict[str, Any]:
    rows = {"correctable": 0, "uncorrectable": 1, "pending": False, "failed": False}
    return {"remapped": {**rows, **changes}}


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        pytest.param(look(gpu(1, **remapped(failed=True))), "row of its memory has failed", id="a"),
        pytest.param(look(gpu(1, recovery_action=1)), "asks for a reset of the GPU", id="b"),
        pytest.param(look(gpu(1, recovery_action=4)), "all work on the GPU to be drained", id="c"),
        pytest.param(
            look(gpus={"unreadable": "NVML: LIB_RM_VERSION_MISMATCH"}), "of two versions", id="d"
        ),
        pytest.param(
            look(disks=[disk(writable=False, reason="Read-only file system")]),
            "/var/tmp/relaunch cannot be written to: Read-only file system",
            id="e",
        ),
        pytest.param(look(disks=[disk(free=0)]), "is full: less than 1 MiB is free", id="f"),
        pytest.param(look(links={"ports": DOWN}), "mlx5_3 port 1 is DOWN", id="g"),
    ],
)
def test_a_look_finds_what_makes_a_node_unfit(answer: dict[str, Any], fault: str) -> None:
    found = read_condition(answer, catalog())
    assert fault in found.fault and not found.reset_wanted


@pytest.mark.parametrize(
    "row", [gpu(1, **remapped(pending=True)), gpu(1, remapped=UNSUPPORTED, retired_pending=True)]
)
def test_a_look_finds_gpus_that_work_and_want_a_reset(row: dict[str, Any]) -> None:
    found = read_condition(look(row), catalog())
    assert "waits for a reset" in found.reset_wanted and not found.fault


def test_what_is_counted_elsewhere_or_only_explains_is_no_fault() -> None:
    lost = {"index": 0, "lost": "GPU_IS_LOST", "bus_id": bus(0)}
    full = [disk(), disk("/dev/shm", free=0)]
    for answer in (
        look(),
        look(lost),
        look(gpus=NO_NVML),
        look(gpus={"unreadable": "NVML did not answer within 10 s", "hangs": True}),
        look(gpu(1, ecc={"volatile_uncorrected": 3, "aggregate_uncorrected": 9}), disks=full),
        look(kernel={"lines": [XID_79]}),
        look(links={"ports": DOWN}, unused_ports=["mlx5_3"]),
        look(links={"ports": [{**DOWN[0], "before": BEFORE, "counters": {"symbol_error": 9000}}]}),
        look(links={"ports": [{**DOWN[3], "kind": "ethernet", "before": BEFORE}]}),
        # a bond on cards that know RDMA
        look(links={"ports": [{**row, "place": "0/1 Ethernet", "before": BEFORE} for row in BOND]}),
        look(
            links={"ports": [{**BOND[0], "place": "0/1 Ethernet", "gone": True, "before": BEFORE}]}
        ),
        look(disks=[{"unreadable": "it did not answer within 2 s"}]),
        look(links={"ports": 3}),
        {"gpus": nvml()},  # of an older agent
        {},
    ):
        assert read_condition(answer, catalog()) == Condition(), answer


def test_a_fault_has_the_same_words_as_long_as_it_lasts() -> None:
    for row in (DOWN[3], {**DOWN[3], "gone": True}):
        ports = [[{**row, "before": {**BEFORE, "ago": ago}}] for ago in (60, 6000)]
        first, second = (
            read_condition(look(links={"ports": one}), catalog()).fault for one in ports
        )
        assert first == second and first.startswith("mlx5_3 port 1 is ")


@pytest.mark.parametrize("layer", ["InfiniBand", "Ethernet"])
def test_siblings_prove_that_a_port_is_down_whatever_it_speaks(layer: str) -> None:
    ports = [{**row, "place": f"0/1 {layer}"} for row in DOWN]
    found = read_condition(look(links={"ports": ports}), catalog())
    assert found.fault == "mlx5_3 port 1 is DOWN"


def test_a_look_names_the_gravest_first_and_counts_the_rest() -> None:
    rows = [gpu(index, recovery_action=1) for index in range(3)]
    found = read_condition(look(*rows, gpu(3, **remapped(failed=True))), catalog()).fault
    assert found.startswith("GPU 0000:08:00: remapping") and found.endswith("; 2 more")

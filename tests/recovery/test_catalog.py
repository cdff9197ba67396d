"""The catalog's data files hold together, and what a user lays over them is checked."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from syrupy.assertion import SnapshotAssertion

import relaunch.evidence.catalog as tables
from relaunch.evidence.catalog import (
    NO_OVERRIDES,
    CatalogOverrides,
    catalog,
    find_exit_row,
    is_cascade,
)
from relaunch.evidence.catalog.dcgm_tables import Advice
from relaunch.evidence.catalog.nvlink import XIDS, decode, interpret_rule
from relaunch.evidence.catalog.overrides import LogOverride
from relaunch.evidence.catalog.signals import SIGNALS
from relaunch.evidence.causes import Cause
from relaunch.evidence.exits import read_log
from relaunch.evidence.findings import Role

FOLDER = Path(__file__).parents[2] / "relaunch" / "evidence" / "catalog"
LAST_WORDS = sorted((Path(__file__).parent / "samples" / "last_words").glob("*.txt"))
FILES = ("xids", "npu_codes", "nvlink", "exits", "log_lines", "kernel_lines", "ecs_stops")


def overrides(**values: Any) -> CatalogOverrides:
    return CatalogOverrides.model_validate(values)


@pytest.mark.parametrize("name", FILES)
def test_every_table_says_what_it_is_whence_and_of_when(name: str) -> None:
    table = json.loads((FOLDER / f"{name}.json").read_text())
    assert table["about"] and table["source"] and table["version"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", table["date"])
    text = (FOLDER / f"{name}.json").read_text()
    # one row is one line
    assert all(text.count(json.dumps(row, ensure_ascii=False)) >= 1 for row in table["rows"])


def test_all_172_xids_of_nvidias_catalog_are_there() -> None:
    assert list(range(1, 173)) == list(catalog().xids)
    assert len(catalog().nvlink) == 94


@pytest.mark.parametrize(
    "table",
    ["xids", "npu_codes", "log_lines", "kernel_lines", "ecs_stops", "exits", "recovery_actions"],
)
def test_every_root_names_a_cause_and_every_row_has_a_meaning(table: str) -> None:
    value = getattr(catalog(), table)
    rows = value.values() if isinstance(value, dict) else value
    assert [row for row in rows if row.role is Role.ROOT and row.cause is None] == []
    assert [row for row in rows if not row.meaning] == []
    assert [
        row
        for row in rows
        if row.role in (Role.CASCADE, Role.INFORMATION) and row.cause is not None
    ] == []


def test_a_pattern_never_matches_an_empty_line() -> None:
    patterns = [row.pattern for row in catalog().log_lines] + [
        row.pattern for row in catalog().kernel_lines
    ]
    assert [pattern for pattern in patterns if pattern.search("")] == []


def test_log_ids_are_unique_and_every_row_cites_a_source() -> None:
    rows = catalog().log_lines
    assert len(rows) == len({row.id for row in rows})
    assert all(row.source for row in rows) and all(row.source for row in catalog().kernel_lines)


def test_exit_rows_cite_a_listed_source_and_are_named_like_exits() -> None:
    sources = json.loads((FOLDER / "exits.json").read_text())["source"]
    for key, row in catalog().exits.items():
        assert key == row.key
        assert row.source in sources
        assert key in SIGNALS.values() or re.fullmatch(r"exit \d{1,3}", key)


@pytest.mark.parametrize(
    ("code", "level", "role", "cause"),
    [
        ("80C98002", "RestartRequest", Role.ROOT, Cause.GPU_USER_INDUCED),
        ("80CB8002", "RestartRequest", Role.ROOT, Cause.GPU_USER_INDUCED),
        ("80C98008", "RestartRequest", Role.ROOT, Cause.GPU_TRANSIENT),
        ("80C98003", "RestartRequest", Role.ROOT, Cause.GPU_TRANSIENT),
        ("80E01801", "RestartBusiness", Role.ROOT, Cause.GPU_TRANSIENT),
        ("8C0E4E00", "FreeRestartNPU", Role.ROOT, Cause.GPU_RESET),
        ("80E18005", "RestartNPU", Role.ROOT, Cause.GPU_RESET),
        ("8F180220", "PreSeparateNPU", Role.ROOT, Cause.GPU_FATAL),
        ("8F180200", "SeparateNPU", Role.ROOT, Cause.GPU_FATAL),
        ("A2301001", "SeparateNPU", Role.ROOT, Cause.GPU_FATAL),
        ("80E18405", "SubHealthFault", Role.SYMPTOM, None),
        ("80C98006", "NotHandleFault", Role.INFORMATION, None),
    ],
)
def test_s4_3_an_npu_code_is_read_as_mindcluster_says(
    code: str, level: str, role: Role, cause: Cause | None
) -> None:
    row = catalog().npu_codes[code]
    assert (row.level, row.role, row.cause) == (level, role, cause)


def test_s4_3_all_802_codes_of_mindcluster_are_there() -> None:
    rows = catalog().npu_codes
    assert len(rows) == 802
    assert all(re.fullmatch(r"[0-9A-F]{8,9}", code) for code in rows)
    users = {code for code, row in rows.items() if row.cause is Cause.GPU_USER_INDUCED}
    assert users == {"80C98002", "80CB8002"}


@pytest.mark.parametrize(
    ("code", "role", "cause"),
    [
        (13, Role.ROOT, Cause.GPU_USER_INDUCED),
        (14, Role.INFORMATION, None),
        (31, Role.ROOT, Cause.GPU_USER_INDUCED),
        (32, Role.ROOT, Cause.GPU_USER_INDUCED),
        (39, Role.ROOT, Cause.GPU_TRANSIENT),
        (43, Role.SYMPTOM, Cause.GPU_USER_INDUCED),
        (45, Role.SYMPTOM, Cause.GPU_TRANSIENT),
        (48, Role.ROOT, Cause.GPU_FATAL),
        (56, Role.SYMPTOM, None),
        (62, Role.ROOT, Cause.GPU_RESET),
        (63, Role.INFORMATION, None),
        (64, Role.ROOT, Cause.GPU_RESET),
        (74, Role.ROOT, Cause.GPU_RESET),
        (79, Role.ROOT, Cause.GPU_FATAL),
        (92, Role.INFORMATION, None),
        (94, Role.ROOT, Cause.GPU_TRANSIENT),
        (95, Role.ROOT, Cause.GPU_RESET),
        (109, Role.ROOT, Cause.GPU_RESET),
        (119, Role.ROOT, Cause.GPU_RESET),
        (120, Role.ROOT, Cause.GPU_RESET),
        (136, Role.ROOT, Cause.GPU_RESET),
        (140, Role.ROOT, Cause.GPU_RESET),
        (149, Role.ROOT, Cause.GPU_RESET),
        (151, Role.ROOT, Cause.GPU_FATAL),
        (167, Role.ROOT, Cause.GPU_FATAL),
        (171, Role.CONFIRMATION, None),
    ],
)
def test_an_xid_is_read_as_nvidia_says(code: int, role: Role, cause: Cause | None) -> None:
    row = catalog().xids[code]
    assert (role, cause) == (row.role, row.cause)


def test_nvidias_buckets_are_followed_except_with_a_reason() -> None:
    rows = catalog().xids.values()
    assert {"GPU_TRANSIENT", "GPU_USER_INDUCED"} == {
        row.cause for row in rows if row.action == "RESTART_APP"
    }
    assert {Cause.GPU_RESET} == {row.cause for row in rows if row.action == "RESET_GPU"}
    assert {Cause.GPU_FATAL} == {
        row.cause for row in rows if row.action in ("RESTART_BM", "RESTART_VM")
    }
    assert [
        row.code for row in rows if row.action == "IGNORE" and row.role is not Role.INFORMATION
    ] == [43, 137]
    assert [
        row.code
        for row in rows
        if row.action == "CONTACT_SUPPORT" and (row.role, row.cause) != (Role.SYMPTOM, None)
    ] == []


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            63,
            (
                "NVIDIA: IGNORE",
                "gpud: reboot",
                "Azure NHC: fails the node",
                "Meta gcm: not critical",
                "DCGM health: warn",
                "We follow NVIDIA",
            ),
        ),
        (
            64,
            (
                "NVIDIA: RESET_GPU",
                "gpud: reboot",
                "Azure NHC: fails the node",
                "DCGM health: fail",
                "AWS",
                "We follow NVIDIA",
            ),
        ),
        (74, ("NVIDIA: WORKFLOW_NVLINK_ERR", "gpud: reboot", "We follow NVIDIA")),
        (109, ("NVIDIA: RESET_GPU", "Meta gcm: not critical")),
        (38, ("NVIDIA: IGNORE", "gpud: reboot", "PCIe Bus Error")),
        (
            68,
            (
                "gpud: reboot",
                "imbue: hardware",
                "Azure NHC: fails the node",
                "Meta gcm: not critical",
            ),
        ),
    ],
)
def test_a_disagreement_is_noted(code: int, words: tuple[str, ...]) -> None:
    assert [word for word in words if word not in catalog().xids[code].note] == []


@pytest.mark.parametrize(
    "rule", catalog().nvlink, ids=lambda r: f"{r.xid} {r.unit} {r.pattern_v1} {r.error_status}"
)
@pytest.mark.parametrize("version", ["pattern_v1", "pattern_v2"])
def test_every_nvlink_rule_decodes_the_line_it_describes(rule: Any, version: str) -> None:
    info = int(getattr(rule, version).replace("-", "0"), 2)
    for unit in rule.unit.split("/"):
        found = decode(
            rule.xid,
            f"{unit} Fatal XC0 i0 Link 01 (0x{info:08x} {rule.error_status} 0x00000000)",
            catalog().nvlink,
        )
        assert not isinstance(found, str)
        # The first pattern cannot distinguish the two pipes of a unit;
        # what they ask for is the same.
        assert (rule.xid, rule.error_status, rule.resolution, rule.severity) == (
            found.xid,
            found.error_status,
            found.resolution,
            found.severity,
        )
        assert unit in found.unit.split("/")


@pytest.mark.parametrize(
    ("xid", "text", "resolution"),
    [
        pytest.param(
            144,
            "SAW_MVB Fatal XC0 i0 Link 1 (0x00000021 0x00000006 0x0)",
            "RESET_GPU",
            id="several bits: the gravest row",
        ),
        pytest.param(
            144,
            "SAW_MVB Nonfatal XC0 i0 Link 1 (0x00000021 0x00000024 0x0)",
            "IGNORE",
            id="several bits, none grave",
        ),
    ],
)
def test_a_status_with_several_bits_is_read_by_its_gravest(
    xid: int, text: str, resolution: str
) -> None:
    found = decode(xid, text, catalog().nvlink)
    assert not isinstance(found, str)
    assert resolution == found.resolution


@pytest.mark.parametrize(
    ("xid", "text", "why"),
    [
        pytest.param(
            149,
            "NETIR Fatal XC0 i0 Link -1 (0x000fe406",
            "cut off",
            id="cut off within the registers",
        ),
        pytest.param(149, "", "cut off", id="nothing"),
        pytest.param(
            149,
            "NETIR_MFDE_EVENT Fatal XC0 i0 Link -1 (0x00000246 0x00000006 0x0)",
            "no row",
            id="149 numbers events, no bits",
        ),
        pytest.param(
            147,
            "NEW_UNIT Fatal XC0 i0 Link -1 (0x00000001 0x00000001 0x0)",
            "no row",
            id="a unit that is new",
        ),
        pytest.param(
            144,
            "SAW_MVB Fatal XC0 i0 Link -1 (0xffffffff 0x00000001 0x0)",
            "no row",
            id="registers that fit nothing",
        ),
    ],
)
def test_what_no_rule_fits_is_said_not_to_be_decoded(xid: int, text: str, why: str) -> None:
    found = decode(xid, text, catalog().nvlink)
    assert isinstance(found, str)
    assert why in found


def test_every_resolution_of_the_nvlink_table_is_read() -> None:
    seen = {
        (rule.resolution, rule.severity.startswith("Non-fatal")): interpret_rule(rule)
        for rule in catalog().nvlink
    }
    assert seen == {
        ("IGNORE", True): (Role.INFORMATION, None),
        ("IGNORE", False): (Role.SYMPTOM, None),
        ("RESET_GPU", False): (Role.ROOT, Cause.GPU_RESET),
        ("XID_154_EVAL", True): (Role.ROOT, Cause.GPU_TRANSIENT),
    }
    assert {*XIDS} == {rule.xid for rule in catalog().nvlink}


def test_without_overrides_the_tables_are_loaded_once() -> None:
    assert catalog() is catalog(NO_OVERRIDES) is catalog(CatalogOverrides())


def test_overridden_tables_are_made_once_and_survive_json() -> None:
    wish = overrides(xid={63: {"cause": "GPU_RESET"}})
    again = CatalogOverrides.model_validate_json(wish.model_dump_json())
    assert wish == again
    assert catalog(wish) is catalog(again)
    assert catalog().xids[63].cause is None


def test_an_xid_override_keeps_nvidias_text_and_names_the_policy(
    snapshot: SnapshotAssertion,
) -> None:
    row = catalog(
        overrides(xid={"63": {"cause": "GPU_RESET", "reason": "our fleet resets at once"}})
    ).xids[63]
    assert (row.role, row.cause, row.action, row.by_user) == (
        Role.ROOT,
        Cause.GPU_RESET,
        "IGNORE",
        True,
    )
    assert row.meaning == snapshot


def test_an_xid_that_the_catalog_does_not_know_can_be_taught(snapshot: SnapshotAssertion) -> None:
    row = catalog(overrides(xid={177: {"role": "information"}})).xids[177]
    assert (row.role, row.cause) == (Role.INFORMATION, None)
    assert row.meaning == snapshot


def test_exit_overrides_replace_and_add() -> None:
    tables = catalog(
        overrides(
            exit={
                "exit 42": {"cause": "PREEMPTED", "meaning": "our scheduler took the node"},
                "SIGUSR1": {"cause": "PREEMPTED", "meaning": "a warning", "role": "symptom"},
            }
        )
    )
    assert (tables.exits["exit 42"].cause, tables.exits["exit 42"].role) == (
        Cause.PREEMPTED,
        Role.ROOT,
    )
    assert Role.SYMPTOM is tables.exits["SIGUSR1"].role
    assert catalog().exits["exit 93"] == tables.exits["exit 93"]


def test_a_known_log_line_keeps_its_place_and_new_ones_go_first() -> None:
    oom = {
        "id": "cuda_oom",
        "pattern": "our oom",
        "role": "root",
        "cause": "APPLICATION",
        "meaning": "ours",
    }
    new = {"id": "our_line", "pattern": "our line", "role": "symptom", "meaning": "new"}
    before = [row.id for row in catalog().log_lines]
    rows = catalog(overrides(log=[oom, new])).log_lines
    assert ["our_line", *before] == [row.id for row in rows]
    assert Cause.APPLICATION is next(row.cause for row in rows if row.id == "cuda_oom")


def test_dcgm_overrides_are_handed_on() -> None:
    assert catalog(overrides(dcgm={80: {"advice": "rma"}})).dcgm == {80: Advice.RMA}
    assert catalog().dcgm == {}


LINE = {"id": "ours", "pattern": "x", "role": "symptom", "meaning": "m"}


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"xid": {0: {"cause": "GPU_RESET"}}}, id="xid-0"),
        pytest.param({"xid": {1000: {"cause": "GPU_RESET"}}}, id="xid-1000"),
        pytest.param({"xid": {"gpu": {"cause": "GPU_RESET"}}}, id="xid-word"),
        pytest.param({"xid": {63: {}}}, id="xid-empty"),
        pytest.param({"xid": {63: {"reason": "so"}}}, id="xid-reason-only"),
        pytest.param({"xid": {63: {"role": "root"}}}, id="xid-root-without-cause"),
        pytest.param({"xid": {63: {"cause": "BROKEN"}}}, id="xid-cause"),
        pytest.param({"xid": {63: {"cause": "GPU_RESET", "because": "so"}}}, id="xid-unknown-key"),
        pytest.param(
            {"xid": {63: {"cause": "GPU_RESET", "reason": "x" * 201}}}, id="xid-reason-too-long"
        ),
        pytest.param({"exit": {"exit 0": {"cause": "PREEMPTED", "meaning": "m"}}}, id="exit-0"),
        pytest.param({"exit": {"exit 256": {"cause": "PREEMPTED", "meaning": "m"}}}, id="exit-256"),
        pytest.param({"exit": {"42": {"cause": "PREEMPTED", "meaning": "m"}}}, id="exit-bare-text"),
        pytest.param({"exit": {42: {"cause": "PREEMPTED", "meaning": "m"}}}, id="exit-bare-number"),
        pytest.param(
            {"exit": {"SIGFOO": {"cause": "PREEMPTED", "meaning": "m"}}}, id="exit-unknown-signal"
        ),
        pytest.param({"exit": {"exit 42": {"cause": "PREEMPTED"}}}, id="exit-without-meaning"),
        pytest.param(
            {"exit": {"exit 42": {"cause": "PREEMPTED", "meaning": ""}}}, id="exit-empty-meaning"
        ),
        pytest.param({"log": [LINE | {"id": "Our Line"}]}, id="log-id"),
        pytest.param({"log": [LINE | {"pattern": "("}]}, id="log-broken-pattern"),
        pytest.param({"log": [LINE | {"pattern": "(?<!no )error"}]}, id="log-lookbehind"),
        pytest.param({"log": [LINE | {"pattern": "x*"}]}, id="log-empty-match"),
        pytest.param({"log": [LINE | {"pattern": "x" * 301}]}, id="log-pattern-too-long"),
        pytest.param({"log": [LINE | {"role": "root"}]}, id="log-root-without-cause"),
        pytest.param({"log": [LINE, LINE]}, id="log-twice"),
        pytest.param({"dcgm": {80: {"advice": "burn"}}}, id="dcgm-advice"),
        pytest.param({"dcgm": {0: {"advice": "rma"}}}, id="dcgm-0"),
        pytest.param({"xid": {code: {"role": "symptom"} for code in range(1, 202)}}, id="too-many"),
        pytest.param({"xids": {}}, id="unknown-table"),
    ],
)
def test_a_bad_override_is_refused_with_a_sentence(
    values: dict[str, Any], snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(ValidationError) as refusal:
        overrides(**values)
    assert refusal.value.errors()[0]["msg"].removeprefix("Value error, ") == snapshot


def test_two_hundred_of_the_longest_overrides_fit_a_jobs_state() -> None:
    many = overrides(
        log=[
            {"id": f"l{n:039d}", "pattern": "x" * 300, "role": "symptom", "meaning": "m" * 200}
            for n in range(200)
        ]
    )
    assert len(many.model_dump_json()) < 130 * 1024


def test_what_a_word_means_by_itself() -> None:
    assert find_exit_row(1, None) is None
    assert find_exit_row(None, 40) is None
    segv = find_exit_row(None, 11)
    assert segv is not None and (segv.cause, segv.meaning) == (
        Cause.APPLICATION,
        "segmentation fault",
    )
    assert is_cascade(("step 1", "ConnectionResetError: [Errno 104] Connection reset by peer"))
    assert not is_cascade(("ValueError: bad batch",))


def test_no_text_makes_a_users_pattern_match_for_long() -> None:
    """Python's own engine doubles its time with each letter: this would be ten thousand years."""
    known = catalog(
        CatalogOverrides(
            log=(LogOverride(id="ours", pattern="(a+)+$", role=Role.SYMPTOM, meaning="hangs"),)
        )
    )
    began = time.process_time()
    assert read_log(("a" * 60 + "b",), known) == ()
    assert read_log(("a" * 60,), known)[0].code == "log ours"
    assert time.process_time() - began < 5.0


def test_the_joined_pattern_fits_into_a_quarter_of_its_memory(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where it does not fit at all, RE2 says so on stderr for each line, and is slow."""
    monkeypatch.setattr(tables, "MAX_STATES_MEMORY", tables.MAX_STATES_MEMORY // 4)
    joined = tables._join_patterns(catalog().log_lines)
    lines = [line for path in LAST_WORDS for line in path.read_text().splitlines()]
    assert len(lines) > 100
    assert any(joined.search(line) for line in lines)
    assert capfd.readouterr().err == ""

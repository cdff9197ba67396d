"""What a run of `dcgmi diag` is read as.

The samples' README says which were captured and which were built.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.catalog.dcgm_tables import Advice, load_dcgm_errors, load_dcgm_exits
from relaunch.evidence.causes import Cause
from relaunch.evidence.dcgm import GRAVITY, Examination, read_diag
from relaunch.evidence.findings import Role, Verdict
from tests.recovery.generated import searched

SAMPLES = Path(__file__).parent / "samples" / "dcgm"
MANIFEST = json.loads((SAMPLES / "synthetic" / "manifest.json").read_text())["cases"]
EXITS = {case["file"]: case["exit_code"] for case in MANIFEST}
REAL = (SAMPLES / "dcgm_4.2.3_r1_gb10_fail_persistence_exit226.json").read_text()
VERDICTS = {"healthy": "HEALTHY"} | dict.fromkeys(("reset", "isolate", "rma"), "UNHEALTHY")


def sample(name: str) -> str:
    return (SAMPLES / "synthetic" / name).read_text()


PASS_3, PASS_4 = sample("v3_r1_pass_8gpu.json"), sample("v4_r1_pass_8gpu.json")
MEMORY = sample("v4_r2_gpu6_faulty_memory_isolate.json")
NOT_DCGM = '{"nodes": [{"name": "n1"}]}'


def error(code: object, text: str = "GPU 1 has it", severity: object = None) -> dict[str, Any]:
    return {"error_id": code, "warning": text, "error_category": 0} | (
        {} if severity is None else {"error_severity": severity}
    )


def result_4(gpu: int, status: str = "Pass", *errors: object) -> dict[str, Any]:
    entity = {"entity_group": "GPU", "entity_group_id": 1, "entity_id": gpu, "status": status}
    return entity | ({"warnings": list(errors)} if errors else {})


def document_4(
    *results: object,
    name: str = "memory",
    category: str = "Hardware",
    version: str = "4.4.1",
    **more: object,
) -> str:
    test = {"name": name, "results": list(results), "test_summary": {"status": "Pass"}} | more
    return json.dumps(
        {
            "DCGM Diagnostic": {"test_categories": [{"category": category, "tests": [test]}]},
            "metadata": {"version": version},
        }
    )


def document_3(
    *results: object, name: str = "GPU Memory", category: str = "Hardware", version: str = "3.3.9"
) -> str:
    test = {"name": name, "results": list(results)}
    return json.dumps(
        {
            "DCGM GPU Diagnostic": {"test_categories": [{"category": category, "tests": [test]}]},
            "version": version,
        }
    )


def failing(version: str, severity: int | None, code: int = 999) -> str:
    if version.startswith("3"):
        return document_3(
            {"gpu_id": "1", "status": "Fail", "warnings": [error(code, severity=severity)]},
            version=version,
        )
    return document_4(result_4(1, "Fail", error(code, severity=severity)), version=version)


@pytest.mark.parametrize("case", [pytest.param(case, id=case["file"]) for case in MANIFEST])
def test_every_sample_is_read_as_its_manifest_says(case: dict[str, Any]) -> None:
    found = read_diag(sample(case["file"]), case["exit_code"])
    assert (case["expected_verdict"], VERDICTS.get(case["expected_verdict"], "UNKNOWN")) == (
        found.advice,
        found.verdict,
    )


@pytest.mark.parametrize(
    "file",
    [
        pytest.param("v4_r1_pass_8gpu.json", id="passed"),
        pytest.param("v4.6_r1_gpu2_row_remap_failure_reset.json", id="row-remap-failure"),
        pytest.param("v4_r1_persistence_mode_fail_8gpu.json", id="persistence-mode"),
        pytest.param("v4_r2_xid45_during_pcie_triage.json", id="xid-45"),
        pytest.param("v4_r3_all_skip.json", id="skipped"),
    ],
)
def test_one_clause_names_the_gpus_and_what_was_found(
    file: str, snapshot: SnapshotAssertion
) -> None:
    assert read_diag(sample(file), EXITS[file]).reason == snapshot


DISABLED = "Persistence mode for GPU {} is disabled."
SKIPPED = document_4(result_4(0), result_4(1, "Skip"))
INTERRUPTED = PASS_4.replace(
    '"test_categories"', '"runtime_error": "the host engine went away", "test_categories"', 1
)
BROKEN = document_4(result_4(0), name="memory, {all of it TEXT").replace("TEXT", "\\q")


@pytest.mark.parametrize(
    ("stdout", "exit_code", "advice"),
    [
        pytest.param(
            REAL, 226, Advice.CONFIG_ERROR, id="the real capture is a setting and not a broken GPU"
        ),
        pytest.param(
            sample("v3_leading_garbage.txt"),
            0,
            Advice.HEALTHY,
            id="lines before the document do not matter",
        ),
        pytest.param(
            "{not this}\n{}\n" + PASS_4 + "bye }",
            0,
            Advice.HEALTHY,
            id="nor do braces before and after it",
        ),
        pytest.param(
            sample("v4_truncated_output.txt"),
            None,
            Advice.INCONCLUSIVE,
            id="a healthy beginning is not health",
        ),
        pytest.param(
            sample("v4_truncated_output.txt"), 0, Advice.INCONCLUSIVE, id="not even with exit 0"
        ),
        pytest.param(
            "{not this}\n" + sample("v4_truncated_output.txt"),
            0,
            Advice.INCONCLUSIVE,
            id="nor behind other braces",
        ),
        pytest.param(
            MEMORY[: MEMORY.index("Found 12")],
            None,
            Advice.ISOLATE,
            id="evidence before the cut counts",
        ),
        pytest.param(
            MEMORY[: MEMORY.index("52,") + 1],
            None,
            Advice.INCONCLUSIVE,
            id="half an error id does not",
        ),
        pytest.param(
            PASS_4, None, Advice.INCONCLUSIVE, id="a document without an exit code was killed"
        ),
        pytest.param(
            PASS_4, 245, Advice.RETRY, id="a passing document with a timeout is tried again"
        ),
        pytest.param(
            PASS_4, 226, Advice.INCONCLUSIVE, id="226 without a readable error is not health"
        ),
        pytest.param(PASS_4, 205, Advice.ISOLATE, id="205 without a readable error is believed"),
        pytest.param(REAL, 205, Advice.ISOLATE, id="205 is not explained by a setting"),
        pytest.param(
            failing("4.4.1", 2, 24),
            205,
            Advice.CONFIG_ERROR,
            id="205 is explained by a library that is missing",
        ),
        pytest.param(MEMORY, 0, Advice.ISOLATE, id="exit 0 with a failure inside is a failure"),
        pytest.param(
            document_4(result_4(3, "Fail")), 0, Advice.INCONCLUSIVE, id="a Fail without a reason"
        ),
        pytest.param(
            document_4(result_4(1, "Warn", error(52))), 0, Advice.ISOLATE, id="Warn is no pass"
        ),
        pytest.param(
            document_4(result_4(3, "Passed?")),
            0,
            Advice.INCONCLUSIVE,
            id="an unknown status is no pass",
        ),
        pytest.param(
            document_4(None, result_4(0), None), 0, Advice.HEALTHY, id="null entries are skipped"
        ),
        pytest.param(
            SKIPPED, 0, Advice.INCONCLUSIVE, id="a GPU that was skipped alone was not examined"
        ),
        pytest.param(
            document_4(result_4(0, "Skip")), 0, Advice.INCONCLUSIVE, id="skip is not pass"
        ),
        pytest.param(
            '{"DCGM Diagnostic": {"test_categories": []}}', 0, Advice.INCONCLUSIVE, id="zero tests"
        ),
        pytest.param('{"iterations": []}', 0, Advice.INCONCLUSIVE, id="zero iterations"),
        pytest.param(
            f'{{"iterations": [{PASS_4}, null]}}',
            0,
            Advice.INCONCLUSIVE,
            id="an iteration that left nothing",
        ),
        pytest.param(
            f'{{"iterations": [{PASS_4}, {PASS_4}]}}', 0, Advice.HEALTHY, id="two good iterations"
        ),
        pytest.param(
            f'{{"iterations": [{PASS_4}, {SKIPPED}]}}',
            0,
            Advice.INCONCLUSIVE,
            id="every iteration counts",
        ),
        pytest.param("", None, Advice.INCONCLUSIVE, id="nothing printed"),
        pytest.param("", 0, Advice.INCONCLUSIVE, id="nothing printed and exit 0"),
        pytest.param(
            "dcgmi: command not found", 127, Advice.INCONCLUSIVE, id="dcgmi is not installed"
        ),
        pytest.param(
            "Successfully ran diagnostic",
            0,
            Advice.INCONCLUSIVE,
            id="the output is not JSON at all",
        ),
        pytest.param(NOT_DCGM, 0, Advice.INCONCLUSIVE, id="JSON of another program"),
        pytest.param("Segmentation fault", 205, Advice.ISOLATE, id="205 counts without a document"),
        pytest.param("", 238, Advice.ISOLATE, id="a lost GPU"),
        pytest.param("", 237, Advice.RESET, id="a GPU that needs a reset"),
        pytest.param("", 222, Advice.RETRY, id="in use"),
        pytest.param("", 202, Advice.RETRY, id="paused"),
        pytest.param("", 204, Advice.INCONCLUSIVE, id="the diagnostic is not installed"),
        pytest.param("", 198, Advice.INCONCLUSIVE, id="no such test"),
        pytest.param("", 143, Advice.INCONCLUSIVE, id="128 + 15"),
        pytest.param("", -9, Advice.INCONCLUSIVE, id="minus 9, as Python says it"),
        pytest.param("", 99, Advice.INCONCLUSIVE, id="an undefined exit code"),
        pytest.param(
            sample("v3_runtime_error.json"),
            238,
            Advice.ISOLATE,
            id="the exit code says runtime error",
        ),
        pytest.param(
            sample("v3_runtime_error.json"), 226, Advice.INCONCLUSIVE, id="a runtime error with 226"
        ),
        pytest.param(
            sample("v3_runtime_error.json"), 0, Advice.INCONCLUSIVE, id="a runtime error with 0"
        ),
        pytest.param(
            INTERRUPTED, 0, Advice.INCONCLUSIVE, id="a runtime error beside tests that passed"
        ),
        pytest.param(
            BROKEN,
            0,
            Advice.INCONCLUSIVE,
            id="a text that breaks off behind a comma and another brace",
        ),
    ],
)
def test_the_output_and_the_exit_code_are_weighed_together(
    stdout: str,
    exit_code: int | None,
    advice: Advice,
    snapshot: SnapshotAssertion,
) -> None:
    found = read_diag(stdout, exit_code)
    assert found.advice == advice
    assert found.reason == snapshot


TEST = ("DCGM Diagnostic", "test_categories", 1, "tests", 0)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        pytest.param(TEST[:3], "torn", id="entry"),
        pytest.param((*TEST[:3], "category"), None, id="category"),
        pytest.param((*TEST[:3], "tests"), None, id="tests"),
        pytest.param((*TEST, "name"), 7, id="test-name"),
        pytest.param((*TEST, "results"), {}, id="results"),
        pytest.param((*TEST, "results", 2), 7, id="result"),
        pytest.param((*TEST, "results", 2, "status"), None, id="status"),
        pytest.param((*TEST, "results", 2, "warnings"), [7], id="warning"),
        pytest.param((*TEST, "results", 2, "entity_id"), None, id="gpu"),
        pytest.param((*TEST, "test_summary"), "torn", id="summary"),
        pytest.param((*TEST, "test_summary", "status"), "Fail", id="summary-failed"),
    ],
)
def test_one_place_that_cannot_be_read_is_in_the_way_of_health(
    place: tuple[Any, ...], value: object, snapshot: SnapshotAssertion
) -> None:
    document = json.loads(sample("v4_r2_xid45_during_pcie_triage.json"))
    del document["DCGM Diagnostic"]["test_categories"][2]  # the only one that failed
    assert read_diag(json.dumps(document), 0).verdict == Verdict.HEALTHY
    holder = document
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    found = read_diag(json.dumps(document), 0)
    assert found.advice == Advice.INCONCLUSIVE
    assert found.reason == snapshot


@pytest.mark.parametrize(
    ("stdout", "exit_code", "advice"),
    [
        pytest.param(failing("4.7.0", 2), 205, Advice.ISOLATE, id="2 is ISOLATE since 3.3"),
        pytest.param(failing("3.3.1", 6), 226, Advice.RESET, id="6 is RESET since 3.3"),
        pytest.param(failing("4.7.0", 5), 226, Advice.CONFIG_ERROR, id="5 is CONFIG since 3.3"),
        pytest.param(failing("4.7.0", 1), 226, Advice.INCONCLUSIVE, id="1 is MONITOR since 3.3"),
        pytest.param(failing("3.2.6", 1), 226, Advice.ISOLATE, id="1 was ISOLATE before"),
        pytest.param(failing("3.2.6", 2), 226, Advice.INCONCLUSIVE, id="2 was UNKNOWN before"),
        pytest.param(failing("3.2.6", None), 226, Advice.INCONCLUSIVE, id="no severity at all"),
        pytest.param(
            failing("3-odd", 2),
            226,
            Advice.INCONCLUSIVE,
            id="a version that cannot be read has no severities",
        ),
        pytest.param(
            failing("4-odd", 2), 226, Advice.ISOLATE, id="the shape of version 4 says enough"
        ),
        pytest.param(failing("4.7.0", 99), 226, Advice.INCONCLUSIVE, id="an undefined severity"),
        pytest.param(
            failing("4.7.0", 1, 52),
            226,
            Advice.ISOLATE,
            id="an id that is known beats its severity",
        ),
        pytest.param(
            failing("3.3.9", 2, 29), 205, Advice.ISOLATE, id="205 in 3.3 is not by persistence mode"
        ),
        pytest.param(
            failing("3.2.6", 1, 29),
            205,
            Advice.CONFIG_ERROR,
            id="205 in 3.2 is, and means a setting",
        ),
    ],
)
def test_severity_counts_only_for_unknown_ids_and_per_version(
    stdout: str, exit_code: int, advice: Advice
) -> None:
    assert advice == read_diag(stdout, exit_code).advice


def test_persistence_mode_is_a_setting_even_without_an_id_in_3_1() -> None:
    failed = {"status": "Fail", "warnings": DISABLED.format(0)}
    found = read_diag(
        document_3(failed, name="Persistence Mode", category="Deployment", version="3.1.8"), 205
    )
    assert (
        found.advice,
        tuple(finding.code for finding in found.findings),
        tuple(finding.gpu for finding in found.findings),
    ) == (Advice.CONFIG_ERROR, ("DCGM 29",), ("0",))


def test_version_3_deployment_results_name_their_gpus_in_texts() -> None:
    errors = [
        {"error_id": 29, "error_severity": 5, "warnings": DISABLED.format(gpu)} for gpu in (0, 1, 2)
    ]
    failed = {"gpu_id": 2, "status": "Fail", "warnings": errors}
    found = read_diag(document_3(failed, name="Persistence Mode", category="Deployment"), 226)
    assert [finding.gpu for finding in found.findings] == [
        "0",
        "1",
        "2",
    ] and found.reason.startswith("GPUs 0-2: ")


def test_version_3_names_a_gpu_by_a_string_or_by_an_integer() -> None:
    for gpu in ("3", 3):
        (finding,) = read_diag(
            document_3({"gpu_id": gpu, "status": "Fail", "warnings": [error(57, "double-bit")]}),
            205,
        ).findings
        assert finding.gpu == "3"


def test_an_error_only_in_the_summary_is_read_and_counted_once() -> None:
    found = read_diag(
        document_4(
            result_4(0), result_4(1), test_summary={"status": "Fail", "warnings": [error(52)]}
        ),
        205,
    )
    assert (found.advice, tuple(finding.gpu for finding in found.findings)) == (
        Advice.ISOLATE,
        ("1",),
    )
    assert len(read_diag(MEMORY, 205).findings) == 1


def test_an_error_of_a_switch_is_no_gpus() -> None:
    switch = {
        "entity_group": "Switch",
        "entity_group_id": 3,
        "entity_id": 4,
        "status": "Fail",
        "warnings": [error(109, "fatal SXID 20034")],
    }
    found = read_diag(document_4(result_4(0), switch), 0)
    assert (found.advice, found.findings[0].gpu, found.reason.startswith("Switch 4: ")) == (
        Advice.ISOLATE,
        None,
        True,
    )


def test_groups_of_other_entities_are_no_gpus() -> None:
    document = json.loads(PASS_4)
    before = read_diag(json.dumps(document), 0)
    document["entity_groups"].append(
        {"entity_group": "CPU", "entity_group_id": 7, "entities": [{"entity_id": 99}]}
    )
    after = read_diag(json.dumps(document), 0)
    assert (after.advice, after.reason) == (before.advice, before.reason)


def test_a_cpu_that_failed_is_the_hosts_fault() -> None:
    cpu = {
        "entity_group": "CPU",
        "entity_group_id": 7,
        "entity_id": 1,
        "status": "Fail",
        "warnings": [error(95, "")],
    }
    (finding,) = read_diag(document_4(cpu, name="cpu_eud"), 205).findings
    assert (finding.cause, finding.gpu, finding.reason) == (
        Cause.NODE_FAULT,
        None,
        "EUD test failed",
    )


def test_of_very_many_findings_the_gravest_are_kept() -> None:
    settings = [error(29, f"setting {number}") for number in range(500)]
    found = read_diag(document_4(result_4(0, "Fail", *settings, error(52, "bad memory"))), 205)
    assert (len(found.findings), found.findings[0].code) == (64, "DCGM 52")


def test_a_requested_level_that_did_not_run_is_missed() -> None:
    assert (read_diag(PASS_3, 0).advice, read_diag(PASS_3, 0, level=3).advice) == (
        Advice.HEALTHY,
        Advice.INCONCLUSIVE,
    )


def test_the_skips_that_follow_a_setting_do_not_hide_the_setting() -> None:
    document = json.loads(sample("v4_r3_all_skip.json"))
    software = document["DCGM Diagnostic"]["test_categories"][0]["tests"][0]["results"][0]
    software |= {"status": "Fail", "warnings": [error(29, severity=5)]}
    assert read_diag(json.dumps(document), 226).advice == Advice.CONFIG_ERROR


IDS = {
    Advice.RMA: 80,
    Advice.ISOLATE: 52,
    Advice.RESET: 85,
    Advice.RETRY: 130,
    Advice.INCONCLUSIVE: 56,
    Advice.CONFIG_ERROR: 29,
}


@pytest.mark.parametrize(
    ("graver", "lesser"), [(a, b) for i, a in enumerate(IDS) for b in list(IDS)[i + 1 :]]
)
def test_of_two_findings_the_graver_wins_and_comes_first(graver: Advice, lesser: Advice) -> None:
    document = document_4(
        result_4(0, "Fail", error(IDS[lesser], "a")), result_4(1, "Fail", error(IDS[graver], "b"))
    )
    found = read_diag(document, 226)
    assert (graver, f"DCGM {IDS[graver]}", "1") == (
        found.advice,
        found.findings[0].code,
        found.findings[0].gpu,
    )
    assert found.reason.startswith("GPU 1: ")


@pytest.mark.parametrize(
    ("code", "role", "cause"),
    [
        (80, Role.ROOT, Cause.GPU_FATAL),
        (52, Role.ROOT, Cause.GPU_FATAL),
        (85, Role.ROOT, Cause.GPU_RESET),
        (56, Role.SYMPTOM, None),
        (130, Role.INFORMATION, None),
        (29, Role.INFORMATION, None),
    ],
)
def test_only_hardware_that_was_found_broken_is_a_cause(
    code: int, role: Role, cause: Cause | None
) -> None:
    message = "GPU 5: so it is"
    (finding,) = read_diag(document_4(result_4(5, "Fail", error(code, message))), 226).findings
    assert (role, cause, "5", message) == (finding.role, finding.cause, finding.gpu, finding.reason)


def test_the_users_word_on_an_error_id_also_silences_205() -> None:
    override = {52: Advice.CONFIG_ERROR}
    assert (read_diag(MEMORY, 205).advice, read_diag(MEMORY, 205, override).advice) == (
        Advice.ISOLATE,
        Advice.CONFIG_ERROR,
    )


def test_texts_with_half_surrogates_and_any_length_still_travel() -> None:
    text = "\\ud800 " + "x " * 5000
    found = read_diag(document_4(result_4(0, "Fail", error(52, "TEXT"))).replace("TEXT", text), 205)
    assert len(found.findings[0].reason.encode()) <= 200 and len(found.reason.encode()) < 400


@pytest.mark.parametrize(
    "stdout",
    [
        '{"iterations":' + "[" * 100_000,
        '{"DCGM Diagnostic": ' + "9" * 5000 + "}",
        '{"DCGM Diagnostic": {"' * 9000,
        '{"DCGM Diagnostic": 7}',
        '{"DCGM Diagnostic": {}, "iterations": [7]}',
    ],
)
def test_output_made_to_break_parsers_is_only_unreadable(stdout: str) -> None:
    assert read_diag(stdout, 0).verdict == Verdict.UNKNOWN


# --- the tables


def test_the_tables_are_whole() -> None:
    assert (list(range(133)), 67) == (list(load_dcgm_errors()), len(load_dcgm_exits()))


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name) for row in load_dcgm_errors().values()]
)
def test_advice_that_departs_from_the_severity_says_why(row: Any) -> None:
    usual = {"ISOLATE": Advice.ISOLATE, "RESET": Advice.RESET, "CONFIG": Advice.CONFIG_ERROR}.get(
        row.severity, Advice.INCONCLUSIVE
    )
    assert row.advice is usual or row.note
    assert bool(row.old_severity) == ("everity was" in row.note or row.id == 80)


def test_no_error_id_means_healthy_and_every_advice_has_a_rank() -> None:
    assert Advice.HEALTHY not in {row.advice for row in load_dcgm_errors().values()}
    assert sorted(Advice) == sorted(GRAVITY)


@pytest.mark.parametrize("code", [29, 55, 23, 28])
def test_what_is_a_setting_is_never_hardware(code: int) -> None:
    assert Advice.CONFIG_ERROR is load_dcgm_errors()[code].advice


# --- properties


def _places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    below = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
    return [
        *([path] if path else []),
        *(place for key, value in below for place in _places(value, (*path, key))),
    ]


DOCUMENTS = {file: json.loads(sample(file)) for file in EXITS} | {"real": json.loads(REAL)}
PLACES = {file: _places(document) for file, document in DOCUMENTS.items()}
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    29,
    1.5,
    10**30,
    "",
    "Pass",
    "80",
    "x",
    [],
    [None],
    [[]],
    {},
    {"error_id": None},
    float("nan"),
]


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    file = draw(st.sampled_from(sorted(DOCUMENTS)))
    document = copy.deepcopy(DOCUMENTS[file])
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(PLACES[file]))
        holder = document
        try:
            for key in path[:-1]:
                holder = holder[key]
            if draw(st.booleans()) and isinstance(holder, dict):
                del holder[path[-1]]
            else:
                holder[path[-1]] = copy.deepcopy(draw(st.sampled_from(VALUES)))
        except (KeyError, IndexError, TypeError):  # an earlier mutation took that place away
            continue
    return document


def _recorded(tests: Any) -> bool:
    """Whether any error, or any Fail, is left where DCGM records one.

    It is the oracle, which knows no more of a document than this.
    """
    if isinstance(tests, dict):
        here = tests.get("status") == "Fail" or (
            "error_id" in tests and ("warning" in tests or "warnings" in tests)
        )
        return here or any(_recorded(value) for value in tests.values())
    return isinstance(tests, list) and any(_recorded(value) for value in tests)


def _passed(node: Any) -> bool:
    if isinstance(node, dict):
        return node.get("status") == "Pass" or any(_passed(value) for value in node.values())
    return isinstance(node, list) and any(_passed(value) for value in node)


def _consistent(found: Examination) -> None:
    assert found.reason and found.verdict == VERDICTS.get(found.advice, "UNKNOWN")
    json.dumps(
        [found.reason, found.version, *(finding.reason for finding in found.findings)],
        ensure_ascii=False,
    ).encode()


@searched(100)
@given(mutated(), st.sampled_from([0, 0, 0, 205, 226, None]))
def test_no_mutated_document_breaks_the_reader_or_hides_an_error(
    document: Any, exit_code: int | None
) -> None:
    found = read_diag(json.dumps(document), exit_code)
    _consistent(found)
    if _recorded(document) or not _passed(document) or exit_code != 0:
        assert Advice.HEALTHY is not found.advice


@searched(100)
@given(st.sampled_from(sorted(EXITS)), st.integers(0, 7000), st.sampled_from([0, None, 226, 205]))
def test_output_cut_anywhere_is_never_healthy(file: str, at: int, exit_code: int | None) -> None:
    text = sample(file).rstrip()
    found = read_diag(text[: min(at, len(text) - 1)], exit_code)
    _consistent(found)
    assert Advice.HEALTHY is not found.advice


@searched(100)
@given(
    st.text(),
    st.sampled_from(sorted(EXITS)),
    st.integers(0, 7000),
    st.one_of(st.none(), st.integers(-300, 70000)),
)
def test_no_text_in_the_midst_of_a_document_breaks_the_reader(
    noise: str, file: str, at: int, exit_code: int | None
) -> None:
    text = sample(file)
    _consistent(read_diag(text[:at] + noise + text[at:], exit_code))


@searched(100)
@given(st.text(), st.integers(-300, 70000))
def test_only_exit_0_can_be_healthy_and_never_without_a_document(
    noise: str, exit_code: int
) -> None:
    assert Verdict.HEALTHY is not read_diag(noise, exit_code).verdict
    if exit_code:
        assert Verdict.HEALTHY is not read_diag(PASS_4, exit_code).verdict

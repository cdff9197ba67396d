"""Kernel lines become findings, each in the light of the others about its GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.catalog import CatalogOverrides, catalog
from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Finding, Role
from relaunch.evidence.kernel_log import KERNEL_MARKS, is_kernel_evidence, read_kernel_log

SAMPLES = [
    line.rstrip("\n").split(" | ", 2)
    for line in (Path(__file__).parent / "samples" / "kernel_log.txt").read_text().splitlines()
    if not line.startswith("#")
]
A, B = "0000:05:00", "0000:06:00"
NVLINK_FATAL = "NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x00000000 0x00000000)"
NVLINK_CRASH = "RLW_REMAP Nonfatal XC0 i0 Link 13 (0x00000082 0x00000001 0x00000000)"
NVLINK_HOST = "NETIR_LINK_EVT Fatal XC0 i0 Link 01 (0x028001c6 0x00000000 0x00000000)"


def xid(
    code: int, text: str = "Ch 00000008", gpu: str = A, at: int = 0, pid: str = "'<unknown>'"
) -> str:
    stamp = f"[{at}.5] " if at else ""
    return f"{stamp}NVRM: Xid (PCI:{gpu}): {code}, pid={pid}, name=<unknown>, {text}"


def action(to: str, gpu: str = A) -> str:
    return xid(154, f"GPU recovery action changed from 0x0 (None) to {to}", gpu)


def read(*lines: str) -> tuple[Finding, ...]:
    return read_kernel_log(lines, catalog())


def brief(*lines: str) -> list[tuple[str, str, str | None]]:
    return [
        (found.code, found.role.value, found.cause.value if found.cause else None)
        for found in read(*lines)
    ]


@pytest.mark.parametrize(
    ("origin", "code", "line"),
    SAMPLES,
    ids=[f"{n} {sample[1]}" for n, sample in enumerate(SAMPLES)],
)
def test_a_sample_line_gives_the_code_its_tag_says(origin: str, code: str, line: str) -> None:
    assert origin in ("T", "O", "S")
    assert ([] if code == "-" else [code]) == [found.code for found in read(line)]
    assert code == "-" or is_kernel_evidence(line)


def test_every_mark_and_every_row_is_met_by_a_sample() -> None:
    lines = [sample[2] for sample in SAMPLES]
    assert [mark for mark in KERNEL_MARKS if not any(mark in line for line in lines)] == []
    assert [
        row for row in catalog().kernel_lines if not any(row.pattern.search(line) for line in lines)
    ] == []


def test_a_client_of_another_version_takes_no_lines_room() -> None:
    assert not is_kernel_evidence("NVRM: API mismatch: the client 'dcgm-exporter' (pid 777)")


def test_what_a_line_names_is_taken_over(snapshot: SnapshotAssertion) -> None:
    (found,) = read(
        "[2397166.983093] NVRM: Xid (PCI:0000:0f:00): 94, pid=2503421, name=python3, Ch 00000008"
    )
    assert (found.source, found.code, found.gpu, found.pid, found.at) == (
        "kernel",
        "Xid 94",
        "0000:0f:00",
        2503421,
        2397166.983093,
    )
    assert found.reason == snapshot


def test_a_pid_or_a_time_that_is_no_number_is_absent(snapshot: SnapshotAssertion) -> None:
    (found,) = read(
        "[...] NVRM: Xid (0000:03:00): 79, pid='<unknown>', name=<unknown>, "
        "GPU has fallen off the bus."
    )
    assert (found.gpu, found.pid, found.at) == ("0000:03:00", None, None)
    # what the meaning says is not said twice
    assert found.reason == snapshot


def test_a_switch_is_named_without_its_function() -> None:
    (found,) = read(
        "[131453.740743] nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Fatal, "
        "Link 30 LTSSM Fault Up"
    )
    assert (found.code, found.gpu, found.role, found.cause) == (
        "SXid 20034",
        "0000:a9:00",
        Role.ROOT,
        Cause.GPU_FATAL,
    )


def test_a_kill_for_memory_confirms_and_names_the_process() -> None:
    rank, other = read(
        "Memory cgroup out of memory: Killed process 123456 (python3) total-vm:98123456kB",
        "Out of memory: Killed process 77 (chrome) total-vm:98123456kB",
    )
    assert (rank.role, rank.cause, rank.pid) == (Role.CONFIRMATION, Cause.OUT_OF_MEMORY, 123456)
    assert (other.role, other.cause, other.pid) == (Role.SYMPTOM, Cause.OUT_OF_MEMORY, 77)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param([xid(177)], [("Xid 177", "symptom", None)], id="an unknown Xid is a symptom"),
        pytest.param(
            [xid(45)], [("Xid 45", "symptom", "GPU_TRANSIENT")], id="45 alone speaks for itself"
        ),
        pytest.param(
            [xid(45), xid(45)],
            [("Xid 45", "symptom", "GPU_TRANSIENT")] * 2,
            id="45 beside another 45 is alone",
        ),
        pytest.param(
            [xid(45), xid(79)],
            [("Xid 45", "cascade", None), ("Xid 79", "root", "GPU_FATAL")],
            id="45 goes with another Xid, also a later one",
        ),
        pytest.param(
            [xid(13), xid(45, gpu=B)],
            [("Xid 13", "root", "GPU_USER_INDUCED"), ("Xid 45", "symptom", "GPU_TRANSIENT")],
            id="45 on another GPU is alone",
        ),
        pytest.param(
            [xid(31, pid="4711"), xid(109, pid="4711")],
            [("Xid 31", "root", "GPU_USER_INDUCED"), ("Xid 109", "cascade", None)],
            id="109 follows what its process did",
        ),
        pytest.param(
            [xid(31, pid="4711"), xid(109, pid="4712")],
            [("Xid 31", "root", "GPU_USER_INDUCED"), ("Xid 109", "root", "GPU_RESET")],
            id="109 of another process does not",
        ),
        pytest.param(
            [xid(63), xid(45)],
            [("Xid 63", "information", None), ("Xid 45", "symptom", "GPU_TRANSIENT")],
            id="45 beside mere information is alone",
        ),
        pytest.param(
            [xid(48)], [("Xid 48", "root", "GPU_FATAL")], id="48 alone needs a field diagnostic"
        ),
        pytest.param(
            [xid(48), xid(63)],
            [("Xid 48", "root", "GPU_RESET"), ("Xid 63", "information", None)],
            id="48 then 63 needs a reset",
        ),
        pytest.param(
            [xid(48), xid(64)],
            [("Xid 48", "root", "GPU_RESET"), ("Xid 64", "root", "GPU_RESET")],
            id="48 then 64 needs a reset",
        ),
        pytest.param(
            [xid(63, at=10), xid(48, at=500)],
            [("Xid 63", "information", None), ("Xid 48", "root", "GPU_FATAL")],
            id="63 long before 48 is of an earlier fault",
        ),
        pytest.param(
            [xid(63, at=10), xid(48, at=11)],
            [("Xid 63", "information", None), ("Xid 48", "root", "GPU_RESET")],
            id="63 just before 48 is of the same fault",
        ),
        pytest.param(
            [xid(63), xid(48)],
            [("Xid 63", "information", None), ("Xid 48", "root", "GPU_RESET")],
            id="63 before 48, without times",
        ),
        pytest.param(
            [xid(45, "Ch 00000001 caused by previous Xid 149")],
            [("Xid 45", "root", "GPU_RESET")],
            id="45 that names an Xid whose line is missing",
        ),
        pytest.param(
            [xid(149, NVLINK_FATAL), xid(45, "Ch 00000001 caused by previous Xid 149")],
            [("Xid 149", "root", "GPU_RESET"), ("Xid 45", "cascade", None)],
            id="45 that names an Xid whose line is there",
        ),
        pytest.param(
            [xid(45, "channel 0x00000010 caused by previous Xid 45")],
            [("Xid 45", "symptom", "GPU_TRANSIENT")],
            id="45 that names itself",
        ),
        pytest.param(
            [xid(74, "link 8(0x800001, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)")],
            [("Xid 74", "information", None)],
            id="74 with bits that NVIDIA ignores",
        ),
        pytest.param(
            [xid(74, "link 8(0x100002, 0x0, 0x0, 0x20000, 0x0, 0x0, 0x0)")],
            [("Xid 74", "symptom", None)],
            id="74 as a consequence",
        ),
        pytest.param(
            [xid(74, "link 8(0x1, 0x0, 0x0, 0x0, 0x4, 0x0, 0x0)")],
            [("Xid 74", "root", "GPU_RESET")],
            id="74 with a bit in another register",
        ),
        pytest.param(
            [xid(74, "link 8(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)")],
            [("Xid 74", "root", "GPU_RESET")],
            id="74 with a bit of a fault",
        ),
        pytest.param([xid(74)], [("Xid 74", "root", "GPU_RESET")], id="74 without registers"),
        pytest.param(
            [xid(48), xid(63, gpu=B)],
            [("Xid 48", "root", "GPU_FATAL"), ("Xid 63", "information", None)],
            id="63 on another GPU is not its",
        ),
        pytest.param(
            [xid(48, gpu="0000:C8:00"), xid(63, gpu="0000:c8:00")],
            [("Xid 48", "root", "GPU_RESET"), ("Xid 63", "information", None)],
            id="an address is the same in capitals",
        ),
        pytest.param([xid(63)], [("Xid 63", "information", None)], id="63 alone is information"),
        pytest.param(
            [xid(94)], [("Xid 94", "root", "GPU_TRANSIENT")], id="94 is over with a restart"
        ),
        pytest.param([xid(95)], [("Xid 95", "root", "GPU_RESET")], id="95 needs a reset"),
        pytest.param(
            [xid(94), action("0x1 (GPU Reset Required)")],
            [("Xid 94", "root", "GPU_RESET"), ("Xid 154", "root", "GPU_RESET")],
            id="154 outweighs the table: reset",
        ),
        pytest.param(
            [xid(119), action("0x2 (OS Reboot)")],
            [("Xid 119", "root", "GPU_FATAL"), ("Xid 154", "root", "GPU_FATAL")],
            id="154 outweighs the table: reboot, whatever its words",
        ),
        pytest.param(
            [xid(79), action("0x0 (None)")],
            [("Xid 79", "root", "GPU_FATAL"), ("Xid 154", "information", None)],
            id="154 none changes nothing",
        ),
        pytest.param(
            [action("0x3 (Drain P2P)")], [("Xid 154", "root", "GPU_RESET")], id="154 drain P2P"
        ),
        pytest.param(
            [action("0x4 (Drain and Reset)")],
            [("Xid 154", "root", "GPU_RESET")],
            id="154 drain and reset",
        ),
        pytest.param(
            [action("0x5 (Recover IMEX Domain)")],
            [("Xid 154", "root", "GPU_FATAL")],
            id="154 IMEX domain",
        ),
        pytest.param(
            [action("0x6 (Bus Reset)")], [("Xid 154", "root", "GPU_RESET")], id="154 bus reset"
        ),
        pytest.param(
            [action("0x7 (System Reboot)")],
            [("Xid 154", "root", "GPU_FATAL")],
            id="154 system reboot",
        ),
        pytest.param(
            [xid(94), action("0x9 (New)")],
            [("Xid 94", "root", "GPU_TRANSIENT"), ("Xid 154", "symptom", None)],
            id="154 with an action that is new",
        ),
        pytest.param(
            [xid(154, "GPU recovery act")], [("Xid 154", "symptom", None)], id="154 cut off"
        ),
        pytest.param(
            [action("0x2 (Node Reboot Required)"), action("0x1 (GPU Reset Required)")],
            [("Xid 154", "information", None), ("Xid 154", "root", "GPU_RESET")],
            id="the last 154 counts",
        ),
        pytest.param(
            [xid(95), action("0x1 (GPU Reset Required)", B)],
            [("Xid 95", "root", "GPU_RESET"), ("Xid 154", "root", "GPU_RESET")],
            id="154 speaks for its own GPU",
        ),
        pytest.param(
            [action("0x1 (GPU Reset Required)"), xid(79)],
            [("Xid 154", "root", "GPU_RESET"), ("Xid 79", "root", "GPU_FATAL")],
            id="what is graver and later than 154 stands",
        ),
        pytest.param(
            [action("0x1 (GPU Reset Required)"), xid(13)],
            [("Xid 154", "root", "GPU_RESET"), ("Xid 13", "root", "GPU_RESET")],
            id="a program on a GPU that waits for a reset is not to blame",
        ),
        pytest.param(
            [xid(149, NVLINK_FATAL), action("0x1 (GPU Reset Required)")],
            [("Xid 149", "root", "GPU_RESET"), ("Xid 154", "root", "GPU_RESET")],
            id="NVLink and the driver agree",
        ),
        pytest.param(
            [xid(145, NVLINK_CRASH)],
            [("Xid 145", "root", "GPU_TRANSIENT")],
            id="NVLink that only cost the program",
        ),
        pytest.param(
            [xid(149, NVLINK_HOST)],
            [("Xid 149", "symptom", None)],
            id="NVLink that NVIDIA blames on the host",
        ),
        pytest.param(
            [xid(149, "NETIR Fatal XC0 i0 Link -1 (0x000fe406")],
            [("Xid 149", "root", "GPU_RESET")],
            id="NVLink cut off: the base row",
        ),
        pytest.param(
            [xid(145, "RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x04")],
            [("Xid 145", "symptom", None)],
            id="NVLink cut off, but not fatal",
        ),
    ],
)
def test_the_xids_of_a_gpu_are_read_together(
    lines: list[str], expected: list[tuple[str, str, str | None]]
) -> None:
    assert expected == brief(*lines)


@pytest.mark.parametrize(
    ("lines", "index"),
    [
        pytest.param([xid(45), xid(79)], 0, id="45-with-79"),
        pytest.param([xid(48)], 0, id="48-alone"),
        pytest.param([xid(48), xid(63)], 0, id="48-then-63"),
        pytest.param([xid(48), xid(95)], 1, id="48-then-95"),
        pytest.param([xid(149, "NETIR Fatal (0x000fe406")], 0, id="149-cut-off"),
        pytest.param([xid(149, NVLINK_FATAL)], 0, id="149-decoded"),
        pytest.param([xid(94), action("0x1 (PF FLR)")], 0, id="94-then-154"),
        pytest.param([xid(94), action("0x1 (PF FLR)")], 0, id="94-and-154-of-another-action"),
        pytest.param([action("0x2 (x)"), action("0x1 (y)")], 0, id="154-twice"),
        pytest.param([action("0x9 (New)")], 0, id="154-unknown-action"),
        pytest.param([xid(154, "cut")], 0, id="154-cut-off"),
        pytest.param([xid(177)], 0, id="177"),
    ],
)
def test_the_reason_says_how_it_was_read(
    lines: list[str], index: int, snapshot: SnapshotAssertion
) -> None:
    assert read(*lines)[index].reason == snapshot


def test_a_users_word_on_an_xid_stands_against_every_workflow() -> None:
    wish = {"cause": "NODE_FAULT", "reason": "ours"}
    ours = catalog(
        CatalogOverrides.model_validate({"xid": dict.fromkeys((45, 48, 149, 154), wish)})
    )
    lines = [
        xid(45),
        xid(48),
        xid(63),
        xid(149, NVLINK_FATAL),
        action("0x1 (GPU Reset Required)"),
        xid(94),
    ]
    found = {each.code: (each.role, each.cause) for each in read_kernel_log(lines, ours)}
    told = (Role.ROOT, Cause.NODE_FAULT)
    assert {"Xid 45": told, "Xid 48": told, "Xid 149": told, "Xid 154": told} == {
        k: v for k, v in found.items() if k not in ("Xid 63", "Xid 94")
    }
    assert found["Xid 94"] == (Role.ROOT, Cause.GPU_TRANSIENT)


def test_findings_stand_in_the_order_of_the_lines() -> None:
    lines = [
        xid(79, at=9),
        "eth0: Lost carrier",
        xid(45, gpu=B, at=3),
        "nothing here",
        xid(94, at=1),
    ]
    assert [found.code for found in read(*lines)] == ["Xid 79", "link-down", "Xid 45", "Xid 94"]
    assert [found.at for found in read(*lines)] == [9.5, None, 3.5, 1.5]


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([sample[2] for sample in SAMPLES], id="of all kinds"),
        pytest.param(
            [xid(48)], id="of one GPU, whose neighbours must not be searched again for each"
        ),
        pytest.param([xid(45), xid(94), xid(13)], id="of one GPU, of several kinds"),
        pytest.param([xid(149, NVLINK_FATAL)], id="that have to be decoded"),
    ],
)
def test_ten_times_the_lines_are_ten_times_the_work(lines: list[str]) -> None:
    def calls(count: int) -> int:
        made = 0

        def counted(frame: object, event: str, argument: object) -> None:
            nonlocal made
            made += event.endswith("call")

        many = [lines[n % len(lines)] for n in range(count)]
        before = sys.getprofile()
        sys.setprofile(counted)
        try:
            assert len(read(*many)) > 0.8 * count
        finally:
            sys.setprofile(before)
        return made

    calls(200)  # what is loaded and compiled once
    assert calls(2_000) < 11 * calls(200)

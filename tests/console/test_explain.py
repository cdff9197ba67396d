"""`explain`: one piece of evidence at a time, for people and for scripts."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import threading
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from syrupy.assertion import SnapshotAssertion

import relaunch.cli.explain as explain_module
from relaunch.cli.explain import KINDS, explain, lines_of, read_end, view_of
from relaunch.config import ConfigError
from relaunch.evidence.catalog import catalog
from relaunch.spec.policy import Policy, preset, resolve
from tests.console.commands import ROOT, one_sentence, starter
from tests.pages import sections

DCGM = ROOT / "tests" / "recovery" / "samples" / "dcgm" / "synthetic"
KERNEL = """\
[ 1000.1] usb 1-1: new high-speed USB device
[ 1234.567890] NVRM: Xid (PCI:0000:05:00): 48, pid=1234, name=python, DBE (double bit error)
[ 1234.567891] NVRM: Xid (PCI:0000:05:00): 45, pid=1234, name=python, Ch 00000010
[ 1234.667891] NVRM: Xid (PCI:0000:05:00): 63, pid=1234, name=python, Row Remapper: \
New row marked for remapping
[ 1235.1] NVRM: Xid (PCI:0000:0a:00): 79, pid=99, name=python, GPU has fallen off the bus.
"""
LOG = """\
step 10
[rank0]: RuntimeError: NCCL communicator was aborted on rank 0.
[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
"""


def view(
    kind: str, what: str, policy: Policy | None = None, exit_code: int | None = None
) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(
        json.dumps(view_of(explain(kind, what, exit_code, policy), policy))
    )
    return made


def text(kind: str, what: str, policy: Policy | None = None) -> str:
    return "\n".join(lines_of(explain(kind, what, None, policy), policy, "mine.yaml"))


def write(folder: Path, content: str) -> str:
    (folder / "evidence").write_text(content)
    return str(folder / "evidence")


def test_an_xid_shows_nvidias_row_our_cause_and_any_disagreement(page: SnapshotAssertion) -> None:
    made = view("xid", "79")
    nvidia = made.pop("nvidia")
    assert nvidia.keys() == {"mnemonic", "description", "action", "investigate"}
    assert (nvidia["action"], nvidia["investigate"]) == ("RESTART_BM", "CONTACT_SUPPORT")
    assert made == {
        "cause": "GPU_FATAL",
        "findings": [
            {
                "source": "kernel",
                "code": "Xid 79",
                "role": "root",
                "cause": "GPU_FATAL",
                "reason": catalog().xids[79].meaning,
                "gpu": None,
                "pid": None,
                "line": None,
            }
        ],
        "reason": catalog().xids[79].meaning,
        "note": "",
    }
    disputed = text("xid", "63")
    assert "IGNORE" in disputed and "Azure NHC" in disputed
    assert view("xid", "63")["cause"] is None
    assert sections({"explain xid 79": text("xid", "79"), "explain xid 63": disputed}) == page


def test_an_npu_code_shows_mindclusters_level_and_our_cause(page: SnapshotAssertion) -> None:
    made = view("npu", "0x80c98002", preset("modelarts"))
    assert made.pop("reason") == catalog().npu_codes["80C98002"].meaning
    assert made.pop("mindcluster") == {"level": "RestartRequest", "part": "AIC", "by": "User"}
    assert (made["cause"], made["first"]) == ("GPU_USER_INDUCED", "RESET_GPU")
    assert made["findings"][0]["code"] == "NPU 80C98002"
    for code in catalog().npu_codes:
        lines = lines_of(explain("npu", code, None, None), None, None)
        assert lines[0].startswith(f"NPU {code}") and max(map(len, lines)) <= 100
    shown = ("80C98002", "80E01801", "8F180200", "80C98006", "80C98003")
    assert sections({f"explain npu {code}": text("npu", code) for code in shown}) == page


def test_an_npu_code_in_a_log_decides(tmp_path: Path) -> None:
    log = "step 10\ndevice_id=3, event_id=0x80cb8002, time us=1\nRuntimeError: Inner error\n"
    made = view("log", write(tmp_path, log))
    assert (made["cause"], made["findings"][0]["code"]) == ("GPU_USER_INDUCED", "NPU 80CB8002")


def test_every_xid_of_the_catalog_can_be_explained_in_a_terminal() -> None:
    for code in catalog().xids:
        lines = lines_of(explain("xid", str(code), None, None), None, None)
        assert lines[0].startswith(f"Xid {code}")
        assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("word", "cause", "code"),
    [
        ("137", "UNKNOWN", "exit 137"),
        ("sigsegv", "APPLICATION", "SIGSEGV"),
        ("KILL", "UNKNOWN", "SIGKILL"),
        ("0", None, "exit 0"),
        ("-9", "UNKNOWN", "SIGKILL"),
        ("-11", "APPLICATION", "SIGSEGV"),
    ],
)
def test_an_exit_is_explained_by_code_or_by_signal(word: str, cause: str | None, code: str) -> None:
    made = view("exit", word)
    assert (made["cause"], made["findings"][0]["code"]) == (cause, code)


def test_a_kill_is_out_of_memory_only_by_the_kernels_word(page: SnapshotAssertion) -> None:
    killed = text("exit", "137")
    assert view("exit", "137")["cause"] == "UNKNOWN" and "OUT_OF_MEMORY" in killed
    assert killed == page


def test_the_gravest_kernel_line_is_the_root_of_named_cascades(
    tmp_path: Path, page: SnapshotAssertion
) -> None:
    made = view("kernel", write(tmp_path, KERNEL))
    assert [(one["line"], one["code"], one["role"]) for one in made["findings"]] == [
        (2, "Xid 48", "root"),
        (3, "Xid 45", "cascade"),
        (4, "Xid 63", "information"),
        (5, "Xid 79", "root"),
    ]
    assert (made["cause"], made["findings"][0]["gpu"], made["findings"][0]["pid"]) == (
        "GPU_FATAL",
        "0000:05:00",
        1234,
    )
    drawn = text("kernel", write(tmp_path, KERNEL))
    (root,) = re.findall(r"^→ line (\d+)  (\w+) +(\w+): (Xid \d+)", drawn, re.MULTILINE)
    assert root == ("5", "root", "GPU_FATAL", "Xid 79")
    assert drawn == page


def test_a_cascade_on_the_first_line_is_not_the_root_of_a_log(
    tmp_path: Path, page: SnapshotAssertion
) -> None:
    made = view("log", write(tmp_path, LOG))
    assert (made["cause"], [(one["line"], one["role"]) for one in made["findings"]]) == (
        "OUT_OF_MEMORY",
        [(2, "cascade"), (3, "root")],
    )
    assert text("log", write(tmp_path, LOG)) == page


def test_a_file_without_evidence_names_no_cause(tmp_path: Path, page: SnapshotAssertion) -> None:
    made = view("kernel", write(tmp_path, "[1.0] usb 1-1: new USB device\n"))
    assert (made["cause"], made["findings"]) == (None, []) and made["reason"]
    assert text("kernel", write(tmp_path, "")) == page


@pytest.mark.parametrize("code", [1, -9])
def test_a_line_that_no_row_knows_comes_with_a_row_for_it(
    tmp_path: Path, page: SnapshotAssertion, code: int
) -> None:
    log = write(tmp_path, "step 1\nAcme: can't reach (store 7) at 10.0.0.12\n")
    made = explain("log", log, code, None)
    assert made.cause == ("APPLICATION" if code == 1 else "UNKNOWN")
    lines = lines_of(made, None, None)
    assert "\n".join(lines) == page
    first = lines.index("catalog:")
    ours = resolve(yaml.safe_load("\n".join(lines[first : first + 3])))
    assert [each.id for each in ours.catalog.log] == ["our_error"]
    again = explain("log", log, code, ours)
    assert (again.cause, again.root and again.root.line) == ("APPLICATION", 2)
    # As `relaunch logs` prints it: the row is for the line that the rank wrote.
    printed = "".join(f"[rank 0] {line}\n" for line in Path(log).read_text().splitlines())
    piped = explain("log", write(tmp_path, printed), code, None)
    assert lines_of(piped, None, None)[-6:] == lines[-6:]


def test_only_the_end_of_a_log_counts_as_in_a_job(tmp_path: Path) -> None:
    long = "torch.OutOfMemoryError: CUDA out of memory.\n" + "chatter\n" * 300 + "KeyError: 'x'\n"
    made = view("log", write(tmp_path, long))
    assert (made["cause"], [one["line"] for one in made["findings"]]) == ("APPLICATION", [302])


def test_a_log_of_echoes_points_at_the_other_ranks(tmp_path: Path) -> None:
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:1"
    made = explain("log", write(tmp_path, lost + "\n"), None, None)
    assert (made.cause, made.root) == ("NETWORK", None)
    assert "no rank failed by itself" in made.reason


def test_bytes_that_are_no_text_are_read_past(tmp_path: Path) -> None:
    (tmp_path / "evidence").write_bytes(b"\xff\xfe\x00 cut\n" + KERNEL.encode())
    assert view("kernel", str(tmp_path / "evidence"))["cause"] == "GPU_FATAL"


@pytest.mark.parametrize("kind", ["log", "kernel"])
def test_of_a_large_log_the_end_is_read(tmp_path: Path, page: SnapshotAssertion, kind: str) -> None:
    last = "RuntimeError: CUDA error: out of memory" if kind == "log" else KERNEL.splitlines()[-1]
    size = 200 << 20  # a hole, which takes no disk
    with (tmp_path / "evidence").open("wb") as file:
        file.truncate(size)
        file.seek(size)
        file.write(f"\n{last}\nchatter\n".encode())
    tracemalloc.start()
    try:
        made = view(kind, str(tmp_path / "evidence"))
        assert tracemalloc.get_traced_memory()[1] < size / 4
    finally:
        tracemalloc.stop()
    assert [one["line"] for one in made["findings"]] == [-2]
    assert made["unread_bytes"] == size + 1
    assert text(kind, str(tmp_path / "evidence")) == page


def test_all_of_a_pipe_passes_and_its_end_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain_module, "MAX_BYTES", 1600)
    content = "chatter\n" * 20_000 + "KeyError: 'x'\nend\n"
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_text(content))
    writer.start()
    end = read_end(str(tmp_path / "pipe"))
    writer.join()
    assert end.lines[-2:] == ["KeyError: 'x'", "end"] and end.lines[0] == "chatter"
    held = len("\n".join(end.lines)) + 1
    assert 1500 < held <= 1600 and end.unread_bytes == len(content) - held
    whole = read_end(write(tmp_path, "x" * 1600))
    assert (whole.lines, whole.unread_bytes) == (["x" * 1600], 0)
    # A line that is longer than what is held has no beginning, and is still there.
    assert read_end(write(tmp_path, "x" * 1700)).lines == ["x" * 1600]


def test_only_the_last_lines_of_a_kernel_log_are_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain_module, "MAX_KERNEL_LINES", 2)
    made = explain("kernel", write(tmp_path, KERNEL), None, None)
    assert [one.line for one in made.found] == [4, 5]
    assert made.head[0] == "5 lines read, the last 2 of them examined, 2 with evidence"


def test_what_is_far_too_large_for_dcgmis_output_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain_module, "MAX_BYTES", 3 << 20)
    path = write(tmp_path, " " * (3 << 20) + "{}")
    with pytest.raises(ConfigError, match=r"has more than 3\.0 MiB: expected the output of dcgmi"):
        explain("dcgm", path, None, None)


@pytest.mark.parametrize(
    ("file", "exit_code", "verdict"),
    [
        ("v4_r2_gpu6_faulty_memory_isolate.json", 205, "UNHEALTHY"),
        ("v4_r1_pass_8gpu.json", 0, "HEALTHY"),
        ("v4_r1_pass_8gpu.json", 226, "UNKNOWN"),
        ("v4_truncated_output.txt", None, "UNKNOWN"),
    ],
)
def test_a_dcgm_report_is_a_verdict(file: str, exit_code: int | None, verdict: str) -> None:
    made = view("dcgm", str(DCGM / file), exit_code=exit_code)
    assert made["verdict"] == verdict
    assert made["reason"] and made["advice"]


def test_a_policy_adds_what_it_would_do_first_for_that_code(page: SnapshotAssertion) -> None:
    assert text("xid", "79", preset("default")) == page
    reboot_once = preset("ecs-reboot-once")
    assert (view("xid", "79", reboot_once)["first"], view("exit", "1", reboot_once)["first"]) == (
        "FAIL",
        "REBOOT_NODE",
    )
    assert view("exit", "0", preset("default"))["first"] is None


def test_a_policys_own_rows_count(tmp_path: Path) -> None:
    rows = {
        "xid": {63: {"cause": "GPU_RESET", "reason": "our fleet resets at once"}},
        "exit": {"exit 42": {"cause": "PREEMPTED", "meaning": "our scheduler took the node"}},
        "log": [
            {
                "id": "ours",
                "pattern": "lost quorum",
                "cause": "STORAGE",
                "meaning": "our store is gone",
            }
        ],
    }
    ours = resolve({"catalog": rows})
    assert (view("xid", "63", ours)["cause"], view("xid", "63", ours)["first"]) == (
        "GPU_RESET",
        "RESET_GPU",
    )
    assert view("exit", "42", ours)["cause"] == "PREEMPTED"
    assert view("log", write(tmp_path, "error: lost quorum\n"), ours)["cause"] == "STORAGE"


@pytest.mark.parametrize(
    ("kind", "what", "expected"),
    [
        ("xid", "abc", ("explain xid: ", "'abc'")),
        ("xid", "²", ("explain xid: ", "'²'")),
        ("xid", "99999", ("Xid 99999", "catalog")),
        ("exit", "300", ("'300'", "0 to 255")),
        ("exit", "-99", ("'-99'", "-11")),
        ("exit", "-9" + "9" * 5000, ("'-99",)),
        ("exit", "SIGNOTHING", ("'SIGNOTHING'",)),
        ("log", "no/such.log", ("no/such.log", "No such file or directory")),
        ("kernel", str(ROOT), (str(ROOT), "Is a directory")),
        ("dcgm", "no/such.json", ("no/such.json",)),
        ("npu", "80C98", ("'80C98'", "80C98002")),
        ("npu", "80C98FFF", ("80C98FFF", "not in the catalog")),
        ("xids", "79", ("'xids'", ", ".join(KINDS))),
    ],
)
def test_what_cannot_be_explained_is_refused_in_one_sentence(
    kind: str, what: str, expected: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refused:
        explain(kind, what, None, None)
    said = str(refused.value)
    assert all(word in said for word in expected) and "\n" not in said


def test_an_exit_code_of_dcgmi_says_nothing_about_other_evidence() -> None:
    with pytest.raises(ConfigError, match=r"--exit-code 3 .* dcgmi"):
        explain("xid", "79", 3, None)


def test_standard_input_is_a_file_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(KERNEL.encode())))
    assert view("kernel", "-")["cause"] == "GPU_FATAL"


async def test_as_people_type_it(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "catalog: {xid: {79: {cause: GPU_RESET, reason: ours come back}}}\n"
    )
    done = await starter(tmp_path, "explain", "xid", "79", "--policy", "mine.yaml")
    assert done.code == 0, done
    first = done.out.partition("mine.yaml first:")[2].split()
    assert "GPU_RESET" in done.out and first[0].startswith("RESET_GPU"), done
    assert (
        json.loads((await starter(tmp_path, "explain", "exit", "137", "--json")).out)["cause"]
        == "UNKNOWN"
    )
    one_sentence(await starter(tmp_path, "explain", "xid", "12345"), "Xid 12345")


async def test_nothing_that_a_rank_wrote_acts_on_the_terminal(tmp_path: Path) -> None:
    log = "\x1b]52;c;cm0=\x07\x1b[?4m\u202eRuntimeError: \x9b2J\x07 boom\n"
    (tmp_path / "rank.log").write_text(log)
    done = await starter(tmp_path, "explain", "log", "rank.log")
    assert "boom" in done.out and done.out.replace("\n", "").isprintable(), ascii(done.out)

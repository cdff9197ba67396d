"""What people see of a node before it is used.

Each thing is a row, with one sentence of what to do where it is not fine.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.cli.direct import FleetPreflight, NodePreflight, PreflightStep
from relaunch.cli.node_check import (
    CheckResult,
    CheckRow,
    can_run_ranks,
    command,
    print_rows,
    rows,
    verdict,
    view,
)
from relaunch.spec.fleet import FleetSpec
from tests.pages import sections

FACTS: dict[str, Any] = {
    "outcome": "done",
    "boot_id": "b1",
    "python": "3.10.12",
    "executable": "/usr/bin/python3",
    "user": "train",
    "uid": 1000,
    "state": {"path": "/var/tmp/relaunch-1000/m1", "type": "ext4", "mounted": "/"},
    "session": "session-12.scope",
    "nvidia_smi": {"path": "/usr/bin/nvidia-smi", "exit_code": 0, "said": "GPU 0"},
    "dcgmi": {"path": "/usr/bin/dcgmi", "exit_code": 0, "said": "1 GPU found"},
    "reboot": {"command": "systemctl reboot", "sudo": True},
    "gpu_reset": {"command": "/usr/bin/nvidia-smi --gpu-reset -i 00000000:00:00.0", "sudo": True},
    "left": {"pid": 7, "started": 9, "address": "192.168.7.11", "port": 23456, "word": "w"},
}
GPU = {"index": 0, "uuid": "GPU-1", "bus_id": "00000000:05:00.0", "name": "NVIDIA H100"}
PROBE: dict[str, Any] = {
    "outcome": "done",
    "boot_id": "b1",
    "stamp": 100.0,
    "wall": 1000.0,
    "answered": 1000.0,
    "exchange": {"sent": 1000.0, "received": 1000.0},
    "load": 0.1,
    "memory": {"total": 1 << 39, "available": 1 << 38},
    "disks": [
        {
            "path": "/var/tmp/relaunch-1000/m1",
            "total": 1 << 40,
            "free": 412 << 30,
            "inodes_free": 1000,
            "writable": True,
        }
    ],
    "gpus": {"driver": "570.86", "nvml": "12.570", "gpus": [GPU]},
    "kernel": {"lines": []},
    "jobs": [],
    "held": None,
    "reboots": [],
}


def spec(sudo: bool = True, gpus: int = 1, backend: str = "ssh", **ssh: Any) -> FleetSpec:
    nodes = [
        {
            "name": "gpu-01",
            "address": "10.0.0.11",
            "user": "train",
            "network": "192.168.7.11",
            "gpus": gpus,
        },
        {"name": "gpu-02", "address": "10.0.0.12", "gpus": gpus},
    ]
    return FleetSpec.model_validate(
        {"name": "lab", "backend": backend, "nodes": nodes, "ssh": {"sudo": sudo, **ssh}}
    )


class Key:
    node, algorithm, fingerprint, file = "gpu-01", "ED25519", "SHA256:abc", "~/.ssh/known_hosts"
    standing, reason = "known", ""


def key(**changes: str) -> Any:
    return type("Changed", (Key,), changes)()


def look(of: FleetSpec | None = None, **changes: Any) -> tuple[CheckRow, ...]:
    """What is said of gpu-01, of which all is fine but what is changed."""
    fleet = of or spec()
    facts, probe = {**FACTS, **changes.pop("facts", {})}, {**PROBE, **changes.pop("probe", {})}
    second_login = {"outcome": "done", "lives": True, "met": {"took": 0.0004}}
    given = {
        "step": PreflightStep.DONE,
        "key": key(),
        "facts": facts,
        "probe": probe,
        "second_login": second_login,
        "neighbour": "gpu-02",
        **changes,
    }
    seen = NodePreflight(fleet.nodes[0], connected=0.61, round_trip=0.02, shipped=626688, **given)
    other = NodePreflight(
        fleet.nodes[1],
        step=PreflightStep.DONE,
        key=key(),
        facts=facts,
        probe=probe,
        second_login={"lives": changes.get("other_lives", True)},
    )
    return rows(FleetPreflight(fleet, Path("lab.yaml"), "3f9a", (seen, other)), seen)


def row(found: tuple[CheckRow, ...], check: str) -> CheckRow:
    return next(one for one in found if one.check == check)


def printed(one: CheckRow) -> str:
    return f"{one.check}: {one.found}: {one.what}" + (f"\n    → {one.fix}" if one.fix else "")


def test_a_node_that_has_all_is_fine_in_every_row(page: SnapshotAssertion) -> None:
    found = look()
    assert [(one.check, one.found) for one in found if one.found is not CheckResult.OK] == [
        ("health", CheckResult.WARN)
    ], "this GPU told nothing of itself"
    assert [one.check for one in found] == [
        "reached",
        "host key",
        "agent",
        "python",
        "state folder",
        "clock",
        "GPUs",
        "health",
        "nvidia-smi",
        "dcgmi",
        "reboot",
        "GPU reset",
        "logout",
        "training network",
    ]
    assert "\n".join(map(printed, found)) == page


NOT_FINE: list[tuple[str, CheckResult, dict[str, Any]]] = [
    (
        "state folder",
        CheckResult.FAIL,
        {"facts": {"state": {"path": "/var/tmp/x", "type": "nfs4"}}},
    ),
    ("state folder", CheckResult.FAIL, {"facts": {"state": {"path": "/x", "type": "fuse.sshfs"}}}),
    ("state folder", CheckResult.WARN, {"facts": {"state": {"path": "/x", "type": "tmpfs"}}}),
    (
        "state folder",
        CheckResult.FAIL,
        {
            "probe": {
                "disks": [
                    {
                        "path": "/x",
                        "total": 9,
                        "free": 1 << 20,
                        "inodes_free": 1,
                        "writable": True,
                    }
                ]
            }
        },
    ),
    (
        "state folder",
        CheckResult.FAIL,
        {
            "probe": {
                "disks": [
                    {
                        "path": "/x",
                        "total": 9,
                        "free": 99 << 30,
                        "inodes_free": 1,
                        "writable": False,
                        "reason": "ro",
                    }
                ]
            }
        },
    ),
    (
        "host name",
        CheckResult.WARN,
        {"facts": {"host": {"name": "gpu-01", "loopback": "127.0.1.1"}}},
    ),
    ("clock", CheckResult.WARN, {"probe": {"wall": 1009.0, "answered": 1009.0}}),
    ("clock", CheckResult.WARN, {"probe": {"wall": 600.0, "answered": 600.0}}),
    ("GPUs", CheckResult.FAIL, {"probe": {"gpus": {"unreadable": "no library"}}}),
    ("GPUs", CheckResult.FAIL, {"probe": {"gpus": {"driver": "1", "gpus": []}}}),
    ("GPUs", CheckResult.WARN, {"probe": {"gpus": {"driver": "1", "gpus": [GPU, GPU]}}}),
    (
        "kernel log",
        CheckResult.WARN,
        {"probe": {"kernel": {"unreadable": "permission denied", "lines": []}}},
    ),
    (
        "nvidia-smi",
        CheckResult.WARN,
        {"facts": {"nvidia_smi": {"missing": "nvidia-smi is not there"}}},
    ),
    (
        "dcgmi",
        CheckResult.WARN,
        {"facts": {"dcgmi": {"path": "/d", "exit_code": 1, "said": "no\nengine"}}},
    ),
    (
        "reboot",
        CheckResult.WARN,
        {
            "facts": {
                "reboot": {
                    "command": "systemctl reboot",
                    "sudo": True,
                    "cannot": "a password is required",
                }
            }
        },
    ),
    (
        "GPU reset",
        CheckResult.WARN,
        {
            "facts": {
                "gpu_reset": {
                    "command": "/opt/nvidia-smi --gpu-reset -i 0",
                    "sudo": True,
                    "cannot": "no",
                }
            }
        },
    ),
    (
        "GPU reset",
        CheckResult.WARN,
        {
            "facts": {
                "gpu_reset": {
                    "command": "/opt/nvidia-smi --gpu-reset -i 0",
                    "sudo": True,
                    "allows": "/opt/nvidia-smi --gpu-reset -i 0 -f /dev/null",
                }
            }
        },
    ),
    (
        "reboot",
        CheckResult.WARN,
        {"facts": {"reboot": {"command": "systemctl reboot", "sudo": True, "missing": "sudo"}}},
    ),
    ("logout", CheckResult.FAIL, {"second_login": {"lives": False, "met": None}}),
    (
        "logout",
        CheckResult.FAIL,
        {"second_login": {"lives": False, "met": None}, "facts": {"session": None}},
    ),
    ("logout", CheckResult.WARN, {"second_login": None, "reason": "refused"}),
    (
        "training network",
        CheckResult.FAIL,
        {"facts": {"left": {"cannot": "no port is free on 192.168.7.11"}}},
    ),
    (
        "training network",
        CheckResult.FAIL,
        {
            "second_login": {
                "lives": True,
                "met": {"cannot": "no answer from 192.168.7.12 port 23133 within 2 s"},
            }
        },
    ),
]


@pytest.mark.parametrize(("check", "level", "changes"), NOT_FINE)
def test_what_is_not_fine_has_one_sentence_of_what_to_do(
    check: str, level: CheckResult, changes: dict[str, Any]
) -> None:
    found = row(look(**changes), check)
    assert found.found is level and found.fix
    assert "\n" not in found.fix and ". " not in found.fix, "one sentence"


def test_the_rows_of_what_is_not_fine_say_what_to_do(page: SnapshotAssertion) -> None:
    found = [row(look(**changes), check) for check, _, changes in NOT_FINE]
    assert "\n".join(map(printed, found)) == page


def test_a_missing_tool_keeps_no_rank_from_running() -> None:
    found = look(
        facts={
            "dcgmi": {"missing": "dcgmi is not on this node's PATH"},
            "nvidia_smi": {"missing": "nvidia-smi is not there"},
        }
    )
    assert can_run_ranks(found)


def test_no_sudoers_line_is_wanted_without_sudo_in_the_file() -> None:
    facts = {
        name: {"command": "systemctl reboot", "cannot": "uid 1000 may not"}
        for name in ("reboot", "gpu_reset")
    }
    found = look(spec(sudo=False), facts=facts)
    assert row(found, "reboot").found is CheckResult.OK
    assert "never rebooted" in row(found, "reboot").what


def test_a_node_without_gpus_is_not_asked_for_their_tools() -> None:
    found = look(
        spec(gpus=0),
        facts={"nvidia_smi": None, "dcgmi": None, "gpu_reset": None},
        probe={"gpus": {"unreadable": "no library"}},
    )
    assert {"GPUs", "nvidia-smi", "dcgmi", "GPU reset"}.isdisjoint(one.check for one in found)
    assert can_run_ranks(found)


def test_a_local_node_has_no_rows_that_make_no_sense_there() -> None:
    found = look(spec(backend="local"), key=None)
    assert {"reached", "host key", "agent", "clock", "reboot", "GPU reset", "logout"}.isdisjoint(
        one.check for one in found
    )


def test_who_ended_with_its_logout_is_not_blamed_on_the_network() -> None:
    fleet = spec()
    first = NodePreflight(
        fleet.nodes[0], PreflightStep.DONE, key=key(), facts=FACTS, probe=PROBE, neighbour="gpu-02"
    )
    first.second_login = {
        "lives": True,
        "met": {"cannot": "192.168.7.12 port 23133: Connection refused"},
    }
    second = NodePreflight(
        fleet.nodes[1],
        PreflightStep.DONE,
        key=key(),
        facts=FACTS,
        probe=PROBE,
        second_login={"lives": False, "met": None},
    )
    found = row(
        rows(FleetPreflight(fleet, Path("lab.yaml"), "3f9a", (first, second)), first),
        "training network",
    )
    assert found.found is CheckResult.WARN
    assert "gpu-02" in found.what and "logout" in found.fix


def test_an_unreachable_node_has_the_command_that_has_to_work() -> None:
    found = look(
        spec(proxy_jump="me@jump:22", port=2222),
        step=PreflightStep.KEY,
        key=None,
        reason="nothing listens there",
    )
    assert [(one.check, one.found) for one in found] == [("reached", CheckResult.FAIL)]
    typed = shlex.split(found[0].fix.split("`")[1])
    assert typed == ["ssh", "-J", "me@jump:22", "-p", "2222", "-l", "train", "10.0.0.11"]


def test_what_a_person_types_is_safe_to_paste() -> None:
    typed = command(spec(key="~/.ssh/id", config="/my files/config"), spec().nodes[0])
    assert "'/my files/config'" in typed
    assert shlex.split(typed) == [
        *("ssh", "-F", "/my files/config"),
        *("-i", "~/.ssh/id", "-l", "train", "10.0.0.11"),
    ]


def test_an_unknown_key_is_compared_and_a_changed_one_a_danger(page: SnapshotAssertion) -> None:
    unknown = look(
        step=PreflightStep.KEY, key=key(standing="unknown", reason="its host key is not in …")
    )
    assert [one.check for one in unknown] == ["host key"]
    assert "nodes trust gpu-01" in unknown[0].fix
    changed = look(
        step=PreflightStep.KEY, key=key(standing="changed", reason="its host key has CHANGED")
    )
    assert "CHANGED" in changed[0].what
    assert "\n".join(map(printed, (*unknown, *changed))) == page


def test_an_agent_that_cannot_start_says_how_to_name_a_python() -> None:
    found = look(
        step=PreflightStep.AGENT,
        reason="the agent could not be started: its Python is 3.6.8; expected 3.8 or newer",
    )
    assert "3.6.8" in row(found, "agent").what
    assert "python: /usr/bin/python3.11" in row(found, "agent").fix
    assert row(found, "reached").found is CheckResult.OK
    assert not can_run_ranks(found)


def fleet_of(*fine: bool) -> FleetPreflight:
    nodes = [
        {"name": f"gpu-{number:02}", "address": f"10.0.0.{number}"}
        for number in range(1, len(fine) + 1)
    ]
    of = FleetSpec.model_validate({"name": "lab", "backend": "ssh", "nodes": nodes})
    seen = []
    for node, good in zip(of.nodes, fine, strict=True):
        facts = {**FACTS, "state": FACTS["state"] if good else {"path": "/x", "type": "nfs"}}
        seen.append(
            NodePreflight(
                node,
                PreflightStep.DONE,
                key=key(),
                facts=facts,
                probe=PROBE,
                second_login={"lives": True, "met": {"took": 0.0}},
                neighbour="x",
            )
        )
    return FleetPreflight(of, Path("lab.yaml"), "3f9a", tuple(seen))


def test_of_many_nodes_those_that_are_fine_take_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, page: SnapshotAssertion
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):  # rich would take the file for a terminal
        monkeypatch.delenv(name, raising=False)
    print_rows(fleet_of(*[True] * 9, False), everything=False)
    out = capsys.readouterr().out
    assert len([line for line in out.splitlines() if line.startswith("gpu-")]) == 10
    assert out.splitlines()[-1].endswith(" gpu-10")
    print_rows(fleet_of(*[True] * 9, False), everything=True)
    assert capsys.readouterr().out.count("host key") == 10
    assert "\n".join(line.rstrip() for line in out.splitlines()) == page


def test_the_end_says_what_comes_next(page: SnapshotAssertion) -> None:
    ends = {
        "one node": verdict(fleet_of(True)),
        "all nodes": verdict(fleet_of(True, True)),
        "not all nodes": verdict(fleet_of(True, False)),
    }
    assert ["--fleet lab.yaml" in end for end in ends.values()] == [True, True, False]
    assert sections(ends) == page


def test_the_view_for_scripts_has_a_row_for_each_check() -> None:
    told = view(fleet_of(True, False))
    assert (told["fleet"], told["agent"], [node["runs"] for node in told["nodes"]]) == (
        "lab",
        "3f9a",
        [True, False],
    )
    assert set(told["nodes"][0]["rows"][0]) == {"check", "found", "what", "fix"}

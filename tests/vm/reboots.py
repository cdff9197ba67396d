"""Real machines, really rebooted: an emulated Debian with systemd and sshd.

Reached by the backend `ssh`. NVIDIA's programs are doubles.

Run by `make vm-test`, and collected by no other command: it takes a quarter of an hour. That a
machine was rebooted is seen by means in which relaunch has no hand.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from tests.vm.image import missing
from tests.vm.lab import FLEET, POLICY, Lab, Sight, eventually
from tests.vm.machine import Machine

pytestmark = pytest.mark.timeout(2400)
TRAINING_TIMEOUT = 600.0
"""Seconds; a reboot of an emulated machine on a busy host takes two minutes of them."""

GPU = "00000000:05:00.0"
"""Bus id of the one that the double of NVML shows."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    if needed := missing():
        pytest.skip(f"this needs programs that are not here: {needed}")
    with Lab() as made:
        yield made
        for title, times in made.times:
            print(f"\n{title}")
            for what, seconds in times:
                print(f"  {seconds:7.1f} s  {what}")


def seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def calls(machine: Machine) -> list[dict[str, Any]]:
    return [json.loads(line) for line in machine.ssh("cat dcgmi.calls").splitlines()]


def reboots(machine: Machine) -> list[dict[str, Any]]:
    """The agent's own journal."""
    files = " ".join(f"/var/{root}/relaunch-*/*/reboots.jsonl" for root in ("lib", "tmp"))
    return [
        json.loads(line) for line in machine.ssh(f"cat {files} 2>/dev/null || true").splitlines()
    ]


def fail(machine: Machine) -> None:
    """Have dcgmi call the machine sick for as long as this boot lasts, and kill its rank.

    A rank that raised would need seconds of an emulated processor to end: those that it leaves
    alone would be heard of first.
    """
    machine.ssh("cat /proc/sys/kernel/random/boot_id > sick; pkill -9 -f rank.py")


def end_well(lab: Lab, job: str, master: Machine) -> None:
    master.ssh("touch run/stop")
    ended = eventually(
        lambda: (now := lab.run_json("show", job))["ended"] and now, f"{job} does not end", 180
    )
    assert (ended["phase"], ended["exit_code"]) == ("SUCCEEDED", 0)


def note_times(
    lab: Lab, title: str, incident: dict[str, Any], sight: Sight, machine: Machine
) -> None:
    """Seconds from the order to reboot."""
    times, opened = incident["times"], seconds(incident["opened"])
    ordered = reboots(machine)[-1]["at"]
    moments = [
        ("rank failed", opened),
        (
            "suspect found UNHEALTHY by dcgmi, repair decided",
            seconds(incident["decisions"][1]["at"]),
        ),
        ("node ordered to reboot (its own journal)", ordered),
        ("sshd gone", sight.find_loss(ordered)),
        ("sshd back", sight.back(ordered)),
        ("dcgmi diag after the reboot", calls(machine)[-1]["at"]),
        ("rebooted and HEALTHY, relaunch decided", seconds(incident["decisions"][2]["at"])),
        ("generation 2 launched", opened + times["launched"]),
        ("its step passed", opened + times["recovered"]),
    ]
    lab.times.append((title, [(what, at - ordered) for what, at in moments]))


def test_s1_3_s1_6_a_sick_machine_of_a_gang_is_rebooted_once(
    lab: Lab,
) -> None:
    lab.submit("reboots", POLICY)
    lab.until("reboots", generation=1, steps=3, within=TRAINING_TIMEOUT)
    machine, master = lab.machine_of("reboots", 1), lab.machine_of("reboots", 0)
    before, known = machine.boot_id(), machine.boots()
    others = master.boots()
    fail(machine)
    with Sight(machine) as sight:
        lab.until("reboots", generation=2, steps=3, within=TRAINING_TIMEOUT)
    assert machine.boot_id() != before
    assert machine.boots() == [*known, machine.boot_id()], (
        "exactly one boot more, by the machine's own count"
    )
    assert master.boots() == others, "the healthy one is left alone"
    assert [one["boot_id"] for one in reboots(machine)] == [before]
    assert [(one["boot"] == before, one["sick"], one["uid"]) for one in calls(machine)] == [
        (True, True, 1000),
        (False, False, 1000),
    ]
    (incident,) = eventually(
        lambda: [one for one in lab.run_json("history", "reboots") if one["closed"]],
        "the incident stays open",
        120,
    )
    decided = [(one["decision"], one["strategy"]) for one in incident["decisions"]]
    assert decided == [("Examine", None), ("Repair", "REBOOT_NODE"), ("Relaunch", None)]
    note_times(lab, f"{machine.name} is rebooted: seconds from the order", incident, sight, machine)
    end_well(lab, "reboots", master)


def repaired(lab: Lab, machine: Machine, *how: str) -> str:
    """Have it repaired by a person; return the last line of what that says."""
    status, text = lab.starter(
        "nodes", "repair", machine.name, *how, "--reason", "its owner says so", "--fleet", FLEET
    )
    assert status == 0, text
    return text.strip().splitlines()[-1]


def test_an_ordinary_user_resets_gpus_by_the_documented_sudoers(lab: Lab) -> None:
    machine = lab.machines[0]
    before = machine.boot_id()
    for how in ((), ("--gpu", GPU)):
        assert f"{machine.name}: done, HEALTHY" in repaired(lab, machine, "--reset-gpus", *how)
    assert machine.ssh("cat /var/tmp/nvidia-smi.calls").splitlines() == [
        "0 --gpu-reset",
        f"0 --gpu-reset -i {GPU}",
    ]
    assert machine.boot_id() == before


def test_s1_6_a_frozen_machine_is_power_cycled_by_the_command(
    lab: Lab,
) -> None:
    machine = lab.machines[0]
    before, known, journal = machine.boot_id(), machine.boots(), reboots(machine)
    machine.freeze()
    frozen = time.time()
    with Sight(machine) as sight:
        said = repaired(lab, machine, "--reboot")
    ended = time.time()
    assert f"{machine.name}: done, HEALTHY:" in said and "power-cycled" in said
    assert machine.boot_id() != before
    assert machine.boots() == [*known, machine.boot_id()], (
        "exactly one boot more, by the machine's own count"
    )
    assert reboots(machine) == journal, "no worker could order anything of it"
    cycled, back = float(machine.cycled.read_text()), sight.back(frozen)
    moments = (
        ("its power is cycled", cycled),
        ("sshd back", back),
        ("rebooted and HEALTHY", ended),
    )
    lab.times.append(
        (
            f"{machine.name} is frozen: seconds from then",
            [(what, at - frozen) for what, at in moments],
        )
    )
    (node,) = [
        one
        for one in lab.run_json("nodes", "list", "--fleet", FLEET)
        if one["name"] == machine.name
    ]
    assert (node["state"], node["health"]) == ("free", "HEALTHY")

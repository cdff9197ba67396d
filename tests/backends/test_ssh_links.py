"""Nodes that call each other over networks with real faults, between separate machines."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from relaunch.activities import links
from relaunch.activities.links import CheckLinksInput, check_links
from relaunch.backends.ssh.backend import SshBackend
from relaunch.evidence.reachability import LINK, NODE_LINK, LinkFindings
from relaunch.job.state import Slot
from tests.backends.netns import TRAINING, Network
from tests.backends.ssh_site import Site
from tests.backends.test_ssh_network import Lab

SLOTS = tuple(Slot(f"n{number}", f"{TRAINING}.{10 + number}") for number in (1, 2, 3))


@pytest.fixture
def lab(tmp_path: Path, agent: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    # As long as a busy machine may need for an answer: no node is silent here.
    monkeypatch.setattr(links, "LISTEN_TIMEOUT_S", 60.0)
    monkeypatch.setattr(links, "ANSWER_TIMEOUT_S", 60.0)
    network = Network(3)
    site = Site(tmp_path, agent)
    try:
        yield Lab(network, site)
    finally:
        for host in site.hosts:
            host.close()
        network.close()


def check(lab: Lab) -> LinkFindings:
    """Have a gang of n1 and n2 call each other, with n3 as a witness."""
    found: list[LinkFindings] = []

    async def work(backend: SshBackend) -> None:
        asked = CheckLinksInput("lab", SLOTS[:2])
        found.append(await check_links(backend, backend, asked, SLOTS[2:]))

    lab.run(work, answer_within=30.0)
    return found[0]


@pytest.mark.long
def test_two_nodes_that_lost_each_other_are_a_pair(lab: Lab) -> None:
    lab.network.part(1, 2)
    lab.network.part(2, 1)
    found = check(lab)
    assert (found.suspects, found.code) == (("n2",), LINK)
    assert found.broken[0].nodes == ("n1", "n2")


@pytest.mark.long
def test_whole_links_break_nothing(lab: Lab) -> None:
    found = check(lab)
    assert (found.suspects, found.broken) == ((), ())


@pytest.mark.long
def test_packets_lost_in_one_direction_break_a_link(lab: Lab) -> None:
    lab.network.part(1, 2)
    found = check(lab)
    assert (found.suspects, found.code) == (("n2",), LINK)


@pytest.mark.long
def test_a_node_without_its_network_is_at_fault_itself(lab: Lab) -> None:
    lab.network.lose(1, "training")
    found = check(lab)
    assert (found.suspects, found.code) == (("n1",), NODE_LINK)
    lab.network.heal(1, "training")
    ip = [*lab.network.inside(2), "ip", "addr", "flush", "dev", "training"]
    subprocess.run(ip, check=True)
    found = check(lab)
    assert (found.suspects, found.code) == (("n2",), NODE_LINK)

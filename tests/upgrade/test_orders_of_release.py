"""Orders that this checkout's command line signs, for workflows of a release without signatures."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.access.keys import make_key
from tests.upgrade.conftest import BEFORE
from tests.upgrade.services import FLEET, Installation, Service, checkout, release

ASKS = {cause: [{"strategy": "ASK"}] for cause in ("APPLICATION", "UNKNOWN")}

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return release(BEFORE, tmp_path_factory.mktemp("installed") / BEFORE)


@pytest.fixture(params=["", "ours-1"], ids=["its release", "another name"])
def service(
    request: pytest.FixtureRequest, old: Installation, tmp_path: Path, worker_id: str
) -> Iterator[Service]:
    """A service of the release, with a build of either name, and a person with a key."""
    number = 45 + int(worker_id.removeprefix("gw").replace("master", "0"))
    with Service(tmp_path / "service", number, old) as made:
        named = {"RELAUNCH_BUILD": request.param} if request.param else {}
        made.variables[old] = named
        made.variables[checkout()] = {"RELAUNCH_SSH_KEY": str(make_key(tmp_path, "ada")), **named}
        yield made


def test_a_job_and_a_fleet_of_a_release_take_every_order(
    service: Service, old: Installation
) -> None:
    up = service.start_up(old)
    service.commands = checkout()
    whose = ("--fleet", FLEET, "--reason", "a fan")
    service.do("nodes", "quarantine", "n1", *whose)
    service.do("nodes", "release", "n1", *whose)
    for order in ("pause", "resume", "apply"):
        service.do("nodes", order, *whose)
    job = service.submit("train", policy={"causes": ASKS})
    job.until("RUNNING")
    job.until_steps()
    service.do("policy", "change", job.name, "--set", "max_restarts=7", "--reason", "it is new")
    service.do("retry", job.name, "--reason", "once more")
    job.until("RUNNING", 2)
    job.until_steps()
    job.fail_rank("the data is not there")
    job.until("WAITING_FOR_PERSON", 2)
    service.do("answer", job.name, "approve", "--reason", "it is now")
    job.until("RUNNING", 3)
    service.do("cancel", job.name, "--reason", "it was a test")
    job.until_ended("CANCELLED")
    shown = service.do("show", job.name)
    assert "refused" not in shown and "unknown key" not in shown
    up.send_signal(signal.SIGTERM)
    assert up.wait(120) == 0

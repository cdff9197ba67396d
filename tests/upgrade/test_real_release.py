"""A released relaunch, from its wheel, is replaced by this checkout under running jobs, and back.

The other tests of upgrades have builds made from this checkout. Here the old program is the one
that people have.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from relaunch.temporal import read_start_time
from tests.releases.record import read_version
from tests.releases.recording import list_releases
from tests.upgrade.services import (
    FLEET,
    PATIENCE_S,
    TIMEOUTS,
    WHEELS,
    Installation,
    Job,
    Service,
    checkout,
    eventually,
    list_wheels,
    release,
)

RESERVED = "n5"
"""Out of service, so that a job that wants all nodes waits."""
ASKS = {cause: [{"strategy": "ASK"}] for cause in ("APPLICATION", "UNKNOWN")}
DELAYS = {
    cause: [{"strategy": "RESTART_IN_PLACE", "tries": 9, "delay": "5s"}]
    for cause in ("APPLICATION", "UNKNOWN")
}
"""Long enough to end a worker while its job is between two generations."""


def test_each_release_has_its_wheel_and_no_wheel_has_changed() -> None:
    recorded = {path.name.removesuffix(".json.xz") for path in list_releases()}
    # That of the version under way is built from its commit, and so is not in it.
    missing = recorded - {read_version()} - set(list_wheels())
    assert not missing, f"{missing}: CONTRIBUTING.md, A release, says how to keep a wheel"
    lines = (WHEELS / "SHA256SUMS").read_text().splitlines()
    assert {name: digest for digest, name in (line.split() for line in lines)} == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in list_wheels().values()
    }


@pytest.fixture(scope="module", params=list_wheels())
def old(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    version: str = request.param
    return release(version, tmp_path_factory.mktemp("installed") / version)


@pytest.fixture(scope="module")
def new() -> Installation:
    return checkout()


@pytest.fixture
def service(old: Installation, tmp_path: Path, worker_id: str) -> Iterator[Service]:
    """A service of the release, of which nothing runs yet."""
    number = 30 + int(worker_id.removeprefix("gw").replace("master", "0"))
    with Service(tmp_path / "service", number, old) as made:
        yield made


@dataclass(frozen=True)
class Jobs:
    trains: Job
    """It runs on two nodes in lockstep."""
    asks: Job
    """A person is asked about its first generation."""
    recovers: Job
    """A new generation is launched some seconds after each fault."""
    waits: Job
    """It wants a node that is out of service."""

    def __iter__(self) -> Iterator[Job]:
        return iter((self.trains, self.asks, self.recovers, self.waits))


def begin(service: Service) -> Jobs:
    """Bring jobs into their phases, all by the release."""
    service.do("nodes", "quarantine", RESERVED, "--fleet", FLEET, "--reason", "a fan is loud")
    jobs = Jobs(
        service.submit("trains", 2),
        service.submit("asks", policy={"causes": ASKS}),
        service.submit("recovers", policy={"causes": DELAYS}),
        service.submit("waits", 5),
    )
    for job in (jobs.trains, jobs.asks, jobs.recovers):
        job.until("RUNNING")
        job.until_steps()
    recover(jobs.recovers, 2)
    jobs.asks.fail_rank("the learning rate is a word")
    jobs.asks.until("WAITING_FOR_PERSON")
    assert jobs.waits.show()["phase"] == "QUEUED"
    return jobs


def end(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    process.send_signal(how)
    assert process.wait(120) == (0 if how is signal.SIGTERM else -how)


def read_everything(service: Service, jobs: Jobs, by: Installation) -> None:
    """Have one command line read all that there is, and find what the release wrote.

    A worker that answers too late for a command is asked again: others may keep the machine busy.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return read_once(service, jobs, by)
        except AssertionError:
            if time.monotonic() > deadline:
                raise


def read_once(service: Service, jobs: Jobs, by: Installation) -> None:
    listed = {one["name"]: one for one in service.read("jobs", by=by)}
    assert set(listed) == {job.name for job in service.jobs}
    shown = jobs.asks.show(by)
    assert (shown["source"], shown["phase"]) == ("worker", listed["asks"]["phase"])
    assert service.read("next", "asks", by=by)["what"]
    assert service.read("report", "asks", by=by)["jobs"] == ["asks"]
    first, *_ = service.read("history", jobs.asks.name, by=by)
    assert (first["generation"], first["cause"]) == (1, "APPLICATION")
    assert "RuntimeError: the learning rate is a word" in first["traceback"]
    first, *_ = service.read("history", jobs.recovers.name, by=by)
    assert [one["strategy"] for one in first["decisions"]] == ["RESTART_IN_PLACE"]
    assert first["closed"] is not None
    assert set(service.read("report", "--fleet", FLEET, by=by)["jobs"]) == set(listed)
    printed = service.do("logs", jobs.trains.name, "--generation", "1", by=by)
    assert "rank 0 of generation 1 starts" in printed and "rank 1 of" in printed
    nodes = {one["name"]: one for one in service.read("nodes", "list", "--fleet", FLEET, by=by)}
    reserved = nodes[RESERVED]
    assert (reserved["state"], reserved["reason"]) == ("quarantined", "a fan is loud")
    assert [nodes[name]["state"] for name in jobs.trains.show(by)["nodes"]] == ["busy"] * 2
    assert service.read("nodes", "show", RESERVED, "--fleet", FLEET, by=by)["by"] == reserved["by"]
    assert service.read("nodes", "show", "--fleet", FLEET, by=by)["name"] == FLEET


def check_untouched(jobs: Jobs, ranks: dict[int, int]) -> None:
    """Check that training went on: in the same generation, in the same processes."""
    jobs.trains.until("RUNNING", ranks[min(ranks)])
    jobs.trains.until_steps()
    assert jobs.trains.ranks() == ranks


def recover(job: Job, generation: int, count: int = 1) -> None:
    """Kill a rank; nothing but one new generation follows."""
    job.kill_rank()
    job.until("RUNNING", generation)
    job.until_ranks(generation, count)
    job.until_steps()


def finish(service: Service, jobs: Jobs) -> None:
    """Have all jobs end well, the one that waited, too."""
    service.do("nodes", "release", RESERVED, "--fleet", FLEET, "--reason", "it was replaced")
    jobs.waits.until("RUNNING")
    jobs.waits.until_steps()
    for job in jobs:
        job.let_end()
    for job in jobs:
        job.until_ended("SUCCEEDED")
        assert (job.violations(), job.ranks()) == ([], {})
        assert all(one["closed"] for one in service.read("history", job.name))
    service.until_well()


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("ends", "returns"),
    [(signal.SIGTERM, signal.SIGKILL), (signal.SIGKILL, signal.SIGTERM)],
    ids=["ended then killed", "killed then ended"],
)
def test_up_of_a_release_is_replaced_in_place_and_put_back(
    service: Service,
    old: Installation,
    new: Installation,
    ends: signal.Signals,
    returns: signal.Signals,
) -> None:
    up = service.start_up(old)
    jobs = begin(service)
    ranks = jobs.trains.ranks()
    jobs.recovers.kill_rank()
    jobs.recovers.until("LAUNCHING", 3)
    end(up, ends)

    up, service.commands = service.start_up(new), new
    service.until_well()
    check_untouched(jobs, ranks)
    jobs.recovers.until("RUNNING", 3)
    jobs.recovers.until_ranks(3, 1)
    jobs.asks.until("WAITING_FOR_PERSON", 1)
    recover(jobs.trains, 2, 2)
    service.do("answer", "asks", "approve", "--reason", "it is a number now")
    jobs.asks.until("RUNNING", 2)
    for by in (new, old):
        read_everything(service, jobs, by)
    ranks = jobs.trains.ranks()
    jobs.recovers.kill_rank()
    jobs.recovers.until("LAUNCHING", 4)
    end(up, returns)

    up, service.commands = service.start_up(old), old
    put_back(service, new)
    check_untouched(jobs, ranks)
    jobs.recovers.until("RUNNING", 4)
    recover(jobs.trains, 3, 2)
    read_everything(service, jobs, old)
    finish(service, jobs)
    end(up, signal.SIGTERM)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_orders_to_a_job_of_a_release_are_checked_in_place(
    service: Service, old: Installation, new: Installation
) -> None:
    """Also where the release, which checked none, had taken one before in the same run."""
    up = service.start_up(old)
    job = service.submit("asks", policy={"causes": ASKS})
    job.until("RUNNING")
    job.fail_rank("the learning rate is a word")
    job.until("WAITING_FOR_PERSON")
    service.do("answer", "asks", "approve", "--reason", "it is a number now")
    job.until("RUNNING", 2)
    job.until_steps()
    end(up, signal.SIGTERM)

    up, service.commands = service.start_up(new), new
    service.until_well()
    with service.fleet_file.open("a") as file:
        file.write("access: {people: {ada: {role: admin}}, unproven: []}\n")
    service.do("nodes", "apply", "--fleet", FLEET)
    service.until_well()
    refused = service.run("cancel", "asks", "--reason", "it is old")
    assert refused.returncode and "may not cancel job asks" in refused.stderr, refused
    job.until_steps()
    job.let_end()
    job.until_ended("SUCCEEDED")
    end(up, signal.SIGTERM)


def move(service: Service, command: str, by: Installation) -> None:
    done = service.run(command, "--within", "5m", by=by)
    assert (done.returncode, "nothing is left" in done.stderr) == (0, True), done


def put_back(service: Service, new: Installation) -> None:
    """Return to the release.

    It cannot continue a job for which the newer build has given an order that it does not know;
    then a worker of that build has to hand the job over (docs/upgrade.md, In place).
    """
    if service.run("rollback").returncode == 0:
        return
    beside = service.start_worker(new)
    # The release is current by now: another `rollback` would go back to the newer build.
    move(service, "upgrade", service.commands)
    end(beside, signal.SIGTERM)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_workers_of_a_release_and_of_this_checkout_side_by_side(
    service: Service, old: Installation, new: Installation
) -> None:
    service.start_up(old, workers=0)
    worker = service.start_worker(old)
    jobs = begin(service)
    ranks = jobs.trains.ranks()
    read_everything(service, jobs, new)
    use(service, "by-new", new)

    beside = service.start_worker(new)
    jobs.recovers.kill_rank()
    jobs.recovers.until("LAUNCHING", 3)
    move(service, "upgrade", new)
    end(worker, signal.SIGTERM)
    check_untouched(jobs, ranks)
    jobs.recovers.until("RUNNING", 3)
    jobs.recovers.until_ranks(3, 1)
    recover(jobs.trains, 2, 2)
    read_everything(service, jobs, old)
    service.do("answer", "asks", "approve", "--reason", "it is a number now", by=old)
    jobs.asks.until("RUNNING", 2)
    use(service, "by-old", old)
    assert service.run("doctor", by=new).returncode == 0

    ranks = jobs.trains.ranks()
    worker = service.start_worker(old)
    jobs.recovers.kill_rank()
    jobs.recovers.until("LAUNCHING", 4)
    move(service, "rollback", old)
    end(beside, signal.SIGKILL)
    check_untouched(jobs, ranks)
    jobs.recovers.until("RUNNING", 4)
    recover(jobs.trains, 3, 2)
    finish(service, jobs)
    end(worker, signal.SIGTERM)


SPARE = "n4"


def list_waiting(service: Service) -> dict[str, int]:
    """Return the living processes that import ahead, by node; those that are ready."""
    found = {}
    for path in (service.state / "nodes").glob("*/jobs/*/warm/standby.json"):
        record = json.loads(path.read_text())
        if record["state"] == "ready" and read_start_time(record["pid"]) == record["started"]:
            found[path.parts[-5]] = int(record["pid"])
    return found


def until_waiting(service: Service, nodes: list[str]) -> dict[str, int]:
    eventually(
        lambda: sorted(list_waiting(service)) == nodes,
        lambda: f"{list_waiting(service)} import ahead, expected {nodes}",
    )
    return list_waiting(service)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_release_goes_on_where_this_checkout_imported_ahead(
    service: Service, old: Installation, new: Installation
) -> None:
    """A release that cannot import ahead takes nodes, spare and job over, and gives them back."""
    lines = service.fleet_file.read_text()
    service.fleet_file.write_text(lines.replace(f"name: {SPARE},", f"name: {SPARE}, spare: true,"))
    up = service.start_up(old)
    service.do("nodes", "quarantine", RESERVED, "--fleet", FLEET, "--reason", "a fan is loud")
    service.until_well()
    end(up, signal.SIGTERM)
    up, service.commands = service.start_up(new), new
    service.until_well()
    times = {**TIMEOUTS, "lease": "30s"}  # a spare imports ahead for as long as one may be lost
    job = service.submit("ahead", 2, policy={"timeouts": times}, warm=("decimal",))
    job.until("RUNNING")
    job.until_steps()
    used = job.show()["nodes"]
    until_waiting(service, sorted([*used, SPARE]))
    ranks = job.ranks()
    end(up, signal.SIGTERM)

    up, service.commands = service.start_up(old), old
    put_back(service, new)
    job.until("RUNNING")
    job.until_steps()
    assert job.ranks() == ranks
    recover(job, 2, 2)
    service.do("nodes", "quarantine", used[1], "--fleet", FLEET, "--reason", "x", "--drain",
               "--within", "1s")  # fmt: skip
    job.until("RUNNING", 3)
    job.until_ranks(3, 2)
    now_used = set(job.show()["nodes"])
    assert now_used <= {"n1", "n2", "n3", SPARE} - {used[1]}
    # On a node that the job has kept it waits beside the generation of the release.
    eventually(
        lambda: set(list_waiting(service)) <= now_used,
        lambda: f"{list_waiting(service)} import ahead, and the job has {now_used}",
    )
    ranks = job.ranks()
    end(up, signal.SIGKILL)

    up, service.commands = service.start_up(new), new
    service.until_well()
    job.until("RUNNING", 3)
    assert job.ranks() == ranks
    recover(job, 4, 2)
    until_waiting(service, sorted({*job.show()["nodes"], SPARE}))
    recover(job, 5, 2)
    said = (service.state / "worker.log").read_text()
    assert re.search("generation 5 runs on .*; its ranks were forked from a Python", said)
    service.do("nodes", "release", used[1], "--fleet", FLEET, "--reason", "it is well")
    service.do("nodes", "release", RESERVED, "--fleet", FLEET, "--reason", "it was replaced")
    job.let_end()
    job.until_ended("SUCCEEDED")
    assert (job.violations(), job.ranks()) == ([], {})
    eventually(lambda: not list_waiting(service), lambda: f"{list_waiting(service)} outlive it")
    service.until_well()
    end(up, signal.SIGTERM)


def use(service: Service, name: str, by: Installation) -> None:
    """Play a whole job by the command line of one version, with a worker of the other."""
    job = service.submit(name, policy={"causes": ASKS}, by=by)
    job.until("RUNNING")
    job.until_steps()
    job.fail_rank("the data is not there")
    job.until("WAITING_FOR_PERSON")
    assert job.show(by)["failure"]["reason"].endswith("the data is not there")
    service.do("answer", name, "approve", "--reason", "it is now", by=by)
    job.until("RUNNING", 2)
    service.do("retry", name, "--reason", "once more", by=by)
    job.until("RUNNING", 3)
    assert "rank 0 of generation 3 starts" in service.do("logs", name, by=by)
    service.do("cancel", name, "--reason", "it was a test", by=by)
    job.until_ended("CANCELLED")
    assert (job.violations(), job.ranks()) == ([], {})

"""The worker's fleet files, read again while it runs.

What changed is served, what cannot be used changes nothing.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from temporalio.client import Client
from temporalio.runtime import TelemetryConfig

from relaunch.activities.running_watches import RunningWatches
from relaunch.activities.sampler import StateSampler
from relaunch.backends.base import (
    Backend,
    Preparation,
    PrepareOrder,
    Refusal,
    StopOrder,
    StopProof,
    identity,
)
from relaunch.config import ConfigError, Settings
from relaunch.generation import Token
from relaunch.temporal import read_server_id
from relaunch.worker import (
    KEPT_FLEETS,
    SDK_THREADS,
    UnreadFleetError,
    WorkerFleets,
    _allow_connections,
    _make_runtime,
    _sample,
    _serve_metrics,
    _trace_incidents,
    make_fleets,
)
from relaunch.worker_log import LogFormatter
from tests.servers import start_dev_server

FLEET = """\
name: lab
backend: local
repairs: act
nodes:
  - {name: n1, address: 127.0.0.2}
  - {name: n2, address: 127.0.0.3}
"""


@pytest.fixture
def fleet_file(tmp_path: Path) -> Path:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET)
    return file


@pytest.fixture
def fleets(fleet_file: Path, tmp_path: Path) -> WorkerFleets:
    return make_fleets(Settings(state=tmp_path / "state", fleets=(fleet_file,)))


def test_an_unchanged_fleet_file_is_served_by_the_same_backend(
    fleets: WorkerFleets,
) -> None:
    spec, backend = fleets.spec("lab"), fleets.backend("lab")
    assert fleets.reload("lab") == spec
    assert fleets.backend("lab") is backend


async def test_a_changed_fleet_file_is_served_by_another_backend(
    fleets: WorkerFleets, fleet_file: Path
) -> None:
    before = fleets.backend("lab")
    fleet_file.write_text(FLEET + "  - {name: n3, address: 127.0.0.4, gpus: 8}\n")
    assert [node.name for node in fleets.reload("lab").nodes] == ["n1", "n2", "n3"]
    assert [node.name for node in fleets.spec("lab").nodes] == ["n1", "n2", "n3"]
    assert fleets.backend("lab").node("n3").gpus == 8
    assert list(fleets.replaced) == [before]
    await fleets.close()


async def test_a_worker_serves_a_new_node_without_an_order_to_reload(
    fleets: WorkerFleets, fleet_file: Path
) -> None:
    fleet_file.write_text(FLEET + "  - {name: n3, address: 127.0.0.4}\n")
    assert fleets.backend("lab").node("n3").address == "127.0.0.4"
    fleet_file.write_text("name: lab\n")
    assert fleets.backend("lab").node("n3").address == "127.0.0.4"
    await fleets.close()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("name: lab\nbackend: local\nnodes: []\n", "fleet.yaml:3:"),
        (
            FLEET.replace("name: lab", "name: other"),
            "'other' now, expected 'lab'",
        ),
        (FLEET.replace("backend: local", "backend: ecs"), "ecs.cluster"),
        (None, "No such file or directory"),
    ],
)
def test_an_unusable_fleet_file_is_reported_and_the_fleet_stays(
    fleets: WorkerFleets, fleet_file: Path, text: str | None, sentence: str
) -> None:
    if text is None:
        fleet_file.unlink()
    else:
        fleet_file.write_text(text)
    with pytest.raises(ValueError, match=r"fleet\.yaml") as wrong:
        fleets.reload("lab")
    assert sentence in str(wrong.value)
    assert [node.name for node in fleets.spec("lab").nodes] == ["n1", "n2"]


@pytest.mark.parametrize(("backend", "raises"), [("ssh", True), ("local", False)])
def test_a_worker_of_remote_nodes_raises_its_limit_of_files(
    tmp_path: Path, backend: str, raises: bool
) -> None:
    given = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = given[1] - 1 if given[1] > 0 else 1024
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET.replace("backend: local", f"backend: {backend}"))
    fleets = make_fleets(Settings(state=tmp_path / "state", fleets=(file,)))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, given[1]))
        _allow_connections(fleets)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == (given[1] if raises else low)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, given)


def test_a_fleet_that_no_file_names_is_refused(fleets: WorkerFleets) -> None:
    with pytest.raises(KeyError, match=r"'other' .* lab"):
        fleets.reload("other")


def test_every_backend_orders_for_the_workers_server_also_later(
    fleets: WorkerFleets, fleet_file: Path
) -> None:
    fleets.set_server("6c1e9ba4")
    before = fleets.backend("lab")
    assert before.server == "6c1e9ba4"
    fleet_file.write_text(FLEET + "  - {name: n3, address: 127.0.0.4}\n")
    fleets.reload("lab")
    assert fleets.backend("lab") is not before
    assert fleets.backend("lab").server == "6c1e9ba4"


@pytest.mark.parametrize("address", ["127.0.0.1:{taken}", "localhost:{taken}"])
def test_an_unusable_address_of_metrics_is_one_sentence(address: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        wanted = address.format(taken=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"setting metrics is '{wanted}': .*; expected an IP"):
            _serve_metrics(wanted)


async def test_an_error_of_the_sampler_ends_the_sampling_only(
    fleets: WorkerFleets,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(self: StateSampler) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(StateSampler, "sample", fail)
    client = cast(Client, SimpleNamespace(namespace="default"))
    settings = Settings(state=tmp_path, metrics="127.0.0.1:9464")
    await _sample(client, settings, fleets, RunningWatches(tmp_path))
    assert "is not sampled" in caplog.text and "a bug" in caplog.text


def test_an_unusable_endpoint_of_traces_stops_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert _trace_incidents(Settings(state=tmp_path)) is None
    assert caplog.text == ""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318")
    assert _trace_incidents(Settings(state=tmp_path)) is None
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is 'collector:4318': expected" in caplog.text
    assert "no incident is traced" in caplog.text


async def test_a_second_controller_of_the_same_names_is_refused(
    fleet_file: Path, tmp_path: Path
) -> None:
    one, other = (
        make_fleets(Settings(state=tmp_path / "state", fleets=(fleet_file,))) for _ in range(2)
    )
    one.set_server("6c1e9ba4")
    other.set_server("0f9d2c77")
    mine, others = one.backend("lab"), other.backend("lab")

    def order(backend: Backend, submission: int) -> PrepareOrder:
        token = Token("default", "train", submission, 1)
        fleet = identity("default", "lab", backend.server)
        return PrepareOrder(token, "127.0.0.2", (0,), 60.0, 60.0, 1.0, 60.0, 1.0, fleet=fleet)

    try:
        assert isinstance(await mine.prepare("n1", order(mine, 1000)), Preparation)
        refused = await others.prepare("n1", order(others, 2000))
        assert isinstance(refused, Refusal)
        assert refused.why == "other_fleet"
        assert "(6c1e9ba4, namespace default)" in refused.reason
        namesake = StopOrder(Token("default", "train", 2000, 1), stop_grace=1.0)
        assert await others.stop("n1", namesake) == StopProof("n1")
        (listed,) = [job for job in (await mine.list("n1"))["jobs"] if job["server"] == "6c1e9ba4"]
        assert [generation["state"] for generation in listed["generations"]] == ["prepared"]
        assert isinstance(
            await mine.stop("n1", StopOrder(Token("default", "train", 1000, 1), stop_grace=1.0)),
            StopProof,
        )
    finally:
        await one.close()
        await other.close()


@asynccontextmanager
async def server_on(database: Path) -> AsyncIterator[Client]:
    environment = await start_dev_server(dev_server_database_filename=str(database))
    async with environment:
        yield environment.client


async def test_a_server_keeps_its_id_over_restarts_and_no_other_has_it(tmp_path: Path) -> None:
    found = []
    for name in ("one", "one", "other"):
        async with server_on(tmp_path / f"{name}.db") as client:
            found.append(await read_server_id(client))
    assert found[0] == found[1] != found[2]
    assert all(0 < len(id_) <= 64 and "/" not in id_ for id_ in found), "it is a part of tokens"


def test_the_runtime_leaves_no_variable_to_agents_and_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(SDK_THREADS, raising=False)
    before = dict(os.environ)
    _make_runtime(TelemetryConfig())
    assert dict(os.environ) == before
    monkeypatch.setenv(SDK_THREADS, "7")
    _make_runtime(TelemetryConfig())
    assert os.environ[SDK_THREADS] == "7", "a person's own"


def test_a_bad_fleet_file_is_served_at_a_start_as_it_last_was(
    fleet_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(FLEET.replace("name: lab", "name: other"))
    settings = Settings(state=tmp_path / "state", fleets=(fleet_file, other))
    make_fleets(settings)
    fleet_file.write_text("name: lab\nnodes: [\n")
    started = make_fleets(settings)
    assert started.backend("lab").node("n2").address == "127.0.0.3"
    assert "fleet lab is served as it last was" in caplog.text
    assert f"{fleet_file}:3" in caplog.text
    (unusable,) = started.list_unusable()
    assert unusable.fleet == "lab" and f"{fleet_file}:3" in unusable.reason
    with pytest.raises(ValueError, match=r"fleet\.yaml"):
        started.reload("lab")
    fleet_file.write_text(FLEET.replace("n2", "n9"))
    assert [node.name for node in started.spec("lab").nodes] == ["n1", "n9"]
    assert started.list_unusable() == ()
    fleet_file.write_text("")
    assert [node.name for node in make_fleets(settings).spec("lab").nodes] == ["n1", "n9"]
    for copy in (tmp_path / "state" / KEPT_FLEETS).iterdir():
        assert copy.stat().st_mode & 0o777 == 0o600


def test_a_fleet_file_that_was_never_good_stops_no_other(
    fleet_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: bad\n")
    started = make_fleets(Settings(state=tmp_path / "state", fleets=(bad, fleet_file)))
    assert started.spec("lab").name == "lab"
    (unusable,) = started.list_unusable()
    assert unusable.fleet == "" and str(bad) in unusable.reason
    assert f"{bad}" in caplog.text and "its fleet is not served" in caplog.text
    with pytest.raises(UnreadFleetError, match=r"'bad' is not known .*bad\.yaml"):
        started.spec("bad")
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        make_fleets(Settings(state=tmp_path / "state", fleets=(bad,)))


def test_a_message_in_the_log_is_one_line_that_does_nothing() -> None:
    formatter = LogFormatter("%(levelname)s %(name)s: %(message)s")
    said = "\x1b[2J\x1b]0;t\x07\u202ex\n2026-01-01 INFO relaunch: forged"
    record = logging.LogRecord("relaunch", logging.INFO, "f", 1, "node %s", (said,), None)
    line = formatter.format(record)
    assert line.startswith("INFO relaunch: node \\x1b[2J") and line.isprintable()
    try:
        raise ValueError(said)
    except ValueError:
        record.exc_info = sys.exc_info()
    assert "\x1b" not in formatter.format(record) and "\nValueError: " in formatter.format(record)

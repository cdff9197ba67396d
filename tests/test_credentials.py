"""What is said of a connection that TLS, a certificate or an API key prevents.

The client is the SDK's; who listens is a double of a server or proxy (`tests/tls.py`).
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio.service import RPCError, RPCStatusCode

from relaunch.cli.doctor import examine_certificates
from relaunch.config import ConfigError
from relaunch.credentials import (
    Credentials,
    ServerUnavailable,
    describe_expiry,
    explain_failure,
    find_expiry,
    read_credentials,
)
from relaunch.temporal import connect, explain_refusal, make_embedded_environment, write_up
from tests.tls import DAY, Authority, answer_http, listen, use_tls

NEVER = Path("/nonexistent")
SECRET = "key-4711-of-alice"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of two CAs, by the names of their files."""
    folder = tmp_path_factory.mktemp("certificates")
    ca, other = Authority(folder, "ca"), Authority(folder, "other")
    ca.issue("server")
    ca.issue("old-server", begins=-9 * DAY, ends=-2 * DAY)
    ca.issue("alice")
    ca.issue("old-alice", begins=-9 * DAY, ends=-2 * DAY)
    ca.issue("early-alice", begins=2 * DAY)
    ca.issue("locked-alice", passphrase=b"sesame")
    other.issue("mallory")
    (folder / "empty.pem").write_text("")
    (folder / "empty.key").write_text("")
    return folder


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith("TEMPORAL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


async def fail(monkeypatch: pytest.MonkeyPatch, address: str, **variables: str) -> ConfigError:
    for name, value in {**variables, "TEMPORAL_ADDRESS": address}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as failed:
        await connect(NEVER)
    said = str(failed.value)
    assert "\n" not in said and "tonic" not in said and SECRET not in said, said
    return failed.value


@contextmanager
def closed() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    yield f"127.0.0.1:{port}"


PAGE_400, PAGE_401 = answer_http(400, "Bad Request"), answer_http(401, "Unauthorized")
PAGE_502 = answer_http(502, "Bad Gateway")
DEMANDS = ("demands a client certificate", "TEMPORAL_TLS_CLIENT_CERT_PATH")


@pytest.mark.parametrize(
    ("client", "server", "expected"),
    [
        ({}, {"answer": PAGE_400}, DEMANDS),
        ({}, {"client_ca": "ca"}, DEMANDS),
        ({}, {"client_ca": "ca", "maximum_version": ssl.TLSVersion.TLSv1_2}, DEMANDS),
        ({"client": "old-alice"}, {"answer": PAGE_400}, ("old-alice.pem", "_CERT_PATH", "ended")),
        ({"client": "early-alice"}, {"answer": PAGE_400}, ("early-alice.pem", "not valid before")),
        ({"client": "mallory"}, {"answer": PAGE_400}, ("mallory.pem", "issued by CN=other")),
        ({"client": "alice"}, {"answer": PAGE_401}, ("alice.pem", "401", "TEMPORAL_API_KEY")),
        ({"client": "empty"}, {}, ("empty.pem", "has no certificate")),
        ({"client": "alice", "key": "empty"}, {}, ("empty.key", "not a private key")),
        ({"client": "alice", "key": "mallory"}, {}, ("mallory.key", "does not belong", "CN=alice")),
        ({"client": "locked-alice"}, {}, ("locked-alice.key", "encrypted")),
        ({"ca": "other"}, {}, ("not issued by", "other.pem", "_SERVER_CA_CERT_PATH")),
        ({"ca": "empty"}, {}, ("empty.pem", "has no certificate")),
        ({}, {"certificate": "old-server"}, ("certificate of the Temporal server at", "ended")),
        ({"TEMPORAL_TLS_SERVER_NAME": "ui.lab"}, {}, ("temporal.lab, 127.0.0.1", "'ui.lab'")),
        ({}, {"certificate": None}, ("does not speak TLS",)),
        ({}, {"answer": PAGE_401}, ("demands", "401", "TEMPORAL_API_KEY")),
        (
            {"TEMPORAL_API_KEY": SECRET},
            {"answer": PAGE_401},
            ("refused the API key", "in TEMPORAL_"),
        ),
    ],
)
async def test_what_cannot_heal_is_one_sentence_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    client: dict[str, str],
    server: dict[str, Any],
    expected: tuple[str, ...],
) -> None:
    options = dict(server)
    name = options.pop("certificate", "server")
    if ca := options.pop("client_ca", None):
        options["client_ca"] = folder / f"{ca}.pem"
    with listen(folder / f"{name}.pem" if name else None, **options) as address:
        variables = use_tls(folder, **client)
        failed = await fail(monkeypatch, address, **variables)
    assert not isinstance(failed, ServerUnavailable)
    assert all(word in str(failed) for word in (*expected, address)), failed


async def test_what_cannot_be_read_is_named_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    gone = await fail(monkeypatch, "127.0.0.1:1", **use_tls(folder, "gone"))
    assert f"{folder}/gone.pem (TEMPORAL_TLS_CLIENT_CERT_PATH) cannot be read" in str(gone)
    monkeypatch.delenv("TEMPORAL_TLS_CLIENT_CERT_PATH")
    half = await fail(
        monkeypatch, "127.0.0.1:1", TEMPORAL_TLS_CLIENT_KEY_PATH=f"{folder}/alice.key"
    )
    assert "alice.key" in str(half) and "TEMPORAL_TLS_CLIENT_CERT_PATH" in str(half)
    monkeypatch.delenv("TEMPORAL_TLS_CLIENT_KEY_PATH")
    nowhere = await fail(monkeypatch, "127.0.0.1:1", TEMPORAL_CONFIG_FILE=str(tmp_path / "no.toml"))
    assert f"TEMPORAL_CONFIG_FILE is '{tmp_path}/no.toml'" in str(nowhere)
    file = tmp_path / "temporal.toml"
    file.write_text("[profile.default\n")
    broken = await fail(monkeypatch, "127.0.0.1:1", TEMPORAL_CONFIG_FILE=str(file))
    assert str(file) in str(broken) and "line 1" in str(broken)
    file.write_text(f'[profile.lab.tls]\nclient_cert_path = "{tmp_path}/no.pem"\n')
    no_profile = await fail(monkeypatch, "127.0.0.1:1", TEMPORAL_PROFILE="prod")
    assert "'prod'" in str(no_profile) and str(file) in str(no_profile)
    in_file = await fail(monkeypatch, "127.0.0.1:1", TEMPORAL_PROFILE="lab")
    assert f"{tmp_path}/no.pem (client_cert_path of profile lab in {file})" in str(in_file)
    switch = await fail(monkeypatch, "127.0.0.1:1", TEMPORAL_TLS="maybe", TEMPORAL_PROFILE="")
    assert "TEMPORAL_TLS is 'maybe'" in str(switch)


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        (closed(), "Connection refused"),
        ({"answer": PAGE_502}, "behind a proxy that does not reach it: 502"),
        ({}, "closed the connection"),
    ],
)
async def test_what_may_heal_can_be_told_apart(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    server: AbstractContextManager[str] | dict[str, Any],
    expected: str,
) -> None:
    place = listen(folder / "server.pem", **server) if isinstance(server, dict) else server
    with place as address:
        failed = await fail(monkeypatch, address, **use_tls(folder, "alice"))
    assert isinstance(failed, ServerUnavailable)
    assert expected in str(failed)


@pytest.mark.parametrize(
    ("message", "status", "may_heal"),
    [
        # A worker got this whose server was killed while it started, on 2026-11-27.
        ("transport error", RPCStatusCode.UNKNOWN, True),
        ("h2 protocol error: error reading a body", RPCStatusCode.INTERNAL, True),
        ("namespace is invalid", RPCStatusCode.INVALID_ARGUMENT, False),
    ],
)
def test_a_broken_connection_is_no_refusal(
    monkeypatch: pytest.MonkeyPatch, message: str, status: RPCStatusCode, may_heal: bool
) -> None:
    monkeypatch.setenv("TEMPORAL_ADDRESS", "temporal.lab:7233")
    found = explain_refusal(RPCError(message, status, b""))
    assert isinstance(found, ServerUnavailable) is may_heal
    assert message in str(found) and ("refused" in str(found)) is not may_heal


def test_a_reset_while_connecting_may_heal() -> None:
    """A worker got this whose server was killed as it connected, on 2026-11-27."""
    error = (
        "Failed client connect: Server connection error: tonic::transport::Error(Transport, "
        'hyper::Error(Io, Os { code: 104, kind: ConnectionReset, message: "Connection reset by '
        'peer" }))'
    )
    found = explain_failure(error, "temporal.lab:7233", Credentials({}), datetime.now(UTC))
    assert isinstance(found, ServerUnavailable) and "closed the connection" in str(found)


def test_blank_variables_count_as_unset() -> None:
    names = ("API_KEY", "TLS_CLIENT_CERT_PATH", "TLS_CLIENT_KEY_DATA", "TLS", "CONFIG_FILE")
    blank = {f"TEMPORAL_{name}": " " for name in names}
    assert read_credentials({**blank, "TEMPORAL_ADDRESS": "a:1"}).config == {"target_host": "a:1"}


async def test_the_server_of_up_gets_nothing_that_is_for_another(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("TEMPORAL_NAMESPACE", "lab")
    monkeypatch.setenv("TEMPORAL_API_KEY", SECRET)
    for name, value in use_tls(folder, "alice").items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as up:
        address = f"127.0.0.1:{up.getsockname()[1]}"
        monkeypatch.setattr("relaunch.temporal.CONNECT_TIMEOUT_S", 0.2)
        write_up(tmp_path, address, "", {})
        with pytest.raises(ServerUnavailable, match="did not answer"):
            await connect(tmp_path)
        connection = up.accept()[0]
        assert connection.recv(3) == b"PRI", "a client with TLS says something else first"
        connection.close()
    children = make_embedded_environment(address)
    assert read_credentials(children).config == {"target_host": address}


def test_a_certificate_that_ends_soon_is_reported(folder: Path, tmp_path: Path) -> None:
    ca = Authority(tmp_path, "ca")
    ca.issue("bob", ends=20 * DAY)
    now = datetime.now(UTC)
    used = read_credentials(use_tls(tmp_path, "bob", TEMPORAL_ADDRESS="a:1"))
    first = find_expiry(used)
    assert first is not None and first.item.path == tmp_path / "bob.pem"
    assert describe_expiry(first, now) is None
    assert "bob.pem" in (describe_expiry(first, now + 10 * DAY) or "")
    assert "ended at" in (describe_expiry(first, now + 21 * DAY) or "")
    assert find_expiry(Credentials({})) is None
    # A CA is replaced by a file with both.
    both = (folder / "ca.pem").read_text() + (tmp_path / "ca.pem").read_text()
    (tmp_path / "ca.pem").write_text(both)
    assert len(both.split("BEGIN")) == 3
    last = find_expiry(read_credentials(use_tls(tmp_path)))
    assert last is not None and last.at > now + 29 * DAY


def test_doctor_looks_at_both_ends(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    ca = Authority(tmp_path, "ca")
    ca.issue("soon", ends=timedelta(days=3))
    now = datetime.now(UTC)
    with listen(ca.issue("server", ends=9 * DAY)) as address:
        for name, value in use_tls(tmp_path, "soon", TEMPORAL_ADDRESS=address).items():
            monkeypatch.setenv(name, value)
        mine, theirs = examine_certificates(address, now)
        assert "soon.pem" in mine.text and mine.action
        assert f"the server at {address} ends at" in theirs.text and theirs.action
        (well,) = examine_certificates(address, now - 20 * DAY)
        assert "soon.pem" in well.text and not well.action
        assert examine_certificates("another:1", now) == [], "the server of an up"
    assert len(examine_certificates(address, now)) == 1, "a server that is away shows none"

"""Reaching nodes by SSH, and each way in which that fails.

Real servers, real causes, one sentence each.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import math
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import paramiko
import pytest

from relaunch.activities.launch import find_address
from relaunch.backends.base import Backend, Preparation, StartedRanks, StartOrder, Unreachable
from relaunch.backends.ssh import backend as ssh_backend
from relaunch.backends.ssh import connection
from relaunch.backends.ssh.backend import NeedsPerson, SshBackend
from relaunch.backends.ssh.known_hosts import KeyStatus, fingerprint, line_for
from relaunch.backends.ssh.route import SshConfigError, read_config, route
from relaunch.backends.ssh.trust import host_key, remember
from relaunch.cli.files import read_fleet
from relaunch.job.state import Slot
from relaunch.spec.fleet import FleetSpec
from relaunch.worker import WorkerFleets
from tests.backends.ssh_site import Site, listener, own_fingerprint, reason, site
from tests.backends.sshd import make_key
from tests.backends.test_contract import prepare_order, reached, token
from tests.console.commands import starter

__all__ = ["site"]
pytestmark = pytest.mark.asyncio


def run(*words: str, env: dict[str, str] | None = None) -> None:
    subprocess.run(words, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=True)


# --- reaching -------------------------------------------------------------------------------------


async def test_s2_1_ranks_start_on_a_node_with_only_sshd_and_python(
    site: Site,
) -> None:
    host = site.host()
    backend = site.backend(host)
    prepared = await backend.prepare("n1", prepare_order(token(1), (0,), address=host.address))
    assert isinstance(prepared, Preparation)
    started = await backend.start("n1", start_order(prepared))
    assert isinstance(started, StartedRanks)
    environment = Path(f"/proc/{started.pids[0]}/environ").read_bytes().split(b"\0")
    assert b"RELAUNCH_NODE_STATE=" + os.fsencode(host.state) in environment
    assert host.logins() == 1, "one connection carries everything"


def start_order(prepared: Preparation) -> StartOrder:
    what: dict[str, Any] = {
        "command": ("sleep", "600"),
        "workdir": None,
        "env": {},
        "rank_env": ({"RANK": "0"},),
        "peers": (),
    }
    return StartOrder(
        token=token(1), node="n1", prepared=prepared.stamp, secret="5ec7e7", fences=True, **what
    )


async def test_the_agent_is_shipped_once(site: Site) -> None:
    host = site.host()
    for _ in range(2):
        backend = site.backend(host)
        await backend.list("n1")
        await backend.close()
    [file] = (host.state / "agents").iterdir()
    shipped = file.stat()
    await site.backend(host).list("n1")
    assert (file.stat().st_ino, file.read_bytes()) == (shipped.st_ino, site.agent.read_bytes())
    assert (host.state / "agents").stat().st_mode & 0o777 == 0o700


async def test_an_agent_that_was_damaged_on_the_node_is_replaced(site: Site) -> None:
    host = site.host()
    backend = site.backend(host)
    await backend.list("n1")
    [file] = (host.state / "agents").iterdir()
    file.write_bytes(file.read_bytes()[:-7] + b"garbage")
    await site.backend(host).list("n1")
    assert [one.read_bytes() for one in (host.state / "agents").iterdir()] == [
        site.agent.read_bytes()
    ]


async def test_two_controllers_that_ship_at_once_leave_one_agent(site: Site) -> None:
    host = site.host()
    backends = [site.backend(host) for _ in range(3)]
    answers = await asyncio.gather(*(backend.list("n1") for backend in backends))
    assert all(answer["outcome"] == "done" for answer in answers)
    assert [one.name for one in (host.state / "agents").iterdir()] == [site.agent.name]


@pytest.mark.long
async def test_agents_of_long_ago_that_nothing_runs_are_swept(site: Site) -> None:
    host = site.host()
    await site.backend(host).list("n1")
    old, new, running = (host.state / "agents" / name for name in ("0ld.pyz", "new.pyz", "run.pyz"))
    for path in (old, new, running):
        path.write_text("import time; time.sleep(600)")
    long_ago = 31 * 24 * 3600
    for path in (old, running):
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - long_ago))
    process = subprocess.Popen(["python3", str(running)])  # noqa: ASYNC220  (it returns at once)
    try:
        await site.backend(host).list("n1")
    finally:
        process.kill()
        process.wait()
    assert {path.name for path in (host.state / "agents").iterdir()} == {
        "new.pyz",
        "run.pyz",
        site.agent.name,
    }


async def test_old_fleet_files_keep_connections_of_watches_only(site: Site, tmp_path: Path) -> None:
    host, file = site.host(), tmp_path / "lab.yaml"
    file.write_text(site.spec(host).model_dump_json(exclude_unset=True))

    def make(path: Path, spec: FleetSpec) -> Backend:
        return SshBackend(spec, site.agent, 30.0)

    spec = read_fleet(file)
    fleets = WorkerFleets({"lab": spec}, {"lab": make(file, spec)}, {"lab": (file, make)})
    backend = fleets.backend("lab")
    prepared = await backend.prepare("n1", prepare_order(token(1), (0,), address=host.address))
    assert isinstance(prepared, Preparation)
    started = await backend.start("n1", start_order(prepared))
    assert isinstance(started, StartedRanks)
    async with backend.watch("n1", token(1), 0, 0.1) as stream:
        lines = stream.lines()
        assert "hello" in await anext(lines)
        for gpus in range(1, 4):
            file.write_text(site.spec(host, gpus=gpus).model_dump_json(exclude_unset=True))
            assert fleets.reload("lab").nodes[0].gpus == gpus
            await fleets.backend("lab").list("n1")
        await until(lambda: count_connections() == 2, "the watch has one, and the newest file")
        assert (await backend.list("n1"))["outcome"] == "done", "who has the old one may use it"
        while "heartbeat" not in await anext(lines):
            pass
    await until(lambda: count_connections() == 1, "the watch has ended")
    assert Path(f"/proc/{started.pids[0]}").exists()
    await fleets.close()


def count_connections() -> int:
    """Return how many SSH connections this process has."""
    threads = threading.enumerate()
    return sum(isinstance(one, paramiko.Transport) and one.is_active() for one in threads)


async def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


async def test_calls_at_once_share_one_login(site: Site) -> None:
    host = site.host()
    backend = site.backend(host)
    await asyncio.gather(*(backend.list("n1") for _ in range(10)))
    assert host.logins() == 1


async def test_what_a_login_shell_prints_first_is_passed_over(site: Site) -> None:
    host = site.host(start=False)
    (host.folder / "home" / ".bashrc").write_text(
        'echo "Welcome to the lab. {"; printf "no end of line"; echo oops >&2\n'
    )
    host.options["ForceCommand"] = '/bin/bash -c "$SSH_ORIGINAL_COMMAND"'
    host.start()
    assert (await site.backend(host).list("n1"))["outcome"] == "done"


@pytest.mark.long_after(variants=2)
@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "fish", "csh", "tcsh"])
async def test_any_login_shell_starts_the_agent(site: Site, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    host = site.host(ForceCommand=f'{shell} -c "$SSH_ORIGINAL_COMMAND"')
    assert (await site.backend(host).list("n1"))["outcome"] == "done"


async def test_a_host_of_the_ssh_configuration_keeps_its_own_address(
    site: Site,
) -> None:
    host = site.host()
    extra = site.folder / "extra.conf"
    extra.write_text(f"Host gpu-*\n  Port {host.port}\n")
    text = (
        f"Include {extra}\nHost gpu-01\n  HostName {host.address}\n  IdentityFile {site.key}\n"
        f"  UserKnownHostsFile {site.known_hosts}\n"
    )
    site.config.write_text(text)
    backend = site.backend(None, {"key": None, "known_hosts": None}, address="gpu-01")
    assert (await backend.list("n1"))["outcome"] == "done"
    assert backend.node("n1").network == host.address
    assert (
        site.backend(None, address="gpu-01", network="192.168.7.12").node("n1").network
        == "192.168.7.12"
    )


async def test_ranks_follow_an_address_that_changes_in_the_ssh_config(site: Site) -> None:
    """As the login does: MASTER_ADDR and the addresses of peers are those of the next launch."""
    site.config.write_text("Host gpu-01\n  HostName 10.0.0.7\n")
    backend = site.backend(None, address="gpu-01")
    slot = Slot("n1", "gpu-01")
    assert find_address(backend, slot) == "10.0.0.7"
    site.config.write_text("Host gpu-01\n  HostName 10.0.0.8\n")
    await until(lambda: find_address(backend, slot) == "10.0.0.8", "it is read again")
    site.config.write_text("Host gpu-01\n  Port none\n  HostName 10.0.0.9\n")
    backend._config_read_at = -math.inf
    assert find_address(backend, slot) == "10.0.0.8", "the next login says what is wrong"


@pytest.mark.long
async def test_a_key_that_only_the_ssh_agent_can_unlock_is_offered(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("ssh-agent") is None:
        pytest.skip("no ssh-agent here")
    host = site.host()
    locked = make_key(site.folder / "locked", passphrase="open sesame")
    host.authorized.write_text(locked.with_suffix(".pub").read_text())
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    said = await reason(site.backend(host, {"key": str(locked)}))
    assert str(locked) in said and "passphrase" in said and "SSH agent" in said
    socket_path = site.folder / "a.sock"
    words = ["ssh-agent", "-D", "-a", str(socket_path)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)  # noqa: ASYNC220 - returns at once
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket_path))
        ask = site.host(start=False).program_named("ask", "#!/bin/sh\necho open sesame\n")
        unlocking = {**os.environ, "SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force"}
        async with asyncio.timeout(60):
            while not socket_path.exists():  # noqa: ASYNC110  (it sends no event)
                await asyncio.sleep(0.01)
        run("ssh-add", "-q", str(locked), env=unlocking)
        assert (await site.backend(host, {"key": str(locked)}).list("n1"))["outcome"] == "done"
    finally:
        process.kill()
        process.wait()


# --- who it is ------------------------------------------------------------------------------------


async def test_an_unknown_host_key_is_refused_first_and_can_be_trusted(
    site: Site,
) -> None:
    host = site.host(known=False)
    backend = site.backend(host)
    said = await reason(backend)
    wanted = own_fingerprint(host.public_keys[0])
    assert f"(ED25519 {wanted})" in said and str(site.known_hosts) in said
    assert said.endswith("nodes trust n1`")
    assert host.logins() == 0 and "ssh2" not in host.log.read_text(), "no login has begun"
    spec = site.spec(host)
    key = await host_key(spec, spec.nodes[0])
    assert (key.algorithm, key.fingerprint, key.standing, key.reason) == (
        "ED25519",
        wanted,
        KeyStatus.UNKNOWN,
        said,
    )
    remember(key)
    assert site.known_hosts.read_text() == host.known_hosts
    assert (await host_key(spec, spec.nodes[0])).standing is KeyStatus.KNOWN
    assert (await site.backend(host).list("n1"))["outcome"] == "done"


async def test_a_changed_host_key_is_refused_with_both_keys(
    site: Site,
) -> None:
    host = site.host(start=False)
    site.known_hosts.write_text("# mine\n" + host.known_hosts)
    before = own_fingerprint(host.public_keys[0])
    for path in (host.host_keys[0], host.host_keys[0].with_suffix(".pub")):
        path.unlink()
    make_key(host.host_keys[0])
    host.start()
    backend = site.backend(host)
    said = await reason(backend)
    now = own_fingerprint(host.public_keys[0])
    assert f"CHANGED (ED25519 {now}, expected {before}" in said
    assert f"{site.known_hosts}:2" in said
    assert host.logins() == 0
    with pytest.raises(NeedsPerson):
        await backend.list("n1")
    spec = site.spec(host)
    with pytest.raises(ValueError, match="CHANGED"):
        remember(await host_key(spec, spec.nodes[0]))
    assert site.known_hosts.read_text().count("\n") == 2


@pytest.mark.long
async def test_a_host_is_asked_for_the_kind_of_key_that_is_known_of_it(site: Site) -> None:
    host = site.host(known=False, kinds=("ed25519", "ecdsa", "rsa"))
    for line in host.known_hosts.splitlines():
        site.known_hosts.write_text(line + "\n")
        assert (await site.backend(host).list("n1"))["outcome"] == "done"


async def test_a_revoked_key_is_refused_and_a_hashed_name_is_found(site: Site) -> None:
    host = site.host(known=False)
    kind, blob = host.public_keys[0].split()[:2]
    hashed = line_for(host.address, host.port, kind, base64.b64decode(blob), hashed=True)
    assert host.address not in hashed
    site.know(f"not a line\n{hashed}\n")
    assert (await site.backend(host).list("n1"))["outcome"] == "done"
    site.know(f"@revoked * {kind} {blob}\n")
    said = await reason(site.backend(host))
    assert "revoked" in said and f"{site.known_hosts}:3" in said
    assert fingerprint(base64.b64decode(blob)) == own_fingerprint(host.public_keys[0])


def ask_openssh(site: Site, name: str) -> str:
    """Return why ssh does not log in to a host of the test's configuration; "" if it does."""
    words = ["ssh", "-F", str(site.config), "-i", str(site.key), "-o", "BatchMode=yes"]
    words += ["-o", f"UserKnownHostsFile={site.known_hosts}", "-o", "GlobalKnownHostsFile=none"]
    words += ["-o", "StrictHostKeyChecking=yes", name, "true"]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return done.stderr if done.returncode else ""


async def test_a_host_key_alias_is_looked_up_as_openssh_does(site: Site) -> None:
    """OpenSSH itself is asked as well where it is installed."""
    has_openssh = shutil.which("ssh") is not None
    host, other = site.host(known=False), make_key(site.folder / "other").with_suffix(".pub")
    site.config.write_text(
        f"Host gpu-01\n  HostName {host.address}\n  Port {host.port}\n  HostKeyAlias lab-gpu\n"
    )
    spec = site.spec(None, address="gpu-01")
    if has_openssh:
        assert "No ED25519 host key is known" in ask_openssh(site, "gpu-01")
    key = await host_key(spec, spec.nodes[0])
    assert key.standing is KeyStatus.UNKNOWN
    remember(key)
    if has_openssh:
        assert ask_openssh(site, "gpu-01") == ""
    assert (await site.backend(None, address="gpu-01").list("n1"))["outcome"] == "done"
    site.known_hosts.write_text(f"lab-gpu {other.read_text()}")
    if has_openssh:
        assert "HAS CHANGED" in ask_openssh(site, "gpu-01")
    key = await host_key(spec, spec.nodes[0])
    assert (key.standing, key.known_as) == (KeyStatus.CHANGED, "lab-gpu")


async def test_aliases_that_0_1_0_wrote_with_a_port_are_known(site: Site) -> None:
    host, other = site.host(known=False), make_key(site.folder / "other").with_suffix(".pub")
    site.config.write_text("Host *\n  HostKeyAlias lab-gpu\n")
    spec, name = site.spec(host), f"[lab-gpu]:{host.port}"
    site.known_hosts.write_text(f"{name} {host.public_keys[0]}")
    assert (await site.backend(host).list("n1"))["outcome"] == "done"
    site.known_hosts.write_text(f"{name} {other.read_text()}")
    key = await host_key(spec, spec.nodes[0])
    assert (key.standing, key.known_as) == (KeyStatus.CHANGED, name)
    site.know(f"lab-gpu {host.public_keys[0]}")
    assert (await host_key(spec, spec.nodes[0])).standing is KeyStatus.KNOWN


async def test_a_refused_login_names_the_user_and_what_was_offered(site: Site) -> None:
    host = site.host()
    other = make_key(site.folder / "other")
    said = await reason(site.backend(host, {"key": str(other)}))
    offered = f"{other} (ED25519 {own_fingerprint(other.with_suffix('.pub').read_text())})"
    assert host.user in said and said.endswith(f"offered {offered}")
    with pytest.raises(NeedsPerson):
        await site.backend(host, user="no-such-user").list("n1")


def close_connection(caller: socket.socket, server: paramiko.Transport) -> None:
    caller.shutdown(socket.SHUT_RDWR)


def reset_connection(caller: socket.socket, server: paramiko.Transport) -> None:
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    caller.close()


def say_farewell(caller: socket.socket, server: paramiko.Transport) -> None:
    """As after too many keys (MaxAuthTries)."""
    server.auth_handler._disconnect_no_more_auth()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (close_connection, "the connection was lost during the authentication: the node closed it"),
        (reset_connection, "the connection was lost during the authentication: the node reset it"),
        (say_farewell, "was refused: offered"),
    ],
)
async def test_a_connection_lost_while_logging_in_is_no_refusal(
    site: Site, end: Callable[[socket.socket, paramiko.Transport], None], said: str
) -> None:
    key = make_key(site.folder / "host_key")

    def serve(caller: socket.socket) -> None:
        class Server(paramiko.ServerInterface):
            def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
                end(caller, server)
                return paramiko.common.AUTH_FAILED

        server = paramiko.Transport(caller)
        server.add_server_key(paramiko.PKey.from_path(key))
        server.start_server(threading.Event(), Server())
        server.join()

    with listener(serve) as (address, port):
        site.know(f"[{address}]:{port} {key.with_suffix('.pub').read_text()}")
        with pytest.raises(Unreachable) as lost:
            await site.backend(None, address=address, port=port).list("n1")
    assert said in lost.value.reason
    assert isinstance(lost.value, NeedsPerson) is (end is say_farewell)


async def test_a_host_that_takes_no_keys_says_what_it_takes(site: Site) -> None:
    host = site.host(PubkeyAuthentication="no", PasswordAuthentication="yes")
    assert (await reason(site.backend(host))).endswith("password")


# --- what does not answer -------------------------------------------------------------------------


async def test_a_name_that_does_not_resolve_is_said_to(site: Site) -> None:
    said = await reason(site.backend(None, address="no-such-node.invalid"))
    assert "'no-such-node.invalid'" in said


async def test_a_refused_connection_is_named_and_not_retried_at_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = site.host(start=False)
    patient, hasty = site.backend(host), site.backend(host)
    said = f"{host.address}:{host.port} refused the connection: nothing listens there"
    # Longer than any machine takes to start the server, and a moment.
    for backend, moment in ((patient, 600.0), (hasty, 1.0)):
        monkeypatch.setattr(ssh_backend, "BACKOFF", (moment, moment))
        monkeypatch.setattr(ssh_backend, "QUICK", moment)
        assert await reason(backend) == said
    host.start()
    assert await reason(patient) == said, "not tried again yet"
    assert host.log.read_text().count("Connection from") == 0
    assert (await reached(lambda: hasty.list("n1")))["outcome"] == "done"
    assert host.logins() == 1


async def test_a_launch_retries_a_node_that_refused_many_connections(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_backend, "BACKOFF", (600.0, 600.0))
    monkeypatch.setattr(ssh_backend, "QUICK", 2.0)
    host = site.host(start=False)
    backend = site.backend(host)
    for _ in range(2):
        assert "refused the connection" in await reason(backend)
    host.start()
    assert (await reached(lambda: backend.list("n1")))["outcome"] == "done"


async def test_a_node_that_stays_away_is_logged_once(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ssh_backend, "BACKOFF", (0.0, 0.0))
    caplog.set_level("INFO", "relaunch.ssh")
    host = site.host(start=False)
    backend = site.backend(host)
    refused = [await reason(backend) for _ in range(3)]
    assert refused[0] == refused[2] and len(caplog.messages) == 1
    backend._failures["n1"] = replace(backend._failures["n1"], until=-math.inf)
    await reason(backend)
    assert len(caplog.messages) == 2
    assert backend._failures["n1"].delay == 2 * ssh_backend.LOG_DELAYS[0]
    host.start()
    await backend.list("n1")
    assert [one.partition(":")[0] for one in caplog.messages] == [
        "node n1 cannot be reached",
        "node n1 cannot be reached",
        "node n1 is reached again",
    ]


async def test_a_node_that_does_not_answer_to_tcp_is_said_not_to(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "TCP", 0.5)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        callers = []
        for _ in range(4):  # until its backlog is full, and it answers no more
            callers.append(socket.socket())
            callers[-1].setblocking(False)
            callers[-1].connect_ex(full.getsockname())
        port = full.getsockname()[1]
        said = await reason(site.backend(None, address="127.0.0.1", port=port))
        for caller in callers:
            caller.close()
    assert said.startswith(f"127.0.0.1:{port} ") and "TCP within 0.5" in said


async def test_a_hung_sshd_answers_to_tcp_and_says_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BANNER", 0.5)
    host = site.host()
    host.signal(signal.SIGSTOP)
    assert "sshd hangs" in await reason(site.backend(host))
    host.signal(signal.SIGCONT)


async def test_a_server_that_turns_logins_away_closes_the_connection(site: Site) -> None:
    host = site.host(MaxStartups="1:100:1", LoginGraceTime="60")
    with socket.create_connection((host.address, host.port)) as first:
        assert first.recv(4) == b"SSH-"
        said = await reason(site.backend(host))
    assert said.startswith(f"{host.address}:{host.port} closed ")
    assert "too many logins" in said


async def test_what_listens_and_is_no_ssh_server_is_said_to_be_none(site: Site) -> None:
    with listener(lambda caller: caller.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 101)) as (
        address,
        port,
    ):
        said = await reason(site.backend(None, address=address, port=port))
        assert f"{address}:{port}" in said and "no SSH server" in said


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", "closed the connection before it said who it is"),
        (b"HTTP/1.1 400 Bad Request\r\n" * 101, "is no SSH server"),
    ],
)
async def test_nodes_trust_says_in_one_sentence_why_it_read_no_key(
    tmp_path: Path, answer: bytes, said: str
) -> None:
    with listener(lambda caller: caller.sendall(answer)) as (address, port):
        fleet = tmp_path / "lab.yaml"
        fleet.write_text(
            "name: lab\nbackend: ssh\nnodes:\n"
            f"  - {{name: n1, address: {address}, port: {port}}}\nssh: {{user: train}}\n"
        )
        done = await starter(tmp_path, "nodes", "trust", "--file", str(fleet))
    assert (done.code, done.err) == (1, ""), "no traceback of paramiko's"
    [line] = done.out.splitlines()
    assert line.startswith("n1: ") and f"{address}:{port} " in line
    assert said in line


async def test_a_login_that_may_run_nothing_is_said_to(site: Site) -> None:
    host = site.host(MaxSessions="0")
    said = await reason(site.backend(host))
    assert host.user in said and "no command" in said


async def test_an_account_without_a_shell_is_reported_with_its_words(site: Site) -> None:
    host = site.host(ForceCommand="echo This account is currently not available.; exit 1")
    said = await reason(site.backend(host))
    assert "with 1: This account" in said


async def test_a_node_without_python_is_said_to_have_none(site: Site) -> None:
    said = await reason(site.backend(site.host(), {"python": "python3.99"}))
    assert "`python3.99`" in said and " 127" in said


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize("version", ["2.7.18", "3.6.15", "3.7.16"])
async def test_a_python_that_is_too_old_is_named_with_its_version(site: Site, version: str) -> None:
    python = Path(f"~/.pyenv/versions/{version}/bin/python").expanduser()
    if not python.exists():
        pytest.skip(f"no Python {version} here")
    said = await reason(site.backend(site.host(), {"python": str(python)}))
    assert version in said and "3.8 or newer" in said


async def test_the_oldest_python_that_is_supported_starts_the_agent(site: Site) -> None:
    python = Path("~/.pyenv/versions/3.8.18/bin/python3.8").expanduser()
    if not python.exists():
        pytest.skip("no Python 3.8 here")
    assert (await site.backend(site.host(), {"python": str(python)}).list("n1"))[
        "outcome"
    ] == "done"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
async def test_a_full_disk_is_reported_and_leaves_nothing_behind(site: Site) -> None:
    host = site.host()
    host.state.mkdir(mode=0o700)
    try:
        run("mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(host.state))
    except subprocess.CalledProcessError:
        pytest.skip("no tmpfs can be mounted here")
    try:
        said = await reason(site.backend(host))
        assert f"{host.state}/agents/" in said
        assert said.endswith(os.strerror(errno.ENOSPC))
        assert list((host.state / "agents").iterdir()) == []
    finally:
        run("umount", str(host.state))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
async def test_a_folder_of_another_user_is_refused(site: Site) -> None:
    host = site.host()
    host.state.mkdir()
    os.chown(host.state, 65534, 65534)
    said = await reason(site.backend(host))
    assert str(host.state) in said and "uid 65534" in said and said.endswith(" 0")
    os.chown(host.state, 0, 0)


# --- jump hosts -----------------------------------------------------------------------------------


@pytest.mark.long
async def test_a_node_behind_two_jump_hosts_is_reached_over_both(site: Site) -> None:
    first, second, host = site.host(), site.host(), site.host()
    way = f"{first.user}@{first.address}:{first.port},{second.address}:{second.port}"
    backend = site.backend(host, {"proxy_jump": way})
    assert (await backend.list("n1"))["outcome"] == "done"
    assert [one.logins() for one in (first, second, host)] == [1, 1, 1]
    assert (
        f"Connection from {second.address}" in host.log.read_text()
        or "Connection from 127.0.0.1" in host.log.read_text()
    )
    key = await host_key(spec := site.spec(host, {"proxy_jump": way}), spec.nodes[0])
    assert key.standing is KeyStatus.KNOWN


async def test_a_failed_jump_host_is_named_and_so_is_a_node_beyond_it(
    site: Site,
) -> None:
    jump, host = site.host(known=False), site.host(start=False)
    way = f"{jump.address}:{jump.port}"
    said = await reason(site.backend(host, {"proxy_jump": way}))
    assert f"jump host {jump.address} failed" in said and "host key" in said
    assert said.endswith(f"then `ssh {jump.address}`")
    site.know(jump.known_hosts)
    said = await reason(site.backend(host, {"proxy_jump": way}))
    assert "jump host" in said and f"{host.address}:{host.port}: " in said
    jump.kill()
    said = await reason(site.backend(host, {"proxy_jump": way}))
    assert f"jump host {jump.address} failed" in said
    assert f"{jump.address}:{jump.port} refused " in said


async def test_a_jump_host_that_hangs_holds_up_no_other_node(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_backend, "CONNECTS", 2)
    for module in (ssh_backend, connection):
        monkeypatch.setattr(module, "BANNER", 600.0)
    asked = threading.Event()

    def hang(caller: socket.socket) -> None:
        asked.set()
        while caller.recv(1024):
            pass

    host = site.host()
    with listener(hang) as (address, port):
        site.config.write_text(f"Host behind-*\n  ProxyJump {address}:{port}\n")
        fleet = site.spec(host).model_dump(exclude_unset=True)
        behind = [f"behind-{number}" for number in range(4)]
        nodes = ({"name": name, "address": name} for name in behind)
        fleet["nodes"] = [*fleet["nodes"], *nodes]
        backend = SshBackend(FleetSpec.model_validate(fleet), site.agent, 30.0)
        site.backends.append(backend)
        waiting = [asyncio.create_task(backend.list(name)) for name in behind]
        await until(asked.is_set, "a login is at the jump host")
        async with asyncio.timeout(60):
            assert (await backend.list("n1"))["outcome"] == "done"
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting)
        await backend.close()


async def test_a_login_that_is_given_up_waits_for_no_turn(site: Site) -> None:
    jump, turn, given_up = site.host(), threading.BoundedSemaphore(1), connection.Connection()
    spec = site.spec(jump, {"proxy_jump": f"{jump.address}:{jump.port}"})
    way = route(spec.ssh, spec.nodes[0], read_config(spec.ssh))
    login = partial(connection.connect, given_up, way, lambda hop: turn)
    turn.acquire()
    waiting = asyncio.create_task(asyncio.to_thread(login))
    try:
        given_up.abort("the worker ends")
        async with asyncio.timeout(60):
            with pytest.raises(connection.ConnectError, match=r"^the worker ends: it waited for "):
                await waiting
    finally:
        turn.release()
    with pytest.raises(connection.ConnectError, match=r"^the jump .* failed: the worker ends$"):
        login()
    assert turn.acquire(blocking=False), "it has ended its turn"


# --- what is wrong before anything is tried -------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "config", "named"),
    [
        (
            {"known_hosts": "/no/such/file"},
            "",
            "ssh: known_hosts: /no/such/file ",
        ),
        ({"key": "/no/such/key"}, "", "ssh: key: /no/such/key "),
        (
            {"config": "/no/such/config"},
            "",
            "ssh: config: /no/such/config ",
        ),
        (
            {},
            "Host *\n  ProxyCommand nc %h %p\n",
            "ProxyCommand for 127.0.0.1",
        ),
        (
            {},
            "Host *\n  Port many\n",
            "port 'many' for 127.0.0.1",
        ),
        (
            {},
            "Host *\n  ProxyJump a\nHost a\n  ProxyJump 127.0.0.1\n",
            "more than 8 hosts",
        ),
    ],
)
async def test_what_the_fleet_file_names_is_looked_at_when_it_is_read(
    site: Site, options: dict[str, str], config: str, named: str
) -> None:
    site.config.write_text(config)
    with pytest.raises(SshConfigError) as refused:
        SshBackend(site.spec(None, options, address="127.0.0.1"), site.agent)
    assert named in str(refused.value)

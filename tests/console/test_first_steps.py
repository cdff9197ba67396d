"""What a new user types first, `nodes trust` and `nodes check --file`.

The SSH servers are real; no server and no worker runs.
"""

from __future__ import annotations

import json
import os
import pty
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.backends.ssh.trust import HostKey, KeyStatus
from relaunch.cli import direct
from relaunch.cli.node_check import CheckResult, CheckRow, can_run_ranks, rows
from relaunch.cli.trust import trust
from relaunch.config import ConfigError
from relaunch.spec.fleet import FleetSpec
from tests.backends.ssh_site import Site, own_fingerprint, python_double, site
from tests.backends.sshd import KINDS, Sshd, eventually, make_key
from tests.console.commands import STARTER, bare_environment

__all__ = ["site"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Hold every server that is installed here against what a new user types first."""
    if "site" in metafunc.fixturenames:
        metafunc.parametrize("site", KINDS, indirect=True)


def fleet_of(site: Site, *hosts: Sshd, **ssh: Any) -> FleetSpec:
    nodes = [
        {"name": f"n{number}", "address": host.address, "port": host.port}
        for number, host in enumerate(hosts, 1)
    ]
    options = {
        "key": str(site.key),
        "known_hosts": str(site.known_hosts),
        "config": str(site.config),
        **ssh,
    }
    return FleetSpec.model_validate(
        {"name": "lab", "backend": "ssh", "nodes": nodes, "ssh": options}
    )


def written(site: Site, spec: FleetSpec) -> Path:
    path = site.folder / "lab.yaml"
    path.write_text(
        json.dumps(spec.model_dump(mode="json", exclude_none=True, exclude_defaults=True))
    )  # JSON is YAML
    return path


async def checked(site: Site, spec: FleetSpec, *names: str) -> list[dict[str, CheckRow]]:
    fleet = await direct.run_preflight(spec, Path("lab.yaml"), names, site.folder / "here")
    return [{row.check: row for row in rows(fleet, seen)} for seen in fleet.nodes]


def starter(site: Site, *words: str) -> subprocess.CompletedProcess[str]:
    environment = bare_environment({"RELAUNCH_STATE": str(site.folder / "here"), "COLUMNS": "200"})
    return subprocess.run(
        [sys.executable, STARTER, *words],
        cwd=site.folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def typed(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def left_behind(host: Sshd) -> list[int]:
    """What a check has started on a host and not ended."""
    mark = f"RELAUNCH_AGENT_STATE={host.state}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and (entry / "comm").read_bytes() == b"relaunch-stay\n"
                and mark in (entry / "environ").read_bytes()
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.long
async def test_two_bare_hosts_are_fine_and_keep_nothing_running(site: Site) -> None:
    hosts = [site.host(), site.host()]
    spec = fleet_of(site, *hosts)
    first = await checked(site, spec)
    assert [
        [row for row in found.values() if row.found is CheckResult.FAIL] for found in first
    ] == [
        [],
        [],
    ]
    assert first[0]["agent"].what.startswith("shipped, ")
    assert "n2" in first[0]["training network"].what.split()
    assert "n1" in first[1]["training network"].what.split()
    assert f"{hosts[0].state}, " in first[0]["state folder"].what
    for host in hosts:
        eventually(
            lambda host=host: not left_behind(host), "what listened is ended when all is seen"
        )
    again = await checked(site, spec, "n2")
    assert again[0]["agent"].what.startswith("already installed, ")
    alone = again[0]["training network"]
    assert alone.found is CheckResult.OK
    assert hosts[1].address in alone.what and "n1" not in alone.what.split()


KILLS = """#!/bin/sh
{python} "$@"
for process in /proc/[0-9]*; do
    if grep -qx relaunch-stay $process/comm && tr '\\0' '\\n' < $process/environ \
| grep -qx "RELAUNCH_AGENT_STATE=$RELAUNCH_AGENT_STATE"
    then kill ${{process#/proc/}}; fi
done 2>/dev/null
"""
"""A double of logind with KillUserProcesses=yes: what was started in a login ends with it."""


@pytest.mark.long
async def test_a_host_that_kills_at_logout_is_detected(site: Site) -> None:
    fine, kills = site.host(), site.host()
    kills.program_named("python3", KILLS.format(python=shlex.quote(sys.executable)))
    first, second = await checked(site, fleet_of(site, fine, kills))
    assert first["logout"].found is CheckResult.OK
    assert second["logout"].found is CheckResult.FAIL
    assert first["training network"].found is CheckResult.WARN
    assert "logout" in first["training network"].fix


@pytest.mark.long
async def test_a_host_down_and_a_host_refusing_login_hide_no_third(
    site: Site,
) -> None:
    fine, down, closed = site.host(), site.host(), site.host()
    down.kill()
    closed.authorized.write_text(make_key(site.folder / "other").with_suffix(".pub").read_text())
    found = await checked(site, fleet_of(site, fine, down, closed))
    assert [can_run_ranks(tuple(each.values())) for each in found] == [True, False, False]
    assert found[1]["reached"].what.startswith(f"{down.address}:{down.port} refused ")
    assert f"-p {down.port}" in found[1]["reached"].fix
    assert str(site.key) in found[2]["reached"].what
    assert "ssh-copy-id" in found[2]["reached"].fix
    assert found[2]["host key"].found is CheckResult.OK


@pytest.mark.long
async def test_a_python_that_is_too_old_is_a_matter_of_the_agent(site: Site) -> None:
    host = site.host()
    line = "\\nrelaunch-agent " + json.dumps(
        {"cannot": "its Python is 3.6.8; expected 3.8 or newer"}
    )
    # As the true one does, it listens before it speaks.
    python_double(host, f"input(); print({line!r}.replace('\\\\n', chr(10)), flush=True)")
    (found,) = await checked(site, fleet_of(site, host))
    assert found["agent"].found is CheckResult.FAIL
    assert "3.6.8" in found["agent"].what
    assert found["reached"].found is CheckResult.OK


@pytest.mark.long
async def test_a_wrong_training_network_is_found_on_the_node_itself(site: Site) -> None:
    host = site.host()
    spec = fleet_of(site, host)
    wrong = spec.model_copy(
        update={"nodes": (spec.nodes[0].model_copy(update={"network": "192.0.2.1"}),)}
    )
    (found,) = await checked(site, wrong)
    assert found["training network"].found is CheckResult.FAIL
    assert "192.0.2.1" in found["training network"].what
    assert "`network:` of n1" in found["training network"].fix


async def test_a_node_that_the_file_does_not_have_is_named(site: Site) -> None:
    with pytest.raises(ConfigError, match=r"^lab\.yaml .*'n7'.* n1$"):
        await checked(site, fleet_of(site, site.host()), "n7")


# --- trust


async def ask_about(
    site: Site, spec: FleetSpec, answer: str | None, yes: bool = False
) -> tuple[bool, list[str]]:
    asked: list[str] = []
    ask: Callable[[str], str] | None = None
    if answer is not None:
        given = answer

        def ask(question: str) -> str:
            asked.append(question)
            return given

    return trust(spec, await direct.read_host_keys(spec, Path("lab.yaml"), ()), yes, ask), asked


async def test_a_key_is_written_down_only_by_a_yes(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    host = site.host(known=False)
    site.known_hosts.unlink()
    spec = fleet_of(site, host)
    for answer in ("", "n", "what?"):
        known, (question,) = await ask_about(site, spec, answer)
        assert not known and " n1? [y/N]" in question
    assert not site.known_hosts.exists()
    assert host.logins() == 0, "nothing is sent to a node whose key is unknown"
    assert (await ask_about(site, spec, "yes"))[0]
    own = own_fingerprint(host.public_keys[0])
    shown = capsys.readouterr().out
    assert f"ED25519 {own}" in shown and str(site.known_hosts) in shown
    assert site.known_hosts.stat().st_mode & 0o777 == 0o600
    assert site.known_hosts.read_text() == host.known_hosts
    assert await ask_about(site, spec, "no") == (True, [])
    (found,) = await checked(site, spec)
    assert can_run_ranks(tuple(found.values()))


@pytest.mark.long
async def test_a_name_is_hashed_where_the_configuration_says_so(site: Site) -> None:
    host = site.host(known=False)
    site.config.write_text("HashKnownHosts yes\n")
    assert (await ask_about(site, fleet_of(site, host), None, yes=True))[0]
    assert host.address not in site.known_hosts.read_text()
    assert (await ask_about(site, fleet_of(site, host), "no")) == (True, [])


async def test_a_changed_key_is_never_replaced_by_any_answer(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    host = site.host()
    host.kill()
    host.host_keys[0].unlink()
    make_key(host.host_keys[0])
    host.start()
    before = site.known_hosts.read_text()
    spec = fleet_of(site, host)
    assert await ask_about(site, spec, "yes", yes=True) == (False, [])
    assert site.known_hosts.read_text() == before
    out = capsys.readouterr().out
    assert "CHANGED" in out and "Nothing was written" in out
    (words,) = [
        line.strip() for line in out.splitlines() if line.strip().startswith("ssh-keygen -R")
    ]
    if shutil.which("ssh-keygen") is None:
        pytest.skip("the last step needs OpenSSH's ssh-keygen")
    typed(*shlex.split(words))
    assert (await ask_about(site, spec, "yes"))[0], "what it says to type is what helps"


async def test_without_a_terminal_nothing_is_asked_or_written(site: Site) -> None:
    host = site.host(known=False)
    file = written(site, fleet_of(site, host))
    done = starter(site, "nodes", "trust", "--file", str(file))
    assert done.returncode == 2
    assert "no terminal" in done.stderr and "--yes" in done.stderr
    assert site.known_hosts.read_text() == ""
    assert starter(site, "nodes", "trust", "n1", "--file", str(file), "--yes").returncode == 0
    assert site.known_hosts.read_text() == host.known_hosts


@pytest.mark.long
async def test_a_jump_host_is_not_stormed_by_many_nodes_behind_it(site: Site) -> None:
    jump = site.host(
        MaxStartups="12:100:12"
    )  # beyond eight: it forgets them a moment after they have logged in
    nodes = [
        {"name": f"n{number:02}", "address": "127.0.0.99", "port": number}
        for number in range(1, 21)
    ]
    ssh = {"key": str(site.key), "known_hosts": str(site.known_hosts), "config": str(site.config)}
    ssh["proxy_jump"] = f"{jump.user}@{jump.address}:{jump.port}"
    spec = FleetSpec.model_validate({"name": "lab", "backend": "ssh", "nodes": nodes, "ssh": ssh})
    found = await direct.read_host_keys(spec, Path("lab.yaml"), ())
    assert all(
        isinstance(one, direct.MissingKey)
        and one.reason.startswith("the jump host")
        and " 127.0.0.99:" in one.reason
        for one in found
    )
    assert jump.logins() == 20


def test_the_page_of_trust_says_what_each_standing_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], page: SnapshotAssertion
) -> None:
    file = str(tmp_path / "known_hosts")
    standings = {
        "gpu-02": (KeyStatus.KNOWN, ""),
        "gpu-03": (KeyStatus.UNKNOWN, "unknown"),
        "gpu-04": (KeyStatus.UNKNOWN, "unknown"),
        "gpu-05": (KeyStatus.CHANGED, "its host key has CHANGED"),
        "gpu-06": (KeyStatus.REVOKED, "its host key is revoked"),
    }
    names = ["gpu-01", *standings]
    nodes = [{"name": name, "address": f"10.0.0.{n}"} for n, name in enumerate(names, 1)]
    spec = FleetSpec.model_validate({"name": "lab", "backend": "ssh", "nodes": nodes})
    keys = [
        direct.MissingKey("gpu-01", "no answer"),
        *(
            HostKey(name, "ED25519", "SHA256:abc", standing, reason, file, f"{name} k", name, "")
            for name, (standing, reason) in standings.items()
        ),
    ]
    answers = {"gpu-03": "no", "gpu-04": "yes"}

    def ask(question: str) -> str:
        print(question)
        return next(answer for name, answer in answers.items() if name in question)

    assert trust(spec, keys, False, ask) is False
    assert Path(file).read_text() == "gpu-04 k\n"
    assert capsys.readouterr().out.replace(str(tmp_path), "~/.ssh") == page


def at_a_terminal(site: Site, answer: str, *words: str) -> tuple[int, str]:
    """Type a command and answer its first question."""
    ours, theirs = pty.openpty()
    environment = bare_environment({"RELAUNCH_STATE": str(site.folder / "here"), "TERM": "dumb"})
    with subprocess.Popen(
        [sys.executable, STARTER, *words],
        cwd=site.folder,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while data := os.read(ours, 4096):
                shown += data
                if shown.endswith(b"[y/N] "):
                    os.write(ours, answer.encode())
        except OSError:  # the other end is closed
            pass
        finally:
            os.close(ours)
    return process.returncode, shown.decode()


@pytest.mark.long
async def test_a_person_at_a_terminal_is_asked(site: Site) -> None:
    host = site.host(known=False)
    file = str(written(site, fleet_of(site, host)))
    for answer in ("\n", "\x04"):  # Enter, and ctrl-D
        code, shown = at_a_terminal(site, answer, "nodes", "trust", "--file", file)
        assert (code, site.known_hosts.read_text()) == (1, ""), shown
        assert "n1: not trusted" in shown
    code, shown = at_a_terminal(site, "y\n", "nodes", "trust", "--file", file)
    assert (code, site.known_hosts.read_text()) == (0, host.known_hosts), shown


# --- the command line


async def test_the_command_says_by_its_exit_code_whether_ranks_can_run(site: Site) -> None:
    host = site.host(known=False)
    file = written(site, fleet_of(site, host))
    unknown = starter(site, "nodes", "check", "--file", str(file), "--json")
    assert unknown.returncode == 1, unknown.stderr
    (told,) = json.loads(unknown.stdout)["nodes"]
    assert (told["name"], told["runs"], [row["check"] for row in told["rows"]]) == (
        "n1",
        False,
        ["host key"],
    )
    site.know(host.known_hosts)
    fine = starter(site, "nodes", "check", "--file", str(file))
    assert fine.returncode == 0, fine.stdout + fine.stderr
    assert f"--fleet {file}" in fine.stdout
    missing = starter(site, "nodes", "check", "--file", str(file), "n9")
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    assert all(word in missing.stderr for word in (str(file), "'n9'", "n1"))


@pytest.mark.long
def test_local_nodes_are_looked_at_as_well_and_have_no_host_keys(tmp_path: Path) -> None:
    file = tmp_path / "laptop.yaml"
    file.write_text(
        "name: laptop\nbackend: local\n"
        "nodes: [{name: a, address: 127.0.0.1}, {name: b, address: 127.0.0.2}]\n"
    )
    environment = bare_environment({"RELAUNCH_STATE": str(tmp_path / "here")})
    words = [sys.executable, STARTER, "nodes"]
    done = subprocess.run(
        [*words, "check", "--file", str(file), "--json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [node["runs"] for node in json.loads(done.stdout)["nodes"]] == [True, True]
    refused = subprocess.run(
        [*words, "trust", "--file", str(file)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (refused.returncode, "host keys" in refused.stderr) == (2, True)


def test_a_check_without_a_node_or_a_file_says_what_it_wants(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, STARTER, "nodes", "check"],
        cwd=tmp_path,
        env=bare_environment({}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "NODE" in done.stderr and "--file FLEET.yaml" in done.stderr


def test_the_commands_that_are_typed_often_do_not_wait_for_ssh(tmp_path: Path) -> None:
    imported = ", ".join(
        f"relaunch.cli.{name}" for name in ("app", "direct", "node_check", "trust")
    )
    program = f"import sys, {imported}; print('paramiko' in sys.modules)"
    root = Path(STARTER).parent
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "False\n", done.stderr

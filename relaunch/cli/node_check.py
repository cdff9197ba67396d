"""Evaluates for `nodes check --file` what was found on the nodes.

It returns a row for each thing that ranks or repairs need, with a fix if something is wrong. It
connects to nothing, and does not know what a training run itself needs (its container, its data,
NCCL).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from relaunch.cli.direct import FleetPreflight, NodePreflight, PreflightStep
from relaunch.cli.terminal import make_console
from relaunch.evidence.catalog import catalog
from relaunch.evidence.findings import Verdict
from relaunch.evidence.health import CLOCK_NAMED, CLOCK_SHOWN, clock_offset, read_health
from relaunch.spec.fleet import FleetNode, FleetSpec, describe_untaken, find_untaken
from relaunch.text import count_noun

GIB = 1 << 30
MIN_FREE_BYTES, RECOMMENDED_FREE_BYTES = 1 * GIB, 10 * GIB
"""Free bytes on the disk of the state folder: below the first is a failure, below the second a
warning. Eight ranks fill 1 GiB in a day of debugging; the agent keeps at most 10 GiB of ended
ones."""
SHARED_FILE_SYSTEMS = (
    "nfs",
    "cifs",
    "smb",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "gluster",
    "afs",
    "9p",
    "panfs",
    "wekafs",
    "orangefs",
    "sshfs",
    "virtiofs",
)
"""Prefixes of the names of file systems that several machines share, after a `fuse.`: locks there
are not local to the node."""
VOLATILE_FILE_SYSTEMS = ("tmpfs", "ramfs")
MAX_NODES_IN_FULL = 3
"""Number of nodes up to which every row is shown; with more nodes, the checks that are ok share a
line."""
MAX_QUOTE_LENGTH = 160


class CheckResult(StrEnum):
    OK = "ok"
    WARN = "warn"
    """Ranks can run; something else cannot, such as a repair."""
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class CheckRow:
    check: str
    found: CheckResult
    what: str
    fix: str = ""
    """One sentence; empty if there is nothing to do."""


def rows(fleet: FleetPreflight, seen: NodePreflight) -> tuple[CheckRow, ...]:
    return tuple(_check_node(fleet, seen))


def can_run_ranks(found: Sequence[CheckRow]) -> bool:
    return all(row.found is not CheckResult.FAIL for row in found)


def _check_node(fleet: FleetPreflight, seen: NodePreflight) -> Iterator[CheckRow]:
    ssh = fleet.spec.backend == "ssh"
    if ssh:
        yield from _check_login(fleet, seen)
    if seen.step in (PreflightStep.KEY, PreflightStep.LOGIN):
        if not ssh:
            yield CheckRow(
                "agent",
                CheckResult.FAIL,
                seen.reason,
                "run this with the Python that relaunch was set up with (`make setup`)",
            )
        return
    if seen.step is PreflightStep.AGENT:
        fix = (
            "the agent needs Python 3.8 or newer and a folder that it can write; to use another "
            f"Python, write `ssh: {{python: /usr/bin/python3.11}}` in {fleet.file}"
        )
        yield CheckRow("agent", CheckResult.FAIL, seen.reason, fix)
        return
    if ssh:
        how = f"shipped, {seen.shipped / 1024:.0f} KiB" if seen.shipped else "already installed"
        yield CheckRow("agent", CheckResult.OK, f"{how}, version {fleet.version}")
    if not seen.facts:
        yield CheckRow("agent", CheckResult.FAIL, seen.reason, _suggest_recheck(seen))
        return
    facts = seen.facts
    yield CheckRow(
        "python",
        CheckResult.OK,
        f"{facts.get('python')}, {facts.get('executable')}, as {facts.get('user')}",
    )
    yield from _check_state_folder(facts, seen.probe)
    if not seen.probe:
        yield CheckRow("health", CheckResult.WARN, seen.reason, _suggest_recheck(seen))
    else:
        if ssh:
            yield from _check_clock(seen.probe)
        gpus = tuple(_check_gpus(seen))
        yield from gpus
        yield from _check_health(seen, not can_run_ranks(gpus))
    if seen.node.gpus:
        yield from _check_tools(facts)
    if ssh:
        yield from _check_powers(fleet.spec, seen)
        yield _check_logout(seen)
        yield from _check_host_name(fleet, facts)
    yield _check_network(fleet, seen)


def _suggest_recheck(seen: NodePreflight) -> str:
    return (
        f"check again; if it persists, read the system log of {seen.node.name}: the login worked, "
        "but the agent did not answer"
    )


# --- the way there


def command(spec: FleetSpec, node: FleetNode) -> str:
    """Return the ssh command line that a person types to connect the same way."""
    words = ["ssh"]
    for flag, value in (
        ("-F", spec.ssh.config),
        ("-i", spec.ssh.key),
        ("-J", spec.ssh.proxy_jump),
        ("-p", node.port or spec.ssh.port),
        ("-l", node.user or spec.ssh.user),
    ):
        words += [flag, str(value)] if value is not None else []
    return " ".join(
        word if word.startswith("~/") else shlex.quote(word) for word in [*words, node.address]
    )


def _check_login(fleet: FleetPreflight, seen: NodePreflight) -> Iterator[CheckRow]:
    key, typed = seen.key, command(fleet.spec, seen.node)
    if key is None:
        yield CheckRow(
            "reached",
            CheckResult.FAIL,
            seen.reason,
            f"make `{typed}` work from here, then check again",
        )
        return
    if seen.step is PreflightStep.LOGIN:
        fix = (
            f"`{typed} true` has to work without a prompt: add your public key to "
            "~/.ssh/authorized_keys there (`ssh-copy-id`)"
        )
        yield CheckRow("reached", CheckResult.FAIL, seen.reason, fix)
    elif seen.step is not PreflightStep.KEY:
        ours = (
            f"logged in and answered in {seen.connected:.2f} s, then in "
            f"{seen.round_trip * 1000:.0f} ms"
        )
        yield CheckRow(
            "reached",
            CheckResult.OK,
            ours if seen.step is not PreflightStep.AGENT else f"logged in to {seen.node.address}",
        )
    words = f"{key.algorithm} {key.fingerprint}"
    if not key.reason:
        yield CheckRow("host key", CheckResult.OK, f"{words}, known")
    elif key.standing == "unknown":
        theirs = f"`ssh-keygen -lf /etc/ssh/ssh_host_{key.algorithm.lower()}_key.pub` there"
        fix = (
            f"compare it with what {theirs} prints, then `relaunch nodes trust {key.node} --file "
            f"{fleet.file}`"
        )
        yield CheckRow("host key", CheckResult.FAIL, f"{words} is not in {key.file}", fix)
    else:
        yield CheckRow(
            "host key",
            CheckResult.FAIL,
            key.reason,
            f"`relaunch nodes trust {key.node} --file {fleet.file}` explains what that may mean",
        )


# --- the node


def _check_state_folder(facts: Mapping[str, Any], probe: Mapping[str, Any]) -> Iterator[CheckRow]:
    state = facts.get("state")
    place = state if isinstance(state, Mapping) else {}
    kind, path = (
        str(place.get("type") or "unknown file system"),
        str(place.get("path")),
    )
    disks = probe.get("disks")
    disk = disks[0] if isinstance(disks, list) and disks and isinstance(disks[0], Mapping) else {}
    free = disk.get("free") if isinstance(disk.get("free"), int) else None
    words = f"{path}, {kind}" + (f", {free / GIB:.0f} GiB free" if free is not None else "")
    elsewhere = (
        "or set RELAUNCH_AGENT_STATE to one for this user (`SetEnv` in the node's sshd_config)"
    )
    if kind.removeprefix("fuse.").startswith(SHARED_FILE_SYSTEMS):
        yield CheckRow(
            "state folder",
            CheckResult.FAIL,
            f"{words}: shared by several machines",
            f"mount a disk of the node itself at /var/tmp, {elsewhere}",
        )
    elif disk and disk.get("writable") is False:
        yield CheckRow(
            "state folder",
            CheckResult.FAIL,
            f"{words}: {disk.get('reason')}",
            f"make it writable, {elsewhere}",
        )
    elif free is not None and free < MIN_FREE_BYTES:
        yield CheckRow(
            "state folder",
            CheckResult.FAIL,
            words,
            f"free at least {MIN_FREE_BYTES // GIB} GiB: logs of ranks are written there",
        )
    elif kind in VOLATILE_FILE_SYSTEMS:
        forgets = f"{words}: a reboot deletes logs and the record of stopped generations"
        yield CheckRow(
            "state folder", CheckResult.WARN, forgets, f"mount a disk at /var/tmp, {elsewhere}"
        )
    elif free is not None and free < RECOMMENDED_FREE_BYTES:
        yield CheckRow(
            "state folder",
            CheckResult.WARN,
            words,
            f"free {RECOMMENDED_FREE_BYTES // GIB} GiB, or make ranks print less: their logs are "
            "written there",
        )
    else:
        yield CheckRow("state folder", CheckResult.OK, words)


def _check_clock(probe: Mapping[str, Any]) -> Iterator[CheckRow]:
    known = clock_offset(probe)
    if known is None:
        return
    offset, within = known
    words = f"{offset:+.2f} s (±{within:.2f} s)"
    far = abs(offset) - within
    fix = "enable time synchronisation there (`timedatectl set-ntp true`, or chrony)"
    if far > CLOCK_NAMED:
        yield CheckRow(
            "clock", CheckResult.WARN, f"{words}: certificates and tokens may be refused", fix
        )
    elif far > CLOCK_SHOWN:
        yield CheckRow(
            "clock", CheckResult.WARN, f"{words}: the logs of several nodes will not line up", fix
        )
    else:
        yield CheckRow("clock", CheckResult.OK, words)


def _check_gpus(seen: NodePreflight) -> Iterator[CheckRow]:
    answer, expected = seen.probe.get("gpus"), seen.node.gpus
    read = answer if isinstance(answer, Mapping) else {}
    listed = read.get("gpus")
    if not isinstance(listed, list):
        if expected:
            why = str(read.get("unreadable", "NVML reported no error"))
            fix = (
                "install NVIDIA's driver there, or write `gpus: 0` in the fleet file if the node "
                "has none"
            )
            yield CheckRow(
                "GPUs",
                CheckResult.FAIL,
                f"none can be read, the fleet file expects {expected}: {why}",
                fix,
            )
        return
    lost = sum(1 for each in listed if isinstance(each, Mapping) and "lost" in each)
    words = f"{len(listed) - lost} of {expected} (driver {read.get('driver')})"
    if len(listed) - lost < expected:
        fix = (
            "`nvidia-smi` there shows which GPU is missing; reboot the node, or write `gpus: "
            f"{len(listed) - lost}` in the fleet file"
        )
        yield CheckRow("GPUs", CheckResult.FAIL, words, fix)
    elif len(listed) > expected:
        yield CheckRow(
            "GPUs",
            CheckResult.WARN,
            f"{words}: the others are not given to jobs",
            f"write `gpus: {len(listed)}` in the fleet file",
        )
    else:
        yield CheckRow("GPUs", CheckResult.OK, words)


def _check_health(seen: NodePreflight, without_gpus: bool) -> Iterator[CheckRow]:
    health = read_health(seen.probe, None, expected_gpus=seen.node.gpus, level=0, catalog=catalog())
    kernel = seen.probe.get("kernel")
    if isinstance(kernel, Mapping) and "unreadable" in kernel:
        fix = (
            "`sysctl kernel.dmesg_restrict=0` there (and in /etc/sysctl.d), or log in as root: "
            "without it relaunch sees no Xid"
        )
        yield CheckRow(
            "kernel log", CheckResult.WARN, str(kernel["unreadable"])[:MAX_QUOTE_LENGTH], fix
        )
    if health.verdict is Verdict.UNHEALTHY:
        yield CheckRow(
            "health",
            CheckResult.FAIL,
            health.reason,
            "repair or replace the node, or leave it out of the fleet file: docs/nodes.md "
            "explains each finding",
        )
    elif health.verdict is Verdict.HEALTHY or not without_gpus:  # else the GPUs row says it
        found = CheckResult.OK if health.verdict is Verdict.HEALTHY else CheckResult.WARN
        yield CheckRow(
            "health",
            found,
            f"{health.verdict}: {health.reason}",
            "" if found is CheckResult.OK else "fix what cannot be read, then check again",
        )


def _check_tools(facts: Mapping[str, Any]) -> Iterator[CheckRow]:
    needed = {
        "nvidia-smi": (
            "nvidia_smi",
            "without it relaunch cannot reset GPUs",
            "install the tools of NVIDIA's driver there (nvidia-utils)",
        ),
        "dcgmi": (
            "dcgmi",
            "without it a node is examined with NVML and its kernel log only",
            "install datacenter-gpu-manager there and start nvidia-dcgm, or write `dcgm_level: 0` "
            "into policies",
        ),
    }
    for name, (key, without, fix) in needed.items():
        answer = facts.get(key)
        tried = answer if isinstance(answer, Mapping) else {}
        if "missing" in tried:
            yield CheckRow(name, CheckResult.WARN, f"{tried['missing']}: {without}", fix)
        elif tried.get("exit_code") != 0:
            said = " ".join(str(tried.get("said", "")).split())[:MAX_QUOTE_LENGTH]
            yield CheckRow(
                name,
                CheckResult.WARN,
                f"{tried.get('path')} ended with {tried.get('exit_code')}: {said}",
                fix,
            )
        else:
            yield CheckRow(name, CheckResult.OK, str(tried.get("path")))


# --- what it lets us do


def _check_powers(spec: FleetSpec, seen: NodePreflight) -> Iterator[CheckRow]:
    """Yield what a repair may do on the node.

    A missing right is a warning only if the fleet file asks for sudo.
    """
    user = str(seen.facts.get("user"))
    for check, key in (("reboot", "reboot"), ("GPU reset", "gpu_reset")):
        answer = seen.facts.get(key)
        if not isinstance(answer, Mapping):
            continue
        typed, by_sudo = str(answer.get("command")), bool(answer.get("sudo"))
        if "missing" in answer:
            missing = str(answer["missing"])
            fix = (
                f"install {missing} there, or log in as root"
                if missing == "sudo"
                else f"install {missing.rpartition('/')[2]} there"
            )
            yield CheckRow(check, CheckResult.WARN, f"{missing} is not on this node's PATH", fix)
        elif "allows" in answer:
            yield CheckRow(
                check,
                CheckResult.WARN,
                f"{user} can write any file as root: sudo would also run `{answer['allows']}`",
                f"`visudo -f /etc/sudoers.d/relaunch` there, and in place of that line write "
                f"`{_write_sudoers_rule(user, key, typed)}`",
            )
        elif "cannot" not in answer:
            yield CheckRow(
                check,
                CheckResult.OK,
                f"{'sudo would run' if by_sudo else f'{user} may run'} `{typed}`",
            )
        elif by_sudo:
            fix = (
                "`visudo -f /etc/sudoers.d/relaunch` there, and write "
                f"`{_write_sudoers_rule(user, key, typed)}`"
            )
            yield CheckRow(
                check,
                CheckResult.WARN,
                " ".join(str(answer["cannot"]).split())[: 2 * MAX_QUOTE_LENGTH],
                fix,
            )
        elif not spec.ssh.sudo:
            never = "a node is never rebooted" if key == "reboot" else "no GPU is reset"
            yield CheckRow(
                check,
                CheckResult.OK,
                f"not requested: {user} is not root and the fleet file says `sudo: false`, so "
                f"{never}",
            )
        else:
            yield CheckRow(
                check,
                CheckResult.WARN,
                str(answer["cannot"])[: 2 * MAX_QUOTE_LENGTH],
                "check again: the agent did not yet know that it may use sudo",
            )


def _write_sudoers_rule(user: str, key: str, typed: str) -> str:
    """Return a line for sudoers, which requires absolute paths.

    The arguments are a regular expression, for sudo 1.9.10 and newer: a `*` would also match other
    options, and some options of nvidia-smi write files as root.
    """
    words = typed if typed.startswith("/") else f"/usr/bin/{typed}"
    program = words.split(" ", maxsplit=1)[0]
    return f"{user} ALL=(root) NOPASSWD: " + (
        words if key == "reboot" else f"{program} ^--gpu-reset( -i [0-9A-Fa-f:.,]+)?$"
    )


def _check_logout(seen: NodePreflight) -> CheckRow:
    """Return whether ranks survive the end of the connection that started them.

    This is tried out with a test process, not read from a configuration.
    """
    if seen.second_login is None:
        return CheckRow(
            "logout",
            CheckResult.WARN,
            f"not tested, there was no second login: {seen.reason}",
            "check again",
        )
    if not seen.test_process:
        return CheckRow(
            "logout",
            CheckResult.WARN,
            "not tested: no test process could be left running there",
            "see training network",
        )
    if seen.second_login.get("lives"):
        return CheckRow("logout", CheckResult.OK, "processes survive the logout")
    user, session = seen.facts.get("user"), seen.facts.get("session")
    what = "processes end with the login session: ranks would die with every lost connection"
    if session:
        fix = (
            f"write `[Login]` and `KillExcludeUsers=root {user}` into "
            "/etc/systemd/logind.conf.d/relaunch.conf there, then "
            "`systemctl restart systemd-logind` (lingering alone does not help: docs/ssh.md)"
        )
        return CheckRow("logout", CheckResult.FAIL, f"{what} (logind, {session})", fix)
    return CheckRow(
        "logout",
        CheckResult.FAIL,
        what,
        "find out what kills processes at logout there (PAM modules, cron jobs, a batch system) "
        "and exempt this user",
    )


def _check_host_name(fleet: FleetPreflight, facts: Mapping[str, Any]) -> Iterator[CheckRow]:
    host = facts.get("host")
    found = host if isinstance(host, Mapping) else {}
    if not found.get("loopback") or len(fleet.spec.nodes) < 2:
        return
    name = found.get("name")
    yield CheckRow(
        "host name",
        CheckResult.WARN,
        f"this host's own name resolves to loopback ({found['loopback']} for {name} in "
        "/etc/hosts): gloo tells ranks of other nodes to connect to that, and they cannot",
        f"write the address that other nodes have for {name} into that line of /etc/hosts there, "
        "or set `env: {GLOO_SOCKET_IFNAME: …}` in the job file",
    )


def _check_network(fleet: FleetPreflight, seen: NodePreflight) -> CheckRow:
    left = seen.facts.get("left")
    listens = left if isinstance(left, Mapping) else {}
    if not seen.test_process:
        reason = str(listens.get("cannot", "the test process is no longer running"))
        fix = (
            f"`network:` of {seen.node.name} in {fleet.file} has to be an address of the node "
            "itself (`ip -brief address` there)"
        )
        return CheckRow("training network", CheckResult.FAIL, reason, fix)
    here = f"listens at {listens.get('address')}"
    met = None if seen.second_login is None else seen.second_login.get("met")
    if not isinstance(met, Mapping):
        alone = (
            "no other node to connect to: check two or more nodes"
            if not seen.neighbour
            else "not tried"
        )
        return CheckRow("training network", CheckResult.OK, f"{here}; {alone}")
    if "cannot" not in met:
        return CheckRow(
            "training network",
            CheckResult.OK,
            f"{here}, reaches {seen.neighbour} in {float(met.get('took', 0)) * 1000:.1f} ms",
        )
    other = next((one for one in fleet.nodes if one.node.name == seen.neighbour), None)
    if (
        other is not None
        and other.second_login is not None
        and other.second_login.get("lives") is False
    ):
        return CheckRow(
            "training network",
            CheckResult.WARN,
            f"{here}; the test process on {seen.neighbour} has ended",
            "fix the logout of that node first",
        )
    fix = (
        "allow TCP on all ports above 1023 between the nodes, or set `network:` of "
        f"{seen.neighbour} in {fleet.file}"
    )
    return CheckRow(
        "training network",
        CheckResult.FAIL,
        f"does not reach {seen.neighbour}: {met['cannot']}",
        fix,
    )


# --- for people and for scripts


def view(fleet: FleetPreflight) -> dict[str, Any]:
    """Return the value of `nodes check --file FILE --json`; its keys are a stable interface."""
    found = [(seen.node.name, rows(fleet, seen)) for seen in fleet.nodes]
    return {
        "fleet": fleet.spec.name,
        "agent": fleet.version,
        "nodes": [
            {"name": name, "runs": can_run_ranks(each), "rows": [asdict(row) for row in each]}
            for name, each in found
        ],
    }


def print_rows(fleet: FleetPreflight, everything: bool) -> None:
    from rich.table import Table

    found = [(seen.node.name, rows(fleet, seen)) for seen in fleet.nodes]
    out = make_console(soft_wrap=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("NODE", "CHECK", "", "WHAT, AND WHAT TO DO"):
        table.add_column(title, no_wrap=title != "WHAT, AND WHAT TO DO", overflow="fold")
    colours = {CheckResult.OK: "green", CheckResult.WARN: "yellow", CheckResult.FAIL: "bold red"}
    for name, each in found:
        fine = [row for row in each if row.found is CheckResult.OK]
        whole = everything or len(found) <= MAX_NODES_IN_FULL
        first = True
        for row in each if whole else [row for row in each if row.found is not CheckResult.OK]:
            what = f"{row.what}\n→ {row.fix}" if row.fix else row.what
            table.add_row(
                name if first else "", row.check, _style(row.found, colours[row.found]), what
            )
            first = False
        if not whole and fine:
            names = ", ".join(row.check for row in fine)
            table.add_row(
                name if first else "",
                count_noun(len(fine), "other") if not first else "all",
                _style(CheckResult.OK, "green"),
                names,
            )
    out.print(table)
    out.print("\n" + verdict(fleet))
    if fleet.spec.notify and (untaken := find_untaken(fleet.spec.notify)):
        out.print(f"Of notify: no channel takes {describe_untaken(untaken)}")


def _style(found: CheckResult, colour: str) -> Any:
    from rich.text import Text

    return Text(str(found), style=colour)


def verdict(fleet: FleetPreflight) -> str:
    bad = [seen.node.name for seen in fleet.nodes if not can_run_ranks(rows(fleet, seen))]
    count = len(fleet.nodes)
    if not bad:
        many = f"all {count} nodes can" if count > 1 else f"{fleet.nodes[0].node.name} can"
        return f"{many} run ranks. Next: relaunch up --fleet {fleet.file}"
    can = f"{count - len(bad)} of {count_noun(count, 'node')} can"
    return f"{can} run ranks; these cannot: {', '.join(bad)}"

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

from relaunch.cli.direct import Fleet, Seen, Step
from relaunch.evidence.catalog import catalog
from relaunch.evidence.findings import Verdict
from relaunch.evidence.health import CLOCK_NAMED, CLOCK_SHOWN, clock_offset, read_health
from relaunch.spec.fleet import FleetNode, FleetSpec
from relaunch.text import count_noun

GIB = 1 << 30
FREE_LEAST, FREE_ENOUGH = 1 * GIB, 10 * GIB
"""Free bytes on the disk of the state folder: below the first is a failure, below the second a
warning. Eight ranks fill 1 GiB in a day of debugging; the agent keeps at most 10 GiB of ended
ones."""
SHARED = (
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
FORGETFUL = ("tmpfs", "ramfs")
SHOWN_WHOLE = 3
"""Number of nodes up to which every row is shown; with more nodes, the checks that are ok share a
line."""
SAID = 160


class Found(StrEnum):
    OK = "ok"
    WARN = "warn"
    """Ranks can run; something else cannot, such as a repair."""
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Row:
    check: str
    found: Found
    what: str
    fix: str = ""
    """One sentence; empty if there is nothing to do."""


def rows(fleet: Fleet, seen: Seen) -> tuple[Row, ...]:
    return tuple(_rows(fleet, seen))


def runs(found: Sequence[Row]) -> bool:
    return all(row.found is not Found.FAIL for row in found)


def _rows(fleet: Fleet, seen: Seen) -> Iterator[Row]:
    ssh = fleet.spec.backend == "ssh"
    if ssh:
        yield from _reached(fleet, seen)
    if seen.step in (Step.KEY, Step.LOGIN):
        if not ssh:
            yield Row(
                "agent",
                Found.FAIL,
                seen.reason,
                "run this with the Python that relaunch was set up with (`make setup`)",
            )
        return
    if seen.step is Step.AGENT:
        fix = f"it wants Python 3.8 or newer and a folder of its own; {fleet.file} may name another: `ssh: {{python: /usr/bin/python3.11}}`"
        yield Row("agent", Found.FAIL, seen.reason, fix)
        return
    if ssh:
        how = f"shipped, {seen.shipped / 1024:.0f} KiB" if seen.shipped else "was there"
        yield Row("agent", Found.OK, f"{how}, version {fleet.version}")
    if not seen.facts:
        yield Row("agent", Found.FAIL, seen.reason, _again(seen))
        return
    facts = seen.facts
    yield Row(
        "python",
        Found.OK,
        f"{facts.get('python')}, {facts.get('executable')}, as {facts.get('user')}",
    )
    yield from _state(facts, seen.probe)
    if not seen.probe:
        yield Row("health", Found.WARN, seen.reason, _again(seen))
    else:
        if ssh:
            yield from _clock(seen.probe)
        gpus = tuple(_gpus(seen))
        yield from gpus
        yield from _health(seen, not runs(gpus))
    if seen.node.gpus:
        yield from _tools(facts)
    if ssh:
        yield from _powers(fleet.spec, seen)
        yield _logout(seen)
    yield _network(fleet, seen)


def _again(seen: Seen) -> str:
    return f"check again, and look into the node's system log if it stays: {seen.node.name} was logged in to and did not answer"


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


def _reached(fleet: Fleet, seen: Seen) -> Iterator[Row]:
    key, typed = seen.key, command(fleet.spec, seen.node)
    if key is None:
        yield Row(
            "reached", Found.FAIL, seen.reason, f"make `{typed}` work from here, then check again"
        )
        return
    if seen.step is Step.LOGIN:
        fix = f"`{typed} true` has to work without a question: its public key belongs into ~/.ssh/authorized_keys there (`ssh-copy-id`)"
        yield Row("reached", Found.FAIL, seen.reason, fix)
    elif seen.step is not Step.KEY:
        ours = f"logged in and answered in {seen.connected:.2f} s, then in {seen.round_trip * 1000:.0f} ms"
        yield Row(
            "reached",
            Found.OK,
            ours if seen.step is not Step.AGENT else f"logged in to {seen.node.address}",
        )
    words = f"{key.algorithm} {key.fingerprint}"
    if not key.reason:
        yield Row("host key", Found.OK, f"{words}, known")
    elif key.standing == "unknown":
        theirs = f"`ssh-keygen -lf /etc/ssh/ssh_host_{key.algorithm.lower()}_key.pub` there"
        fix = f"compare it with what {theirs} prints, then `relaunch nodes trust {key.node} --file {fleet.file}`"
        yield Row("host key", Found.FAIL, f"{words} is not in {key.file}", fix)
    else:
        yield Row(
            "host key",
            Found.FAIL,
            key.reason,
            f"`relaunch nodes trust {key.node} --file {fleet.file}` says what that may mean",
        )


# --- the node


def _state(facts: Mapping[str, Any], probe: Mapping[str, Any]) -> Iterator[Row]:
    state = facts.get("state")
    place = state if isinstance(state, Mapping) else {}
    kind, path = (
        str(place.get("type") or "a file system that cannot be told"),
        str(place.get("path")),
    )
    disks = probe.get("disks")
    disk = disks[0] if isinstance(disks, list) and disks and isinstance(disks[0], Mapping) else {}
    free = disk.get("free") if isinstance(disk.get("free"), int) else None
    words = f"{path}, {kind}" + (f", {free / GIB:.0f} GiB free" if free is not None else "")
    elsewhere = (
        "or set RELAUNCH_AGENT_STATE to one for this user (`SetEnv` in the node's sshd_config)"
    )
    if kind.removeprefix("fuse.").startswith(SHARED):
        yield Row(
            "state folder",
            Found.FAIL,
            f"{words}: several machines see it",
            f"mount a disk of the node itself at /var/tmp, {elsewhere}",
        )
    elif disk and disk.get("writable") is False:
        yield Row(
            "state folder",
            Found.FAIL,
            f"{words}: {disk.get('reason')}",
            f"make it writable, {elsewhere}",
        )
    elif free is not None and free < FREE_LEAST:
        yield Row(
            "state folder",
            Found.FAIL,
            words,
            f"free {FREE_LEAST // GIB} GiB at least: logs of ranks are written there",
        )
    elif kind in FORGETFUL:
        forgets = f"{words}: it forgets at a reboot which generations were stopped, and logs"
        yield Row("state folder", Found.WARN, forgets, f"mount a disk at /var/tmp, {elsewhere}")
    elif free is not None and free < FREE_ENOUGH:
        yield Row(
            "state folder",
            Found.WARN,
            words,
            f"free {FREE_ENOUGH // GIB} GiB, or have ranks print less: their logs are written there",
        )
    else:
        yield Row("state folder", Found.OK, words)


def _clock(probe: Mapping[str, Any]) -> Iterator[Row]:
    known = clock_offset(probe)
    if known is None:
        return
    offset, within = known
    words = f"{offset:+.2f} s (±{within:.2f} s)"
    far = abs(offset) - within
    fix = "switch time synchronisation on there (`timedatectl set-ntp true`, or chrony)"
    if far > CLOCK_NAMED:
        yield Row("clock", Found.WARN, f"{words}: certificates and tokens may be refused", fix)
    elif far > CLOCK_SHOWN:
        yield Row("clock", Found.WARN, f"{words}: the logs of several nodes will not line up", fix)
    else:
        yield Row("clock", Found.OK, words)


def _gpus(seen: Seen) -> Iterator[Row]:
    answer, expected = seen.probe.get("gpus"), seen.node.gpus
    read = answer if isinstance(answer, Mapping) else {}
    listed = read.get("gpus")
    if not isinstance(listed, list):
        if expected:
            why = str(read.get("unreadable", "NVML did not say"))
            fix = "install NVIDIA's driver there, or write `gpus: 0` if the node has none"
            yield Row(
                "GPUs", Found.FAIL, f"none can be read, the fleet file says {expected}: {why}", fix
            )
        return
    lost = sum(1 for each in listed if isinstance(each, Mapping) and "lost" in each)
    words = f"{len(listed) - lost} of {expected} (driver {read.get('driver')})"
    if len(listed) - lost < expected:
        fix = f"`nvidia-smi` there shows which is missing; reboot the node, or write `gpus: {len(listed) - lost}`"
        yield Row("GPUs", Found.FAIL, words, fix)
    elif len(listed) > expected:
        yield Row(
            "GPUs",
            Found.WARN,
            f"{words}: the others are given to nobody",
            f"write `gpus: {len(listed)}` in the fleet file",
        )
    else:
        yield Row("GPUs", Found.OK, words)


def _health(seen: Seen, without_gpus: bool) -> Iterator[Row]:
    health = read_health(seen.probe, None, expected_gpus=seen.node.gpus, level=0, catalog=catalog())
    kernel = seen.probe.get("kernel")
    if isinstance(kernel, Mapping) and "unreadable" in kernel:
        fix = "`sysctl kernel.dmesg_restrict=0` there (and in /etc/sysctl.d), or log in as root: without it no Xid is seen"
        yield Row("kernel log", Found.WARN, str(kernel["unreadable"])[:SAID], fix)
    if health.verdict is Verdict.UNHEALTHY:
        yield Row(
            "health",
            Found.FAIL,
            health.reason,
            "repair or replace the node, or leave it out of the fleet file: docs/nodes.md says what each means",
        )
    elif health.verdict is Verdict.HEALTHY or not without_gpus:  # else the GPUs row says it
        found = Found.OK if health.verdict is Verdict.HEALTHY else Found.WARN
        yield Row(
            "health",
            found,
            f"{health.verdict}: {health.reason}",
            "" if found is Found.OK else "mend what cannot be read, then check again",
        )


def _tools(facts: Mapping[str, Any]) -> Iterator[Row]:
    needed = {
        "nvidia-smi": (
            "nvidia_smi",
            "without it no GPU is reset",
            "install the tools of NVIDIA's driver there (nvidia-utils)",
        ),
        "dcgmi": (
            "dcgmi",
            "without it a node is examined by NVML and its kernel log only",
            "install datacenter-gpu-manager there and start nvidia-dcgm, or write `dcgm_level: 0` into policies",
        ),
    }
    for name, (key, without, fix) in needed.items():
        answer = facts.get(key)
        tried = answer if isinstance(answer, Mapping) else {}
        if "missing" in tried:
            yield Row(name, Found.WARN, f"{tried['missing']}: {without}", fix)
        elif tried.get("exit_code") != 0:
            said = " ".join(str(tried.get("said", "")).split())[:SAID]
            yield Row(
                name,
                Found.WARN,
                f"{tried.get('path')} ended with {tried.get('exit_code')}: {said}",
                fix,
            )
        else:
            yield Row(name, Found.OK, str(tried.get("path")))


# --- what it lets us do


def _powers(spec: FleetSpec, seen: Seen) -> Iterator[Row]:
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
            yield Row(check, Found.WARN, f"{missing} is not on this node's PATH", fix)
        elif "cannot" not in answer:
            yield Row(
                check, Found.OK, f"{'sudo would run' if by_sudo else f'{user} may run'} `{typed}`"
            )
        elif by_sudo:
            fix = (
                f"`visudo -f /etc/sudoers.d/relaunch` there, and write `{_rule(user, key, typed)}`"
            )
            yield Row(check, Found.WARN, " ".join(str(answer["cannot"]).split())[: 2 * SAID], fix)
        elif not spec.ssh.sudo:
            never = "a node is never rebooted" if key == "reboot" else "no GPU is reset"
            yield Row(
                check,
                Found.OK,
                f"not asked for: {user} is not root and the fleet file says `sudo: false`, so {never}",
            )
        else:
            yield Row(
                check,
                Found.WARN,
                str(answer["cannot"])[: 2 * SAID],
                "check again: the agent was not told that it may use sudo",
            )


def _rule(user: str, key: str, typed: str) -> str:
    """Return a line for sudoers, which requires absolute paths."""
    words = typed if typed.startswith("/") else f"/usr/bin/{typed}"
    program = words.split(" ", maxsplit=1)[0]
    return f"{user} ALL=(root) NOPASSWD: " + (
        words if key == "reboot" else f"{program} --gpu-reset, {program} --gpu-reset -i *"
    )


def _logout(seen: Seen) -> Row:
    """Return whether ranks survive the end of the connection that started them.

    This is tried out with a test process, not read from a configuration.
    """
    if seen.again is None:
        return Row(
            "logout",
            Found.WARN,
            f"not seen, there was no second login: {seen.reason}",
            "check again",
        )
    if not seen.left:
        return Row(
            "logout",
            Found.WARN,
            "not seen: nothing could be left running there",
            "see training network",
        )
    if seen.again.get("lives"):
        return Row("logout", Found.OK, "what was started stays")
    user, session = seen.facts.get("user"), seen.facts.get("session")
    what = "what was started ends with the login: ranks would die with every lost connection"
    if session:
        fix = (
            f"write `[Login]` and `KillExcludeUsers=root {user}` into /etc/systemd/logind.conf.d/relaunch.conf there, then "
            "`systemctl restart systemd-logind` (lingering alone does not help: docs/ssh.md)"
        )
        return Row("logout", Found.FAIL, f"{what} (logind, {session})", fix)
    return Row(
        "logout",
        Found.FAIL,
        what,
        "find out what kills processes at logout there (PAM modules, cron jobs, a batch system) and except this user",
    )


def _network(fleet: Fleet, seen: Seen) -> Row:
    left = seen.facts.get("left")
    listens = left if isinstance(left, Mapping) else {}
    if not seen.left:
        reason = str(listens.get("cannot", "what was left running is not there any more"))
        fix = f"`network:` of {seen.node.name} in {fleet.file} has to be an address that the node itself has (`ip -brief address` there)"
        return Row("training network", Found.FAIL, reason, fix)
    here = f"listens at {listens.get('address')}"
    met = None if seen.again is None else seen.again.get("met")
    if not isinstance(met, Mapping):
        alone = "nobody to connect to: name two nodes" if not seen.neighbour else "not tried"
        return Row("training network", Found.OK, f"{here}; {alone}")
    if "cannot" not in met:
        return Row(
            "training network",
            Found.OK,
            f"{here}, reaches {seen.neighbour} in {float(met.get('took', 0)) * 1000:.1f} ms",
        )
    other = next((one for one in fleet.seen if one.node.name == seen.neighbour), None)
    if other is not None and other.again is not None and other.again.get("lives") is False:
        return Row(
            "training network",
            Found.WARN,
            f"{here}; what listened on {seen.neighbour} has ended",
            "mend its logout first",
        )
    fix = f"let TCP from and to all ports above 1023 through between the nodes, or give {seen.neighbour} its `network:` in {fleet.file}"
    return Row(
        "training network", Found.FAIL, f"does not reach {seen.neighbour}: {met['cannot']}", fix
    )


# --- for people and for scripts


def view(fleet: Fleet) -> dict[str, Any]:
    """Return the value of `nodes check --file FILE --json`; its keys are a stable interface."""
    found = [(seen.node.name, rows(fleet, seen)) for seen in fleet.seen]
    return {
        "fleet": fleet.spec.name,
        "agent": fleet.version,
        "nodes": [
            {"name": name, "runs": runs(each), "rows": [asdict(row) for row in each]}
            for name, each in found
        ],
    }


def print_rows(fleet: Fleet, everything: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    found = [(seen.node.name, rows(fleet, seen)) for seen in fleet.seen]
    out = Console(markup=False, highlight=False, soft_wrap=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("NODE", "CHECK", "", "WHAT, AND WHAT TO DO"):
        table.add_column(title, no_wrap=title != "WHAT, AND WHAT TO DO", overflow="fold")
    colours = {Found.OK: "green", Found.WARN: "yellow", Found.FAIL: "bold red"}
    for name, each in found:
        fine = [row for row in each if row.found is Found.OK]
        whole = everything or len(found) <= SHOWN_WHOLE
        first = True
        for row in each if whole else [row for row in each if row.found is not Found.OK]:
            what = f"{row.what}\n→ {row.fix}" if row.fix else row.what
            table.add_row(
                name if first else "", row.check, _styled(row.found, colours[row.found]), what
            )
            first = False
        if not whole and fine:
            names = ", ".join(row.check for row in fine)
            table.add_row(
                name if first else "",
                count_noun(len(fine), "other") if not first else "all",
                _styled(Found.OK, "green"),
                names,
            )
    out.print(table)
    out.print("\n" + verdict(fleet))


def _styled(found: Found, colour: str) -> Any:
    from rich.text import Text

    return Text(str(found), style=colour)


def verdict(fleet: Fleet) -> str:
    bad = [seen.node.name for seen in fleet.seen if not runs(rows(fleet, seen))]
    count = len(fleet.seen)
    if not bad:
        many = f"all {count} nodes can" if count > 1 else f"{fleet.seen[0].node.name} can"
        return f"{many} run ranks. Next: relaunch up --fleet {fleet.file}"
    return f"{count - len(bad)} of {count} nodes can run ranks, not {', '.join(bad)}"

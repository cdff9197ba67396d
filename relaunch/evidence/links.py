"""Judge a node's network ports by their siblings and by their own record.

Nothing on a host says which of its ports are in use. So a port without a link is a fault only if
the same port of most cards of its model has one, or if it had one itself within the last week.

NVIDIA/NVSentinel compares the cards of a host in the same way and takes a port that is down, a link
that flaps and growing counters as in `ERROR_LIMITS` for fatal (its NIC health monitor: link state
and link counter detection). leptonai/gpud waits four minutes for a link to come back, then has the
hardware inspected. Azure NHC (`check_hw_ib`) and Meta gcm (`check-iblink`) take a node out of
service for a link that is down or too slow. What the counters mean: Linux
Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from relaunch.evidence.causes import Cause
from relaunch.evidence.fields import count, fields, text, unreadable
from relaunch.evidence.findings import Finding, Role
from relaunch.fields import duration
from relaunch.text import count_noun

MAX_PORTS = 64
MIN_SIBLINGS = 3
"""Siblings that have to agree. Of two or three cards, one may be spare."""
FAST_GBPS = 10.0
"""An Ethernet port below this does not carry training: it manages the host, or is a laptop's."""
MAX_FLAPS, FLAP_WINDOW = 3, timedelta(hours=12)
"""A link that was lost so often in this time is faulty (leptonai/gpud). Once or twice may be the
restart of a switch."""
ERROR_WINDOW = timedelta(hours=1)
ERROR_LIMITS = {
    "symbol_error": 120,
    "local_link_integrity_errors": 0,
    "excessive_buffer_overrun_errors": 0,
}
"""How much these may grow in an hour. The first is the bit error rate that the InfiniBand
specification allows; the others grow only when the card's own threshold was exceeded."""
SHOWN_ERRORS = ("link_error_recovery", "port_rcv_errors")
LINK_FAULTS = ("port down", "port slow", "port flaps", "port errors", "network card missing")
"""Of findings that say that a link or a card is at fault."""
ETHERNET = " Ethernet"
"""How the place of a port ends that speaks Ethernet: RoCE, a bond, a network for storage."""
WAITING = ("INIT", "ARMED")
"""The port has a link and waits for the subnet manager."""


@dataclass(frozen=True, slots=True)
class LinkReading:
    findings: tuple[Finding, ...] = ()
    unread: tuple[str, ...] = ()
    working: int = 0
    """Number of ports that have a link."""


@dataclass(frozen=True, slots=True)
class _Record:
    """How a port was when it last had a link."""

    ago: timedelta
    rate: float | None
    counters: Mapping[str, int]
    since: timedelta | None
    """The age of the counters; None: there are none of this boot."""


@dataclass(frozen=True, slots=True)
class _Port:
    name: str
    is_rdma: bool
    group: tuple[str, str]
    """The model of its card and its place on it: siblings have the same."""
    state: str
    phys_state: str
    rate: float | None
    """In Gb/s."""
    is_enabled: bool
    counters: Mapping[str, int]
    is_gone: bool
    before: _Record | None

    @property
    def is_up(self) -> bool:
        return self.state in ("ACTIVE", "ACTIVE_DEFER", "up")

    @property
    def is_down(self) -> bool:
        return self.state in ("DOWN", "down", "lowerlayerdown", *WAITING)

    @property
    def carries_training(self) -> bool:
        rate = self.before.rate if self.before is not None else self.rate
        return self.is_rdma or (rate is not None and rate >= FAST_GBPS)


def read_links(facts: Mapping[str, Any]) -> LinkReading:
    """Read the ports of a probe's answer; an answer without any says nothing about them.

    Ports that the fleet file calls unused (`unused_ports`) are left out, also as siblings.
    """
    answer = facts.get("links")
    if answer is None:
        return LinkReading()
    reading = fields(answer)
    rows = reading.get("ports") if reading is not None else None
    if not isinstance(rows, list) or len(rows) > MAX_PORTS:
        return LinkReading(
            unread=(f"network cards: {unreadable(answer if reading is None else rows)}",)
        )
    ports = [_read_port(row) for row in rows]
    used = [port for port in ports if port is not None and not _is_unused(port, facts)]
    known = [port for port in used if not port.is_gone]
    findings = [found for port in known for found in _judge_port(port, _list_siblings(port, known))]
    findings += _judge_gone([port for port in used if port.is_gone], known)
    findings += _check_record(reading.get("record") if reading is not None else None)
    return LinkReading(
        tuple(findings),
        ("a network port cannot be read",) if None in ports else (),
        sum(port.is_up for port in known),
    )


def read_present_faults(facts: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Return the faults of ports that are so now, in words that stay the same as long as they are.

    Ports that speak Ethernet count where their siblings prove it, and not by their own record: one
    port of a bond may be down for hours, on all nodes, and no job notices.
    """
    links = fields(facts.get("links")) or {}
    rows = links.get("ports")
    ports: list[Mapping[str, Any]] = []
    for row in rows if isinstance(rows, list) else ():
        if not isinstance(row, Mapping) or row.get("kind") != "rdma":
            continue
        speaks_ethernet = text(row.get("place"), 60).endswith(ETHERNET)
        ports.append({**row, "before": None} if speaks_ethernet else row)
    found = read_links({**facts, "links": {"ports": ports}}).findings
    return tuple(
        # What follows says when it had a link, or how its siblings do.
        replace(one, reason=one.reason.partition("; ")[0]) if one.code != "port slow" else one
        for one in found
        if one.role is Role.ROOT and one.code in ("port down", "port slow", "network card missing")
    )


def _is_unused(port: _Port, facts: Mapping[str, Any]) -> bool:
    names = facts.get("unused_ports")
    card = port.name.partition(" ")[0]
    return isinstance(names, list) and (port.name in names or card in names)


def _read_port(row: object) -> _Port | None:
    if not isinstance(row, Mapping):
        return None
    name, kind = text(row.get("name"), 60), row.get("kind")
    if not name or kind not in ("rdma", "ethernet"):
        return None
    return _Port(
        name,
        kind == "rdma",
        (text(row.get("model"), 60), text(row.get("place"), 60)),
        text(row.get("state"), 20),
        text(row.get("phys_state"), 30),
        _read_rate(row.get("rate")),
        row.get("enabled") is not False,
        _read_counters(row.get("counters")),
        row.get("gone") is True,
        _read_record(row.get("before")),
    )


def _check_record(value: object) -> list[Finding]:
    """Return a note if the node could not read how its ports were before."""
    if value is None:
        return []
    words = f"how the network ports were before cannot be read: {unreadable(value)}"
    return [_note("port record", words)]


def _read_record(value: object) -> _Record | None:
    if not isinstance(value, Mapping) or (ago := _read_span(value.get("ago"))) is None:
        return None
    return _Record(
        ago,
        _read_rate(value.get("rate")),
        _read_counters(value.get("counters")),
        _read_span(value.get("seconds")),
    )


def _read_rate(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        return None
    return float(value)


def _read_span(value: object) -> timedelta | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        return None
    return timedelta(seconds=int(value))


def _read_counters(value: object) -> dict[str, int]:
    rows = value if isinstance(value, Mapping) else {}
    known = {name: count(rows.get(name)) for name in (*_DOWNS, *ERROR_LIMITS, *SHOWN_ERRORS)}
    return {name: number for name, number in known.items() if number is not None}


_DOWNS = ("link_downed", "carrier_down_count")


def _list_siblings(port: _Port, ports: list[_Port]) -> list[_Port]:
    """Return the same port of the other cards of its model. Ethernet cards other than RoCE serve
    different purposes on one host, and have none."""
    if not port.is_rdma:
        return []
    return [other for other in ports if other is not port and other.group == port.group]


def _judge_port(port: _Port, siblings: list[_Port]) -> list[Finding]:
    if not port.is_enabled:
        return []
    if port.is_down:
        return _judge_down(port, siblings)
    if not port.is_up:
        # For example a `state` that cannot be read: neither healthy nor a fault.
        words = f"{port.name} is in state {port.state or 'unknown'}"
        return [_note("port state", words)] if port.is_rdma else []
    slow = _judge_rate(port, siblings)
    return slow + _judge_flaps(port) + _judge_errors(port)


def _judge_down(port: _Port, siblings: list[_Port]) -> list[Finding]:
    state = f"{port.name} is {port.state}" + (f" ({port.phys_state})" if port.phys_state else "")
    up = [other for other in siblings if other.is_up]
    if len(up) >= MIN_SIBLINGS and 2 * len(up) > len(siblings) + 1:
        named = _describe_siblings(up, siblings)
        words = f"{state}; {named} are {up[0].state}{_describe_rate(up)}"
        return [_fault("port down", words)]
    if port.before is None:
        return []  # it is not in use
    rate = f" at {port.before.rate:g} Gb/s" if port.before.rate else ""
    words = f"{state}; it had a link{rate} {_describe_age(port.before)}"
    # A port that waits for the subnet manager, alone or with its siblings, is not what is broken.
    is_fault = port.carries_training and port.state not in WAITING
    return [_fault("port down", words) if is_fault else _note("port down", words)]


def _judge_rate(port: _Port, siblings: list[_Port]) -> list[Finding]:
    if port.rate is None:
        return []
    runs = f"{port.name} runs at {port.rate:g} Gb/s"
    up = [other for other in siblings if other.is_up and other.rate is not None]
    faster = [other for other in up if other.rate is not None and other.rate > port.rate]
    if len(faster) >= MIN_SIBLINGS and 2 * len(faster) > len(up) + 1:
        rate = _describe_rate(faster) or " faster"
        words = f"{runs}; {_describe_siblings(faster, siblings)} run{rate}"
        return [_fault("port slow", words)]
    before = port.before
    if before is None or before.rate is None or before.rate <= port.rate:
        return []
    words = f"{runs}; within the last week it ran at {before.rate:g} Gb/s"
    return [_fault("port slow", words) if port.is_rdma else _note("port slow", words)]


def _judge_flaps(port: _Port) -> list[Finding]:
    lost = _count_growth(port, _DOWNS)
    since = port.before.since if port.before is not None else None
    if not lost or since is None:
        return []
    words = f"{port.name} lost its link {count_noun(lost, 'time')} within {_describe_span(since)}"
    is_fault = lost * (FLAP_WINDOW / max(since, FLAP_WINDOW)) >= MAX_FLAPS
    if is_fault and port.carries_training:
        return [_fault("port flaps", words)]
    return [_note("port flaps", words)]


def _judge_errors(port: _Port) -> list[Finding]:
    since = port.before.since if port.before is not None else None
    # A link that is lost and trained again counts errors: the restart of a switch explains them.
    if since is None or _count_growth(port, _DOWNS):
        return []
    findings = []
    for name in (*ERROR_LIMITS, *SHOWN_ERRORS):
        grown = _count_growth(port, (name,))
        if not grown:
            continue
        words = f"{port.name}: {name} has grown by {grown} within {_describe_span(since)}"
        hourly = grown * (ERROR_WINDOW / max(since, ERROR_WINDOW))
        is_fault = name in ERROR_LIMITS and hourly > ERROR_LIMITS[name]
        findings.append((_fault if is_fault else _note)("port errors", words))
    return findings


def _count_growth(port: _Port, names: tuple[str, ...]) -> int:
    """Return by how much counters have grown; one that is lower than before was set to zero."""
    if port.before is None:
        return 0
    pairs = [
        (port.counters[name], port.before.counters[name])
        for name in names
        if name in port.counters and name in port.before.counters
    ]
    return sum(now - before if now >= before else now for now, before in pairs)


def _judge_gone(gone: list[_Port], known: list[_Port]) -> list[Finding]:
    """Judge ports that were here and are not. A card of the same model that is new replaces one."""
    findings = []
    new = [port.group for port in known if port.is_up and port.before is None]
    for port in gone:
        if port.group in new:
            new.remove(port.group)
        elif port.before is not None and port.carries_training:
            words = f"{port.name} is not there; it had a link {_describe_age(port.before)}"
            findings.append(
                Finding("node", "network card missing", Role.ROOT, words, Cause.NODE_FAULT)
            )
    return findings


def _fault(code: str, words: str) -> Finding:
    return Finding("node", code, Role.ROOT, words, Cause.NODE_FAULT, needs_person=True)


def _note(code: str, words: str) -> Finding:
    return Finding("node", code, Role.SYMPTOM, words)


def _describe_siblings(ports: list[_Port], siblings: list[_Port]) -> str:
    some = "" if len(ports) == len(siblings) else f"{len(ports)} of "
    return f"{some}its {len(siblings)} siblings"


def _describe_rate(ports: list[_Port]) -> str:
    rates = {port.rate for port in ports}
    rate = rates.pop() if len(rates) == 1 else None
    return f" at {rate:g} Gb/s" if rate is not None else ""


def _describe_age(record: _Record) -> str:
    return f"{_describe_span(record.ago)} ago"


def _describe_span(span: timedelta) -> str:
    """Return a span without seconds where it is long."""
    minutes = span >= timedelta(minutes=2)
    return duration(timedelta(minutes=span // timedelta(minutes=1)) if minutes else span)

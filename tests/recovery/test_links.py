"""When a network port is a fault of its node: by its siblings, and by its own record."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.catalog import catalog
from relaunch.evidence.findings import Finding, Role, Verdict
from relaunch.evidence.health import Health, read_health
from relaunch.evidence.links import MAX_PORTS, read_links
from tests.recovery.generated import searched
from tests.recovery.nodes import diag, probe

HOUR = 3600.0
DOWN = {"state": "DOWN", "phys_state": "Polling", "rate": 10.0}
BEFORE = {"ago": 2 * HOUR, "rate": 400.0}


def port(index: int = 0, **changes: Any) -> dict[str, Any]:
    row = {
        "name": f"mlx5_{index} port 1",
        "kind": "rdma",
        "model": "MT_0000000838",
        "place": "0/1 InfiniBand",
        "state": "ACTIVE",
        "phys_state": "LinkUp",
        "rate": 400.0,
        "enabled": True,
        "counters": {},
        **changes,
    }
    return {key: value for key, value in row.items() if value is not ...}


def ethernet(name: str = "eno1", **changes: Any) -> dict[str, Any]:
    values = {
        "name": name,
        "kind": "ethernet",
        "model": "0x8086:0x1593",
        "place": "",
        "state": "up",
    }
    return port(**{**values, "phys_state": "", "rate": 25.0, **changes})


def cards(*rows: dict[str, Any], count: int = 8) -> list[dict[str, Any]]:
    """Eight cards with a link, the first of them as given."""
    return [*rows, *(port(index) for index in range(len(rows), count))]


def grown(seconds: float = HOUR, **counters: int) -> dict[str, Any]:
    """A port whose counters were zero so many seconds ago."""
    zero = dict.fromkeys(counters, 0)
    return {"counters": counters, "before": {**BEFORE, "counters": zero, "seconds": seconds}}


def judge(rows: list[Any]) -> tuple[Finding, ...]:
    return read_links({"links": {"ports": rows}}).findings


FAULTS = {
    "a port is down and its siblings are not": cards(port(**DOWN)),
    "three of four have a link": cards(port(**DOWN), count=4),
    "a port waits for the subnet manager alone": cards(port(state="INIT")),
    "a port was up": [port(**DOWN, before=BEFORE)],
    "a fast Ethernet port was up": [
        ethernet(state="down", rate=..., before={"ago": 90, "rate": 25.0})
    ],
    "a port was up at an unknown rate": [port(**DOWN, before={"ago": 1, "rate": None})],
    "a port is slower than its siblings": cards(port(rate=200.0)),
    "a port is slower than most": cards(port(rate=200.0), port(1, rate=100.0)),
    "a port is slower than it was": [port(rate=200.0, before=BEFORE)],
    "a link flaps": [port(**grown(link_downed=3))],
    "a link flapped for days": [port(**grown(48 * HOUR, link_downed=12))],
    "an Ethernet link flaps": [ethernet(rate=400.0, **grown(carrier_down_count=5))],
    "symbol errors": [port(**grown(symbol_error=121))],
    "symbol errors within minutes": [port(**grown(60, symbol_error=121))],
    "the threshold of the card is exceeded": [port(**grown(local_link_integrity_errors=1))],
    "a card is gone": [
        *(port(index, before=BEFORE) for index in range(7)),
        port(7, gone=True, state=..., before=BEFORE),
    ],
}
HEALTHY = {
    "no card": [],
    "all cards": cards(),
    "a port in a deferred state": [port(state="ACTIVE_DEFER")],
    "seven unused ports": [port(), *(port(index, **DOWN) for index in range(1, 8))],
    "half of the ports are cabled": [*cards(count=4), *(port(i, **DOWN) for i in range(4, 8))],
    "one of three has none": cards(port(**DOWN), count=3),
    "the second port of each card": [
        *cards(),
        *(port(index + 8, place="1/1 InfiniBand", **DOWN) for index in range(8)),
    ],
    "another model": cards(port(model="MT_0000000884", **DOWN)),
    "another network": cards(port(place="0/1 Ethernet", **DOWN)),
    "it was never set up": cards(port(enabled=False, **DOWN)),
    "unused Ethernet": [ethernet(), *(ethernet(f"eno{i}", state="down") for i in range(2, 9))],
    "storage is slower": cards(*(port(i, rate=200.0, model="MT_2") for i in range(2))),
    "half is slower": cards(*(port(i, rate=200.0) for i in range(4))),
    "no rate": cards(port(rate=None)),
    "counters of another boot": [port(counters={"link_downed": 9}, before=BEFORE)],
    "counters stand still": [port(**grown(symbol_error=0))],
    "a card was replaced": [*cards(count=8), port(9, gone=True, before=BEFORE)],
    "a card is gone that nothing is known of": [*cards(), port(9, gone=True)],
    "a slow port is gone": [ethernet(gone=True, before={"ago": 9, "rate": 1.0})],
}
NOTES = {
    "a slow Ethernet port was up": [ethernet(state="down", before={"ago": 9, "rate": 1.0})],
    "all wait for the subnet manager": [port(i, state="INIT", before=BEFORE) for i in range(8)],
    "a switch restarted": [port(**grown(link_downed=1, symbol_error=5000))],
    "a link of an office flaps": [
        ethernet(
            rate=1.0,
            **{
                **grown(carrier_down_count=9),
                "before": {
                    "ago": 9,
                    "rate": 1.0,
                    "counters": {"carrier_down_count": 0},
                    "seconds": 60,
                },
            },
        )
    ],
    "few symbol errors": [port(**grown(symbol_error=120))],
    "few symbol errors in a day": [port(**grown(24 * HOUR, symbol_error=2000))],
    "receive errors": [port(**grown(port_rcv_errors=9999))],
    "counters were set to zero": [
        port(
            counters={"symbol_error": 7},
            before={**BEFORE, "counters": {"symbol_error": 900}, "seconds": 60},
        )
    ],
    "Ethernet is slower than it was": [ethernet(rate=10.0, before={"ago": 9, "rate": 25.0})],
    "the state cannot be read": cards(port(state="")),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_port_is_a_fault_when(case: str, snapshot: SnapshotAssertion) -> None:
    found = judge(FAULTS[case])
    assert found and {one.role for one in found} == {Role.ROOT}
    assert {one.needs_person for one in found} == {case != "a card is gone"}
    assert [one.reason for one in found] == snapshot


@pytest.mark.parametrize("case", HEALTHY)
def test_a_port_is_nothing_to_tell_when(case: str) -> None:
    assert judge(HEALTHY[case]) == ()


@pytest.mark.parametrize("case", NOTES)
def test_a_port_is_only_told_when(case: str, snapshot: SnapshotAssertion) -> None:
    found = judge(NOTES[case])
    assert found and {one.role for one in found} == {Role.SYMPTOM}
    assert found[0].reason == snapshot


def test_an_ethernet_port_in_an_unknown_state_is_nothing_to_tell() -> None:
    assert judge([ethernet(state="unknown")]) == ()


GONE = {"gone": True, "state": ..., "before": BEFORE}


@pytest.mark.parametrize(
    ("name", "unused"), [("mlx5_0", True), ("mlx5_0 port 1", True), ("mlx5_0 port 2", False)]
)
@pytest.mark.parametrize("row", [port(**DOWN), port(rate=200.0), port(**GONE)])
def test_unused_ports_are_left_out(name: str, unused: bool, row: dict[str, Any]) -> None:
    used = [port(index, before=BEFORE) for index in range(1, 8)]
    reading = read_links({"links": {"ports": [row, *used]}, "unused_ports": [name]})
    assert (reading.findings == ()) is unused
    assert not unused or reading.working == 7


def test_unused_ports_are_no_siblings() -> None:
    facts = {"links": {"ports": cards(port(**DOWN), count=4)}, "unused_ports": ["mlx5_1"]}
    assert read_links(facts).findings == ()
    assert read_links({**facts, "unused_ports": 3}).findings != ()


# --- the examination


def examine(links: Any) -> Health:
    return read_health(probe(links=links), diag(), expected_gpus=8, level=1, catalog=catalog())


def test_a_dead_link_makes_a_node_unhealthy() -> None:
    health = examine({"ports": cards(port(3, **DOWN))})
    assert health.verdict is Verdict.UNHEALTHY
    assert health.reason == "mlx5_3 port 1 is DOWN (Polling); its 7 siblings are ACTIVE at 400 Gb/s"
    assert health.gpus == ()


def test_links_are_part_of_what_was_examined() -> None:
    health = examine({"ports": cards(port(**DOWN, enabled=False))})
    assert health.verdict is Verdict.HEALTHY and "7 network links" in health.reason


@pytest.mark.parametrize(
    ("links", "unread"),
    [
        (..., ""),
        ({"unreadable": "they did not answer"}, "network cards: they did not answer"),
        ({}, "network cards: the node's answer lacks it"),
        ({"ports": 3}, "network cards: the node's answer makes no sense there"),
        ({"ports": [port()] * (MAX_PORTS + 1)}, "network cards: the node's answer makes no sense"),
        ({"ports": [3]}, "a network port cannot be read"),
        ({"ports": [{"name": "x", "kind": "token ring"}]}, "a network port cannot be read"),
    ],
)
def test_ports_that_cannot_be_read_leave_the_health_unknown(links: Any, unread: str) -> None:
    health = examine(links)
    assert health.verdict is (Verdict.UNKNOWN if unread else Verdict.HEALTHY)
    assert unread in health.reason


def test_a_record_that_the_node_cannot_read_is_only_told(snapshot: SnapshotAssertion) -> None:
    for record in ({"unreadable": "Input/output error"}, 3):
        health = examine({"ports": cards(), "record": record})
        assert health.verdict is Verdict.HEALTHY and health.reason == snapshot


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.dictionaries(st.sampled_from(["ago", "rate", "counters", "seconds"]), st.integers()),
)


@searched(200)
@given(st.lists(st.dictionaries(st.sampled_from([*port(), "before", "gone"]), VALUES), max_size=9))
def test_no_answer_about_ports_breaks_the_reading(rows: list[dict[str, Any]]) -> None:
    judge([{**port(), **row} for row in rows])

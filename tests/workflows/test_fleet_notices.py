"""Which states of a fleet are matters for people, and what resolves them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from relaunch.pool.messages import Claim, Place
from relaunch.pool.state import Breaker, ClaimRecord, NodeStatus
from relaunch.workflows.fleet.notices import WAITS_LONG, list_notices, resolve_notice
from tests.workflows.test_fleet_details import NOW, fleet, node


def test_a_job_that_waits_a_day_is_a_matter_until_it_has_nodes() -> None:
    claim = Claim("llama", 7, 1, 2, gpus=8)
    record = ClaimRecord(claim, waiting_since=NOW - WAITS_LONG + timedelta(seconds=1))
    state = fleet(node("n1"), claims=(record,))
    assert list_notices(state, (), NOW) == {}
    (notice,) = list_notices(state, (), NOW + timedelta(seconds=1)).values()
    assert (notice.event, notice.key, notice.job) == ("waiting", "lab/waiting/llama/7", "llama")
    has = replace(state, claims=(replace(record, granted=(Place("n1"),)),))
    assert list_notices(has, (), NOW + WAITS_LONG) == {}
    resolved = resolve_notice(has, notice.key, NOW)
    assert (resolved.state, resolved.event, resolved.key) == ("resolved", "waiting", notice.key)
    assert resolved.reason != resolve_notice(fleet(), notice.key, NOW).reason


def test_only_what_relaunch_has_quarantined_is_a_matter() -> None:
    out = node("n1", status=NodeStatus.QUARANTINED, by="relaunch", reason="it did not help")
    persons = node("n2", status=NodeStatus.QUARANTINED, by="ada", reason="a fan")
    state = fleet(out, persons, breaker=Breaker("2 of 2 nodes are out", NOW))
    found = list_notices(state, state.nodes, NOW)
    assert list(found) == ["lab/breaker", "lab/quarantine/n1"]
    taken = fleet(replace(out, by="ada"), persons)
    resolved = resolve_notice(taken, "lab/quarantine/n1", NOW)
    assert (resolved.state, resolved.event, resolved.nodes) == ("resolved", "quarantine", ("n1",))
    assert "ada" in resolved.subject
    assert resolve_notice(fleet(), "lab/quarantine/n1", NOW).nodes == ("n1",)
    assert resolve_notice(taken, "lab/breaker", NOW).event == "breaker"

"""Parts of the placement and of the escalation that generated stories reach only by chance."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from relaunch.pool.events import ClaimEvent, ProbeOrder
from relaunch.pool.messages import Claim
from relaunch.pool.placement import MIN_PROBES, Placement
from relaunch.repair.escalation import Escalation, cancel
from tests.recovery.fleet_builders import Desk, nodes


def shape(gpus: int, with_spares: bool = False) -> Any:
    return SimpleNamespace(gpus=gpus, with_spares=with_spares, __hash__=None)


def test_a_job_is_ahead_only_where_a_node_fits_both_shapes() -> None:
    large, small = "large", "small"
    shapes = {large: shape(8), small: shape(1)}
    for in_file, ahead in (([(False, 4)], ""), ([(True, 8)], ""), ([(True, 8), (False, 8)], "a")):
        reserved = SimpleNamespace(items=lambda: [(shapes[large], "a")])
        pool: Any = SimpleNamespace(reserved=reserved, _in_file=in_file)
        assert Placement.find_job_ahead(pool, shapes[small]) == ahead


def test_the_first_reason_to_cancel_counts() -> None:
    once = cancel(Escalation("n1", "Xid 79"), "first")
    assert cancel(once, "second").cancel_reason == "first"


def test_free_nodes_are_counted_beside_those_that_a_claim_avoids() -> None:
    desk = Desk(*nodes("n1", "n2", "n3", "n4", "n5"), *nodes("n6", spare=True))
    desk.claim("b", 1, keep=("n3",), holds=("n3",))
    desk.silent["n4"] = "no route to host"
    desk.look()
    claim = Claim("a", 1, 1, 1, avoid=("n1",), running=True)

    def count(claim: Claim) -> int:
        return desk.scheduler.count_free(desk.state, desk.now, claim)

    assert count(claim) == 3, "n2, n5 and the spare"
    desk.now += timedelta(minutes=2)
    assert count(claim) == 3, "their probes are only old"
    assert count(replace(claim, gpus=16)) == 0
    assert count(replace(claim, running=False)) == 2


def test_no_more_stale_nodes_are_probed_than_may_be_needed() -> None:
    desk = Desk(*nodes(*(f"n{number}" for number in range(1, MIN_PROBES + 6))))
    desk.now += timedelta(seconds=30)
    desk.learn(ClaimEvent(Claim("a", 1, 1, 2, since=desk.now)))
    desk.settle()
    (probe,) = desk.of(ProbeOrder)
    assert probe.nodes == tuple(f"n{number}" for number in range(1, MIN_PROBES + 3))
    desk.look(probe.nodes)
    desk.settle()
    assert desk.granted() == {"a": ["n1", "n2"]}

"""Which nodes a generation ran on is known for as long as its logs may be kept."""

from __future__ import annotations

import pytest

from relaunch.job import generation_nodes
from relaunch.job.apply import resubmit
from relaunch.job.events import LaunchOrdered
from relaunch.job.fencing import plan_generation
from relaunch.job.generation_nodes import GenerationNodes, find_nodes, record_nodes
from tests.recovery.builders import T0, record, running

Records = tuple[GenerationNodes, ...]


def recorded(*launches: tuple[int, str]) -> Records:
    records: Records = ()
    for generation, nodes in launches:
        records = record_nodes(records, generation, tuple(nodes.split()))
    return records


def test_each_generation_is_found_where_it_ran() -> None:
    records = recorded(
        (1, "a b c"), (2, "a b c"), (3, "a d c"), (5, "d c"), (6, "d c e f"), (7, "d c e f")
    )
    found = {generation: " ".join(find_nodes(records, generation) or ()) for generation in range(9)}
    assert found == {
        0: "",
        1: "a b c",
        2: "a b c",
        3: "a d c",
        4: "a d c",
        5: "d c",
        6: "d c e f",
        7: "d c e f",
        8: "d c e f",
    }
    assert [len(one.nodes) for one in records] == [1, 3, 0, 4], "only what differs is kept"


def test_a_launch_ordered_again_replaces_its_record() -> None:
    records = recorded((1, "a b"), (2, "a c"), (2, "x d"))
    assert (find_nodes(records, 1), find_nodes(records, 2)) == (("a", "b"), ("x", "d"))
    records = recorded((1, "a b"), (2, "a c"), (2, "a b"))
    assert (find_nodes(records, 1), find_nodes(records, 2)) == (("a", "b"), ("a", "b"))


def test_the_oldest_records_beyond_the_limits_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_nodes, "MAX_NODES", 3)
    records = recorded((1, "a b"), (2, "c b"), (3, "d e"), (4, "d f"))
    assert [find_nodes(records, number) for number in (1, 2, 3, 4)] == [
        None,
        ("c", "b"),
        ("d", "e"),
        ("d", "f"),
    ]
    monkeypatch.setattr(generation_nodes, "MAX_RECORDS", 2)
    assert [one.first for one in recorded((1, "a"), (2, "b"), (3, "c"))] == [2, 3]


def test_a_job_records_the_nodes_that_it_orders_to_launch() -> None:
    job = running()
    for generation, nodes in ((1, ("n1", "n2")), (2, ("n1", "n3"))):
        job = record(job, LaunchOrdered(generation, plan_generation(job, generation, nodes)), T0)
    assert find_nodes(job.generation_nodes, 1) == ("n1", "n2")
    assert find_nodes(job.generation_nodes, 2) == ("n1", "n3")
    again = resubmit(job, 2000, "ann", T0, False, ())
    assert again.generation_nodes == (), "its generations are numbered from 1 again"

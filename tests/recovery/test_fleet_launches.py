"""A fleet hands the times of a job's launches to the next submission of that job, which judges silent nodes by them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from recovery.claim import claim
from recovery.fleet.facts import JobsClosed, Reclaimed
from recovery.model import LaunchedGeneration
from tests.recovery.builders import new_job, running
from tests.recovery.fleet_builders import Desk

PLANNED = claim(new_job(), 1).launched
RUNNING = claim(running(), 1).launched[:1]


def gangs(launched: tuple[LaunchedGeneration, ...]) -> list[tuple[str, ...]]:
    return [one.nodes for one in launched]


def test_a_later_submission_is_told_what_the_earlier_one_launched_on_the_nodes_that_it_was_granted() -> None:
    desk = Desk()
    desk.claim("a", 2, launched=PLANNED)
    desk.claim("a", 1, submission=2)
    grant = desk.grants()["a"]
    assert grant.holding == ("n1", "n2")
    assert grant.launched == (replace(PLANNED[0], nodes=("n1", "n2")),)
    desk.claim("a", 1, seq=2, submission=2, avoid=("n4",))
    assert desk.grants()["a"].launched == grant.launched, "it claimed anew before it had heard of its grant"
    desk.claim("a", 1, seq=3, submission=2, holds=("n1", "n2", "n3"))
    assert desk.grants()["a"].launched == ()


def test_what_was_launched_together_is_known_when_some_of_the_nodes_are_free_again() -> None:
    desk = Desk()
    longer = replace(RUNNING[0], nodes=("n2", "n3"), fence_after=timedelta(hours=1))
    desk.claim("a", 2, launched=(longer, *PLANNED), holds=("n2", "n3"))
    desk.go(JobsClosed((("a", 1),)))
    desk.go(Reclaimed("a", 1, ("n1", "n2")))
    desk.claim("a", 1, submission=2)
    grant = desk.grants()["a"]
    assert grant.holding == ("n3",)
    assert gangs(grant.launched)[0] == ("n2", "n3"), "n2 was proven stopped, and is proof for n3"


def test_a_third_submission_is_told_of_the_first_where_the_second_never_heard_of_it() -> None:
    desk = Desk()
    desk.claim("a", 2, launched=PLANNED)
    desk.claim("a", 4, submission=2, launched=PLANNED)
    desk.claim("a", 0, seq=2, submission=2)
    assert gangs(desk.record("a").inherited_launched) == [("n1", "n2")]
    desk.claim("a", 1, submission=3)
    assert desk.grants()["a"].launched[0] == replace(PLANNED[0], nodes=("n1", "n2"))

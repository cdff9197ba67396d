"""Searches interleavings of cuts, crashes, sleeps and zombie workers for two tokens of one job alive at once.

The accepted residual is named here and shown below: a node that slept as a whole (SIGSTOP of everything, a suspended
machine) wakes, and its ranks may write until its keeper is scheduled for the first time. Refuses to say anything of a
keeper that is stopped alone, or of a machine whose CLOCK_BOOTTIME stands still: both break the assumptions.
"""

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Search
from hypothesis.stateful import run_state_machine_as_test

from tests.model.machine import Fencing, walk
from tests.model.protocol import Broken, State
from tests.model.stories import STORIES, begin, lose, recover, run, world_for
from tests.model.world import World

DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
"""Minutes instead of seconds: `HYPOTHESIS_PROFILE=deep pytest tests/model --timeout 3600`."""
STEPS = 30
VIOLATION = r"two tokens are alive|twice"
FOUND = {
    Broken.ANY_PEER: 42,
    Broken.ALL_LOST: 261,
    Broken.NO_FENCE_AFTER: 2,
    Broken.NO_LEASE: 12,
    Broken.NO_GRACE: 2,
    Broken.NO_HOPS: 42,
    Broken.ONLY_THIS_WATCH: 73,
    Broken.FENCES_FALSE_ELSEWHERE: 9,
    Broken.VOUCHES_WHEN_FENCED: 42,
    Broken.GRACE_FROM_WAKING: 2,
}
"""The first seed that finds it. For the other rules no walk in the first few hundred does; their stories stand alone."""


def search(broken: Broken | None, examples: int, steps: int) -> None:
    machine = type("Fencing", (Fencing,), {"broken": broken})
    phases = (Search.generate,) if broken or not DEEP else (Search.generate, Search.shrink)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=not DEEP or broken is not None,
            database=None,
            deadline=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_two_tokens_are_never_alive_at_once() -> None:
    search(None, 20_000 if DEEP else 100, 60 if DEEP else 30)


def test_every_broken_rule_has_a_story() -> None:
    assert set(STORIES) == set(Broken)


@pytest.mark.parametrize("broken", STORIES, ids=lambda b: b.name.lower())
def test_each_rule_is_needed(broken: Broken) -> None:
    story = STORIES[broken]
    story(world_for(story, None))
    with pytest.raises(AssertionError, match=VIOLATION):
        story(world_for(story, broken))


@pytest.mark.parametrize(
    ("broken", "seed"), FOUND.items(), ids=lambda value: value.name.lower() if isinstance(value, Broken) else str(value)
)
def test_a_random_walk_finds_the_broken_rule(broken: Broken, seed: int) -> None:
    with pytest.raises(AssertionError, match=VIOLATION):
        walk(broken, seed, STEPS)


def test_random_walks_find_nothing_in_the_whole_protocol() -> None:
    for seed in range(20_000 if DEEP else 100):
        walk(None, seed, STEPS)


def test_residual_a_node_that_slept_writes_until_its_keeper_is_scheduled() -> None:
    world = World([1.0] * 4)
    begin(world, 0, 1)
    world.sleep(1, asking=False)
    recover(world, 0, 2)
    lose(world, 1)
    world.nodes[1].wake(world.now)
    keeper = world.nodes[1].keepers[1]
    states = [keeper.state]
    assert world.nodes[0].alive() == [2]
    world.tick()
    states.append(keeper.state)
    assert states == [State.RUNNING, State.GONE], "beside generation 2, and not beyond the first time its keeper is scheduled"


def test_training_goes_on_for_hours_without_a_controller() -> None:
    for ring in (False, True):
        world = World([1.0] * 4, ring=ring)
        begin(world, 0, 1, 2, 3)
        world.workers[-1].frozen = True
        run(world, 5000)
        assert [node.alive() for node in world.nodes] == [[1]] * 4


def test_a_node_that_only_the_controller_lost_goes_on() -> None:
    world = World([1.0] * 4)
    begin(world, 0, 1, 2)
    world.cut_in.add(2)
    world.cut_out.add(2)
    world.cut_peers |= {(1, 2), (2, 1)}
    run(world, 500)
    assert world.nodes[2].alive() == [1], "one peer whose lease lives is enough"

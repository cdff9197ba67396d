"""Searches for two tokens of one job alive at once, under cuts, crashes, sleeps and zombie workers.

What the protocol cannot prevent is in `LIMITS` (tests/model/stories.py): each is shown below, with
how long it lasts. Nothing else is left out.
"""

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Search
from hypothesis.stateful import run_state_machine_as_test

from relaunch.job.fencing import hops, peers_of
from tests.model.machine import Fencing, walk
from tests.model.protocol import Broken
from tests.model.stories import (
    LIMITS,
    MORE,
    STORIES,
    Story,
    begin,
    lose,
    run,
    the_state_folder_is_removed,
    world_for,
)
from tests.model.world import Limit, World

DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
"""Minutes instead of seconds: `HYPOTHESIS_PROFILE=deep pytest tests/model --timeout 3600`."""
STEPS = 30
VIOLATION = r"two tokens are alive|twice"
FOUND = {
    Broken.ANY_PEER: 57,
    Broken.ALL_LOST: 33,
    Broken.NO_FENCE_AFTER: 4,
    Broken.NO_LEASE: 4,
    Broken.NO_GRACE: 4,
    Broken.FENCES_FALSE_ELSEWHERE: 5,
    Broken.GRACE_FROM_WAKING: 0,
    Broken.PREPARE_KEEPS_OLD: 23,
    Broken.FIRST_STOP: 169,
    Broken.POLICY_OF_NOW: 57,
    Broken.FENCES_OF_NOW: 15,
    Broken.ONE_SHIM: 79,
    Broken.SWEPT_STATE: 129,
    Broken.NO_SERVER: 1,
}
"""The first seed that finds it.

The other rules are rarely found by chance; their stories show them."""


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
    search(None, 20_000 if DEEP else 60, 60 if DEEP else 30)


def test_every_broken_rule_has_a_story() -> None:
    assert set(STORIES) == set(Broken)


@pytest.mark.parametrize(
    ("broken", "story"),
    [*STORIES.items(), *MORE],
    ids=lambda value: value.name.lower() if isinstance(value, Broken) else value.__name__,
)
def test_each_rule_is_needed(broken: Broken, story: Story) -> None:
    story(world_for(story, None))
    with pytest.raises(AssertionError, match=VIOLATION):
        story(world_for(story, broken))


@pytest.mark.parametrize(
    ("broken", "seed"),
    FOUND.items(),
    ids=lambda value: value.name.lower() if isinstance(value, Broken) else str(value),
)
def test_a_random_walk_finds_the_broken_rule(broken: Broken, seed: int) -> None:
    with pytest.raises(AssertionError, match=VIOLATION):
        walk(broken, seed, STEPS)


def test_random_walks_find_nothing_in_the_whole_protocol() -> None:
    for seed in range(20_000 if DEEP else 80):
        walk(None, seed, STEPS)


@pytest.mark.parametrize("broken", [Broken.ANY_PLACE, Broken.SWEPT_STATE])
def test_a_removed_state_folder_is_harmless_by_two_rules(broken: Broken) -> None:
    """The living ranks are found without it, and the new folder proves nothing."""
    the_state_folder_is_removed(world_for(the_state_folder_is_removed, broken))


def test_every_limit_has_a_story() -> None:
    assert {limit for limit, _, _ in LIMITS} == set(Limit)


@pytest.mark.parametrize(
    ("limit", "story", "longest"),
    LIMITS,
    ids=lambda value: value.name.lower() if isinstance(value, Limit) else "",
)
def test_a_limit_is_what_the_protocol_cannot_prevent_and_ends(
    limit: Limit, story: Story, longest: int | None
) -> None:
    """Two tokens are alive where the check does not leave it out, for no longer than it says."""
    world = world_for(story, None)
    world.limits.discard(limit)
    with pytest.raises(AssertionError, match=VIOLATION):
        story(world)
    world = world_for(story, None)
    story(world)
    ticks = 0
    while limit in world.limits_met():
        if longest is None and ticks == 100:
            world.nodes[1].go_on(world.now)
        world.tick()
        ticks += 1
        assert ticks <= (101 if longest is None else longest)
    assert ticks > 0


def test_nodes_of_a_sparse_gang_are_within_hops_of_each_other() -> None:
    """A stop travels against the questions: from who is asked to who asks."""
    for nodes in (2, 17, 18, 19, 40, 255, 256, 257, 300):
        asks = {node: peers_of(node, nodes) for node in range(nodes)}
        for start in range(0, nodes, max(1, nodes // 16)):
            reached, distance = {start}, 0
            while len(reached) < nodes:
                distance += 1
                reached |= {node for node in range(nodes) if reached & set(asks[node])}
                assert distance <= hops(nodes), f"{nodes} nodes, from {start}"


def test_training_goes_on_for_hours_without_a_controller() -> None:
    for sparse in (False, True):
        world = World(sparse=sparse)
        begin(world, 0, 1, 2, 3)
        world.workers[-1].frozen = True
        run(world, 1500)
        assert world.alive() == {1: [0, 1, 2, 3]}


def test_a_node_that_only_the_controller_lost_goes_on() -> None:
    world = World()
    begin(world, 0, 1, 2)
    world.cut_in.add(2)
    world.cut_out.add(2)
    world.cut_peers |= {(1, 2), (2, 1)}
    run(world, 500)
    assert world.alive() == {1: [0, 1, 2]}, "one peer whose lease lives is enough"


def test_a_lost_node_that_is_back_is_renewed_again() -> None:
    world = World()
    begin(world, 0, 1)
    lose(world, 1)
    run(world, 10)
    assert world.controller.lost_nodes == {1}
    world.cut_in.clear(), world.cut_out.clear(), world.cut_peers.clear()
    run(world, 100)
    assert not world.controller.lost_nodes
    assert world.alive() == {1: [0, 1]}


def test_a_machine_with_a_stopped_clock_goes_on_with_its_peers() -> None:
    world = World()
    begin(world, 0, 1, 2)
    world.sleep(1, asking=False, clock_stands=True)
    run(world, 4)
    world.nodes[1].wake(world.now)
    run(world, 60)
    assert world.alive() == {1: [0, 1, 2]}


def test_a_shim_that_goes_on_after_a_stop_goes_on_with_its_ranks() -> None:
    world = World()
    begin(world, 0, 1)
    world.nodes[1].shim_stopped = True
    run(world, 60)
    world.nodes[1].shim_stopped = False
    run(world, 60)
    assert world.alive() == {1: [0, 1]}

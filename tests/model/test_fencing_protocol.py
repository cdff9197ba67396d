"""Searches interleavings of cuts, crashes, sleeps and zombie workers for two tokens of one job alive at once.

The accepted residual is named here and shown below: a node that slept as a whole (SIGSTOP of everything, a suspended
machine) wakes, and its ranks may write until its keeper is scheduled for the first time. Refuses to say anything of a
keeper that is stopped alone, or of a machine whose CLOCK_BOOTTIME stands still: both break the assumptions.
"""

import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Search
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.model.protocol import LEASE, VALID_FOR, Broken, State
from tests.model.world import Launcher, Message, Phase, World

DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
NODE = st.integers(0, 3)
SOME = st.sets(NODE, min_size=1)
RATE = st.sampled_from([1.0, 127 / 128, 129 / 128])
SEARCHED = (
    Broken.NO_FENCE_AFTER,
    Broken.NO_LEASE,
    Broken.NO_GRACE,
    Broken.GRACE_FROM_WAKING,
)
STEPS = st.sampled_from([(0,), (1,), (2,), (0, 1), (0, 1, 2)])
LONGEST_WAIT = 80  # ticks; the longest wait of the model is 67


class Fencing(RuleBasedStateMachine):
    broken: Broken | None = None

    @initialize(
        rates=st.tuples(RATE, RATE, RATE, RATE), ring=st.booleans(), fences=st.sampled_from([True, True, True, False])
    )
    def begin(self, rates: tuple[float, ...], ring: bool, fences: bool) -> None:
        self.world = World(rates, ring=ring, fences=fences, broken=self.broken)
        self.launch({0, 1, 2})

    @rule(ticks=st.integers(1, 12))
    def time_passes(self, ticks: int) -> None:
        for _ in range(ticks):
            self.world.tick()

    @rule(members=SOME)
    def launch(self, members: set[int]) -> None:
        """Give up what runs, wait as long as the rule says, and launch."""
        world = self.world
        if world.phase is not Phase.STOPPING:
            world.give_up()
        for _ in range(LONGEST_WAIT):
            if world.may_launch():
                world.launch(tuple(sorted(members)))
                break
            world.tick()
        for _ in range(4):
            world.tick()

    @rule(nodes=SOME, ticks=st.integers(0, 8))
    def lose_and_launch(self, nodes: set[int], ticks: int) -> None:
        """Lose some nodes together and launch on the others: what every other rule is there to disturb."""
        self.part(nodes)
        self.time_passes(ticks)
        self.launch({0, 1, 2, 3} - nodes or {3})

    @rule(nodes=SOME, ticks=st.integers(0, 8))
    def lose_asleep_and_launch(self, nodes: set[int], ticks: int) -> None:
        for node in sorted(nodes):
            self.sleep(node, asking=True)
        self.time_passes(ticks)
        self.launch({0, 1, 2, 3} - nodes or {3})
        for node in sorted(nodes):
            self.wake(node)
        self.world.tick()

    @rule(nodes=SOME, kept=st.sampled_from(["prepare", "start", "renew", "stop"]))
    def begin_again_and_delay(self, nodes: set[int], kept: str) -> None:
        """Launch on all four, with the messages of one kind to some nodes kept for later."""
        world = self.world
        if world.phase is not Phase.STOPPING:
            world.give_up()
        for _ in range(LONGEST_WAIT):
            if world.may_launch():
                world.launch((0, 1, 2, 3))
                break
            world.tick()
        for _ in range(4):
            world.tick()
            for message in list(world.flight):
                if message.kind == kept and message.node in nodes:
                    world.flight.remove(message)
                    world.held.append(message)

    @precondition(lambda self: self.world.held)
    @rule(copy=st.booleans())
    def all_arrive_late(self, copy: bool) -> None:
        late = list(self.world.held)
        if not copy:
            self.world.held.clear()
        for message in late:
            self.world.deliver(message)
            self.world.check()

    @precondition(lambda self: self.world.phase is not Phase.STOPPING)
    @rule()
    def give_up(self) -> None:
        self.world.give_up()

    @precondition(lambda self: self.world.may_launch())
    @rule(members=SOME)
    def launch_begins(self, members: set[int]) -> None:
        self.world.launch(tuple(sorted(members)))

    @rule(nodes=SOME)
    def part(self, nodes: set[int]) -> None:
        """Cut some nodes off from the controller and from the other nodes; they still see each other."""
        self.world.cut_in |= nodes
        self.world.cut_out |= nodes
        self.world.cut_peers |= {(a, b) for a in range(4) for b in range(4) if (a in nodes) != (b in nodes)}

    @rule(node=NODE, way=st.sampled_from(["in", "out", "both"]))
    def cut(self, node: int, way: str) -> None:
        if way != "out":
            self.world.cut_in.add(node)
        if way != "in":
            self.world.cut_out.add(node)

    @rule(asker=NODE, peer=NODE)
    def cut_peers(self, asker: int, peer: int) -> None:
        self.world.cut_peers.add((asker, peer))

    @rule(nodes=SOME)
    def mend(self, nodes: set[int]) -> None:
        self.world.cut_in -= nodes
        self.world.cut_out -= nodes
        self.world.cut_peers = {link for link in self.world.cut_peers if not nodes & set(link)}

    @rule(node=NODE, asking=st.booleans())
    def sleep(self, node: int, asking: bool) -> None:
        if self.world.nodes[node].awake:
            self.world.sleep(node, asking=asking)

    @rule(node=NODE)
    def wake(self, node: int) -> None:
        if not self.world.nodes[node].awake:
            self.world.nodes[node].wake(self.world.now)
            self.world.check()

    @rule(node=NODE)
    def ranks_and_keeper_die(self, node: int) -> None:
        self.world.nodes[node].die()

    @rule(node=NODE)
    def reboot(self, node: int) -> None:
        self.world.reboot(node)

    @precondition(lambda self: self.world.flight)
    @rule(which=st.integers(0, 7), copy=st.booleans())
    def delay(self, which: int, copy: bool) -> None:
        """Keep a message, or a copy of it, for an arbitrary time."""
        flight = self.world.flight
        message = flight[which % len(flight)]
        if not copy:
            flight.remove(message)
        self.world.held.append(message)

    @precondition(lambda self: self.world.held)
    @rule(which=st.integers(0, 7), copy=st.booleans(), dies=st.booleans())
    def arrive_late(self, which: int, copy: bool, dies: bool) -> None:
        held = self.world.held
        message = held[which % len(held)]
        if not copy:
            held.remove(message)
        self.world.deliver(message, dies=dies)
        self.world.check()

    @precondition(lambda self: self.world.workers)
    @rule(steps=STEPS)
    def worker_freezes(self, steps: tuple[int, ...]) -> None:
        worker = self.world.workers[-1]
        self.world.work(worker, steps)
        worker.frozen = True

    @precondition(lambda self: self.world.workers and self.world.workers[-1].current)
    @rule()
    def supersede(self) -> None:
        self.world.supersede()

    @precondition(lambda self: self.world.workers)
    @rule(which=st.integers(1, 4), steps=STEPS)
    def zombie_works(self, which: int, steps: tuple[int, ...]) -> None:
        self.world.work(self.world.workers[-min(which, len(self.world.workers))], steps)


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
    search(None, 20_000 if DEEP else 300, 60 if DEEP else 30)


# The shortest counterexample known for each broken rule. Every one is run against the whole protocol too.

Story = Callable[[World], None]


def begin(world: World, *members: int) -> None:
    world.launch(members)
    run(world, 6)


def run(world: World, ticks: int) -> None:
    for _ in range(ticks):
        world.tick()


def lose(world: World, *nodes: int) -> None:
    world.cut_in |= set(nodes)
    world.cut_out |= set(nodes)
    world.cut_peers |= {(a, b) for a in range(4) for b in range(4) if (a in nodes) != (b in nodes)}


def recover(world: World, *members: int) -> None:
    if world.phase is not Phase.STOPPING:
        world.give_up()
    for _ in range(LONGEST_WAIT):
        if world.may_launch():
            return begin(world, *members)
        world.tick()


def keep(world: World, kind: str, node: int) -> list[Message]:
    kept = [m for m in world.flight if (m.kind, m.node) == (kind, node)]
    for message in kept:
        world.flight.remove(message)
    return kept


def one_node_is_lost(world: World) -> None:
    begin(world, 0, 1)
    lose(world, 1)
    recover(world, 0, 2)


def two_lost_nodes_see_each_other(world: World) -> None:
    begin(world, 0, 1, 2)
    lose(world, 1, 2)
    recover(world, 0, 3)


def every_node_is_lost(world: World) -> None:
    begin(world, 0, 1)
    lose(world, 0, 1)
    recover(world, 2, 3)


def the_lost_form_the_tail_of_a_ring(world: World) -> None:
    """0 asks 1 asks 2 asks 3 asks 0: only 3 notices at once that 0 was stopped."""
    begin(world, 0, 1, 2, 3)
    lose(world, 1, 2, 3)
    recover(world, 0)


def an_old_watcher_heard_it_last(world: World) -> None:
    begin(world, 0, 1)
    run(world, 10)
    lose(world, 1)
    world.supersede()
    run(world, 1)
    recover(world, 0, 2)


def a_single_node_without_a_fence_is_lost(world: World) -> None:
    begin(world, 0, 1)
    lose(world, 1)
    recover(world, 0, 2)


def a_renewal_arrives_late(world: World) -> None:
    begin(world, 0, 1)
    late = keep(world, "renew", 1)
    lose(world, 1)
    world.give_up()
    run(world, 13)
    world.cut_in.discard(1)
    for message in late:
        world.deliver(message)
    world.cut_in.add(1)
    recover(world, 0, 2)


def a_superseded_watcher_goes_on(world: World) -> None:
    begin(world, 0, 1)
    zombie = world.workers[-1]
    zombie.frozen = True
    lose(world, 1)
    world.give_up()
    run(world, 13)
    world.cut_in.discard(1)
    world.cut_out.discard(1)
    world.work(zombie)
    kept = keep(world, "renew", 1)
    for message in kept:
        world.deliver(message)
    lose(world, 1)
    recover(world, 0, 2)


def a_node_sleeps_through_its_end(world: World) -> None:
    begin(world, 0, 1)
    world.sleep(1, asking=False)
    recover(world, 0, 2)
    world.nodes[1].wake(world.now)
    lose(world, 1)
    run(world, 1)


def launcher_sends_start_to_one(world: World) -> tuple[Launcher, list[Message]]:
    """A launch of generation 1 on 0 and 1 whose start to node 1 is on its way."""
    world.launch((0, 1))
    launcher = world.workers[-1]
    assert isinstance(launcher, Launcher)
    run(world, 2)
    return launcher, keep(world, "start", 1)


def start_arrives_after_the_prepared_keeper_expired(world: World) -> None:
    _, late = launcher_sends_start_to_one(world)
    lose(world, 1)
    recover(world, 0, 2)
    world.cut_in.discard(1)
    world.deliver(late[0])
    world.check()


def start_arrives_at_the_last_moment(world: World) -> None:
    _, late = launcher_sends_start_to_one(world)
    lose(world, 1)
    world.give_up()
    run(world, int(VALID_FOR) - 3)
    world.cut_in.discard(1)
    world.deliver(late[0])
    world.cut_in.add(1)
    recover(world, 0, 2)


def prepare_and_start_arrive_late(world: World) -> None:
    launcher, late = launcher_sends_start_to_one(world)
    lose(world, 1)
    recover(world, 0, 2)
    world.cut_in.discard(1)
    world.deliver(Message("prepare", 1, 1, launcher=launcher))
    world.deliver(late[0])
    world.check()


def a_frozen_launcher_goes_on(world: World) -> None:
    world.launch((0, 1))
    launcher = world.workers[-1]
    lose(world, 1)
    run(world, 3)
    launcher.frozen = True
    recover(world, 0, 2)
    world.cut_in.discard(1)
    world.cut_out.discard(1)
    for steps in ((0,), (1, 2)):
        world.work(launcher, steps)
        for message in [m for m in world.flight if (m.node, m.generation) == (1, 1)]:
            world.flight.remove(message)
            world.deliver(message)
    world.check()


def the_next_generation_is_prepared_over_the_old(world: World) -> None:
    begin(world, 0, 1)
    world.give_up()
    launcher = Launcher(2, world.now)
    world.members.append((0, 1))
    world.unproven[2] = {0, 1}
    for n in (0, 1):
        world.deliver(Message("prepare", n, 2, launcher=launcher))
    world.deliver(Message("start", 0, 2, launcher.stamps[0], launcher))
    world.check()


def prepare_and_start_of_an_old_token_arrive(world: World) -> None:
    launcher_sends_start_to_one(world)
    recover(world, 0, 2)
    launcher = Launcher(1, world.now)
    world.deliver(Message("prepare", 1, 1, launcher=launcher))
    if 1 in launcher.stamps:
        world.deliver(Message("start", 1, 1, launcher.stamps[1], launcher))
    world.check()


def an_answer_is_read_after_a_sleep(world: World) -> None:
    begin(world, 0, 1)
    world.cut_in.add(1)
    world.cut_out.add(1)
    run(world, int(LEASE) + 2)
    world.sleep(1, asking=True)
    lose(world, 1)
    recover(world, 0, 2)
    world.nodes[1].wake(world.now)
    run(world, 1)


def a_node_rebooted_before_it_was_prepared(world: World) -> None:
    world.launch((0, 1))
    world.reboot(1)
    run(world, 6)
    lose(world, 1)
    world.cut_out.discard(1)
    recover(world, 0, 2)


def a_started_generation_is_launched_again(world: World) -> None:
    begin(world, 0, 1)
    world.nodes[0].die()
    launcher = Launcher(1, world.now)
    world.deliver(Message("prepare", 0, 1, launcher=launcher))
    if 0 in launcher.stamps:
        world.deliver(Message("start", 0, 1, launcher.stamps[0], launcher))
    world.check()


STORIES: dict[Broken, Story] = {
    Broken.ANY_PEER: two_lost_nodes_see_each_other,
    Broken.ALL_LOST: every_node_is_lost,
    Broken.ANY_REBOOT: a_node_rebooted_before_it_was_prepared,
    Broken.ANSWERS_FROM_RECEIPT: an_answer_is_read_after_a_sleep,
    Broken.NO_FENCE_AFTER: one_node_is_lost,
    Broken.NO_LEASE: one_node_is_lost,
    Broken.NO_GRACE: one_node_is_lost,
    Broken.NO_HOPS: the_lost_form_the_tail_of_a_ring,
    Broken.VOUCHES_WHEN_FENCED: the_lost_form_the_tail_of_a_ring,
    Broken.ONLY_THIS_WATCH: an_old_watcher_heard_it_last,
    Broken.FENCES_FALSE_ELSEWHERE: a_single_node_without_a_fence_is_lost,
    Broken.RENEWS_FROM_RECEIPT: a_renewal_arrives_late,
    Broken.RENEWS_UNACKNOWLEDGED: a_superseded_watcher_goes_on,
    Broken.GRACE_FROM_WAKING: a_node_sleeps_through_its_end,
    Broken.START_AFTER_EXPIRY: start_arrives_after_the_prepared_keeper_expired,
    Broken.NO_VALID_FOR: start_arrives_at_the_last_moment,
    Broken.START_OF_ANY_PREPARE: prepare_and_start_arrive_late,
    Broken.START_UNACKNOWLEDGED: a_frozen_launcher_goes_on,
    Broken.PREPARE_KEEPS_OLD: the_next_generation_is_prepared_over_the_old,
    Broken.PREPARE_OF_ANY_AGE: prepare_and_start_of_an_old_token_arrive,
    Broken.PREPARED_TWICE: a_started_generation_is_launched_again,
}


def world_for(story: Story, broken: Broken | None) -> World:
    return World(
        [1.0] * 4,
        ring=story is the_lost_form_the_tail_of_a_ring,
        fences=story is not a_single_node_without_a_fence_is_lost,
        broken=broken,
    )


def test_every_broken_rule_has_a_story() -> None:
    assert set(STORIES) == set(Broken)


@pytest.mark.parametrize("broken", STORIES, ids=lambda b: b.name.lower())
def test_each_rule_is_needed(broken: Broken) -> None:
    story = STORIES[broken]
    story(world_for(story, None))
    with pytest.raises(AssertionError, match="two tokens are alive|twice"):
        story(world_for(story, broken))


@pytest.mark.parametrize("broken", SEARCHED, ids=lambda b: b.name.lower())
def test_the_search_finds_the_broken_rule(broken: Broken) -> None:
    with pytest.raises(AssertionError, match="two tokens are alive|twice"):
        search(broken, 400, 20)


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
    assert states == [State.RUNNING, State.GONE], (
        "beside generation 2, and not beyond the first time its keeper is scheduled"
    )


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

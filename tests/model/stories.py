"""The shortest counterexample known for each broken rule. Every one is run against the whole protocol too."""

from collections.abc import Callable

from tests.model.protocol import LEASE, VALID_FOR, Broken
from tests.model.world import Launcher, Message, Phase, World

LONGEST_WAIT = 80  # ticks; the longest wait of the model is 67

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

"""The shortest counterexample known for each broken rule, also run against the whole protocol."""

from collections.abc import Callable, Mapping
from typing import Any

from tests.model.protocol import PATIENT, SHORT, USUAL, Broken
from tests.model.world import ELSEWHERE, End, Launcher, Limit, Message, Phase, Watcher, World

LONGEST_WAIT = 90  # ticks; the longest wait of the model is 82
LEASE, VALID_FOR = int(USUAL.lease), int(USUAL.valid_for)

ALIVE_ALONE = int(USUAL.lease + USUAL.fence_after + USUAL.stop_grace) + 1
"""Ticks that ranks live at most when nothing prolongs their lease."""

Story = Callable[[World], None]


def begin(world: World, *members: int) -> None:
    world.launch(members)
    run(world, 6)
    assert world.phase is Phase.RUNNING


def run(world: World, ticks: int) -> None:
    for _ in range(ticks):
        world.tick()


def lose(world: World, *hosts: int) -> None:
    """Cut hosts off from the controller and from all others; they still see each other."""
    world.cut_in |= set(hosts)
    world.cut_out |= set(hosts)
    part(world, *hosts)


def part(world: World, *hosts: int) -> None:
    """Cut hosts off from all other hosts, not from the controller."""
    everyone = range(len(world.nodes))
    world.cut_peers |= {(a, b) for a in everyone for b in everyone if (a in hosts) != (b in hosts)}


def cut(world: World, *hosts: int) -> None:
    """Cut hosts off from the controller, not from each other."""
    world.cut_in |= set(hosts)
    world.cut_out |= set(hosts)


def mend(world: World, *hosts: int) -> None:
    world.cut_in -= set(hosts)
    world.cut_out -= set(hosts)


def wait(world: World, *, most: int = LONGEST_WAIT) -> bool:
    """Wait until a launch is safe; returns whether it came to that."""
    if world.phase is not Phase.STOPPING:
        world.give_up()
    for _ in range(most):
        if world.may_launch():
            return True
        world.tick()
    return False


def recover(world: World, *members: int) -> None:
    if wait(world):
        world.launch(members)
        run(world, 6)


def keep(world: World, kind: str, node: int) -> list[Message]:
    """Take the messages of a kind to a node off the wire."""
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


def the_lost_ask_in_a_chain(world: World) -> None:
    """0 asks 1, 1 asks 2 and 3, 2 asks 0 and 1, 3 asks 2: only 2 sees at once that 0 stopped."""
    begin(world, 0, 1, 2, 3)
    lose(world, 1, 2, 3)
    recover(world, 0)


def all_but_one_of_eighteen_are_lost(world: World) -> None:
    """Too many for all to ask all: some are two questions away from the node that was stopped."""
    begin(world, *range(18))
    lose(world, *range(1, 18))
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


def start_arrives_after_the_prepared_shim_expired(world: World) -> None:
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
    run(world, VALID_FOR - 3)
    world.cut_in.discard(1)
    world.deliver(late[0])
    world.cut_in.add(1)
    recover(world, 0, 2)


def prepare_and_start_arrive_late(world: World) -> None:
    launcher, late = launcher_sends_start_to_one(world)
    lose(world, 1)
    recover(world, 0, 2)
    world.cut_in.discard(1)
    world.deliver(Message("prepare", 1, 1, 1, launcher=launcher))
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
    world.launch_in_place((0, 1))
    launcher = world.workers[-1]
    assert isinstance(launcher, Launcher)
    run(world, 2)
    keep(world, "start", 1)
    run(world, 1)


def prepare_and_start_of_an_old_token_arrive(world: World) -> None:
    launcher_sends_start_to_one(world)
    recover(world, 0, 2)
    launcher = Launcher(1, world.now)
    world.deliver(Message("prepare", 1, 1, 1, launcher=launcher))
    if 1 in launcher.stamps:
        world.deliver(Message("start", 1, 1, 1, launcher.stamps[1], launcher))
    world.check()


def an_answer_is_read_after_a_sleep(world: World) -> None:
    begin(world, 0, 1)
    world.cut_in.add(1)
    world.cut_out.add(1)
    run(world, LEASE + 2)
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
    world.deliver(Message("prepare", 0, 0, 1, launcher=launcher))
    if 0 in launcher.stamps:
        world.deliver(Message("start", 0, 0, 1, launcher.stamps[0], launcher))
    world.check()


# The wait: from when it counts, and by which times.


def the_last_witness_vouches_until_its_own_stop(world: World) -> None:
    """1 sees only 2, which is leased and vouches for it alone; 2 is stopped long after 0."""
    begin(world, 0, 1, 2)
    cut(world, 1)
    world.cut_peers |= {(0, 1), (1, 0)}
    run(world, 30)
    cut(world, 2)
    world.give_up(End.CANCEL)
    run(world, 13)
    world.cut_peers |= {(1, 2), (2, 1)}
    mend(world, 2)
    run(world, 2)
    recover(world, 0, 3)


def the_vouching_node_is_silent_itself(world: World) -> None:
    """1 was lost long ago; 2, silent since the stop, vouches for it while its lease runs."""
    begin(world, 0, 1, 2)
    cut(world, 1)
    world.cut_peers |= {(0, 1), (1, 0)}
    run(world, 40)
    cut(world, 2)
    world.give_up(End.CANCEL)
    run(world, 19)
    mend(world, 2)
    run(world, 2)
    recover(world, 0, 3)


def a_lost_node_is_renewed_before_its_loss_is_reported(world: World) -> None:
    begin(world, 0, 1)
    cut(world, 1)
    run(world, 10)
    assert 1 in world.controller.lost_nodes
    watcher = world.workers[-1]
    assert isinstance(watcher, Watcher)
    watcher.gathers = True
    mend(world, 1)
    run(world, 3)
    lose(world, 1)
    world.give_up(End.CANCEL)
    recover(world, 0, 2)


def the_policy_is_shortened(world: World) -> None:
    begin(world, 0, 1)
    world.controller.set_policy(SHORT, True)
    lose(world, 1)
    recover(world, 0, 2)


def the_policy_says_now_that_ranks_fence(world: World) -> None:
    begin(world, 0, 1)
    world.controller.set_policy(USUAL, True)
    lose(world, 1)
    recover(world, 0, 2)


def a_job_is_submitted_again_with_shorter_times(world: World) -> None:
    begin(world, 0, 1)
    world.controller.set_policy(SHORT, True)
    lose(world, 1)
    world.resubmit(new_fleet=False)
    recover(world, 0, 2)


def job_and_fleet_are_submitted_again(world: World) -> None:
    begin(world, 0, 1)
    lose(world, 1)
    world.resubmit(new_fleet=True)
    recover(world, 0, 2)


def the_wall_clock_is_set_ahead(world: World) -> None:
    begin(world, 0, 1)
    lose(world, 1)
    world.give_up(End.CANCEL)
    run(world, 2)
    world.controller.wall += 60
    recover(world, 0, 2)


# Launches that are not known to have started ranks.


def the_first_attempt_started_ranks(world: World) -> None:
    """Both start, 1 is cut off before it answers, and the last attempt sends no start."""
    world.launch((0, 1))
    run(world, 2)
    world.cut_out.add(1)
    run(world, 1)
    lose(world, 1)
    world.supersede()
    run(world, 2)
    world.give_up()
    recover(world, 0, 2)


def one_starts_and_one_refuses(world: World) -> None:
    world.launch((0, 1))
    run(world, 2)
    world.nodes[0].die()
    run(world, 1)
    lose(world, 1)
    world.give_up(End.REFUSED)
    recover(world, 0, 2)


# What proves ranks gone.


def another_machine_answers_to_the_name(world: World) -> None:
    begin(world, 0, 1)
    lose(world, 1)
    world.at[1] = ELSEWHERE
    recover(world, 0, 2)


def two_machines_change_names(world: World) -> None:
    begin(world, 0, 1)
    world.at[1], world.at[2] = 2, 1
    lose(world, 1)
    recover(world, 0, 3)


def a_job_is_submitted_again_and_the_name_leads_elsewhere(world: World) -> None:
    begin(world, 0, 1)
    lose(world, 1)
    world.at[1] = ELSEWHERE
    world.resubmit(new_fleet=False)
    recover(world, 0, 2)


def a_launch_is_repeated_at_another_machine(world: World) -> None:
    """1 has started, its answer is lost, and the next attempt prepares another machine."""
    world.launch((0, 1))
    run(world, 2)
    world.cut_out.add(1)
    run(world, 1)
    lose(world, 1)
    world.at[1] = ELSEWHERE
    world.supersede()
    run(world, 6)
    world.give_up()
    recover(world, 0, 2)


def the_files_of_a_living_job_are_removed(world: World) -> None:
    begin(world, 0, 1)
    world.nodes[1].sweep(whole=False)
    recover(world, 0, 2)


def the_state_folder_is_removed(world: World) -> None:
    begin(world, 0, 1)
    world.nodes[1].sweep(whole=True)
    recover(world, 0, 2)


# What a node does by itself.


def the_shim_is_stopped_alone(world: World) -> None:
    begin(world, 0, 1)
    world.nodes[1].shim_stopped = True
    lose(world, 1)
    recover(world, 0, 2)


def the_disk_is_frozen(world: World) -> None:
    begin(world, 0, 1)
    world.nodes[1].disk_frozen = True
    lose(world, 1)
    recover(world, 0, 2)


def a_machine_is_paused_with_its_clock(world: World) -> None:
    """It wakes while its peers are there, and is behind them from then on."""
    begin(world, 0, 1, 2)
    run(world, 8)
    cut(world, 1)
    world.sleep(1, asking=False, clock_stands=True)
    run(world, 10)
    world.nodes[1].wake(world.now)
    run(world, 2)
    lose(world, 1)
    recover(world, 0, 3)


def a_renewal_from_before_the_pause_arrives(world: World) -> None:
    begin(world, 0, 1, 2)
    run(world, 8)
    late = keep(world, "renew", 1)
    cut(world, 1)
    world.sleep(1, asking=False, clock_stands=True)
    run(world, 8)
    world.nodes[1].wake(world.now)
    run(world, 2)
    world.cut_in.discard(1)
    for message in late:
        world.deliver(message)
    lose(world, 1)
    recover(world, 0, 3)


def a_machine_paused_with_its_clock_wakes_beside_the_next_generation(world: World) -> None:
    """No peer can tell it the time, but all refuse to be asked."""
    begin(world, 0, 1)
    world.sleep(1, asking=False, clock_stands=True)
    cut(world, 1)
    recover(world, 0, 2)
    world.nodes[1].wake(world.now)
    run(world, 20)


def a_machine_is_paused_with_its_clock_before_its_first_renewal(world: World) -> None:
    """Its first lease has only begun, by its own clock, when its gang has been stopped."""
    world.launch((0, 1))
    run(world, 4)
    shim = world.nodes[1].shim(1)
    assert shim is not None and shim.lease is not None
    assert shim.known and not shim.lease.renewed
    world.sleep(1, asking=False, clock_stands=True)
    cut(world, 1)
    recover(world, 0, 2)
    world.nodes[1].wake(world.now)
    run(world, 20)


def another_server_has_a_job_of_the_name(world: World) -> None:
    begin(world, 0, 1)
    other_server_launches(world, 1)


def other_server_launches(world: World, host: int) -> None:
    """Have a controller of another server, with the same names, launch its job on a host."""
    world.others += 1
    node, g = world.nodes[host], world.others
    if node.awake and (stamp := node.prepare(g, USUAL, world.now, server=1)) is not None:
        node.start(g, stamp, True, (), world.now, server=1)
    world.check()


STORIES: dict[Broken, Story] = {
    Broken.ANY_PEER: two_lost_nodes_see_each_other,
    Broken.ALL_LOST: every_node_is_lost,
    Broken.ANY_REBOOT: a_node_rebooted_before_it_was_prepared,
    Broken.ANSWERS_FROM_RECEIPT: an_answer_is_read_after_a_sleep,
    Broken.NO_FENCE_AFTER: one_node_is_lost,
    Broken.NO_LEASE: one_node_is_lost,
    Broken.NO_GRACE: one_node_is_lost,
    Broken.NO_HOPS: the_lost_ask_in_a_chain,
    Broken.VOUCHES_WHEN_FENCED: the_lost_ask_in_a_chain,
    Broken.ONLY_THIS_WATCH: an_old_watcher_heard_it_last,
    Broken.FENCES_FALSE_ELSEWHERE: a_single_node_without_a_fence_is_lost,
    Broken.RENEWS_FROM_RECEIPT: a_renewal_arrives_late,
    Broken.RENEWS_UNACKNOWLEDGED: a_superseded_watcher_goes_on,
    Broken.GRACE_FROM_WAKING: a_node_sleeps_through_its_end,
    Broken.START_AFTER_EXPIRY: start_arrives_after_the_prepared_shim_expired,
    Broken.NO_VALID_FOR: start_arrives_at_the_last_moment,
    Broken.START_OF_ANY_PREPARE: prepare_and_start_arrive_late,
    Broken.START_UNACKNOWLEDGED: a_frozen_launcher_goes_on,
    Broken.PREPARE_KEEPS_OLD: the_next_generation_is_prepared_over_the_old,
    Broken.PREPARE_OF_ANY_AGE: prepare_and_start_of_an_old_token_arrive,
    Broken.PREPARED_TWICE: a_started_generation_is_launched_again,
    Broken.FIRST_STOP: the_last_witness_vouches_until_its_own_stop,
    Broken.OWN_LEASE_ONLY: the_vouching_node_is_silent_itself,
    Broken.RENEWS_LOST: a_lost_node_is_renewed_before_its_loss_is_reported,
    Broken.POLICY_OF_NOW: the_policy_is_shortened,
    Broken.FENCES_OF_NOW: the_policy_says_now_that_ranks_fence,
    Broken.TIMES_OF_OTHERS: a_job_is_submitted_again_with_shorter_times,
    Broken.NEW_FLEET: job_and_fleet_are_submitted_again,
    Broken.WALL_CLOCK: the_wall_clock_is_set_ahead,
    Broken.LAST_ATTEMPT: the_first_attempt_started_ranks,
    Broken.REFUSED_UNKNOWN: one_starts_and_one_refuses,
    Broken.ANY_PLACE: another_machine_answers_to_the_name,
    Broken.PREPARED_AGAIN: a_launch_is_repeated_at_another_machine,
    Broken.SWEPT_STATE: the_files_of_a_living_job_are_removed,
    Broken.ONE_SHIM: the_shim_is_stopped_alone,
    Broken.WRITES_FIRST: the_disk_is_frozen,
    Broken.STOPPED_CLOCK: a_machine_is_paused_with_its_clock,
    Broken.GOES_ON_ALONE: a_machine_paused_with_its_clock_wakes_beside_the_next_generation,
    Broken.OLD_STAMPS: a_renewal_from_before_the_pause_arrives,
    Broken.NO_SERVER: another_server_has_a_job_of_the_name,
}
MORE: tuple[tuple[Broken, Story], ...] = (
    (Broken.NO_HOPS, all_but_one_of_eighteen_are_lost),
    (Broken.ANY_PLACE, two_machines_change_names),
    (Broken.GOES_ON_ALONE, a_machine_is_paused_with_its_clock_before_its_first_renewal),
)
"""Other ways around a rule that has a story already."""

# What the protocol cannot prevent.


def a_node_wakes_beside_the_next_generation(world: World) -> None:
    begin(world, 0, 1)
    world.sleep(1, asking=False)
    recover(world, 0, 2)
    lose(world, 1)
    world.nodes[1].wake(world.now)
    world.check()


def a_machine_paused_with_its_clock_finds_no_peer(world: World) -> None:
    begin(world, 0, 1)
    world.sleep(1, asking=False, clock_stands=True)
    recover(world, 0, 2)
    lose(world, 1)
    world.nodes[1].wake(world.now)
    world.check()


def a_machine_is_paused_with_its_clock_before_a_peer_answered(world: World) -> None:
    """All refuse to be asked when it wakes, which proves nothing of a peer that never answered."""
    part(world, 1)
    world.launch((0, 1))
    run(world, 4)
    world.sleep(1, asking=False, clock_stands=True)
    cut(world, 1)
    recover(world, 0, 2)
    world.cut_peers.clear()
    world.nodes[1].wake(world.now)
    world.tick()


def all_processes_but_the_ranks_are_stopped(world: World) -> None:
    begin(world, 0, 1)
    node = world.nodes[1]
    node.shim_stopped = node.guard_stopped = node.supervisor_stopped = True
    lose(world, 1)
    recover(world, 0, 2)


def a_launch_is_cancelled_and_a_name_leads_elsewhere(world: World) -> None:
    world.launch((0, 1))
    run(world, 2)
    world.cut_out.add(1)
    run(world, 1)
    world.workers[-1].frozen = True
    lose(world, 1)
    world.at[1] = ELSEWHERE
    world.give_up(End.CANCEL)
    recover(world, 0, 2)


def a_living_node_is_declared_dead(world: World) -> None:
    begin(world, 0, 1)
    lose(world, 1)
    world.declare_dead(1)
    recover(world, 0, 2)


def a_node_declared_dead_vouches_for_another(world: World) -> None:
    begin(world, 0, 1, 2)
    cut(world, 2)
    world.cut_peers |= {(0, 2), (2, 0)}
    run(world, 30)
    world.declare_dead(1)
    cut(world, 1)
    recover(world, 0, 3)


LIMITS: tuple[tuple[Limit, Story, int | None], ...] = (
    (Limit.OVERSLEPT, a_node_wakes_beside_the_next_generation, 1),
    (Limit.CLOCK_STOOD, a_machine_paused_with_its_clock_finds_no_peer, ALIVE_ALONE),
    (Limit.CLOCK_STOOD, a_machine_is_paused_with_its_clock_before_a_peer_answered, ALIVE_ALONE),
    (Limit.ALL_STOPPED, all_processes_but_the_ranks_are_stopped, None),
    (Limit.PLACE_UNKNOWN, a_launch_is_cancelled_and_a_name_leads_elsewhere, ALIVE_ALONE),
    (Limit.PLACE_UNKNOWN, a_job_is_submitted_again_and_the_name_leads_elsewhere, ALIVE_ALONE),
    (Limit.DECLARED_DEAD, a_living_node_is_declared_dead, ALIVE_ALONE),
    (Limit.DECLARED_DEAD, a_node_declared_dead_vouches_for_another, ALIVE_ALONE),
)
"""Each with the most ticks that it lasts on a node that is cut off; None: until it goes on."""

WORLDS: Mapping[Story, Mapping[str, Any]] = {
    the_lost_ask_in_a_chain: {"sparse": True},
    all_but_one_of_eighteen_are_lost: {"rates": (1.0,) * 18},
    a_single_node_without_a_fence_is_lost: {"fences": False},
    the_policy_says_now_that_ranks_fence: {"fences": False},
    the_last_witness_vouches_until_its_own_stop: {"times": PATIENT},
    the_vouching_node_is_silent_itself: {"times": PATIENT},
    a_node_declared_dead_vouches_for_another: {"times": PATIENT},
    a_machine_is_paused_with_its_clock: {"times": PATIENT},
    a_renewal_from_before_the_pause_arrives: {"times": PATIENT},
}


def world_for(story: Story, broken: Broken | None) -> World:
    return World(**WORLDS.get(story, {}), broken=broken)

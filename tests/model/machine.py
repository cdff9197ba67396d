"""What may happen to a gang, as rules for two searches: hypothesis and plain seeded walks."""

import random
from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.model.protocol import POLICIES, Broken, Times
from tests.model.stories import LONGEST_WAIT, other_server_launches
from tests.model.world import ELSEWHERE, NODES, End, Phase, Watcher, World

NODE = st.integers(0, NODES - 1)
HOST = st.integers(0, ELSEWHERE)
SOME = st.sets(NODE, min_size=1)
RATES = (1.0, 127 / 128, 129 / 128)
RATE = st.sampled_from(RATES)
STEPS = st.sampled_from([(0,), (1,), (2,), (0, 1), (0, 1, 2)])
ENDS = st.sampled_from(End)
ALWAYS = (0, 1, 3)
"""Of the rules of a walk: time, and launches."""
EVERYONE = range(NODES + 1)


class Fencing(RuleBasedStateMachine):
    broken: Broken | None = None

    @initialize(
        rates=st.tuples(RATE, RATE, RATE, RATE),
        sparse=st.booleans(),
        fences=st.sampled_from([True, True, True, False]),
        times=st.sampled_from(POLICIES),
    )
    def begin(self, rates: tuple[float, ...], sparse: bool, fences: bool, times: Times) -> None:
        self.world = World(rates, sparse=sparse, fences=fences, times=times, broken=self.broken)
        self.launch({0, 1, 2})

    @rule(ticks=st.integers(1, 12))
    def time_passes(self, ticks: int) -> None:
        for _ in range(ticks):
            self.world.tick()

    def launch_safely(self, members: set[int], end: End = End.REPORT) -> None:
        """Give up what runs, wait as long as the rule says, and launch."""
        world = self.world
        if world.phase is not Phase.STOPPING:
            world.give_up(end)
        for _ in range(LONGEST_WAIT):
            if world.may_launch():
                world.launch(tuple(sorted(members)))
                break
            if world.waits_for_ever and not self.is_reached():
                break
            world.tick()

    def is_reached(self) -> bool:
        """Whether a node that is not proven stopped may answer."""
        world = self.world
        hosts = {world.at[n] for n in world.controller.waits_for}
        return any(world.nodes[h].awake and h not in world.cut_in | world.cut_out for h in hosts)

    @rule(members=SOME, end=ENDS)
    def launch(self, members: set[int], end: End = End.REPORT) -> None:
        self.launch_safely(members, end)
        self.time_passes(4)

    @precondition(lambda self: self.world.phase is not Phase.STOPPING)
    @rule(more=SOME)
    def launch_in_place(self, more: set[int]) -> None:
        self.world.launch_in_place(more)
        self.time_passes(4)

    @rule(nodes=SOME, ticks=st.integers(0, 8), end=ENDS)
    def lose_and_launch(self, nodes: set[int], ticks: int, end: End = End.REPORT) -> None:
        """Lose some nodes together and launch on the others, which every other rule may disturb."""
        self.part(nodes)
        self.time_passes(ticks)
        self.launch({0, 1, 2, 3} - nodes or {3}, end)

    @rule(nodes=SOME, ticks=st.integers(0, 8), clock_stands=st.booleans())
    def lose_asleep_and_launch(self, nodes: set[int], ticks: int, clock_stands: bool) -> None:
        for node in sorted(nodes):
            self.sleep(node, asking=True, clock_stands=clock_stands)
        self.time_passes(ticks)
        self.launch({0, 1, 2, 3} - nodes or {3})
        for node in sorted(nodes):
            self.wake(node)
        self.world.tick()

    @rule(nodes=SOME, kept=st.sampled_from(["prepare", "start", "renew", "stop"]))
    def begin_again_and_delay(self, nodes: set[int], kept: str) -> None:
        """Launch on all four, with the messages of one kind to some nodes kept for later."""
        world = self.world
        self.launch_safely({0, 1, 2, 3})
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
    @rule(end=ENDS)
    def give_up(self, end: End) -> None:
        self.world.give_up(end)

    @precondition(lambda self: self.world.may_launch())
    @rule(members=SOME)
    def launch_begins(self, members: set[int]) -> None:
        self.world.launch(tuple(sorted(members)))

    @precondition(lambda self: self.world.phase is Phase.STOPPING)
    @rule()
    def stop_again(self) -> None:
        self.world.repeat_stop()

    @rule(new_fleet=st.booleans(), times=st.sampled_from(POLICIES))
    def resubmit(self, new_fleet: bool, times: Times) -> None:
        self.world.controller.set_policy(times, self.world.controller.is_fencing)
        self.world.resubmit(new_fleet=new_fleet)

    @rule(times=st.sampled_from(POLICIES), fences=st.booleans())
    def change_policy(self, times: Times, fences: bool) -> None:
        self.world.controller.set_policy(times, fences)

    @rule(ahead=st.sampled_from([-60.0, 60.0]))
    def set_wall_clock(self, ahead: float) -> None:
        self.world.controller.wall += ahead

    # The network.

    @rule(nodes=SOME)
    def part(self, nodes: set[int]) -> None:
        """Cut some nodes off from the controller and the others; they still see each other."""
        self.world.cut_in |= nodes
        self.world.cut_out |= nodes
        self.world.cut_peers |= {
            (a, b) for a in EVERYONE for b in EVERYONE if (a in nodes) != (b in nodes)
        }

    @rule(node=NODE, peer=NODE, before=st.integers(4, 30), after=st.integers(4, 16))
    def lean_on_one_peer(self, node: int, peer: int, before: int, after: int) -> None:
        """Let a node see one other only, which is lost to the controller for a while, too."""
        world = self.world
        world.cut_in.add(node)
        world.cut_out.add(node)
        others = [h for h in EVERYONE if h not in (node, peer)]
        world.cut_peers |= {(node, h) for h in others} | {(h, node) for h in others}
        self.time_passes(before)
        self.cut(peer, "both")
        if world.phase is not Phase.STOPPING:
            world.give_up(End.CANCEL)
        self.time_passes(after)
        world.cut_in.discard(peer)
        world.cut_out.discard(peer)
        self.time_passes(2)
        self.launch({0, 1, 2, 3} - {node})

    @rule(node=HOST, way=st.sampled_from(["in", "out", "both"]))
    def cut(self, node: int, way: str) -> None:
        if way != "out":
            self.world.cut_in.add(node)
        if way != "in":
            self.world.cut_out.add(node)

    @rule(asker=HOST, peer=HOST)
    def cut_peers(self, asker: int, peer: int) -> None:
        self.world.cut_peers.add((asker, peer))

    @rule(nodes=SOME, peers=st.booleans())
    def mend(self, nodes: set[int], peers: bool) -> None:
        self.world.cut_in -= nodes
        self.world.cut_out -= nodes
        if peers:
            self.world.cut_peers = {link for link in self.world.cut_peers if not nodes & set(link)}

    @rule(node=NODE, ticks=st.integers(1, 6))
    def flap(self, node: int, ticks: int) -> None:
        """Have a node lost, and back while a fault is gathered; then it is lost again."""
        world = self.world
        world.cut_in.add(node)
        world.cut_out.add(node)
        self.time_passes(8)
        if isinstance(worker := world.workers[-1], Watcher):
            worker.gathers = True
        self.mend({node}, peers=False)
        self.time_passes(ticks)
        self.part({node})

    @rule(node=NODE, other=HOST)
    def change_names(self, node: int, other: int) -> None:
        """Have a name lead to another machine; where that has a name, they change."""
        at = self.world.at
        if other in at:
            at[at.index(other)] = at[node]
        at[node] = other

    # The nodes.

    @rule(node=HOST, asking=st.booleans(), clock_stands=st.booleans())
    def sleep(self, node: int, asking: bool, clock_stands: bool) -> None:
        if self.world.nodes[node].awake:
            self.world.sleep(node, asking=asking, clock_stands=clock_stands)

    @rule(node=HOST)
    def wake(self, node: int) -> None:
        if not self.world.nodes[node].awake:
            self.world.nodes[node].wake(self.world.now)
            self.world.check()

    @rule(node=NODE, ticks=st.integers(2, 12))
    def pause(self, node: int, ticks: int) -> None:
        """Have a machine stand still with its clock, and wake while its peers are there."""
        self.sleep(node, asking=False, clock_stands=True)
        self.time_passes(ticks)
        self.wake(node)
        self.time_passes(2)

    @rule(node=HOST)
    def ranks_and_shim_die(self, node: int) -> None:
        self.world.nodes[node].die()

    @rule(node=HOST)
    def reboot(self, node: int) -> None:
        self.world.reboot(node)

    @rule(node=HOST, stopped=st.booleans())
    def stop_shim(self, node: int, stopped: bool) -> None:
        self.world.nodes[node].shim_stopped = stopped

    @rule(node=HOST, guard=st.booleans())
    def stop_helper(self, node: int, guard: bool) -> None:
        """Stop the guard, or the supervisor."""
        if guard:
            self.world.nodes[node].guard_stopped = True
        else:
            self.world.nodes[node].supervisor_stopped = True

    @rule(node=HOST)
    def go_on(self, node: int) -> None:
        self.world.nodes[node].go_on(self.world.now)

    @rule(node=NODE)
    def declare_dead(self, node: int) -> None:
        self.world.declare_dead(node)

    @rule(node=HOST, frozen=st.booleans())
    def freeze_disk(self, node: int, frozen: bool) -> None:
        self.world.nodes[node].disk_frozen = frozen

    @rule(node=HOST, whole=st.booleans())
    def sweep(self, node: int, whole: bool) -> None:
        self.world.nodes[node].sweep(whole=whole)

    @rule(node=HOST)
    def other_server(self, node: int) -> None:
        other_server_launches(self.world, node)

    # Messages and workers.

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

    @precondition(lambda self: self.world.workers)
    @rule(gathers=st.booleans())
    def a_fault_is_gathered(self, gathers: bool) -> None:
        if isinstance(worker := self.world.workers[-1], Watcher):
            worker.gathers = gathers


def walk(broken: Broken | None, seed: int, steps: int) -> World:
    """Take random steps until two tokens are alive or the steps are used up.

    The same seed always walks the same way.
    """
    chance = random.Random(seed)
    machine = Fencing()
    machine.broken = broken
    machine.begin(
        tuple(chance.choice(RATES) for _ in range(NODES)),
        chance.random() < 0.5,
        chance.random() < 0.75,
        chance.choice(POLICIES),
    )

    def node() -> int:
        return chance.randrange(NODES)

    def host() -> int:
        return chance.randrange(NODES + 1)

    def some() -> set[int]:
        return {n for n in range(NODES) if chance.random() < 0.4} or {node()}

    def flip() -> bool:
        return chance.random() < 0.5

    def end() -> End:
        return chance.choice(tuple(End))

    def sub_steps() -> tuple[int, ...]:
        return chance.choice([(0,), (1,), (2,), (0, 1), (0, 1, 2)])

    world = machine.world
    rules: list[tuple[int, Callable[[], object], Callable[[], object]]] = [
        (4, lambda: True, lambda: machine.time_passes(chance.randint(1, 12))),
        (2, lambda: True, lambda: machine.launch(some(), end())),
        (1, lambda: world.phase is not Phase.STOPPING, lambda: machine.launch_in_place(some())),
        (4, lambda: True, lambda: machine.lose_and_launch(some(), chance.randint(0, 8), end())),
        (
            2,
            lambda: True,
            lambda: machine.lose_asleep_and_launch(
                some(), chance.randint(0, 8), chance.random() < 0.2
            ),
        ),
        (
            3,
            lambda: True,
            lambda: machine.begin_again_and_delay(
                some(), chance.choice(["prepare", "start", "renew", "stop"])
            ),
        ),
        (2, lambda: world.held, lambda: machine.all_arrive_late(flip())),
        (1, lambda: world.phase is not Phase.STOPPING, lambda: machine.give_up(end())),
        (1, world.may_launch, lambda: machine.launch_begins(some())),
        (1, lambda: world.phase is Phase.STOPPING, machine.stop_again),
        (1, lambda: True, lambda: machine.resubmit(flip(), chance.choice(POLICIES))),
        (
            2,
            lambda: True,
            lambda: machine.change_policy(chance.choice(POLICIES), chance.random() < 0.75),
        ),
        (1, lambda: True, lambda: machine.set_wall_clock(chance.choice((-60.0, 60.0)))),
        (3, lambda: True, lambda: machine.part(some())),
        (
            2,
            lambda: True,
            lambda: machine.lean_on_one_peer(
                node(), node(), chance.randint(4, 30), chance.randint(4, 16)
            ),
        ),
        (2, lambda: True, lambda: machine.cut(host(), chance.choice(["in", "out", "both"]))),
        (1, lambda: True, lambda: machine.cut_peers(host(), host())),
        (4, lambda: True, lambda: machine.mend(some(), flip())),
        (1, lambda: world.workers, lambda: machine.flap(node(), chance.randint(1, 6))),
        (1, lambda: True, lambda: machine.change_names(node(), host())),
        (1, lambda: True, lambda: machine.sleep(node(), flip(), chance.random() < 0.2)),
        (1, lambda: True, lambda: machine.wake(node())),
        (1, lambda: True, lambda: machine.pause(node(), chance.randint(2, 12))),
        (1, lambda: True, lambda: machine.ranks_and_shim_die(node())),
        (1, lambda: True, lambda: machine.reboot(node())),
        (1, lambda: True, lambda: machine.stop_shim(node(), flip())),
        (1, lambda: True, lambda: machine.stop_helper(host(), flip())),
        (1, lambda: True, lambda: machine.go_on(host())),
        (1, lambda: True, lambda: machine.declare_dead(node())),
        (1, lambda: True, lambda: machine.freeze_disk(node(), flip())),
        (1, lambda: True, lambda: machine.sweep(node(), flip())),
        (1, lambda: True, lambda: machine.other_server(host())),
        (2, lambda: world.flight, lambda: machine.delay(chance.randint(0, 7), flip())),
        (
            3,
            lambda: world.held,
            lambda: machine.arrive_late(chance.randint(0, 7), flip(), chance.random() < 0.2),
        ),
        (2, lambda: world.workers, lambda: machine.worker_freezes(sub_steps())),
        (2, lambda: world.workers and world.workers[-1].current, machine.supersede),
        (2, lambda: world.workers, lambda: machine.zombie_works(chance.randint(1, 4), sub_steps())),
        (1, lambda: world.workers, lambda: machine.a_fault_is_gathered(flip())),
    ]
    # Each walk leaves out about half of what may happen, so that the rest happens often.
    weights = [weight * (index in ALWAYS or flip()) for index, (weight, _, _) in enumerate(rules)]
    for _ in range(steps):
        _, possible, do = chance.choices(rules, weights)[0]
        if possible():
            do()
    return world

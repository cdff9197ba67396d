"""What may happen to a gang, as rules that two searches draw from: hypothesis, and plain seeded walks."""

import random
from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.model.protocol import Broken
from tests.model.stories import LONGEST_WAIT
from tests.model.world import Phase, World

NODE = st.integers(0, 3)
SOME = st.sets(NODE, min_size=1)
RATE = st.sampled_from([1.0, 127 / 128, 129 / 128])
STEPS = st.sampled_from([(0,), (1,), (2,), (0, 1), (0, 1, 2)])


class Fencing(RuleBasedStateMachine):
    broken: Broken | None = None

    @initialize(rates=st.tuples(RATE, RATE, RATE, RATE), ring=st.booleans(), fences=st.sampled_from([True, True, True, False]))
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


def walk(broken: Broken | None, seed: int, steps: int) -> World:
    """Take random steps until two tokens are alive or the steps are used up. The same seed always walks the same way."""
    chance = random.Random(seed)
    machine = Fencing()
    machine.broken = broken
    machine.begin(tuple(chance.choice((1.0, 127 / 128, 129 / 128)) for _ in range(4)), chance.random() < 0.5, chance.random() < 0.75)

    def node() -> int:
        return chance.randrange(4)

    def some() -> set[int]:
        return {n for n in range(4) if chance.random() < 0.4} or {node()}

    def flip() -> bool:
        return chance.random() < 0.5

    def sub_steps() -> tuple[int, ...]:
        return chance.choice([(0,), (1,), (2,), (0, 1), (0, 1, 2)])

    world = machine.world
    rules: list[tuple[int, Callable[[], object], Callable[[], object]]] = [
        (3, lambda: True, lambda: machine.time_passes(chance.randint(1, 12))),
        (2, lambda: True, lambda: machine.launch(some())),
        (4, lambda: True, lambda: machine.lose_and_launch(some(), chance.randint(0, 8))),
        (2, lambda: True, lambda: machine.lose_asleep_and_launch(some(), chance.randint(0, 8))),
        (3, lambda: True, lambda: machine.begin_again_and_delay(some(), chance.choice(["prepare", "start", "renew", "stop"]))),
        (2, lambda: world.held, lambda: machine.all_arrive_late(flip())),
        (1, lambda: world.phase is not Phase.STOPPING, machine.give_up),
        (1, world.may_launch, lambda: machine.launch_begins(some())),
        (3, lambda: True, lambda: machine.part(some())),
        (1, lambda: True, lambda: machine.cut(node(), chance.choice(["in", "out", "both"]))),
        (1, lambda: True, lambda: machine.cut_peers(node(), node())),
        (3, lambda: True, lambda: machine.mend(some())),
        (1, lambda: True, lambda: machine.sleep(node(), flip())),
        (1, lambda: True, lambda: machine.wake(node())),
        (1, lambda: True, lambda: machine.ranks_and_keeper_die(node())),
        (1, lambda: True, lambda: machine.reboot(node())),
        (2, lambda: world.flight, lambda: machine.delay(chance.randint(0, 7), flip())),
        (3, lambda: world.held, lambda: machine.arrive_late(chance.randint(0, 7), flip(), chance.random() < 0.2)),
        (2, lambda: world.workers, lambda: machine.worker_freezes(sub_steps())),
        (2, lambda: world.workers and world.workers[-1].current, machine.supersede),
        (2, lambda: world.workers, lambda: machine.zombie_works(chance.randint(1, 4), sub_steps())),
    ]
    weights = [weight for weight, _, _ in rules]
    for _ in range(steps):
        _, possible, do = chance.choices(rules, weights)[0]
        if possible():
            do()
    return world

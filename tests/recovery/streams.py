"""A job driven as its workflow drives it, and the moves that disturb it.

A small world answers each decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal, TypeVar, cast

from relaunch.evidence.findings import Verdict
from relaunch.evidence.observations import Observation, RankExited, RanksFenced, RanksVanished
from relaunch.evidence.stacks import HungRank
from relaunch.job.apply import apply_decision, finish
from relaunch.job.events import (
    CancelRequested,
    DeadlinePassed,
    Event,
    FaultObserved,
    IncidentsArchived,
    Launched,
    LaunchFailed,
    LaunchRefused,
    MessageRejected,
    NodeDeclaredDead,
    NodeRefusal,
    NodeReturned,
    NodesAcquired,
    NodesExamined,
    NodesMissing,
    NodeUnreachable,
    PolicyChanged,
    ProgressSeen,
    RanksFound,
    RanksHung,
    RanksStopped,
    RanksSucceeded,
    RepairEnded,
    RetryRequested,
    StepReached,
    Submitted,
)
from relaunch.job.ladder import remaining_slots
from relaunch.job.ranks import seat
from relaunch.job.state import (
    Ask,
    Decision,
    Examine,
    ExaminedNode,
    Ignore,
    JobState,
    Phase,
    Relaunch,
    Repair,
    Stop,
    Wait,
)
from relaunch.job.step import evaluate_event
from relaunch.pool.messages import Place
from relaunch.spec.policy import Policy, Strategy
from tests.recovery.builders import T0, error, new_job

T = TypeVar("T")

INVENTORY = tuple(f"n{number}" for number in range(1, 8))
"""More nodes than any gang here has, and so few that isolating one by one leaves too few."""
PAUSES = tuple(timedelta(seconds=s) for s in (0, 0, 0, 1, 20, 90, 600, 2400, 5 * 3600, 25 * 3600))
"""Nothing, as two reports in one task; up to beyond every window of the presets."""
WATCHED: tuple[str, ...] = (
    "fault",
    "fault",
    "fault",
    "hung",
    "unreachable",
    "returned",
    "progress",
    "progress",
    "step",
    "succeeded",
)
PEOPLE: tuple[str, ...] = ("cancel", "retry", "declare", "change", "reject", "archive")


class Choice:
    """Takes one number apart, so that a move means something in whatever state it comes."""

    def __init__(self, number: int) -> None:
        self._left = (
            number * 0x9E3779B97F4A7C15 % 2**64 >> 8
        )  # Fibonacci hashing: neighbours choose differently, 0 chooses the first

    def among(self, options: Sequence[T]) -> T:
        self._left, index = divmod(self._left, len(options))
        return options[index]

    def once_in(self, count: int) -> bool:
        """False for the number 0, so that what is drawn shrinks to what goes well."""
        return self.among(range(count)) == count - 1


@dataclass(frozen=True, slots=True)
class Turn:
    """One event and what became of it."""

    event: Event
    now: datetime
    before: JobState
    recorded: JobState
    decision: Decision
    after: JobState


class Run:
    """The workflow's loop without the workflow: one act at a time, a watch, a deadline."""

    def __init__(
        self,
        policy: Policy,
        *,
        nodes: int | dict[str, int] = 2,
        others: tuple[Policy, ...] = (),
        **always: object,
    ) -> None:
        self.job = new_job(policy=policy, nodes=nodes)
        self.now = T0
        self.others = others
        """What a person may change the policy to."""
        self.always = always
        """What always comes out the same.

        `verdict`, `outcome`, `launch`, `refusal`, `missing`, `ending`, `reported`.
        """
        self.turns: list[Turn] = []
        self.act: Iterator[Event | None] | None = None
        self.watching = False
        self.deadline: datetime | None = None
        self.granted: tuple[str, ...] = ()
        """To a job that has asked for more."""
        self.step = 0
        self.choice = Choice(0)
        self.take(Submitted("", "ada"))

    # --- the loop of workflows/training_job/workflow.py

    def take(self, event: Event) -> Turn:
        before = self.job
        recorded, decision = evaluate_event(before, event, self.now)
        self.job = apply_decision(recorded, decision, self.now)
        turn = Turn(event, self.now, before, recorded, decision, self.job)
        self.turns.append(turn)
        match decision:
            case Relaunch():
                self.watching, self.deadline, self.act = False, None, self._relaunch(decision)
            case Stop():
                self.watching, self.deadline, self.act = False, None, self._stop()
            case Examine() | Repair():
                self.watching, self.deadline, self.act = (
                    False,
                    decision.until,
                    self._look_after(decision),
                )
            case Ask():
                self.deadline = self.job.next.at
                self.watching = bool(self.job.lost)
                if not self.watching:
                    self.act = self._clean_up()
            case Wait():
                self.deadline = decision.until
                self.watching = self.watching or decision.phase in (Phase.RUNNING, Phase.NODE_LOST)
            case Ignore():
                if self.act is None and self.job.phase in (Phase.RUNNING, Phase.NODE_LOST):
                    self.watching = True
        return turn

    def of(self, choice: Choice, name: str, options: Sequence[T]) -> T:
        return cast(T, self.always[name]) if name in self.always else choice.among(options)

    def _answer(self, name: str, options: Sequence[T]) -> T:
        return self.of(self.choice, name, options)

    def answer(self, choice: Choice) -> bool:
        """Let the act that runs come to its next result. False: there is none, or it waits."""
        self.choice = choice
        if self.act is None:
            return False
        for event in self.act:
            if event is not None:
                self.take(event)
            return event is not None
        self.act = None
        if self.job.ending is not None:
            self.job = finish(self.job, self.now)
        return True

    def pass_deadline(self) -> None:
        assert self.deadline is not None
        self.now, self.deadline = max(self.now, self.deadline), None
        self.take(DeadlinePassed())

    def wait(self, pause: timedelta) -> None:
        """No deadline is slept through."""
        until = self.now + pause
        while self.deadline is not None and self.deadline <= until:
            self.pass_deadline()
        self.now = max(self.now, until)

    @property
    def moves_on(self) -> bool:
        """Whether anything is left that can wake the workflow without a person."""
        return (
            self.job.phase.is_final
            or self.act is not None
            or self.watching
            or self.deadline is not None
        )

    # --- what the activities would answer

    def _relaunch(self, decision: Relaunch) -> Iterator[Event | None]:
        excluded = {*decision.without, *(avoided.node for avoided in self.job.avoided)}
        places = tuple(slot.node for slot in self.job.slots)
        spec = self.job.spec
        if decision.strategy is Strategy.GROW:
            places = self.granted
        elif decision.strategy is Strategy.SHRINK:
            places = tuple(slot.node for slot in remaining_slots(self.job, tuple(excluded)))
        elif not decision.keep_nodes or not places or excluded & set(places):
            kept = [
                node if decision.keep_nodes and node not in excluded else None for node in places
            ] or [None] * spec.node_count
            free = [node for node in INVENTORY if node not in excluded and node not in kept]
            if spec.is_elastic:
                left = [node for node in kept if node is not None]
                fewest = max(0, spec.fewest_nodes - len(left))
                most = max(fewest, min(len(free), spec.node_count - len(left)))
                kept = [*left, *([None] * self.choice.among(range(fewest, most + 1)))]
            if len(free) < kept.count(None) or self._answer(
                "missing", (False, False, False, False, False, True)
            ):
                hopeless = self.choice.once_in(8)
                yield NodesMissing("too few nodes answer", hopeless)
                if hopeless:
                    return
                avoided = {avoided.node for avoided in self.job.avoided}
                free = [node for node in INVENTORY if node not in avoided and node not in kept]
                while len(free) < kept.count(None):
                    yield None  # until a person or a deadline ends the wait
            if self.choice.once_in(8):
                yield RanksFound((free[-1],))
            taken = iter(free[self.choice.among(range(len(free) - kept.count(None) + 1)) :])
            places = tuple(node if node is not None else next(taken) for node in kept)
        if set(self.job.maybe_alive) - set(places):
            yield RanksStopped(decision.generation - 1, self.job.maybe_alive, self.now)
        yield NodesAcquired(
            seat(self.job.slots, tuple(Place(node, f"10.0.0.{node[1:]}") for node in places))
        )
        generation, node = decision.generation, self.choice.among(places)
        match self._answer("launch", ("well", "well", "well", "well", "failed", "refused")):
            case "failed":
                started = self.choice.once_in(2)
                within = self.job.policy.timeouts.valid_for if started else timedelta(0)
                yield LaunchFailed(generation, (node,), started, within, f"{node} does not answer")
            case "refused":
                why = self._answer(
                    "refusal",
                    ("expired", "stuck", "command_not_found", "secret_missing", "not_above"),
                )
                seen = (
                    (
                        self.job.submission + self.choice.once_in(9),
                        generation + self.choice.among((0, 3)),
                    )
                    if why == "not_above"
                    else None
                )
                yield LaunchRefused(generation, (NodeRefusal(node, why, f"refused: {why}", seen),))
            case _:
                yield Launched(generation, self.now, self.now)

    def _look_after(self, decision: Examine | Repair) -> Iterator[Event]:
        generation = self.job.generation
        if self.job.maybe_alive:
            yield RanksStopped(generation, self.job.maybe_alive, self.now)
        if isinstance(decision, Examine):
            yield NodesExamined(
                generation,
                tuple(
                    ExaminedNode(node, self._answer("verdict", tuple(Verdict)), "examined")
                    for node in decision.nodes
                ),
            )
        else:
            outcome = self._answer("outcome", OUTCOMES)
            yield RepairEnded(
                generation, decision.strategy, decision.nodes, outcome, f"it is {outcome}"
            )

    def _stop(self) -> Iterator[Event]:
        nodes = tuple(
            dict.fromkeys((*self.job.maybe_alive, *(slot.node for slot in self.job.slots)))
        )
        if nodes:
            yield RanksStopped(self.job.generation, nodes, self.now)

    def _clean_up(self) -> Iterator[Event]:
        yield RanksStopped(
            self.job.generation, tuple(slot.node for slot in self.job.slots), self.now
        )

    # --- what may happen at any time

    def make(self, kind: str, choice: Choice) -> tuple[Event, ...]:
        """What a watch reports together, or a person sends; nothing where it cannot happen."""
        generation, nodes = (
            self.job.generation,
            tuple(slot.node for slot in self.job.slots) or INVENTORY[:1],
        )
        node, silence = choice.among(nodes), timedelta(minutes=4)
        match kind:
            case "fault":
                with_progress = self._progress(choice) if choice.once_in(3) else ()
                silent = ((choice.among(nodes), silence),) if choice.once_in(6) else ()
                return (
                    *with_progress,
                    FaultObserved(
                        generation,
                        self._observations(choice),
                        choice.among((0, 5)),
                        self.now,
                        silent,
                    ),
                )
            case "hung":
                silent = ((node, silence),) if choice.once_in(4) else ()
                hang = RanksHung(generation, (1, 3), "no step for 30 minutes", self.now, silent)
                suspects = (HungRank(3, node, "is in __next__"),) if choice.once_in(2) else ()
                return (replace(hang, suspects=suspects),)
            case "unreachable":
                return (NodeUnreachable(generation, node, silence, "connection refused"),)
            case "returned":
                return tuple(NodeReturned(generation, lost.node) for lost in self.job.lost[:1])
            case "progress":
                return self._progress(choice)
            case "step":
                at = self.job.report_at_step
                return (
                    ()
                    if at is None
                    else (StepReached(generation, at + choice.among((0, 2)), self.now),)
                )
            case "succeeded":
                return (RanksSucceeded(generation),) if choice.once_in(6) else ()
            case "cancel":
                return (
                    (CancelRequested("", choice.among(("", "ada"))),) if choice.once_in(8) else ()
                )
            case "retry":
                return (
                    RetryRequested(
                        "", "ada", (node,) if choice.once_in(3) else (), choice.once_in(3)
                    ),
                )
            case "declare":
                return (NodeDeclaredDead(choice.among(INVENTORY), "smoke", "ada"),)
            case "change":
                return (PolicyChanged(choice.among(self.others), "", "ada"),) if self.others else ()
            case "reject":
                return (MessageRejected("cancel", "not a mapping"),)
            case _:
                return (IncidentsArchived(len(self.job.incidents) // 2),)

    def _progress(self, choice: Choice) -> tuple[Event, ...]:
        self.step = max(
            0, self.step + choice.among((5, 0, -5))
        )  # a checkpoint may lie before what was seen
        return (ProgressSeen(self.job.generation, self.step, self.now),)

    def _observations(self, choice: Choice) -> tuple[Observation, ...]:
        places = tuple(slot.node for slot in self.job.slots) or INVENTORY[:1]
        place = choice.among(range(len(places)))
        root = self.of(choice, "ending", ENDINGS)(places[place], 2 * place, self.now)
        echoes = (
            tuple(echo(node, 2 * index + 1, self.now) for index, node in enumerate(places))
            if choice.once_in(3)
            else ()
        )
        return choice.among(((root, *echoes), (*echoes, root), echoes or (root,)))

    def wild(self, choice: Choice) -> Event:
        """Any event at all, true or not: of any generation, answering what was never asked."""
        generation = max(0, self.job.generation + choice.among((0, 0, 0, -1, 1)))
        node, other = choice.among(INVENTORY[:4]), choice.among(INVENTORY)
        made: tuple[Event, ...] = (
            Submitted("", "ada"),
            NodesAcquired(
                seat(
                    self.job.slots,
                    tuple(Place(name, name) for name in INVENTORY[: self.job.spec.node_count]),
                )
            ),
            RanksFound((node, other)),
            NodesMissing("too few nodes answer", choice.once_in(20)),
            Launched(generation, self.now, self.now),
            LaunchRefused(
                generation,
                (NodeRefusal(node, choice.among(("stuck", "expired")), "no", (1000, generation)),),
            ),
            LaunchFailed(generation, (node,), choice.once_in(2), timedelta(minutes=1), "no answer"),
            FaultObserved(generation, self._observations(choice), 0, self.now),
            FaultObserved(generation, (), 3, self.now),
            RanksHung(
                generation,
                (),
                "no step",
                self.now,
                ((node, timedelta(0)),) if choice.once_in(2) else (),
            ),
            NodeUnreachable(generation, node, timedelta(minutes=3), "no route"),
            NodeReturned(generation, node),
            ProgressSeen(generation, choice.among((0, 5, 500)), self.now),
            StepReached(generation, choice.among((0, 5, 500)), self.now),
            RanksStopped(generation, (node, other), self.now, (node,)),
            NodesExamined(
                generation,
                tuple(
                    ExaminedNode(n, choice.among(tuple(Verdict)), "") for n in {node: 0, other: 0}
                ),
            ),
            NodesExamined(generation, ()),
            RepairEnded(
                generation,
                choice.among((Strategy.RESET_GPU, Strategy.REBOOT_NODE)),
                (node,),
                choice.among(OUTCOMES),
                "so",
            ),
            DeadlinePassed(),
            NodeDeclaredDead(node, "", ""),
            RetryRequested("", "", (node, other), choice.once_in(2)),
            IncidentsArchived(1),
            RanksSucceeded(generation) if choice.once_in(9) else DeadlinePassed(),
        )
        return choice.among(made)


@dataclass(frozen=True, slots=True)
class Move:
    kind: Literal["answer", "watch", "people", "again", "late", "wild"]
    number: int
    pause: timedelta = timedelta(0)

    def do(self, run: Run) -> None:
        """Let it happen, where it can.

        A watch reports only while it runs, and only what was seen can be seen again.
        """
        run.wait(self.pause)
        choice = Choice(self.number)
        match self.kind:
            case "answer":
                run.answer(choice)
            case "watch":
                kind = run.of(choice, "reported", WATCHED)
                for event in run.make(kind, choice) if run.watching else ():
                    run.take(event)
            case "people":
                for event in run.make(choice.among(PEOPLE), choice):
                    run.take(event)
            case "again":
                if not isinstance(run.turns[-1].event, DeadlinePassed | Submitted | NodesAcquired):
                    run.take(run.turns[-1].event)
            case "late":
                run.take(choice.among(run.turns).event)
            case "wild":
                run.take(run.wild(choice))


OUTCOMES: tuple[Literal["done", "refused", "ambiguous"], ...] = (
    "done",
    "done",
    "refused",
    "ambiguous",
)

# --- what a rank may end with, a row for each cause that has its own evidence


def echo(node: str, rank: int, at: datetime) -> RankExited:
    return RankExited(
        node,
        rank,
        rank % 2,
        1,
        None,
        at,
        error=error("ConnectionResetError: [Errno 104] Connection reset by peer", None),
    )


def fenced(node: str, rank: int, at: datetime) -> RanksFenced:
    return RanksFenced(node, at, "isolated", "no peer answered for 60 s")


def vanished(node: str, rank: int, at: datetime) -> RanksVanished:
    return RanksVanished(node, at, "the node rebooted", rebooted=True)


@dataclass(frozen=True, slots=True)
class Root:
    """A way for one rank to fail by itself."""

    code: int | None = None
    signal: int | None = None
    message: str | None = None
    tail: tuple[str, ...] = ()
    kernel: tuple[str, ...] = ()

    def __call__(self, node: str, rank: int, at: datetime) -> RankExited:
        said = None if self.message is None else error(self.message, at.timestamp() - 1)
        return RankExited(
            node,
            rank,
            rank % 2,
            self.code,
            self.signal,
            at,
            error=said,
            log_tail=self.tail,
            kernel=self.kernel,
        )


def xid(code: int, gpu: str = "0000:05:00") -> tuple[str, ...]:
    return (f"[  100.000000] NVRM: Xid (PCI:{gpu}): {code}, pid=4711, name=python, it is so",)


ROOTS = (
    Root(signal=9),
    Root(code=1),
    Root(code=7, tail=("training begins", "something is wrong")),
    Root(code=1, message="ValueError: bad batch"),
    Root(
        code=1,
        message="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
        "GPU 0 has a total capacity of 79.11 GiB",
    ),
    Root(code=1, message="FloatingPointError: loss is nan"),
    Root(code=1, message="OSError: [Errno 116] Stale file handle: '/mnt/nfs/data'"),
    Root(code=1, message="RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    Root(code=127),
    Root(code=93),
    Root(signal=11),
    Root(signal=6, kernel=xid(94)),
    Root(signal=6, kernel=xid(95)),
    Root(signal=6, kernel=xid(95, "0000:06:00")),
    Root(signal=6, kernel=xid(79)),
    Root(signal=6, kernel=xid(31)),
)


def shim_killed(node: str, rank: int, at: datetime) -> RanksVanished:
    return RanksVanished(node, at, "the shim of its ranks has died")


ENDINGS: tuple[Callable[[str, int, datetime], Observation], ...] = (
    *ROOTS,
    fenced,
    vanished,
    shim_killed,
)

"""What no repair does, whatever a node and people answer, in whatever order, and whenever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from random import Random
from typing import Any, TypeVar

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from relaunch.evidence.catalog import catalog
from relaunch.evidence.findings import Verdict
from relaunch.repair.machine import apply_event, begin, decide
from relaunch.repair.state import (
    AskPerson,
    FinishRepair,
    NoAnswer,
    NodeDiagnosed,
    NodeProbed,
    OrderDone,
    OrderRefused,
    PermitAnswered,
    PersonAnswered,
    PowerCycleNode,
    ProbeNode,
    RebootNode,
    RepairCancelRequested,
    RepairDecision,
    RepairEvent,
    RepairRules,
    RepairState,
    ResetGpus,
    RunDiag,
    TimeExpired,
    WaitEnded,
    WaitForNode,
)
from relaunch.spec.policy import Strategy
from tests.recovery.builders import T0
from tests.recovery.generated import searched
from tests.recovery.nodes import FAULTY, NO_NVML, bus, diag, gpu, journal, nvml, probe

T = TypeVar("T")
STATES: TypeAdapter[RepairState] = TypeAdapter(RepairState)
DECISIONS: TypeAdapter[RepairDecision] = TypeAdapter(RepairDecision)
EVENTS: TypeAdapter[RepairEvent] = TypeAdapter(RepairEvent)
ID = "repair/gpus/n2/1"
BUSY: tuple[dict[str, Any], ...] = (
    {"jobs": [{"job": "llama", "generation": 1}]},
    {"jobs": None},
    {"held": {"by": "diagnose", "id": "r7"}},
    {"gpus": nvml(gpu(0, processes=[{"pid": 7}]), count=2)},
)
OTHERS: tuple[dict[str, Any], ...] = (
    {"gpus": NO_NVML},
    {"gpus": nvml(count=1)},
    {"gpus": nvml(gpu(0, recovery_action=2), count=2)},
    {"gpus": nvml(gpu(0, remapped={"pending": True, "failed": False}), count=2)},
    {"held": {"by": "reboot", "id": ID}},
    {"boot_id": None},
    {"outcome": "?"},
    {"reboots": None},
    {"reboots": journal((5, ID), boot_id="boot-0")},
    {"reboots": journal((5, ID), boot_id="boot-1")},
    {"reboots": journal((5, "r1"))},
    {"reboots": journal((5, "r1"), (9, "r2"))},
)
DIAGNOSED: tuple[dict[str, Any], ...] = (
    {"exit_code": None},
    {"stdout": FAULTY, "exit_code": 205},
    {"missing": "no dcgmi"},
    {"stdout": ""},
    {"boot_id": "boot-9"},
    {"refused": "busy", "reason": "pid 7"},
)
ORDERED: tuple[RepairEvent, ...] = (
    OrderDone({"outcome": "done", "exit_code": 0, "boot_id": "boot-1"}),
    OrderDone({"outcome": "done", "exit_code": 3, "output": "in use"}),
    OrderDone({}),
    OrderRefused("boot_changed", "it has", "boot-2"),
    OrderRefused("boot_changed", "it says", None),
    OrderRefused("busy", "a job"),
    OrderRefused("cannot_reboot", "sudo"),
)
STRAY: tuple[RepairEvent, ...] = (
    *ORDERED,
    PermitAnswered(True, "?"),
    PermitAnswered(False, "?"),
    WaitEnded(),
    PersonAnswered(True, "eve", ""),
    TimeExpired(),
    NoAnswer("?"),
    NodeDiagnosed(diag()),
)


class Choice:
    """Hundreds of choices by one number."""

    def __init__(self, number: int) -> None:
        self._random = Random(number)

    def among(self, options: Sequence[T]) -> T:
        return self._random.choice(options)

    def once_in(self, count: int) -> bool:
        return self._random.randrange(count) == 0


@dataclass
class Story:
    """One repair from its beginning to its end, and what an onlooker has seen of it."""

    number: int
    choice: Choice = field(init=False)
    state: RepairState = field(init=False)
    now: datetime = T0
    boot: int = 1
    facts: dict[str, Any] = field(default_factory=dict)
    """The answer to the last probe."""
    busy: bool = False
    reboots: bool = True
    first_boot: str = ""
    orders: list[RepairDecision] = field(default_factory=list)
    approved: bool = False
    cancelled: bool = False
    dark: bool = False
    """It answers nothing for a while."""
    former: bool = False
    """The node's journal has told of a reboot that this repair ordered before it was forgotten."""
    healthy: bool = False
    """The last examination read after an order, or after an unordered boot, has found nothing."""
    moves: int = 0

    def __post_init__(self) -> None:
        self.choice = Choice(self.number)
        self.approved, self.reboots = self.choice.once_in(4), not self.choice.once_in(3)
        self.dark = self.choice.once_in(4)
        self.state = begin(
            id=ID,
            fleet="gpus",
            node="n2",
            strategy=self.choice.among((Strategy.RESET_GPU, Strategy.REBOOT_NODE)),
            gpus=self.choice.among(((), (bus(0),), ("0000:06:00", "1"))),
            reason="Xid 79",
            by="job llama",
            rules=RepairRules(
                mode=self.choice.among(("act", "act", "ask", "ask", "observe")),
                level=self.choice.among((1, 1, 1, 0)),
                expected_gpus=self.choice.among((2, 2, 2, 0)),
                diag_timeout=timedelta(minutes=3),
                answer_timeout=timedelta(minutes=self.choice.among((5, 60))),
                max_reboots=self.choice.among((2, 1)),
                has_power_command=self.choice.once_in(2),
                job_waits=self.choice.once_in(3),
                repair_timeout=timedelta(minutes=self.choice.among((25, 8))),
            ),
            now=T0,
            deadline=T0 + timedelta(minutes=25),
            approved_by="ada" if self.approved else "",
        )
        if (
            self.state.rules.has_power_command
            and self.state.strategy is Strategy.REBOOT_NODE
            and self.choice.once_in(3)
        ):
            self.state = replace(self.state, power=True)

    def play(self) -> FinishRepair:
        while True:
            self.moves += 1
            # it does not end
            assert self.moves < 2000
            step = decide(self.state, self.now)
            if isinstance(step, FinishRepair):
                return step
            assert self.now < self.state.deadline
            if isinstance(step, ResetGpus | RebootNode | PowerCycleNode):
                if self.choice.once_in(10):
                    self.now += timedelta(seconds=self.choice.among((6, 60)))
                    self._learn(PermitAnswered(not self.choice.once_in(3), "1 of 2 repairs"))
                    continue
                self._may_be_given(step)
            fact = self._answer(step)
            self._learn(fact)
            if self.choice.once_in(25):
                self._learn(
                    RepairCancelRequested("enough") if self.choice.once_in(4) else self._stray()
                )

    def _stray(self) -> RepairEvent:
        """An answer that comes late, twice, or to nothing; none comes before its order is given."""
        given = not isinstance(
            decide(self.state, self.now), ResetGpus | RebootNode | PowerCycleNode
        )
        return self.choice.among(
            STRAY
            if given
            else (
                WaitEnded(),
                TimeExpired(),
                PersonAnswered(True, "eve", ""),
                NodeDiagnosed(diag()),
            )
        )

    def _learn(self, fact: RepairEvent) -> None:
        by_power = self.state.power
        if isinstance(fact, RepairCancelRequested):
            self.cancelled = True
        if isinstance(fact, PersonAnswered) and fact.approve:
            self.approved = True
        self.state = apply_event(self.state, fact, self.now, catalog())
        if self.state.power and not by_power and self.state.rules.mode == "ask":
            self.approved = False  # of a reboot
        if self.moves < 30:
            assert STATES.validate_json(STATES.dump_json(self.state)) == self.state
            assert EVENTS.validate_json(EVENTS.dump_json(fact)) == fact
        assert isinstance(decide(self.state, self.state.deadline), FinishRepair)
        assert len(self.state.log) <= 60 and (
            self.state.health is None or len(self.state.health.findings) <= 16
        )

    def _may_be_given(self, step: ResetGpus | RebootNode | PowerCycleNode) -> None:
        rules = self.state.rules
        assert rules.mode == "act" or (rules.mode == "ask" and self.approved)
        assert not self.cancelled
        if isinstance(step, PowerCycleNode):
            assert rules.has_power_command and self.state.strategy is Strategy.REBOOT_NODE
            assert not any(isinstance(order, PowerCycleNode) for order in self.orders)
            assert not self.busy or self.state.silent_since is not None
            assert (
                self.state.silent_since is None
                or self.now - self.state.silent_since >= timedelta(minutes=3)
            )
            assert not rules.job_waits or self.now + step.timeout <= self.state.deadline
            self.orders.append(step)
            self.healthy = False
            return
        assert not self.busy
        assert step.boot_id == self.facts["boot_id"]
        if isinstance(step, RebootNode):
            others = [one for one in self.facts["reboots"] if one["id"] != ID]
            assert len(others) < rules.max_reboots
        self.orders.append(step)
        assert (
            len(self.orders) <= 2
            and len(
                {
                    order.boot_id
                    for order in self.orders
                    if isinstance(order, ResetGpus | RebootNode)
                }
            )
            == 1
        )
        self.healthy = False

    def _answer(self, step: RepairDecision) -> RepairEvent:
        assert DECISIONS.validate_json(DECISIONS.dump_json(step)) == step
        if isinstance(step, WaitForNode):
            self.now += step.delay
            return WaitEnded()
        self.now += timedelta(seconds=self.choice.among((0, 0, 1, 20, 90)))
        if isinstance(step, AskPerson):
            return self.choice.among(
                (
                    PersonAnswered(True, "ada", ""),
                    PersonAnswered(True, "", ""),
                    PersonAnswered(False, "ada", "no"),
                    TimeExpired(),
                )
            )
        if self.dark or self.choice.once_in(
            2 if isinstance(step, ResetGpus | RebootNode | PowerCycleNode) else 6
        ):
            self.dark = self.dark and not self.choice.once_in(30)
            return NoAnswer("no route")
        if isinstance(step, ProbeNode):
            return self._probed()
        if isinstance(step, RunDiag):
            healthy = not self.choice.once_in(4)
            self.healthy = healthy
            return NodeDiagnosed(
                diag(
                    **{
                        "boot_id": f"boot-{self.boot}",
                        **({} if healthy else self.choice.among(DIAGNOSED)),
                    }
                )
            )
        return ORDERED[0] if not self.choice.once_in(3) else self.choice.among(ORDERED)

    def _probed(self) -> NodeProbed:
        if (self.orders and self.choice.once_in(3)) or self.choice.once_in(20):
            self.boot += 1
        self.busy = self.choice.once_in(12)
        odd = (
            self.choice.among(BUSY)
            if self.busy
            else self.choice.among(OTHERS)
            if self.choice.once_in(4)
            else {}
        )
        facts = probe(**{"boot_id": f"boot-{self.boot}", "gpus": nvml(count=2), **odd})
        if facts["boot_id"] is not None and facts["outcome"] == "done":
            self.facts = facts
            bad = OTHERS[:4] if self.state.rules.expected_gpus else OTHERS[2:4]
            self.healthy = odd not in bad
            self.former |= any(one["id"] == ID for one in facts["reboots"] or ())
            self.first_boot = self.first_boot or str(facts["boot_id"])
        return NodeProbed(facts)


@searched(200)
@given(st.integers(0, 2**64))
def test_no_repair_does_what_it_must_not(number: int) -> None:
    story = Story(number)
    end = story.play()
    state = story.state
    assert state.deadline <= T0 + timedelta(minutes=90) and (
        state.rules.has_power_command or state.deadline == T0 + timedelta(minutes=25)
    )
    assert story.now <= state.deadline + timedelta(
        seconds=90
    )  # what is under way at the deadline is heard to its end
    assert end.reason and len(end.reason) <= 700
    if end.outcome == "done":
        assert end.verdict is Verdict.HEALTHY and story.healthy
        booted_unseen = bool(story.orders) and state.power and not state.boot_id
        another = story.facts["boot_id"] != story.first_boot or booted_unseen
        assert story.former or another or (story.orders and state.strategy is Strategy.RESET_GPU)
    else:
        assert end.verdict is not Verdict.HEALTHY
    if state.rules.mode == "observe":
        assert not story.orders


def test_the_stories_reach_every_end() -> None:
    stories = [Story(number) for number in range(600)]
    ends = {(story.play().outcome, story.state.strategy, len(story.orders)) for story in stories}
    powered = [
        story
        for story in stories
        if any(isinstance(order, PowerCycleNode) for order in story.orders)
    ]
    assert {"done", "refused", "ambiguous"} <= {
        story.state.outcome or decide(story.state, story.now).outcome for story in powered
    }  # type: ignore[union-attr]
    assert {1, 2, 3} <= {len(story.orders) for story in powered}
    for strategy in (Strategy.RESET_GPU, Strategy.REBOOT_NODE):
        assert {
            ("done", strategy, 0),
            ("done", strategy, 1),
            ("refused", strategy, 0),
            ("refused", strategy, 1),
        } <= ends
    assert {
        ("ambiguous", Strategy.RESET_GPU, 2),
        ("done", Strategy.RESET_GPU, 2),
        ("refused", Strategy.REBOOT_NODE, 2),
    } <= ends

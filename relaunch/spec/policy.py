"""Policies as validated values: ladders, budgets, timeouts, and the checks for contradictions.

`ladder` and `decide` choose the next rung. Presets are the data files in `presets/`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from datetime import timedelta
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from relaunch.evidence.catalog.overrides import NO_OVERRIDES, CatalogOverrides
from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Verdict
from relaunch.fields import Duration, StrictModel, duration

PRESETS = Path(__file__).with_name("presets")

KEPT_TRIES = 200
"""Maximum number of tries that a job keeps; the oldest are dropped, long after their windows."""
MAX_BACKOFF = timedelta(hours=1)
"""Maximum backoff: a job that sleeps for days looks like a job that is lost."""


class Strategy(StrEnum):
    RESTART_IN_PLACE = "RESTART_IN_PLACE"
    """Restart all ranks on the same nodes."""
    RESET_GPU = "RESET_GPU"
    """Reset the suspected GPUs, then restart as above."""
    REBOOT_NODE = "REBOOT_NODE"
    """Reboot the suspected nodes, then restart as above."""
    REPLACE_NODE = "REPLACE_NODE"
    """Replace each suspected node by another; the others keep their places."""
    RESCHEDULE_JOB = "RESCHEDULE_JOB"
    """Assign all places again."""
    SHRINK = "SHRINK"
    """Continue without the suspects on the remaining nodes, for jobs that may have fewer nodes."""
    GROW = "GROW"
    """Not a rung: restart with more nodes that the fleet offers, for jobs that may have more."""
    ASK = "ASK"
    FAIL = "FAIL"

    @property
    def ends(self) -> bool:
        """Return whether the strategy launches nothing."""
        return self in (Strategy.ASK, Strategy.FAIL)

    @property
    def repairs(self) -> bool:
        """Return whether the strategy repairs a node before it launches."""
        return self in (Strategy.RESET_GPU, Strategy.REBOOT_NODE)


RepairKind = Literal["reset-gpus", "reboot", "power-cycle"]
"""What is done to a node, in the words of `relaunch nodes repair`."""


def _make_list(value: Any) -> Any:
    """Turn a single string into a list of one, so that users may write `when: HEALTHY`."""
    return [value] if isinstance(value, str) else value


Key = Literal["job", "cause", "node", "gpu", "code"]


class Rung(StrictModel):
    """One way to recover, and how often it is tried before the next rung."""

    strategy: Strategy
    """What is done."""
    tries: int | None = Field(default=None, ge=1, le=100)
    """How many tries the rung has; default: no limit."""
    window: Duration | None = None
    """Count only tries within this time; default: all since the budgets were renewed."""
    key: Annotated[tuple[Key, ...], BeforeValidator(_make_list)] = ("cause",)
    """What an earlier try must have in common with this fault to count.

    `[node, gpu, code]` counts each fault code of each GPU separately, `[job]` counts all tries.
    """
    consecutive: bool = False
    """Count only consecutive tries, since the last event that `reset_by` names."""
    reset_by: Annotated[tuple[Cause | Literal["PROGRESS"], ...], BeforeValidator(_make_list)] = ()
    """With `consecutive`: the causes whose faults reset the count, and PROGRESS for training that
    passed the step it had reached. Empty: a fault of any other cause, and progress."""
    codes: Annotated[tuple[str, ...], BeforeValidator(_make_list)] = ()
    """The rung is only for faults with one of these codes, such as `Xid 94`; empty: for all.

    A fault with another code also matches by the exit code of its rank, such as `exit 1`.
    """
    when: Annotated[tuple[Verdict, ...], BeforeValidator(_make_list)] = ()
    """The rung applies only to suspects with one of these verdicts, so they are examined first.

    Empty: no examination.
    """
    isolate: bool = False
    """Whether the job does not use the suspects again."""
    spends: bool = True
    """Whether a try is one of the job's `max_restarts`."""
    delay: Duration = timedelta(0)
    """How long to wait before the launch."""
    backoff: float = Field(default=1.0, ge=1.0, le=100.0)
    """Factor by which the delay grows with each further try, up to one hour."""

    @property
    def label(self) -> str:
        """The name under which tries are counted and shown: `REPLACE_NODE when UNHEALTHY`."""
        text = self.strategy.value
        if self.when:
            text += " when " + " or ".join(self.when)
        if self.codes:
            text += " for " + ", ".join(self.codes)
        return text

    def delay_of(self, used: int) -> timedelta:
        """Return how long to wait before the try that follows `used` others."""
        if not self.delay:
            return self.delay
        # The exponent is capped at 64, where the float does not overflow: doubled 64 times, every
        # delay has long reached the maximum.
        seconds = self.delay.total_seconds() * self.backoff ** min(used, 64)
        return max(
            self.delay,
            min(timedelta(seconds=min(seconds, MAX_BACKOFF.total_seconds())), MAX_BACKOFF),
        )

    @model_validator(mode="before")
    @classmethod
    def _spare_restarts(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("strategy") == Strategy.SHRINK:
            return {"spends": False, **value}
        return value

    @model_validator(mode="after")
    def _check_meaning(self) -> Self:
        for condition, sentence in (
            (
                self.strategy is Strategy.GROW,
                "GROW is no answer to a fault: grow_after says when a job takes more nodes",
            ),
            (
                self.strategy is Strategy.SHRINK and self.spends,
                "SHRINK never takes one of max_restarts: leave spends out",
            ),
            (
                self.strategy.ends and self.tries is not None,
                f"{self.strategy} ends a ladder: it takes no tries",
            ),
            (
                self.strategy.ends and bool(self.delay),
                f"{self.strategy} launches nothing: it takes no delay",
            ),
            (
                self.isolate
                and self.strategy
                not in (Strategy.REPLACE_NODE, Strategy.RESCHEDULE_JOB, Strategy.SHRINK),
                f"{self.strategy} keeps its nodes:"
                " isolate is for REPLACE_NODE, RESCHEDULE_JOB and SHRINK",
            ),
            (
                bool(self.reset_by) and not self.consecutive,
                "reset_by says what resets the count: it needs consecutive: true",
            ),
            (
                self.window is not None and not self.window,
                "window is 0s: no try would ever count, so the rung would be tried for ever;"
                " write one such as 1h, or leave window out",
            ),
            (
                self.consecutive and self.window is not None,
                "consecutive counts tries in a row and window those within a time: choose one",
            ),
            (
                self.backoff != 1.0 and not self.delay,
                "backoff multiplies the delay: it needs one, such as delay: 5s",
            ),
            (
                "job" in self.key and len(self.key) > 1,
                f"key {list(self.key)}: job counts all tries, so nothing can stand beside it",
            ),
            (
                not self.key,
                "key is empty: it names what tries have in common,"
                " such as [cause] or [node, gpu, code]",
            ),
        ):
            if condition:
                raise ValueError(sentence)
        return self


class HangRules(StrictModel):
    """What decides that training hangs before its limit has passed. docs/hangs.md says when."""

    stopped: bool = True
    """A process of a rank is stopped (state T)."""
    blocked: bool = True
    """A rank is blocked in the kernel (state D) and nothing about it changes."""
    missing_rank: bool = True
    """torch's records of collectives show a rank that has not entered the one of the others."""
    odd_one_out: bool = True
    """All ranks but one wait in the same collective, and that one does nothing."""
    cut_off: bool = True
    """On connections between ranks nothing is acknowledged, and no rank works."""


class HangLimits(StrictModel):
    """How long the step may stay the same.

    A limit that is not the default counts as written. The defaults, and what is learned, count only
    once it is proven that no rank works, or after `at_most`.
    """

    after: Literal["learned", "off"] | Duration = "learned"
    """How long a step may take; `learned`: from the steps so far; `off`: no limit."""
    first_step: Duration = timedelta(minutes=30)
    """From the launch to the first step."""
    checkpoint: Duration = timedelta(minutes=20)
    """While ranks report the phase `checkpoint`."""
    evaluation: Duration = timedelta(minutes=60)
    """While ranks report the phase `evaluation`."""
    at_most: Duration = timedelta(hours=2)
    """How long past such a limit training counts as hung, whatever its ranks do."""
    rules: HangRules = HangRules()
    """What proves a hang sooner."""


class StragglerLimits(StrictModel):
    """When a node counts as slower than the others, and what follows. docs/stragglers.md."""

    action: Literal["report", "examine", "replace", "off"] = "report"
    """report: people are notified. examine: also, ranks are stopped and the node is examined.
    replace: also, the ranks go on without it, whatever the examination finds."""
    slower_by: float = Field(default=1.2, ge=1.05, le=100.0)
    """How many times slower than the median of the others, at least."""
    over: Duration = timedelta(minutes=10)
    """For how long, at least; not less than 30 heartbeats."""


class Timeouts(StrictModel):
    heartbeat: Duration = timedelta(seconds=10)
    """How often steps are read and leases renewed."""
    lease: Duration = timedelta(seconds=60)
    """How long ranks may live without a renewal, before their node asks its peers."""
    lost_after: Duration = timedelta(seconds=180)
    """How long a node may be silent until it counts as lost."""
    fence_after: Duration = timedelta(seconds=60)
    """How long after its lease a node stops its ranks, where no peer vouches."""
    stop_grace: Duration = timedelta(seconds=15)
    """From SIGTERM to SIGKILL."""
    exit_barrier: Duration = timedelta(seconds=300)
    """How long the other ranks may take to finish or advance, once one has exited with 0."""
    reboot: Duration = timedelta(minutes=25)
    """How long a repair may take; after that the next rung is tried."""
    examination: Duration = timedelta(minutes=30)
    """How long the examination of the suspects may take; after that the verdict is UNKNOWN.

    DCGM's level 3 takes up to half an hour.
    """
    collective: Duration | None = None
    """The timeout of the job's own collectives (`init_process_group(timeout=…)`).

    relaunch cannot see it, and uses this value only to check the other timeouts.
    """
    ask_after: Duration = timedelta(hours=1)
    """How long to wait for a lost node, or for proof that ranks have stopped, where only waiting is
    safe, before a person is asked."""
    unwatched: Duration | None = None
    """How long ranks may run while no controller watches them, before they stop by themselves.

    Default: without end, because a service comes back. `run` without `up` sets it: its service may
    not.
    """
    answer_within: Duration = timedelta(hours=24)
    """How long to wait for nodes or for an answer, until what `unanswered` says."""

    @property
    def valid_for(self) -> timedelta:
        """How long a prepared node accepts the start order.

        The slowest other node may still be stopping old ranks.
        """
        return self.lease + 2 * self.stop_grace


class Policy(StrictModel):
    extends: str = "default"
    """The preset that these keys override."""
    max_restarts: int = Field(default=8, ge=0)
    """How many restarts the job has, until `renewal` renews them."""
    exhaust_restarts: bool = False
    """Whether all `max_restarts` are spent before a ladder ends the job for its own faults.

    True where a person states `max_restarts` over the preset `default`, unless stated as well.
    """
    renewal: Literal["progress", "never"] = "progress"
    """What renews the job's restarts and its tries without a window.

    progress: training that passes the step it had reached. Tries within a window count until it
    is over, and beyond it until then. never: nothing, and windows end by time alone.
    """
    unanswered: Literal["remind", "fail"] = "remind"
    """What follows when `answer_within` passes without an answer, or without nodes.

    remind: people are reminded, and the job waits on; it gives back the nodes that it holds while a
    person is asked. fail: a job without nodes asks a person, one without an answer fails.
    """
    no_progress_stop: Annotated[int, Field(ge=1)] | Literal["off"] = 3
    """How many generations in a row may end without progress, until a fault that the job may have
    caused fails it."""
    no_progress_ask: Annotated[int, Field(ge=1, le=KEPT_TRIES)] | Literal["off"] = "off"
    """How many consecutive launches without progress, of any cause, until a person is asked.

    With `exhaust_restarts`, those that spend a restart are not counted.

    Keyed budgets are counted for each GPU separately, so they would never stop a fault that moves
    over a thousand GPUs.
    """
    startup_stop: Annotated[int, Field(ge=2)] | Literal["off"] = "off"
    """How many launches in a row may end within a minute with the same error of the program.

    More restarts would not help, so the job fails, however many are left. It is one more, which the
    ladder may place on other nodes, once training has advanced, or where all of them name the same
    one of several nodes.
    """
    bad_checkpoint_ask: Annotated[int, Field(ge=2)] | Literal["off"] = "off"
    """How many resumed generations in a row may end with the same error at the same step, or before
    any, until a person is asked to remove the checkpoint.

    Only errors of the program count, and only once an earlier generation has reported a step. Where
    all of them name the same one of several nodes, and no checkpoint, the ladder goes on and a
    person is asked where it would end the job.
    """
    healthy_for: Duration = timedelta(hours=1)
    """How long without a fault counts as progress where no step was ever reported, or where the
    step counter starts again in each epoch."""
    grow_after: Duration | Literal["off"] = timedelta(minutes=30)
    """How long a generation must run without an incident before it is restarted to use more nodes.

    Only for jobs that may have more.
    """
    causes: dict[Cause, tuple[Rung, ...]]
    """The ladder of each cause: rungs, in order. A cause without one has that of UNKNOWN."""
    catalog: CatalogOverrides = NO_OVERRIDES
    """Rows that override relaunch's catalog of fault codes and log lines."""
    dcgm_level: int = Field(default=2, ge=0, le=3)
    """The level N of `dcgmi diag -r N` in the examination of a node with GPUs.

    1 checks the software (10 s), 2 also memory and PCIe (2 min), 3 also the GPU under load (up to
    30 min). 0: dcgmi is not run, and the NVML reading is enough to call a node healthy.
    """
    hang: HangLimits = HangLimits()
    """When training counts as hung (docs/hangs.md)."""
    timeouts: Timeouts = Timeouts()
    """Times between controller, nodes and ranks."""
    strict_lease: bool = False
    """Whether ranks that are cut off stop themselves also on a single node and with
    `gang: independent`, where nothing vouches for them."""
    kill_survivors: Literal["never", "checkpointed", "always"] = "never"
    """When ranks that outlive a fault of their gang get SIGKILL at once, without `stop_grace`.

    They wait for a rank that is gone, so what they do at SIGTERM, such as saving a checkpoint, may
    never be done. checkpointed: once a checkpoint of their generation is known to be finished.
    always: also without one. Only for a gang in lockstep of which a rank or a node is gone: not
    after a hang, a preemption or a SIGTERM, nor where a whole gang is drained or cancelled.
    """
    check_links: bool = True
    """Whether the nodes of a gang are asked whether they reach each other, before it is launched
    again a second time for a HANG or a NETWORK fault that names no node.

    A node that others cannot reach is then the suspect of a NETWORK fault with the code `link`, or
    `node_link` where several others cannot reach it.
    """
    check_foreign_processes: bool = True
    """Whether a node on which a GPU's memory ran out is asked, before the restart, which processes
    that relaunch did not start use the job's GPUs there.

    Where there are some, the incident names them, no budget of the job is spent, and it is launched
    on other GPUs, or once they are free.
    """
    stated: tuple[Literal["exhaust_restarts", "no_progress_stop"], ...] = ()
    """Not a setting: which of these were written, perhaps with the preset's value. A `max_restarts`
    that is given later leaves them."""
    stragglers: StragglerLimits = StragglerLimits()
    """When a node counts as slow (docs/stragglers.md)."""

    @model_validator(mode="before")
    @classmethod
    def _read_older(cls, value: Any) -> Any:
        # One that 0.1.0 has resolved has all the keys of its preset but those that came later.
        lacks = [key for key in LATER_KEYS if key not in value] if isinstance(value, dict) else []
        if not lacks or value.get("extends") not in preset_names():
            return value
        below = _read_preset(value["extends"])
        return {**value, **{key: below[key] for key in lacks if key in below}}

    @model_validator(mode="before")
    @classmethod
    def _convert_off(cls, value: Any) -> Any:
        # YAML 1.1 reads an unquoted `off` as false, and users write it unquoted.
        if isinstance(value, dict):
            for key in (
                "no_progress_stop",
                "no_progress_ask",
                "startup_stop",
                "bad_checkpoint_ask",
                "grow_after",
            ):
                if value.get(key) is False:
                    value = {**value, key: "off"}
                if value.get(key) is True:
                    raise ValueError(
                        f"{key} is on:"
                        f" {'30m' if key == 'grow_after' else 'a number, such as 3'}, or off"
                    )
            hang = value.get("hang")
            if isinstance(hang, dict) and hang.get("after") is False:
                value = {**value, "hang": {**hang, "after": "off"}}
            slow = value.get("stragglers")
            if isinstance(slow, dict) and slow.get("action") is False:
                value = {**value, "stragglers": {**slow, "action": "off"}}
        return value

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if Cause.UNKNOWN not in self.causes:
            raise ValueError(
                "causes.UNKNOWN is missing: it is the ladder for every cause without one"
            )
        for cause, ladder in self.causes.items():
            for sentence in find_ladder_errors(ladder):
                raise ValueError(f"causes.{cause}: {sentence}")
            served = {one for one in Cause if self.ladder(one) is ladder}
            for rung in ladder:
                if own := [one for one in rung.reset_by if one in served]:
                    raise ValueError(
                        f"causes.{cause}: reset_by names {own[0]}, which this ladder serves:"
                        " the count would never exceed one"
                    )
        for sentence in find_timeout_errors(self.timeouts, self.hang):
            raise ValueError(sentence)
        if not self.healthy_for:
            raise ValueError(
                "healthy_for is 0s: every launch would renew all budgets, so the job would be"
                " restarted for ever; write one such as 1h"
            )
        return self

    def ladder(self, cause: Cause) -> tuple[Rung, ...]:
        return self.causes.get(cause) or self.causes[Cause.UNKNOWN]


def find_ladder_errors(ladder: tuple[Rung, ...]) -> list[str]:
    """Return what in a ladder can never happen, each as a sentence that says what to change."""
    if not ladder:
        return ["it has no rungs: at least one, such as {strategy: FAIL}"]
    sentences = []
    for above, rung in enumerate(ladder[:-1], start=1):
        # These rungs are skipped where there is no suspect, the repair fails, or the job may not
        # have fewer nodes.
        may_pass_by = rung.strategy.repairs or rung.strategy in (
            Strategy.REPLACE_NODE,
            Strategy.SHRINK,
        )
        if rung.tries is None and not rung.when and not rung.codes and not may_pass_by:
            what = "ends the ladder" if rung.strategy.ends else "has no tries"
            sentences.append(
                f"rung {above} ({rung.label}) {what}, so rung {above + 1} is never reached"
            )
    seen: dict[str, int] = {}
    for number, rung in enumerate(ladder, start=1):
        if rung.label in seen:
            both = f"rungs {seen[rung.label]} and {number} are both {rung.label}"
            sentences.append(f"{both}, and would count each other's tries: make them one")
        seen.setdefault(rung.label, number)
    return sentences


def find_timeout_errors(timeouts: Timeouts, hang: HangLimits) -> list[str]:
    """Return the contradictions between timeouts, each as a sentence that says what to change."""
    sentences = []
    heartbeat = f"timeouts.heartbeat {duration(timeouts.heartbeat)}"
    if timeouts.heartbeat <= timedelta(0):
        sentences.append("timeouts.heartbeat is 0s: it must be more")
    if timeouts.lease < 3 * timeouts.heartbeat:
        sentences.append(
            f"timeouts.lease is {duration(timeouts.lease)} and {heartbeat}: "
            "two lost heartbeats would end the lease; "
            f"set lease to at least {duration(3 * timeouts.heartbeat)}"
        )
    if timeouts.lost_after < 2 * timeouts.heartbeat:
        sentences.append(
            f"timeouts.lost_after is {duration(timeouts.lost_after)} and {heartbeat}: "
            "one late heartbeat would lose a node; "
            f"set lost_after to at least {duration(2 * timeouts.heartbeat)}"
        )
    if timeouts.fence_after < timeouts.heartbeat:
        sentences.append(
            f"timeouts.fence_after is {duration(timeouts.fence_after)} and {heartbeat}: "
            "a short silence would fence a node; "
            f"set fence_after to at least {duration(timeouts.heartbeat)}"
        )
    if timeouts.unwatched is not None and timeouts.unwatched < timeouts.heartbeat:
        sentences.append(
            f"timeouts.unwatched is {duration(timeouts.unwatched)} and {heartbeat}: ranks would"
            " stop while a watch is only being repeated;"
            f" set unwatched to at least {duration(timeouts.heartbeat)}"
        )
    if hang.after == "learned":
        sentences += [
            f"hang.{phase} is {duration(limit)} and {heartbeat}: training that advances would"
            f" count as hung; set hang.{phase} to at least {duration(3 * timeouts.heartbeat)}"
            for phase in ("first_step", "checkpoint", "evaluation")
            if (limit := getattr(hang, phase)) < 3 * timeouts.heartbeat
        ]
    if not isinstance(hang.after, timedelta):
        return sentences
    after = f"hang.after is {duration(hang.after)}"
    if hang.after < 3 * timeouts.heartbeat:
        sentences.append(
            f"{after} and {heartbeat}: steps are seen once a heartbeat, "
            "so training that advances would count as hung; "
            f"set hang.after to at least {duration(3 * timeouts.heartbeat)}"
        )
    for phase in ("first_step", "checkpoint", "evaluation"):
        limit = getattr(hang, phase)
        if hang.after > limit:
            sentences.append(
                f"{after} and hang.{phase} {duration(limit)}: the longest phases would be "
                f"allowed less than a step; set hang.{phase} to at least {duration(hang.after)}"
            )
    if timeouts.collective is not None and hang.after <= timeouts.collective:
        sentences.append(
            f"{after} and timeouts.collective {duration(timeouts.collective)}: "
            "the ranks would be stopped before their own watchdog could say which collective "
            "hangs; set hang.after to more than that"
        )
    return sentences


LATER_KEYS = ("check_foreign_processes",)
"""Keys that presets have got since 0.1.0. A policy of a running job that lacks one follows its
preset there, so that presets of other systems decide as those systems do."""


@cache
def _read_preset(name: str) -> dict[str, Any]:
    with (PRESETS / f"{name}.toml").open("rb") as file:
        return tomllib.load(file)


def preset_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PRESETS.glob("*.toml")))


def preset(name: str) -> Policy:
    """Return a preset.

    Raises:
        ValueError: There is no preset of that name.
    """
    if name not in preset_names():
        raise ValueError(f"policy {name!r} is no preset: one of {', '.join(preset_names())}")
    return Policy.model_validate({**_read_preset(name), "extends": name})


def resolve(source: dict[str, Any]) -> Policy:
    """Return the policy of a mapping as a user writes it.

    Its keys override those of the preset that `extends` names (by default `default`). Mappings are
    merged key by key; under `causes`, each cause's ladder is replaced as a whole.
    """
    extends = source.get("extends", "default")
    if not isinstance(extends, str) or extends not in preset_names():
        raise ValueError(f"extends: {extends!r} is no preset: one of {', '.join(preset_names())}")
    merged = dict(_read_preset(extends))
    for key, value in {**source, "extends": extends}.items():
        below = merged.get(key)
        merged[key] = (
            {**below, **value} if isinstance(below, dict) and isinstance(value, dict) else value
        )
    if "max_restarts" in source and extends in STATABLE and source.get(EXHAUST) is not False:
        merged |= {key: value for key, value in STATED_BUDGET.items() if key not in source}
    # A policy that was resolved before has all keys, and says itself which were stated.
    return Policy.model_validate({"stated": list_stated(source), **merged})


def list_stated(source: Mapping[str, object], before: Iterable[str] = ()) -> list[str]:
    """Return which keys of `STATED_BUDGET` a mapping, or one before it, states."""
    return [key for key in STATED_BUDGET if key in source or key in before]


STATABLE = ("default",)
"""Presets in which a person's `max_restarts` is spent whatever the ladders say.

The others reproduce the decisions of systems in which a ladder may end before the restarts do.
"""
EXHAUST = "exhaust_restarts"
STATED_BUDGET = {EXHAUST: True, "no_progress_stop": "off"}
"""What follows from `max_restarts` in a policy that says no more about it."""


def state_restarts(policy: Policy, count: int) -> Policy:
    """Return a policy with a person's `max_restarts`, given beside the policy.

    What was stated before stays, as in `resolve`.
    """
    changes: dict[str, Any] = {"max_restarts": count}
    keeps_ladders = EXHAUST in policy.stated and not policy.exhaust_restarts
    if policy.extends in STATABLE and not keeps_ladders:
        changes |= {key: value for key, value in STATED_BUDGET.items() if key not in policy.stated}
    return policy.model_copy(update=changes)

"""What a policy says: ladders, budgets, timeouts, and which timeouts cannot hold together.

Which rung is next is `decide`'s. Presets are the data files in `presets/`.
"""

from __future__ import annotations

import tomllib
from datetime import timedelta
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from recovery.causes import Cause
from recovery.spec import Duration, Strict, duration

PRESETS = Path(__file__).with_name("presets")


class Strategy(StrEnum):
    RESTART_IN_PLACE = "RESTART_IN_PLACE"
    REPLACE_NODE = "REPLACE_NODE"
    RESCHEDULE_JOB = "RESCHEDULE_JOB"
    ASK = "ASK"
    FAIL = "FAIL"


class Rung(Strict):
    """One way to recover, and how often it is tried before the next."""

    strategy: Strategy
    tries: int | None = Field(default=None, ge=1)
    """None: always. FAIL and ASK end a ladder and take no tries."""
    window: Duration | None = None
    """Only tries within this time count; None: all since the budgets were renewed."""
    spends: bool = True
    """Whether a try is one of the job's `max_restarts`."""
    delay: Duration = timedelta(0)


class HangLimits(Strict):
    after: Literal["learned", "off"] | Duration = "learned"
    first_step: Duration = timedelta(minutes=30)
    checkpoint: Duration = timedelta(minutes=20)
    evaluation: Duration = timedelta(minutes=60)


class Timeouts(Strict):
    heartbeat: Duration = timedelta(seconds=10)
    lease: Duration = timedelta(seconds=60)
    lost_after: Duration = timedelta(seconds=180)
    fence_after: Duration = timedelta(seconds=60)
    stop_grace: Duration = timedelta(seconds=15)
    exit_barrier: Duration = timedelta(seconds=300)
    reboot: Duration = timedelta(minutes=25)
    ask_after: Duration = timedelta(hours=1)
    """How long a lost node is waited for, where only waiting is safe, before a person is asked."""
    answer_within: Duration = timedelta(hours=24)
    """How long nodes or a person's answer are waited for; then the job asks, or fails."""

    @property
    def valid_for(self) -> timedelta:
        """How long a node that prepared accepts the order to start: the slowest other node may still be stopping old ranks."""
        return self.lease + 2 * self.stop_grace


class Policy(Strict):
    max_restarts: int = Field(default=8, ge=0)
    no_progress_stop: int | Literal["off"] = 3
    healthy_for: Duration = timedelta(hours=1)
    causes: dict[Cause, tuple[Rung, ...]]
    hang: HangLimits = HangLimits()
    timeouts: Timeouts = Timeouts()
    strict_lease: bool = False

    @model_validator(mode="before")
    @classmethod
    def _yaml_off(cls, value: Any) -> Any:
        # YAML 1.1 reads a bare `off` as false, and everybody writes it bare.
        if isinstance(value, dict):
            if value.get("no_progress_stop") is False:
                value = {**value, "no_progress_stop": "off"}
            hang = value.get("hang")
            if isinstance(hang, dict) and hang.get("after") is False:
                value = {**value, "hang": {**hang, "after": "off"}}
        return value

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        for cause, ladder in self.causes.items():
            if not ladder:
                raise ValueError(f"causes.{cause} has no rungs: at least one, such as {{strategy: FAIL}}")
            for above, rung in enumerate(ladder[:-1], start=1):
                if rung.tries is None:
                    raise ValueError(f"causes.{cause}: rung {above} ({rung.strategy}) has no tries, so rung {above + 1} is never reached")
        if Cause.UNKNOWN not in self.causes:
            raise ValueError("causes.UNKNOWN is missing: it is the ladder for every cause that has none of its own")
        for sentence in impossible_timeouts(self.timeouts, self.hang):
            raise ValueError(sentence)
        return self

    def ladder(self, cause: Cause) -> tuple[Rung, ...]:
        return self.causes.get(cause) or self.causes[Cause.UNKNOWN]


def impossible_timeouts(timeouts: Timeouts, hang: HangLimits) -> list[str]:
    """Relations between timeouts that cannot hold, each as a sentence that says what to change."""
    sentences = []
    if timeouts.heartbeat <= timedelta(0):
        sentences.append("timeouts.heartbeat is 0s: it must be more")
    if timeouts.lease < 3 * timeouts.heartbeat:
        sentences.append(
            f"timeouts.lease is {duration(timeouts.lease)} and timeouts.heartbeat {duration(timeouts.heartbeat)}: "
            "two lost heartbeats would end the lease; "
            f"set lease to at least {duration(3 * timeouts.heartbeat)}"
        )
    if timeouts.lost_after < 2 * timeouts.heartbeat:
        sentences.append(
            f"timeouts.lost_after is {duration(timeouts.lost_after)} and timeouts.heartbeat {duration(timeouts.heartbeat)}: "
            "one late heartbeat would lose a node; "
            f"set lost_after to at least {duration(2 * timeouts.heartbeat)}"
        )
    if timeouts.fence_after < timeouts.heartbeat:
        sentences.append(
            f"timeouts.fence_after is {duration(timeouts.fence_after)} and timeouts.heartbeat {duration(timeouts.heartbeat)}: "
            "a short silence would fence a node; "
            f"set fence_after to at least {duration(timeouts.heartbeat)}"
        )
    if isinstance(hang.after, timedelta) and hang.after < 3 * timeouts.heartbeat:
        sentences.append(
            f"hang.after is {duration(hang.after)} and timeouts.heartbeat {duration(timeouts.heartbeat)}: steps are seen once a heartbeat, "
            f"so training that advances would count as hung; set hang.after to at least {duration(3 * timeouts.heartbeat)}"
        )
    return sentences


@cache
def _read_preset(name: str) -> dict[str, Any]:
    with (PRESETS / f"{name}.toml").open("rb") as file:
        return tomllib.load(file)


def preset_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PRESETS.glob("*.toml")))


def preset(name: str) -> Policy:
    """Return a preset.

    Raises:
        ValueError: there is no preset of that name.
    """
    if name not in preset_names():
        raise ValueError(f"policy {name!r} is no preset: one of {', '.join(preset_names())}")
    return Policy.model_validate(_read_preset(name))


def resolve(source: dict[str, Any]) -> Policy:
    """Return the policy of a mapping as a user writes it: `extends` a preset (by default `default`), keys laid over it.

    A cause's ladder is replaced as a whole, the other mappings key by key.
    """
    mapping = dict(source)
    extends = mapping.pop("extends", "default")
    if not isinstance(extends, str) or extends not in preset_names():
        raise ValueError(f"extends: {extends!r} is no preset: one of {', '.join(preset_names())}")
    merged = dict(_read_preset(extends))
    for key, value in mapping.items():
        below = merged.get(key)
        merged[key] = {**below, **value} if isinstance(below, dict) and isinstance(value, dict) else value
    return Policy.model_validate(merged)

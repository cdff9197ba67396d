"""The accounts of a job's time: what each second between its submission and its end went into.

`relaunch.job.ledger` charges them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum


class Account(StrEnum):
    QUEUED = "queued"
    """Until the job has its first nodes."""
    LAUNCHING = "launching"
    """From the proof that older ranks are gone to the first step, a policy's delay included."""
    PRODUCTIVE = "productive"
    """Training that was kept, or that may still be kept."""
    SAVING = "saving"
    """Ranks said that they save a checkpoint; where they do not say so, this is in PRODUCTIVE."""
    CONTROLLER_AWAY = "controller_away"
    """No watch was connected, and training went on: as productive as PRODUCTIVE."""
    LOST_WORK = "lost_work"
    """Training that a fault undid, or that was done again after it."""
    DETECTING = "detecting"
    """From the fault, or the last step before a hang, until it was reported."""
    DECIDING = "deciding"
    """From the report of a hang until the job decided about it."""
    STOPPING = "stopping"
    """Until no older rank is left: stopped, or fenced on a node that does not answer."""
    EXAMINING = "examining"
    REPAIRING = "repairing"
    WAITING_FOR_NODES = "waiting_for_nodes"
    WAITING_FOR_PERSON = "waiting_for_person"
    UNKNOWN = "unknown"
    """Nothing was reported that says what this time went into."""

    @property
    def is_effective(self) -> bool:
        return self in (Account.PRODUCTIVE, Account.CONTROLLER_AWAY)

    @property
    def is_loss(self) -> bool:
        """Whether a second in this account was taken from training for certain."""
        return not (self.is_effective or self is Account.UNKNOWN)


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """A time without interruption that was charged to one account."""

    account: Account
    begin: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What one watch has learned about the course of a generation, beside its step."""

    first_step_at: datetime | None = None
    """When this watch first knew a step. Only that of a generation's first watch is its start."""
    checkpoint: int | None = None
    """The step of the newest checkpoint that all ranks which report theirs have finished."""
    checkpoint_at: datetime | None = None
    """When this watch first saw it; None: it is older than this watch, or there is none."""
    checkpoints: int = 0
    """How many were finished while this watch ran."""
    watched: timedelta = timedelta(0)
    """From this watch's first step to that newest checkpoint: the time for `checkpoints`."""
    saving: timedelta = timedelta(0)
    """For how long ranks said that they save one."""
    away: timedelta = timedelta(0)
    """For how long no attempt of this watch ran."""
    longest_step: timedelta | None = None
    """The longest time between two advances of the step, saving and evaluation left out."""


@dataclass(frozen=True, slots=True)
class RunningTime:
    """What is known about the generation that runs, whose time is not charged yet."""

    first_step_at: datetime | None = None
    checkpoint_at: datetime | None = None
    """When the newest checkpoint of this generation was finished."""
    saving: timedelta = timedelta(0)
    away: timedelta = timedelta(0)
    reported_at: datetime | None = None
    """When a watch last reported its figures; what happened after it is not known here."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """What a job's time went into, up to `charged_until`. Its size does not grow with time."""

    charged_until: datetime | None = None
    """None: nothing was charged yet."""
    totals: dict[Account, timedelta] = field(default_factory=dict)
    """Over all submissions of the job."""
    earlier: timedelta = timedelta(0)
    """Time between submission and end of all earlier submissions; part of `totals`."""
    running: RunningTime = field(default_factory=RunningTime)
    newest_checkpoint: int | None = None
    """The step of the newest finished checkpoint that was reported; None: none was."""
    reports_checkpoints: bool = False
    """Whether a finished checkpoint was ever reported."""
    at_risk: timedelta = timedelta(0)
    """Charged as productive, though no checkpoint says that it was kept.

    The job's passing the step it had reached shows that it was, else it becomes unknown.
    """
    regains: bool = False
    """Whether training is done again whose loss is not charged yet, as no checkpoint was known."""
    checkpoints: int = 0
    """Checkpoints finished within `checkpointed`, of which `saving` was spent in saving."""
    checkpointed: timedelta = timedelta(0)
    saving: timedelta = timedelta(0)
    longest_step: timedelta | None = None
    """As in `RunFigures`, of all generations."""

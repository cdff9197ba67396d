"""Tries a policy on events: those of a job's history, or those that a file lists.

Every refusal raises `ConfigError` with a one-sentence message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relaunch.config import ConfigError
from relaunch.fields import duration
from relaunch.job.replay import ReplayedStep, name_decision, replay, simulate
from relaunch.job.state import Decision, Ignore, Relaunch, Repair, Stop, Wait
from relaunch.spec.annotations import apply_annotations, apply_grace_period
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import Policy
from relaunch.text import count_noun

if TYPE_CHECKING:
    from temporalio.client import Client


@dataclass(frozen=True)
class Trial:
    replayed: tuple[ReplayedStep, ...]
    start: datetime | None = None
    """Set if times are shown relative to the start, for a file that has no time of day."""
    notes: tuple[str, ...] = ()
    """Limitations of this trial, for the reader of the decisions."""

    @property
    def decisions(self) -> tuple[ReplayedStep, ...]:
        """The decisions, without events that both policies ignore."""
        return tuple(
            r for r in self.replayed if not (isinstance(r.decision, Ignore) and not r.differs)
        )

    def format_time(self, moment: datetime) -> str:
        if self.start is not None:
            return f"+{duration(moment - self.start)}"
        return moment.replace(microsecond=0).isoformat().replace("+00:00", "Z")


def try_on_events(policy: Policy, path: Path) -> Trial:
    from relaunch.cli.event_file import read_events

    file = read_events(path, policy)
    policy, notes = _apply_annotations(policy, file.spec)
    return Trial(
        simulate(policy, file.job(policy), file.steps), None if file.absolute else file.start, notes
    )


async def try_on_history(client: Client, name: str, policy: Policy, run_id: str | None) -> Trial:
    """Apply a policy to the events of a job, in all runs of one submission.

    Raises:
        ConfigError: There is no such run, or this version cannot replay it.
    """
    import logging

    from relaunch.cli import jobs

    # This imports the workflow, and with it activities and backends: no other command needs them.
    from relaunch.workflows.training_job.recording import NotReplayable, recording

    histories, complete = await jobs.read_histories(client, name, run_id)
    # A refusal is reported here in one sentence; the SDK would print a stack trace before it.
    logging.getLogger("temporalio").setLevel(logging.CRITICAL)
    try:
        recorded = await recording(histories, client.namespace, client.data_converter)
    except NotReplayable as error:
        raise ConfigError(
            f"job {name}: this version of relaunch cannot replay its history: {error}"
        ) from None
    policy, notes = _apply_annotations(policy, recorded.job.spec)
    if not complete:
        notes = (
            *notes,
            f"older runs of job {name} are no longer on the server: this replay begins at "
            f"{histories[0].run_id}",
        )
    return Trial(replay(policy, recorded.job, recorded.steps), notes=notes)


def _apply_annotations(policy: Policy, spec: JobSpec) -> tuple[Policy, tuple[str, ...]]:
    try:
        policy = apply_grace_period(policy, spec.env)
    except ValueError as error:
        return policy, (f"the job's environment is ignored: {error}",)
    try:
        return apply_annotations(policy, spec.metadata.annotations), ()
    except ValueError as error:
        return policy, (f"the job's annotations are ignored: {error}",)


def trial_lines(trial: Trial) -> list[str]:
    """Return one line per decision, with those that differ marked, and a summary."""
    rows = [
        ((trial.format_time(r.at), r.event, name_decision(r.decision)), r) for r in trial.decisions
    ]
    times, kinds, names = (
        max((len(words[column]) for words, _ in rows), default=0) for column in (0, 1, 2)
    )
    lines = []
    for (time, kind, name), r in rows:
        left = f" [left: {text}]" if (text := getattr(r.decision, "left", "")) else ""
        then = f" [{r.differs}]" if r.differs else ""
        lines.append(
            f"{'!' if r.differs else ' '} {time:>{times}}  {kind:<{kinds}}  {name:<{names}}  "
            f"{r.decision.reason}{left}{then}"
        )
    return [*lines, *_summary(trial)]


def _summary(trial: Trial) -> list[str]:
    count = len(trial.decisions)
    text = count_noun(count, "decision")
    known = any(r.decided is not None for r in trial.replayed)
    if known:
        text += f", {sum(bool(r.differs) for r in trial.decisions)} differ"
    lines = [text]
    stop = next((n for n, r in enumerate(trial.replayed) if isinstance(r.decision, Stop)), None)
    if stop is None:
        return lines
    ended = trial.replayed[stop]
    if known and ended.differs:
        lines.append(
            f"this policy would have ended the job at {trial.format_time(ended.at)}; later events "
            "are judged as the job actually went on"
        )
    elif not known and (unused := len(trial.replayed) - stop - 1):
        lines.append(
            f"the job has ended at {trial.format_time(ended.at)}: "
            f"{count_noun(unused, 'later event changes', 'later events change')} nothing"
        )
    return lines


def trial_view(trial: Trial) -> dict[str, Any]:
    return {
        "decisions": [
            {
                "at": trial.format_time(r.at),
                "event": r.event,
                **_decision_view(r.decision),
                "then": None if r.decided is None else _decision_view(r.decided),
                "differs": bool(r.differs),
                "difference": r.differs,
            }
            for r in trial.decisions
        ],
        "differ": sum(bool(r.differs) for r in trial.decisions),
    }


def _decision_view(decision: Decision) -> Mapping[str, Any]:
    strategy = decision.strategy if isinstance(decision, Relaunch | Repair) else None
    return {
        "decision": decision.kind,
        "strategy": str(strategy) if strategy else None,
        "phase": str(decision.phase) if isinstance(decision, Wait | Stop) else None,
        "reason": decision.reason,
        "spent": isinstance(decision, Relaunch | Repair) and decision.spent,
        "left": decision.left if isinstance(decision, Relaunch | Repair) else "",
    }

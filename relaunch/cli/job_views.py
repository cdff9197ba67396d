"""Formats a job's state for people and scripts.

Pure: values in, plain mappings and lines out. The keys of `show` and `history_entry` are a stable
interface for scripts: keys may be added, never renamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from relaunch.cli.progress_hints import explain_missing_progress
from relaunch.text import count_noun, join_names, omit_said

if TYPE_CHECKING:
    from relaunch.job.state import Incident, JobState


CHECKPOINT_FORMATS = {
    "dcp": "torch.distributed.checkpoint",
    "other": "by its name",
    "hf": "Hugging Face",
    "accelerate": "Accelerate",
    "megatron": "Megatron-LM",
    "torch": "torch.save",
}


@dataclass(frozen=True)
class Watch:
    """The latest report on the ranks: the heartbeat details of the pending `watch_ranks`."""

    generation: int | None = None
    step: int | None = None
    at: str | None = None
    rate: float | None = None
    """Steps per second."""
    values: Mapping[str, float] = field(default_factory=dict)
    reachable: int | None = None
    unreachable: tuple[str, ...] = ()
    checkpoint: int | None = None
    """The step of the newest finished checkpoint."""
    stalled: tuple[str, ...] = ()
    """Nodes where the exit of a rank may not be reported."""
    missing: Mapping[str, Any] | None = None
    """Why no step is known: a `MissingProgress`."""


def merge_watches(details: list[Mapping[str, Any]]) -> Watch | None:
    """Merge heartbeat details, one mapping per shard; return None if there are none.

    Malformed values are ignored: the worker may be older or newer than this process.
    """
    if not details:
        return None
    reported = [d for d in details if isinstance(d.get("step"), int)]
    slowest = min(reported, key=lambda d: int(d["step"])) if reported else details[0]
    saved = [int(d["checkpoint"]) for d in details if isinstance(d.get("checkpoint"), int)]
    counts = [d["reachable"] for d in details if isinstance(d.get("reachable"), int)]
    rate, values = slowest.get("rate"), slowest.get("values")
    return Watch(
        generation=slowest.get("generation"),
        step=slowest.get("step"),
        at=slowest.get("at"),
        rate=float(rate) if isinstance(rate, int | float) else None,
        values={str(k): float(v) for k, v in values.items() if isinstance(v, int | float)}
        if isinstance(values, Mapping)
        else {},
        reachable=sum(counts) if counts else None,
        unreachable=tuple(node for d in details for node in d.get("unreachable") or ()),
        checkpoint=min(saved, default=None),
        stalled=tuple(node for d in details for node in d.get("stalled") or ()),
        missing=next((d["missing"] for d in details if isinstance(d.get("missing"), Mapping)), None)
        if not reported
        else None,
    )


def budgets(state: JobState, now: datetime) -> dict[str, Any]:
    """Return what was spent of each budget, and what is allowed.

    `causes` has the ladders of the causes seen since the last renewal.
    """
    from relaunch.job.ladder import launches_without_progress, list_used_budgets

    policy = state.policy
    used = list_used_budgets(state, now)
    met = {t.cause for t in state.tries} | ({state.incident.cause} if state.incident else set())
    return {
        "max_restarts": {"spent": state.restarts_spent, "limit": policy.max_restarts},
        "no_progress": {"spent": state.flat_generations, "limit": policy.no_progress_stop},
        "launches_without_progress": {
            "spent": launches_without_progress(state),
            "limit": policy.no_progress_ask,
        },
        "causes": {
            str(cause): [
                {
                    "strategy": str(rung.strategy),
                    "when": [str(verdict) for verdict in rung.when],
                    "codes": list(rung.codes),
                    "used": max(
                        (u.used for u in used if u.cause is cause and u.rung is rung), default=0
                    )
                    if rung.tries
                    else None,
                    "allowed": rung.tries,
                    "by": {
                        u.where: u.used
                        for u in used
                        if u.cause is cause and u.rung is rung and u.where
                    },
                    "window": rung.window.total_seconds() if rung.window is not None else None,
                }
                for rung in policy.ladder(cause)
            ]
            for cause in sorted(met)
        },
    }


def show(state: JobState, watch: Watch | None, now: datetime) -> dict[str, Any]:
    from relaunch.job.failure import find_failure
    from relaunch.job.next_step import describe_next
    from relaunch.job.slow_nodes import list_slow

    incident = state.incident
    shown = incident or (state.incidents[-1] if state.incidents else None)
    failure = find_failure(state)
    return {
        "name": state.name,
        "phase": str(state.phase),
        "generation": state.generation,
        "nodes": [slot.node for slot in state.slots],
        "ranks": (len(state.slots) or state.spec.node_count) * state.spec.ranks_per_node,
        "size": {
            "nodes": len(state.slots),
            "min": state.spec.fewest_nodes,
            "max": state.spec.node_count,
            "reason": state.fewer or None,
        },
        "progress": _progress(state, watch),
        "progress_hint": _find_progress_hint(state, watch, now),
        "budgets": budgets(state, now),
        "incidents": state.incidents_archived + len(state.incidents) + (1 if incident else 0),
        "reason": state.reason,
        "next": {"what": describe_next(state), "at": _iso(state.next.at)},
        "failure": {
            "cause": str(failure.fault.cause),
            "reason": failure.fault.reason,
            "generation": failure.fault.generation,
            "nodes": list(failure.fault.nodes),
            "ranks": list(failure.fault.ranks),
            "traceback": failure.fault.traceback,
            "logs": failure.logs or None,
            "advice": failure.advice or None,
            "earlier": list(failure.earlier),
        }
        if failure is not None
        else None,
        "incident": history_entry(shown, state) if shown else None,
        "lost": list(state.lost_names),
        "stalled": list(watch.stalled) if watch is not None else [],
        "drains": [
            {
                "node": one.node,
                "by": one.by,
                "reason": one.reason,
                "until": _iso(one.until),
                "denied": one.denied or None,
            }
            for one in state.drains
        ],
        "avoided": [{"node": a.node, "reason": a.reason, "at": _iso(a.at)} for a in state.avoided],
        "notices": list(state.notices),
        "slow": [
            {
                "node": one.slow.node,
                "at": _iso(one.at),
                "seconds": one.slow.seconds,
                "others": one.slow.others,
                "ranks": one.slow.ranks,
                "span_s": one.slow.span_s,
                "measure": one.slow.measure,
            }
            for one in list_slow(state)
        ],
        "policy_changes": [
            {"at": _iso(c.at), "by": c.by, "reason": c.reason, "keys": list(c.keys)}
            for c in state.policy_changes
        ],
        "submitted": {"by": state.submitted_by, "at": _iso(state.submitted_at)},
        "ended": _iso(state.ended_at),
        "exit_code": state.exit_code,
    }


def _progress(state: JobState, watch: Watch | None) -> dict[str, Any] | None:
    if (
        watch is not None
        and watch.step is not None
        and watch.generation in (None, state.generation)
    ):
        return {
            "step": watch.step,
            "at": watch.at,
            "rate": watch.rate,
            "values": dict(watch.values),
            "checkpoint": watch.checkpoint,
        }
    return {"step": state.progress.step, "at": _iso(state.progress.at)} if state.progress else None


def _find_progress_hint(state: JobState, watch: Watch | None, now: datetime) -> str | None:
    if watch is None or watch.missing is None or watch.generation != state.generation:
        return None
    try:
        waited = now - datetime.fromisoformat(str(watch.at))
    except (TypeError, ValueError):
        return None
    return explain_missing_progress(state.spec.progress, watch.missing, waited)


def history_entry(incident: Incident, job: JobState) -> dict[str, Any]:
    from relaunch.job.failure import list_faults, logs_command

    faults = list_faults(incident)

    def seconds_after_opening(moment: datetime | None) -> float | None:
        return None if moment is None else (moment - incident.opened).total_seconds()

    return {
        "opened": _iso(incident.opened),
        "closed": _iso(incident.closed),
        "generation": incident.generation,
        "cause": str(incident.cause),
        "nodes": list(incident.nodes),
        "reason": incident.reason,
        "decisions": [
            {
                "at": _iso(d.at),
                "decision": d.decision,
                "strategy": d.strategy,
                "reason": d.reason,
                "spent": d.spent,
                "left": d.left,
            }
            for d in incident.decisions
        ],
        "times": {
            name: seconds_after_opening(getattr(incident, name))
            for name in ("detected", "decided", "stopped", "launched", "recovered")
        },
        "ranks": list(incident.ranks),
        "gpus": list(incident.gpus),
        "code": incident.code,
        "certainty": str(incident.certainty),
        "reached": incident.reached,
        "outcome": incident.outcome,
        "dropped_decisions": incident.dropped_decisions,
        "traceback": incident.traceback,
        "faults": [
            {
                "at": _iso(fault.at),
                "generation": fault.generation,
                "cause": str(fault.cause),
                "nodes": list(fault.nodes),
                "gpus": list(fault.gpus),
                "code": fault.code,
                "reason": fault.reason,
                "ranks": list(fault.ranks),
                "traceback": fault.traceback,
                "withdrawn": fault.withdrawn or None,
            }
            for fault in faults
        ],
        "dropped_faults": incident.dropped_faults,
        "logs": logs_command(job, faults[-1]) or None,
    }


def show_lines(view: Mapping[str, Any], now: datetime) -> list[str]:
    """Return the lines for a `show` view, with times relative to `now`."""
    progress, next_ = view["progress"], view["next"]
    lines = [
        f"job         {view['name']}",
        f"phase       {view['phase']}: {view['reason']}",
        *_failure_lines(view["failure"], view["reason"]),
        f"next        {next_['what']}"
        + (f", {moment_text(next_['at'], now)}" if next_["at"] else ""),
        f"generation  {view['generation']} with {count_noun(view['ranks'], 'rank')} on "
        f"{names(view['nodes']) or 'no nodes yet'}",
        *([f"fewer       {view['size']['reason']}"] if view["size"]["reason"] else []),
        f"progress    {progress_text(progress)}"
        + (f": {view['progress_hint']}" if view["progress_hint"] else ""),
        *(f"checkpoint  {line}" for line in checkpoint_lines(view.get("checkpoint"))),
        f"budgets     {budget_text(view['budgets'])}",
        f"incidents   {view['incidents']}",
    ]
    if view["lost"]:
        lines.append(f"lost        {names(view['lost'])}")
    if view["stalled"]:
        why = "its disk hangs or its shim was stopped; an exit there may look like a hang"
        lines.append(f"stalled     {names(view['stalled'])}: {why}")
    lines += [f"avoided     {a['node']}: {a['reason']}" for a in view["avoided"]]
    lines += [f"notice      {notice}" for notice in view["notices"]]
    if view["incident"]:
        lines += [
            "",
            "incident still open" if view["incident"]["closed"] is None else "last incident",
        ]
        failure = view["failure"]
        told = [view["reason"], failure["reason"]] if failure else [view["reason"]]
        lines += history_lines(view["incident"], now, told, with_tracebacks=failure is None)
    return lines


def _failure_lines(failure: Mapping[str, Any] | None, phase_reason: str) -> list[str]:
    if failure is None:
        return []
    (reason,) = omit_said([failure["reason"]], [phase_reason])
    return [
        f"failure     {failure['cause']} in generation {failure['generation']}"
        + (f": {reason}" if reason else ""),
        *(f"            | {line}" for line in failure["traceback"].splitlines()),
        *([f"what helps  {failure['advice']}"] if failure["advice"] else []),
        *(f"before it   {line}" for line in failure["earlier"]),
        *([f"log         {failure['logs']}"] if failure["logs"] else []),
    ]


def history_lines(
    entry: Mapping[str, Any],
    now: datetime,
    said: Iterable[str] = (),
    *,
    with_tracebacks: bool = True,
) -> list[str]:
    """Return the lines for one incident.

    Its opening time is shown relative to `now`, all other times relative to its opening. What
    `said`, or an earlier line, has said already is not repeated.
    """

    def quote(traceback: str) -> list[str]:
        return [f"    | {line}" for line in traceback.splitlines()] if with_tracebacks else []

    opened = entry["opened"]
    where = f" on {names(entry['nodes'])}" if entry["nodes"] else ""
    (reason,) = omit_said([entry["reason"]], said)
    lines = [
        f"{moment_text(opened, now)}  generation {entry['generation']}  {entry['cause']}{where}"
        + (f": {reason}" if reason else ""),
        *quote(entry["traceback"]),
    ]
    shown = entry["traceback"]
    steps = [*entry["faults"][1:], *entry["decisions"]]
    steps.sort(key=lambda step: datetime.fromisoformat(step["at"]))  # of equal ones, faults first
    reasons = omit_said((step["reason"] for step in steps), [entry["reason"]])
    for step, reason in zip(steps, reasons, strict=True):
        at = f"    {_offset(opened, step['at'])}  "
        if "decision" in step:
            strategy = f" {step['strategy']}" if step["strategy"] else ""
            spent = " (one restart spent)" if step["spent"] else ""
            what = f"{step['decision']}{strategy}{f': {reason}' if reason else ''}{spent}"
            lines.append(f"{at}{what}")
            continue
        on = f" on {names(step['nodes'])}" if step["nodes"] else ""
        what = f"{step['cause']}{on}{f': {reason}' if reason else ', as before'}"
        lines.append(f"{at}further fault in generation {step['generation']}: {what}")
        if step["traceback"] != shown:
            shown = step["traceback"]
            lines += quote(shown)
    if entry["dropped_faults"]:
        lines.append(
            "    "
            + count_noun(
                entry["dropped_faults"],
                "further fault in between was",
                "further faults in between were",
            )
            + " not kept"
        )
    times = ", ".join(
        f"{name} {value:.2f} s" for name, value in entry["times"].items() if value is not None
    )
    lines.append(f"    after it opened: {times or 'nothing yet'}")
    closed = (
        f"    {_offset(opened, entry['closed'])}  closed: {entry['outcome'] or ''}".rstrip(": ")
        if entry["closed"]
        else "    open"
    )
    lines.append(closed)
    if entry["logs"]:
        lines.append(f"    log: {entry['logs']}")
    return lines


def progress_text(progress: Mapping[str, Any] | None) -> str:
    if progress is None:
        return "not reported"
    rate = f", {progress['rate']:.3g} steps/s" if progress.get("rate") is not None else ""
    values = "".join(
        f", {name} {value:.4g}" for name, value in (progress.get("values") or {}).items()
    )
    saved = (
        f", checkpoint {progress['checkpoint']}" if progress.get("checkpoint") is not None else ""
    )
    return f"step {progress['step']}{rate}{values}{saved}"


def checkpoint_lines(view: Mapping[str, Any] | None) -> list[str]:
    """Return the sentences that say what the next generation can resume from."""
    if view is None:
        return []
    directory, newest = view["directory"], view["newest"]
    if view["unreadable"]:
        return [f"{directory} was not read: {view['unreadable']}"]
    told = [f"none is complete in {directory} on {view['node']}"]
    if newest is not None:
        step = "" if newest["step"] is None else f"step {newest['step']}, "
        how = CHECKPOINT_FORMATS.get(newest["format"], newest["format"])
        told = [
            f"{_checkpoint_name(directory, newest)} ({step}{how}), saved "
            f"{_checkpoint_age(newest)} ago: the next generation can resume from it"
        ]
    for torn in view["incomplete"]:
        taken = "; get_last_checkpoint takes it all the same: remove it before the next launch"
        told.append(
            f"{_checkpoint_name(directory, torn)} is not complete: {torn['incomplete']}, changed "
            f"{_checkpoint_age(torn)} ago{taken if torn['format'] == 'hf' else ''}"
        )
    return told


def _checkpoint_name(directory: str, found: Mapping[str, Any]) -> str:
    name = found["name"]
    path = directory if name == "." else f"{directory.rstrip('/')}/{name}"
    return "".join(letter if letter.isprintable() else "?" for letter in path)


def _checkpoint_age(found: Mapping[str, Any]) -> str:
    return age(timedelta(seconds=found["age"]))


def budget_text(view: Mapping[str, Any]) -> str:
    restarts = view["max_restarts"]
    parts = [f"{restarts['spent']} of {count_noun(restarts['limit'], 'restart')}"]
    if (flat := view["no_progress"])["limit"] != "off":
        parts.append(f"{flat['spent']} of {flat['limit']} without progress")
    for cause, rungs in view["causes"].items():
        parts += [
            f"{cause} {r['strategy']} {r['used']} of {r['allowed']}"
            for r in rungs
            if r["allowed"] is not None and r["used"]
        ]
    return ", ".join(parts)


def names(items: list[str]) -> str:
    """Return up to eight names, and the number of the others."""
    return join_names(items, 8)


def age(span: timedelta) -> str:
    seconds = int(span.total_seconds())
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{max(seconds, 0)}s"


def moment_text(written: str, now: datetime) -> str:
    """Format a time for people: `2026-11-22 23:29:59 UTC (3m ago)`."""
    moment = datetime.fromisoformat(written)
    distance = f"{age(now - moment)} ago" if moment <= now else f"in {age(moment - now)}"
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC ({distance})"


def _offset(since: str, written: str) -> str:
    """Format the time from one moment to another: `+0.2s`, `+21.6s`, `+4m`."""
    span = datetime.fromisoformat(written) - datetime.fromisoformat(since)
    return f"+{span.total_seconds():.1f}s" if span < timedelta(minutes=2) else f"+{age(span)}"


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat().replace("+00:00", "Z")

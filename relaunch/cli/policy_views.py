"""Draws a policy as text for people, and shapes it as values for scripts.

Pure: a policy in, lines out.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from relaunch.evidence.causes import OWN_CAUSES, Cause
from relaunch.evidence.findings import Verdict
from relaunch.fields import duration
from relaunch.spec.policy import MAX_BACKOFF, Policy, Rung, Strategy
from relaunch.text import count_noun

WIDTH = 100
DELAYS_SHOWN = 6
"""Longest list of delays shown: the course of a backoff is clear by then."""

PRESETS = {
    "default": "restart, examine, replace, as fits the cause; faulty hardware costs no restart",
    "ecs-reboot-once": "exit 1 on an unhealthy node reboots it once; everything else fails the job",
    "gputasker": "nothing is started twice; a lost node is waited for, and a person decides",
    "modelarts": "Huawei ModelArts' fault recovery with every kind of restart switched on",
    "torchelastic": "torchrun's: any failure restarts all ranks, 3 times in the job's life",
}
"""One line about each preset. The files in relaunch/spec/presets say where each comes from."""

STRATEGIES = {
    Strategy.RESTART_IN_PLACE: "all ranks restart on the same nodes",
    Strategy.RESET_GPU: "the suspected GPUs are reset, then all ranks restart",
    Strategy.REBOOT_NODE: "the suspected node is rebooted, then all ranks restart",
    Strategy.REPLACE_NODE: "another node takes the suspect's place, the others stay",
    Strategy.RESCHEDULE_JOB: "all nodes of the job are allocated again",
    Strategy.SHRINK: "the job goes on without the suspects; only for jobs with `nodes: {min, max}`",
}
SUSPECTS_NEEDED = (Strategy.REPLACE_NODE, Strategy.RESET_GPU, Strategy.REBOOT_NODE, Strategy.SHRINK)

KEYS = {"job": "job", "cause": "cause", "node": "node", "gpu": "GPU", "code": "code"}


def presets_lines() -> list[str]:
    width = max(map(len, PRESETS)) + 2
    return [f"{name:<{width}}{what}" for name, what in PRESETS.items()]


def ladders(policy: Policy, only: Cause | None) -> list[tuple[tuple[Cause, ...], tuple[Rung, ...]]]:
    """Return the ladders, each with the causes that share it, in the order of the causes."""
    shared: dict[tuple[Rung, ...], list[Cause]] = {}
    for cause in Cause:
        shared.setdefault(policy.ladder(cause), []).append(cause)
    return [
        (tuple(causes), ladder)
        for ladder, causes in shared.items()
        if only is None or only in causes
    ]


def policy_lines(name: str, policy: Policy, only: Cause | None) -> list[str]:
    """Return the lines of `policy explain`."""
    base = "" if policy.extends == name or name in PRESETS else f"  (over {policy.extends})"
    lines = [f"policy {name}{base}", "", "budgets", *_budgets(policy)]
    drawn = ladders(policy, only)
    for causes, ladder in drawn:
        title = ", ".join(causes) if only is None else str(only)
        lines += ["", *textwrap.wrap(title, WIDTH), *ladder_lines(policy, ladder)]
    used = {rung.strategy for _, ladder in drawn for rung in ladder}
    if legend := _legend(used):
        lines += ["", *legend]
    return lines


def ladder_lines(policy: Policy, ladder: Sequence[Rung]) -> list[str]:
    lines = []
    for number, rung in enumerate(ladder, start=1):
        lines += _entry(f"  {number}  {rung.strategy:<17} ", _rung(policy, rung))
        if after := _describe_fallthrough(rung):
            lines += _entry("     ↓ ", after)
    last = ladder[-1]
    if not last.strategy.ends and _describe_fallthrough(last):
        lines.append("     the job ends as FAILED")
    return lines


def short(ladder: Sequence[Rung]) -> str:
    """Return a ladder in one line: `RESTART_IN_PLACE 3 times, then FAIL`."""
    return ", then ".join(
        rung.label
        + (
            ""
            if rung.strategy.ends
            else " always"
            if rung.tries is None
            else f" {_times(rung.tries)}"
        )
        for rung in ladder
    )


def policy_view(name: str, policy: Policy, only: Cause | None) -> dict[str, Any]:
    """Return the value of `policy explain --json`."""
    return {
        "policy": name,
        "extends": policy.extends,
        "budgets": {
            "max_restarts": policy.max_restarts,
            "exhaust_restarts": policy.exhaust_restarts,
            "renewal": policy.renewal,
            "no_progress_stop": None
            if policy.no_progress_stop == "off"
            else policy.no_progress_stop,
            "no_progress_ask": None if policy.no_progress_ask == "off" else policy.no_progress_ask,
            "startup_stop": None if policy.startup_stop == "off" else policy.startup_stop,
            "bad_checkpoint_ask": None
            if policy.bad_checkpoint_ask == "off"
            else policy.bad_checkpoint_ask,
            "unanswered": policy.unanswered,
            "healthy_for": policy.healthy_for.total_seconds(),
            "grow_after": None if policy.grow_after == "off" else policy.grow_after.total_seconds(),
        },
        "ladders": [
            {
                "causes": [str(cause) for cause in causes],
                "rungs": [_rung_view(number, rung) for number, rung in enumerate(ladder, start=1)],
            }
            for causes, ladder in ladders(policy, only)
        ],
    }


def first(policy: Policy, cause: Cause, code: str) -> Rung:
    """Return the rung that a policy takes first for a fault; the last one if none has its code."""
    ladder = policy.ladder(cause)
    return next((rung for rung in ladder if not rung.codes or code in rung.codes), ladder[-1])


def first_rung(policy: Policy, cause: Cause, code: str) -> str:
    """Return that rung as a clause."""
    rung = first(policy, cause, code)
    return f"{rung.strategy}: {_rung(policy, rung)}"


def _budgets(policy: Policy) -> list[str]:
    renewed = {
        "progress": "progress: when training passes its furthest step, restarts and tries without "
        "a window are given back, and until then tries leave no window",
        "never": "never: neither restarts nor tries without a window are given back",
    }
    stop = "off"
    if policy.no_progress_stop != "off":
        stop = (
            f"{count_noun(policy.no_progress_stop, 'generation')} in a row that did not pass the "
            "furthest step, or reported none and ended like the one before: the job fails, if the "
        )
        stop += f"job itself may be the cause ({', '.join(OWN_CAUSES)})"
    ask = "off"
    if policy.no_progress_ask != "off":
        ask = (
            f"{count_noun(policy.no_progress_ask, 'launch', 'launches')} in a row that did not "
            "pass the furthest step, whatever the cause: a person is asked"
        )
    startup = "off"
    if policy.startup_stop != "off":
        startup = (
            f"{count_noun(policy.startup_stop, 'launch', 'launches')} in a row that end within a "
            "minute with the same error of the program: the job fails; one more, if all name the "
            "same one of several nodes, or training has advanced"
        )
    bad = "off"
    if policy.bad_checkpoint_ask != "off":
        bad = (
            f"{count_noun(policy.bad_checkpoint_ask, 'generation')} in a row that resume and end "
            "with the same error at the same step, or before any: a person is asked to remove the "
            "checkpoint; where the ladder would end the job, if all name the same one of several "
            "nodes"
        )
    restarts = "when they are spent, a rung that spends a restart fails the job instead"
    if policy.exhaust_restarts:
        restarts = (
            "all are spent before a ladder ends the job, except for USER_INPUT; when they are "
            "spent, the job fails"
        )
    rows = (
        ("max_restarts", f"{policy.max_restarts}: {restarts}"),
        ("renewal", renewed[policy.renewal]),
        ("no_progress_stop", stop),
        ("startup_stop", startup),
        ("bad_checkpoint_ask", bad),
        ("no_progress_ask", ask),
        (
            "healthy_for",
            f"{duration(policy.healthy_for)} without a fault counts as progress if no step is "
            "reported, or the counter starts again in each epoch",
        ),
    )
    return [line for key, text in rows for line in _entry(f"  {key:<20}", text)]


def _rung(policy: Policy, rung: Rung) -> str:
    conditions = []
    if rung.codes:
        conditions.append(f"only for {_or(rung.codes)}")
    if rung.when:
        conditions.append(f"when examined {_or(rung.when)}")
    head = f"{', '.join(conditions)}: " if conditions else ""
    if rung.strategy is Strategy.FAIL:
        return f"{head}the job ends as FAILED"
    if rung.strategy is Strategy.ASK:
        return (
            f"{head}a person decides; without an answer within "
            f"{duration(policy.timeouts.answer_within)} "
            + ("the job fails" if policy.unanswered == "fail" else "people are reminded")
        )
    parts = [_tries(rung)]
    if rung.delay:
        parts.append(f"after {_delays(rung)}")
    if rung.isolate:
        parts.append("isolates the suspects")
    parts.append("spends a restart" if rung.spends else "spends no restart")
    return head + "; ".join(parts)


def _tries(rung: Rung) -> str:
    if rung.tries is None:
        return "always"
    text = count_noun(rung.tries, "try", "tries")
    if rung.consecutive:
        text += " in a row"
    if rung.window is not None:
        text += f" within {duration(rung.window)}"
    text += (
        ", counted for the whole job"
        if rung.key == ("job",)
        else f", counted by {_and([KEYS[key] for key in rung.key])}"
    )
    if rung.consecutive:
        resets = [str(one) for one in rung.reset_by if one != "PROGRESS"] or (
            [] if rung.reset_by else ["a fault of another cause"]
        )
        if not rung.reset_by or "PROGRESS" in rung.reset_by:
            resets.append("progress")
        text += f"; the count starts over after {_or(resets)}"
    return text


def _delays(rung: Rung) -> str:
    if rung.backoff == 1.0:
        return duration(rung.delay)
    count = DELAYS_SHOWN if rung.tries is None else min(rung.tries, DELAYS_SHOWN)
    delays = [rung.delay_of(used) for used in range(count)]
    shown = ", ".join(duration(delay) for delay in delays)
    if rung.tries is not None and rung.tries <= DELAYS_SHOWN:
        return shown
    return f"{shown} … at most {duration(max(MAX_BACKOFF, rung.delay))}"


def _describe_fallthrough(rung: Rung) -> str:
    """Return what leads to the next rung; empty if nothing does."""
    ways = []
    if rung.tries is not None:
        ways.append("used up")
    if rung.strategy.repairs:
        ways.append("the repair fails")
    if others := [verdict for verdict in Verdict if rung.when and verdict not in rung.when]:
        ways.append(f"the verdict is {_or(others)}")
    if rung.codes:
        ways.append("the code is different")
    if rung.strategy is Strategy.SHRINK:
        ways.append("fewer nodes than its min would remain")
    return ", or ".join(ways)


def _legend(used: set[Strategy]) -> list[str]:
    lines = [
        f"  {strategy:<17} {what}" for strategy, what in STRATEGIES.items() if strategy in used
    ]
    if needed := [strategy for strategy in SUSPECTS_NEEDED if strategy in used]:
        verb = "is" if len(needed) == 1 else "are"
        lines += _entry(
            "  ",
            f"{_and(needed)} {verb} skipped if there is no suspect; after the last rung the job "
            "fails.",
        )
    return lines


def _rung_view(number: int, rung: Rung) -> dict[str, Any]:
    count = DELAYS_SHOWN if rung.tries is None else rung.tries
    return {
        "number": number,
        "strategy": str(rung.strategy),
        "tries": rung.tries,
        "window": rung.window.total_seconds() if rung.window is not None else None,
        "key": list(rung.key),
        "consecutive": rung.consecutive,
        "reset_by": [str(one) for one in rung.reset_by],
        "codes": list(rung.codes),
        "when": [str(verdict) for verdict in rung.when],
        "isolate": rung.isolate,
        "spends": rung.spends and not rung.strategy.ends,
        "delays": [rung.delay_of(used).total_seconds() for used in range(count)]
        if rung.delay
        else [],
        "then": _describe_fallthrough(rung),
    }


def _entry(head: str, text: str) -> list[str]:
    """Return `head` with `text` wrapped beside it."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _or(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def _and(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)

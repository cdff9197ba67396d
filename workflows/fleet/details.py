"""The page of a fleet in Markdown, for the person on call: what is stopped, which nodes are out and
why, which jobs wait for what."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from relaunch.pool.inventory import used_by
from relaunch.pool.state import ClaimRecord, FleetState, NodeRecord, NodeStatus
from relaunch.text import count_noun, join_names
from relaunch.workflows.search_attributes import DETAILS_LIMIT

MOST_SHOWN = 16
"""Items shown of each list; the query `state` returns all. Together they stay within the server's
limit."""
LONGEST = 240
"""Characters of a reason."""
HOW_TO_RESUME = '`relaunch nodes resume --reason …`, or the signal `resume` `{"reason": "…", "by": "you"}` from this page'


def fleet_details(state: FleetState, now: datetime, doing: Sequence[str], what_next: str) -> str:
    """Return the page.

    Args:
        state: All that the fleet knows.
        now: Time by the workflow's clock.
        doing: What is under way, one clause each.
        what_next: The answer of the query `next`.
    """
    out = [node for node in state.nodes if node.standing is not NodeStatus.IN_SERVICE]
    odd = [node for node in state.nodes if node.standing is NodeStatus.IN_SERVICE and _odd(node)]
    waiting = [record for record in state.claims if record.waits]
    using = [record for record in state.claims if record.places]
    lines = [f"## {_summary(state, out, odd, using, waiting)}", ""]
    lines += _stands_still(state)
    lines += [f"**Next** {what_next}", ""]
    if doing:
        lines += [f"**Under way** {_some(doing)}", ""]
    lines += _section("Out of service", [_out_line(node) for node in out])
    lines += _section("In service, but not to be had", [_odd_line(node) for node in odd])
    gpus = [f"**{node.name}** {said}" for node in state.nodes if (said := _gpus(node))]
    lines += _section("GPUs that strangers use, that are missing or cannot be read", gpus)
    lines += _section("Waiting for nodes", [_waiting_line(record) for record in waiting])
    asked = [
        f"{one.node}: {one.step} since {_clock(one.asked_at)} by `{one.workflow}`: {_cut(one.reason)}"
        for one in state.requests
    ]
    open_offers = [one for one in state.offers if one.places]
    offers = [
        f"{_some([place.node for place in one.places])} offered to job {one.job} until {_clock(one.until)}"
        for one in open_offers
    ]
    lines += _section("Offered to jobs that would take more", offers)
    lines += _section("Repairs that wait for a permit", asked)
    lines += _section("In use", [_using_line(record) for record in using])
    if state.notices:
        lines += [
            "### Notices, newest first",
            "",
            *(f"- {_cut(notice)}" for notice in reversed(state.notices[-MOST_SHOWN:])),
            "",
        ]
    lines += [
        "### To overrule it",
        "",
        "Send a signal from this page (one JSON object):",
        "",
        '- `quarantine` `{"node": "n2", "reason": "…", "by": "you", "drain": true, "within": "30m"}` nobody new gets n2; `drain`: whoever'
        " is on it leaves",
        '- `release` `{"node": "n2", "reason": "…", "by": "you"}` n2 is in service again: you vouch for it',
        '- `pause` and `resume` `{"reason": "…", "by": "you"}` stop all repairs; resume also closes the breaker',
        "- `apply` reads the fleet file again now",
    ]
    text = "\n".join(lines)
    return (
        text
        if len(text.encode()) <= DETAILS_LIMIT
        else text.encode()[:DETAILS_LIMIT].decode(errors="ignore") + "\n…"
    )


def _summary(
    state: FleetState,
    out: Sequence[NodeRecord],
    odd: Sequence[NodeRecord],
    using: Sequence[ClaimRecord],
    waiting: Sequence[ClaimRecord],
) -> str:
    parts = [count_noun(len(state.nodes), "node")]
    for standing in (NodeStatus.SUSPECT, NodeStatus.REPAIRING, NodeStatus.QUARANTINED):
        if count := sum(node.standing is standing for node in out):
            parts.append(f"{count} {standing}")
    if odd:
        parts.append(f"{len(odd)} silent or held")
    parts += [
        count_noun(len(using), "job has nodes", "jobs have nodes"),
        f"{len(waiting)} wait{'s' * (len(waiting) == 1)}",
    ]
    return f"fleet {state.name}: {', '.join(parts)}"


def _stands_still(state: FleetState) -> list[str]:
    breaker = state.breaker
    lines: list[str] = []
    if breaker.is_open:
        lines += [
            f"**THE BREAKER IS OPEN{_since(breaker.since)}** {_cut(breaker.reason)}. Nothing is granted and nothing is repaired"
            f" until somebody closes it: {HOW_TO_RESUME}.",
            "",
        ]
    if breaker.paused:
        lines += [
            f"**Repairs are paused{_since(breaker.paused_since)}** {_cut(breaker.paused)}. To end it: {HOW_TO_RESUME}.",
            "",
        ]
    if not breaker.is_open and not breaker.paused:
        lines += [
            "**Breaker** closed; repairs are "
            + {"act": "done", "ask": "asked for", "observe": "only written down"}[state.repairs],
            "",
        ]
    if state.awaited:
        until = f" until {_clock(state.settles_at)}" if state.settles_at else ""
        lines += [
            f"**Begun anew** nothing is granted{until}, unless these jobs say before what they hold: {_some(state.awaited)}",
            "",
        ]
    return lines


def _odd(node: NodeRecord) -> bool:
    looks_odd = node.look is not None and bool(node.look.silent or node.look.held)
    return looks_odd or bool(node.repair) or node.drain is not None


def _out_line(node: NodeRecord) -> str:
    by = f" by {node.by}" if node.by else ""
    return (
        f"**{node.name}** {node.standing}{_since(node.since)}{by}: {_cut(node.reason)}{_more(node)}"
    )


def _odd_line(node: NodeRecord) -> str:
    return f"**{node.name}**{_more(node).removeprefix(';')}"


def _gpus(node: NodeRecord) -> str:
    if node.inventory is None or not node.spec.gpus:
        return ""
    if node.inventory.unreadable:
        return f"GPUs unreadable, and given unseen: {_cut(node.inventory.unreadable)}"
    # For a suspect this is already shown as its reason.
    lacks = node.short if node.standing is NodeStatus.IN_SERVICE else ""
    return "; ".join(_cut(part) for part in (lacks, used_by(node.foreign_processes)) if part)


def _more(node: NodeRecord) -> str:
    parts: list[str] = []
    if node.look is not None and node.look.silent:
        parts.append(f"no answer{_since(node.silent_since)}: {_cut(node.look.silent)}")
    if node.look is not None and node.look.held:
        parts.append(_cut(node.look.held))
    if node.repair:
        parts.append(f"repair `{node.repair}`")
    if node.drain is not None:
        parts.append(
            f"jobs leave it until {_clock(node.drain.until)} ({node.drain.by}: {_cut(node.drain.reason)})"
        )
    elif node.leave is not None and node.told:
        parts.append(
            f"{_some(node.told)} asked to leave it by {_clock(node.leave.until)}, so that it can be examined"
        )
    return "".join(f"; {part}" for part in parts)


def _waiting_line(record: ClaimRecord) -> str:
    claim = record.claim
    gpus = f" with {count_noun(claim.gpus, 'GPU')} each" if claim.gpus else ""
    first = "a replacement, " if claim.running else ""
    why = _cut(record.said) or "nobody has told it why yet"
    fewest = f"{claim.nodes} to " if claim.nodes < claim.up_to else ""
    nodes = fewest + count_noun(claim.up_to, "node")
    return f"**{claim.job}** {first}{nodes}{gpus}{_since(record.waiting_since)}: {why}"


def _using_line(record: ClaimRecord) -> str:
    names = [
        place.node + (f" (GPUs {','.join(map(str, place.gpus))})" if place.gpus else "")
        for place in record.places
    ]
    closed = (
        "; its workflow has ended, what is left of its ranks is being stopped"
        if record.closed
        else ""
    )
    claim = record.claim
    more = (
        ""
        if claim.more_at is None
        else f"; takes up to {claim.most} from {_clock(claim.more_at)} on"
    )
    return f"**{claim.job}** {_some(names)}{more}{closed}"


def _section(title: str, lines: Sequence[str]) -> list[str]:
    # Lists, not tables: the web UI renders the cells of a table without space between them.
    if not lines:
        return []
    more = (
        [f"- and {len(lines) - MOST_SHOWN} more: the query `state` has them"]
        if len(lines) > MOST_SHOWN
        else []
    )
    return [
        f"### {title} ({len(lines)})",
        "",
        *(f"- {line}" for line in lines[:MOST_SHOWN]),
        *more,
        "",
    ]


def _some(names: Sequence[str]) -> str:
    return join_names(names, MOST_SHOWN)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _since(at: datetime | None) -> str:
    return f" since {_clock(at)}" if at else ""


def _clock(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M:%S UTC")

"""The page of a fleet in Markdown, for the person on call: what is stopped, which nodes are out and
why, which jobs wait for what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TypeVar

from relaunch.pool.inventory import describe_uses
from relaunch.pool.messages import PermitRequest
from relaunch.pool.state import ClaimRecord, FleetState, NodeRecord, NodeStatus, OfferRecord
from relaunch.text import count_noun, escape_markdown, join_names, quote_code
from relaunch.workflows.search_attributes import cut_page

Item = TypeVar("Item")
MOST_SHOWN = 16
"""Items shown of each list; the query `state` returns all. Together they stay within the server's
limit."""
LONGEST = 240
"""Characters of a reason."""
HOW_TO_RESUME = (
    '`relaunch nodes resume --reason …`, or the signal `resume` `{"reason": "…", "by": "you"}`'
    " from this page"
)


def fleet_details(
    state: FleetState,
    notable: Sequence[NodeRecord],
    now: datetime,
    doing: Sequence[str],
    what_next: str,
) -> str:
    """Return the page.

    Args:
        state: All that the fleet knows.
        notable: The nodes of which there is more to say than that they are in service and answer.
        now: Time by the workflow's clock.
        doing: What is under way, one clause each.
        what_next: The answer of the query `next`.
    """
    out = [node for node in notable if node.status is not NodeStatus.IN_SERVICE]
    odd = [node for node in notable if node.status is NodeStatus.IN_SERVICE and _is_odd(node)]
    waiting = [record for record in state.claims if record.is_waiting]
    using = [record for record in state.claims if record.places]
    lines = [f"## {_summary(state, out, odd, using, waiting)}", ""]
    lines += _breaker_lines(state)
    lines += [f"**Next** {escape_markdown(what_next)}", ""]
    if doing:
        lines += [f"**Under way** {_some(doing)}", ""]
    is_drained = any(node.drain is not None for node in notable)
    used = {place.node for record in using for place in record.places} if is_drained else set()
    lines += _section("Out of service", out, lambda node: _out_line(node, node.name in used))
    lines += _section(
        "In service, but not available", odd, lambda node: _odd_line(node, node.name in used)
    )
    gpus = [node for node in notable if _gpu_note(node)]
    reported = "What nodes report: faults, and GPUs that are missing, unreadable or used by others"
    lines += _section(reported, gpus, _gpu_line)
    lines += _section("Waiting for nodes", waiting, _waiting_line)
    offers = [one for one in state.offers if one.places]
    lines += _section("Offered to jobs that would take more", offers, _offer_line)
    lines += _section("Repairs that wait for a permit", state.requests, _request_line)
    lines += _section("In use", using, _using_line)
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
        '- `quarantine` `{"node": "n2", "reason": "…", "by": "you", '
        '"drain": true, "within": "30m"}`'
        " no job gets n2 any more; `drain`: jobs on it leave it",
        '- `release` `{"node": "n2", "reason": "…", "by": "you"}`'
        " n2 is in service again: you vouch for it",
        '- `pause` and `resume` `{"reason": "…", "by": "you"}`'
        " stop all repairs; resume first closes the breaker, if it is open",
        "- `apply` reads the fleet file again now",
    ]
    return cut_page(lines)


def _summary(
    state: FleetState,
    out: Sequence[NodeRecord],
    odd: Sequence[NodeRecord],
    using: Sequence[ClaimRecord],
    waiting: Sequence[ClaimRecord],
) -> str:
    parts = [count_noun(len(state.nodes), "node")]
    for standing in (NodeStatus.SUSPECT, NodeStatus.REPAIRING, NodeStatus.QUARANTINED):
        if count := sum(node.status is standing for node in out):
            parts.append(f"{count} {standing}")
    if odd:
        parts.append(f"{len(odd)} silent or held")
    parts += [
        count_noun(len(using), "job has nodes", "jobs have nodes"),
        f"{len(waiting)} wait{'s' * (len(waiting) == 1)}",
    ]
    return f"fleet {state.name}: {', '.join(parts)}"


def _breaker_lines(state: FleetState) -> list[str]:
    breaker = state.breaker
    lines: list[str] = []
    if breaker.is_open:
        lines += [
            f"**THE BREAKER IS OPEN{_format_since(breaker.since)}** {_cut(breaker.reason)}."
            " Nothing is granted and nothing is repaired until a person closes it:"
            f" {HOW_TO_RESUME}.",
            "",
        ]
    if breaker.paused:
        once = "the same again" if breaker.is_open else HOW_TO_RESUME
        lines += [
            f"**Repairs are paused{_format_since(breaker.paused_since)}** {_cut(breaker.paused)}."
            f" To end it: {once}.",
            "",
        ]
    if not breaker.is_open and not breaker.paused:
        lines += [
            "**Breaker** closed; repairs are "
            + {"act": "done", "ask": "asked for", "observe": "only recorded"}[state.repairs],
            "",
        ]
    if state.awaited_jobs:
        until = f" until {_format_time(state.awaited_until)}" if state.awaited_until else ""
        lines += [
            f"**Restarted** nothing is granted{until}, unless these jobs claim their nodes before:"
            f" {_some(state.awaited_jobs)}",
            "",
        ]
    return lines


def _is_odd(node: NodeRecord) -> bool:
    looks_odd = node.probe is not None and bool(node.probe.silent or node.probe.busy)
    return looks_odd or bool(node.repair) or node.drain is not None


def _out_line(node: NodeRecord, is_used: bool) -> str:
    by = f" by {escape_markdown(node.by)}" if node.by else ""
    return (
        f"**{node.name}** {node.status}{_format_since(node.since)}{by}: "
        f"{_cut(node.reason)}{_node_notes(node, is_used)}"
    )


def _odd_line(node: NodeRecord, is_used: bool) -> str:
    return f"**{node.name}**{_node_notes(node, is_used).removeprefix(';')}"


def _offer_line(offer: OfferRecord) -> str:
    nodes = _some([place.node for place in offer.places])
    return f"{nodes} offered to job {escape_markdown(offer.job)} until {_format_time(offer.until)}"


def _request_line(request: PermitRequest) -> str:
    return (
        f"{escape_markdown(request.node)}: {request.step} since {_format_time(request.asked_at)}"
        f" by {quote_code(request.workflow)}: {_cut(request.reason)}"
    )


def _gpu_line(node: NodeRecord) -> str:
    return f"**{node.name}** {_gpu_note(node)}"


def _gpu_note(node: NodeRecord) -> str:
    if node.inventory is None or not node.spec.gpus:
        return ""
    # For a suspect this is already shown as its reason.
    told = node.remarks if node.status is NodeStatus.IN_SERVICE else ()
    if node.inventory.unreadable and not node.fault:
        told = (*told, f"GPUs unreadable, and granted unread: {node.inventory.unreadable}")
    parts = (*told, describe_uses(node.foreign_processes))
    return "; ".join(_cut(part) for part in parts if part)


def _node_notes(node: NodeRecord, is_used: bool) -> str:
    parts: list[str] = []
    if node.probe is not None and node.probe.silent:
        parts.append(f"no answer{_format_since(node.silent_since)}: {_cut(node.probe.silent)}")
    if node.probe is not None and node.probe.busy:
        parts.append(_cut(node.probe.busy))
    if node.repair:
        parts.append(f"repair {quote_code(node.repair)}")
    if node.drain is not None:
        left = f"jobs leave it until {_format_time(node.drain.until)}"
        parts.append(
            f"{left if is_used else 'no job has it any more'}"
            f" ({escape_markdown(node.drain.by)}: {_cut(node.drain.reason)})"
        )
    elif node.repair_drain is not None and node.asked_jobs:
        parts.append(
            f"{_some(node.asked_jobs)} asked to leave it by "
            f"{_format_time(node.repair_drain.until)}, so that it can be examined"
        )
    return "".join(f"; {part}" for part in parts)


def _waiting_line(record: ClaimRecord) -> str:
    claim = record.claim
    gpus = f" with {count_noun(claim.gpus, 'GPU')} each" if claim.gpus else ""
    first = "a replacement, " if claim.running else ""
    why = _cut(record.wait_reason) or "the reason is not known yet"
    fewest = f"{claim.nodes} to " if claim.nodes < claim.max_nodes else ""
    nodes = fewest + count_noun(claim.max_nodes, "node")
    since = _format_since(record.waiting_since)
    return f"**{escape_markdown(claim.job)}** {first}{nodes}{gpus}{since}: {why}"


def _using_line(record: ClaimRecord) -> str:
    names = [
        place.node + (f" (GPUs {','.join(map(str, place.gpus))})" if place.gpus else "")
        for place in record.places
    ]
    closed = (
        "; its workflow has ended, what is left of its ranks is being stopped"
        if record.is_closed
        else ""
    )
    claim = record.claim
    more = (
        ""
        if claim.more_at is None
        else f"; takes up to {claim.most} from {_format_time(claim.more_at)} on"
    )
    return f"**{escape_markdown(claim.job)}** {_some(names)}{more}{closed}"


def _section(title: str, items: Sequence[Item], describe: Callable[[Item], str]) -> list[str]:
    # Lists, not tables: the web UI renders the cells of a table without space between them.
    if not items:
        return []
    more = (
        [f"- and {len(items) - MOST_SHOWN} more: the query `state` has them"]
        if len(items) > MOST_SHOWN
        else []
    )
    return [
        f"### {title} ({len(items)})",
        "",
        *(f"- {describe(item)}" for item in items[:MOST_SHOWN]),
        *more,
        "",
    ]


def _some(names: Sequence[str]) -> str:
    return escape_markdown(join_names(names, MOST_SHOWN))


def _cut(text: str) -> str:
    return escape_markdown(text if len(text) <= LONGEST else text[: LONGEST - 1] + "…")


def _format_since(at: datetime | None) -> str:
    return f" since {_format_time(at)}" if at else ""


def _format_time(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M:%S UTC")

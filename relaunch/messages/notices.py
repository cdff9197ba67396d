"""What people are notified of, and the texts and the JSON in which channels carry it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal, get_args

from relaunch.evidence.causes import Cause
from relaunch.spec.fleet import NoticeEvent, Severity, find_severity
from relaunch.text import count_noun, escape_controls, join_names, printable

JSON_VERSION = 1
MAX_LISTED = 50
"""Notices that the text of a summary lists; its JSON has all."""
MAX_REASON = 240
"""Characters of a reason in a summary."""
MAX_LINE = 4000
"""Characters of one line of a text."""
MessageEvent = NoticeEvent | Literal["test"]
"""What a message may be about. A test is sent to every channel, so no channel names it."""
NOUNS: dict[MessageEvent, tuple[str, str]] = {
    "question": ("question", "questions"),
    "failed": ("failed job", "failed jobs"),
    "quarantine": ("quarantined node", "quarantined nodes"),
    "breaker": ("open breaker", "open breakers"),
    "waiting": ("job without nodes", "jobs without nodes"),
    "slow_node": ("report of slow nodes", "reports of slow nodes"),
    "test": ("test", "tests"),
}


@dataclass(frozen=True, slots=True)
class Notice:
    """One matter, as it is when the notice is sent: open, or resolved."""

    event: MessageEvent
    key: str
    """Identifies the matter: what resolves it has the same one."""
    subject: str
    """One line, without `relaunch:` before it."""
    reason: str
    """What happened; of a matter that is resolved, what ended it."""
    at: datetime
    """Since when the matter is open, or resolved. An open one that is sent again has a later
    time."""
    state: Literal["open", "resolved"] = "open"
    done: str = ""
    """What relaunch did."""
    wanted: str = ""
    """What a person should do, or what happens without it."""
    command: str = ""
    """The command that answers."""
    details: tuple[str, ...] = ()
    """Further lines for people."""
    job: str = ""
    nodes: tuple[str, ...] = ()
    cause: Cause | None = None
    workflow: str = ""
    """The id of the workflow whose page shows more."""
    run: str = ""
    reminders: int = 0
    """How many times people have been reminded of it, this time included; 0: it is new."""


@dataclass(frozen=True, slots=True)
class TellPeopleInput:
    fleet: str
    notices: tuple[Notice, ...]


@dataclass(frozen=True, slots=True)
class UnknownDelivery:
    """A message of which no outcome is known, as the worker that sent it has ended, for example.

    Each channel that takes a notice with these may have it.
    """

    cause: Cause | None = None
    reminders: int = 0


@dataclass(frozen=True, slots=True)
class AddressedNotice:
    notice: Notice
    channels: tuple[str, ...] | None = None
    """The channels that it is for, by name; None: all that take its event and cause."""
    unknown: UnknownDelivery | None = None
    """Of one that resolves a matter: it is also for the channels that may have this."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message: a notice, or several in a summary."""

    number: int
    notices: tuple[AddressedNotice, ...]
    channels: tuple[str, ...] | None = None
    """The channels to be tried, by name; None: all."""
    tries: int = 0
    """How often it has failed."""
    due: datetime | None = None
    """When to try again; None: it is under way, or was when the run before ended."""


@dataclass(frozen=True, slots=True)
class DeliverInput:
    fleet: str
    delivery: Delivery


@dataclass(frozen=True, slots=True)
class ChannelResult:
    channel: str
    outcome: Literal["done", "refused", "ambiguous"]
    """Ambiguous: whether it was delivered is not known, for example because of a timeout."""
    reason: str = ""
    keys: tuple[str, ...] = ()
    """The keys of the open notices that the message had for this channel."""


@dataclass(frozen=True, slots=True)
class DeliveryResult:
    channels: tuple[str, ...]
    """All channels that the fleet file has."""
    results: tuple[ChannelResult, ...]
    """Of those that the message was for."""


@dataclass(frozen=True, slots=True)
class SendTestInput:
    fleet: str
    by: str
    """Who wants to know whether the channels work."""


@dataclass(frozen=True, slots=True)
class SendTestResult:
    worker: str
    """The identity of the worker that sent the test message."""
    results: tuple[ChannelResult, ...]
    """Of each channel of the fleet; empty: it has none."""


@dataclass(frozen=True, slots=True)
class OpenNotice:
    """A matter that people were notified of, and that is not resolved."""

    key: str
    at: datetime
    channels: tuple[str, ...] = ()
    """The channels that may have delivered it."""
    unknown: UnknownDelivery | None = None
    """None: what came of each message about it is known."""


@dataclass(frozen=True, slots=True)
class ChannelStatus:
    """A channel whose last message was not delivered."""

    channel: str
    since: datetime
    failures: int
    reason: str


@dataclass(frozen=True, slots=True)
class Outbox:
    """The notices of one fleet that are not delivered yet, and the matters that are open."""

    pending: tuple[Notice, ...] = ()
    """To be sent, the oldest first."""
    collect_until: datetime | None = None
    """When the pending ones are sent as a summary."""
    open: tuple[OpenNotice, ...] = ()
    deliveries: tuple[Delivery, ...] = ()
    """Under way, or to be tried again."""
    sent_at: tuple[datetime, ...] = ()
    """When the messages of the last minute were sent."""
    failing: tuple[ChannelStatus, ...] = ()
    count: int = 0
    """How many messages there were."""
    dropped: int = 0
    """How many notices were left out because too many were pending, and messages given up."""


@dataclass(frozen=True, slots=True)
class NotifierInput:
    fleet: str
    outbox: Outbox = field(default_factory=Outbox)
    inbox: tuple[Notice, ...] = ()


def find_grade(notices: Sequence[Notice]) -> Severity | Literal["resolved"]:
    """Return the gravest severity of the open notices; "resolved" if none is open."""
    opened = {find_severity(one.event, one.reminders) for one in notices if one.state == "open"}
    return next((one for one in get_args(Severity) if one in opened), "resolved")


def make_test_notice(fleet: str, by: str, worker: str, at: datetime) -> Notice:
    """Return a notice that is marked as a test. Each test of a fleet has the same key."""
    return Notice(
        "test",
        f"{fleet}/test",
        f"this is a test of fleet {fleet}",
        "nothing has happened; a person wanted to know whether messages arrive",
        at,
        done=f"worker {worker} sent it for {by}",
        wanted="nothing",
    )


def shorten_notice(notice: Notice) -> Notice:
    """Return the notice as a summary has it."""
    reason = notice.reason
    if len(reason) > MAX_REASON:
        reason = f"{reason[: MAX_REASON - 1]}…"
    return replace(notice, reason=reason, details=())


def format_subject(fleet: str, notices: Sequence[Notice]) -> str:
    if len(notices) == 1:
        return printable(f"relaunch: {_format_notice_subject(notices[0])}")
    opened = Counter(one.event for one in notices if one.state == "open")
    parts = [count_noun(count, *NOUNS[event]) for event, count in opened.items()]
    if resolved := len(notices) - opened.total():
        parts.append(f"{resolved} resolved")
    return f"relaunch: fleet {fleet}: {', '.join(parts)}"


def format_text(notices: Sequence[tuple[Notice, str]]) -> str:
    """Return the text of a message for people; beside each notice is the link to its page.

    It is plain text, without control characters. What a chat or a mail would take as markup is
    muted where it is sent there.
    """
    if len(notices) == 1:
        return _format_notice(*notices[0])
    lines = []
    for notice, link in notices[:MAX_LISTED]:
        lines.append(printable(f"- {_format_notice_subject(notice)}: {notice.reason}", MAX_LINE))
        lines += [f"  {line}" for line in (notice.command, link) if line]
    if len(notices) > MAX_LISTED:
        lines.append(f"- and {len(notices) - MAX_LISTED} more")
    return "\n".join(lines)


def _format_notice_subject(notice: Notice) -> str:
    state = "resolved: " if notice.state == "resolved" else ""
    reminder = f" (reminder {notice.reminders})" if notice.reminders else ""
    return f"{state}{notice.subject}{reminder}"


def _format_notice(notice: Notice, link: str) -> str:
    lines = [printable(f"{notice.subject}: {notice.reason}", MAX_LINE), ""]
    if notice.details:
        lines += [*(escape_controls(line) for line in notice.details), ""]
    for label, value in (
        ("Done", notice.done),
        ("Wanted", notice.wanted),
        ("Command", notice.command),
        ("Nodes", join_names(notice.nodes, 16)),
        ("Page", link),
    ):
        if value:
            lines.append(f"{label}: {printable(value, MAX_LINE)}")
    return "\n".join(lines).rstrip()


def format_json(
    fleet: str, id: str, sent_at: datetime, notices: Sequence[tuple[Notice, str]]
) -> dict[str, Any]:
    """Return the body of a webhook; docs/notifications.md describes it."""
    return {
        "version": JSON_VERSION,
        "id": id,
        "fleet": fleet,
        "sent_at": sent_at.isoformat(timespec="seconds"),
        "subject": format_subject(fleet, [notice for notice, _ in notices]),
        "notices": [
            {
                "key": notice.key,
                "state": notice.state,
                "event": notice.event,
                "severity": find_severity(notice.event, notice.reminders),
                "reminders": notice.reminders,
                "at": notice.at.isoformat(timespec="seconds"),
                "subject": notice.subject,
                "reason": notice.reason,
                "done": notice.done or None,
                "wanted": notice.wanted or None,
                "command": notice.command or None,
                "link": link or None,
                "details": list(notice.details),
                "job": notice.job or None,
                "nodes": list(notice.nodes),
                "cause": notice.cause and notice.cause.value,
            }
            for notice, link in notices
        ],
    }

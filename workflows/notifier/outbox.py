"""Decide what is sent to people, and when: which notices, alone or in a summary, and what is tried
again.

Pure. Bounds the messages of a minute, and sends nothing about a matter that is resolved meanwhile,
except to say so to the channels that have it as open.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from relaunch.messages.notices import (
    AddressedNotice,
    ChannelStatus,
    Delivery,
    DeliveryResult,
    Notice,
    OpenNotice,
    Outbox,
    UnknownDelivery,
    shorten_notice,
)

MINUTE = timedelta(minutes=1)
MAX_MESSAGES = 10
"""Messages of a fleet within a minute; each goes to every channel that takes it."""
MAX_SINGLE = 5
"""Of these, messages with one notice. The others are left for summaries."""
COLLECT_DELAY = timedelta(seconds=10)
"""How long notices are collected for a summary."""
MAX_SUMMARY = 100
"""Notices of a summary: some 60 KB of JSON. More follow in the next one."""
MAX_PENDING = 1000
MAX_OPEN = 2000
NEVER = datetime.min.replace(tzinfo=UTC)
RETRY_DELAYS = tuple(timedelta(seconds=seconds) for seconds in (5, 15, 60, 300, 900))
"""A message that no try delivers within these 21 minutes is given up."""
MAX_RETRIED = 16
"""Messages that wait for another try. The whole outbox has to fit into 2 MiB, the server's limit
for the input of the next run."""


def post(outbox: Outbox, notice: Notice) -> Outbox:
    """Add a notice. What it makes obsolete is not sent any more."""
    key = notice.key
    notice = replace(notice, at=_in_utc(notice.at))
    was_pending = any(one.key == key and one.state == "open" for one in outbox.pending)
    pending = tuple(one for one in outbox.pending if one.key != key)
    known = next((one for one in outbox.open if one.key == key), None)
    outbox = replace(outbox, pending=pending)
    if notice.state == "open":
        if known is not None and notice.at <= _in_utc(known.at) and not was_pending:
            return outbox  # sent again by a fleet that was restarted
        outbox = _strip_retries(outbox, {key})
    elif known is None:
        return outbox
    else:
        outbox = _strip_retries(outbox, {key})
    pending = (*outbox.pending, notice if len(pending) < MAX_SINGLE else shorten_notice(notice))
    surplus = max(0, len(pending) - MAX_PENDING)
    return replace(outbox, pending=pending[surplus:], dropped=outbox.dropped + surplus)


def take(
    outbox: Outbox, now: datetime, under_way: Collection[int]
) -> tuple[Outbox, tuple[Delivery, ...]]:
    """Return the messages to be sent now.

    Args:
        outbox: The outbox.
        now: Time by the workflow's clock.
        under_way: Numbers of the messages that are being sent.
    """
    due = [
        replace(one, due=None)
        for one in outbox.deliveries
        if one.number not in under_way and (one.due is None or one.due <= now)
    ]
    begun = {one.number: one for one in due}
    outbox = replace(
        outbox,
        deliveries=tuple(begun.get(one.number, one) for one in outbox.deliveries),
        sent_at=tuple(at for at in outbox.sent_at if now - at < MINUTE),
    )
    outbox = _drop_unknown(outbox)
    ready = _list_ready(outbox)
    while ready:
        if len(outbox.sent_at) < MAX_SINGLE:
            batch = ready[:1]
        elif outbox.collect_until is None:
            outbox = replace(outbox, collect_until=now + COLLECT_DELAY)
            break
        elif now < outbox.collect_until or len(outbox.sent_at) >= MAX_MESSAGES:
            break
        else:
            batch = ready[:MAX_SUMMARY]
        ready = ready[len(batch) :]
        outbox, delivery = _send(outbox, batch, now)
        due.append(delivery)
    if not ready:
        outbox = replace(outbox, collect_until=None)
    return outbox, tuple(due)


def record_results(
    outbox: Outbox,
    number: int,
    result: DeliveryResult | None,
    now: datetime,
    is_current: Callable[[], bool] = lambda: True,
    *,
    may_have_arrived: bool = True,
) -> Outbox:
    """Record what came of sending a message.

    Args:
        outbox: The outbox.
        number: The number of the message.
        result: What came of it; None: nothing is known of any channel.
        now: Time by the workflow's clock.
        is_current: Asked where 0.1.0 decided otherwise: whether this release decides.
        may_have_arrived: Whether a channel may have the message of which nothing is known.
    """
    delivery = next((one for one in outbox.deliveries if one.number == number), None)
    if delivery is None:
        return outbox
    others = tuple(one for one in outbox.deliveries if one.number != number)
    outbox = replace(outbox, deliveries=others)
    missed = delivery.channels
    if result is None:
        if may_have_arrived and is_current():
            outbox = _record_unknown(outbox, delivery)
    else:
        outbox = _record_channels(outbox, result, now)
        missed = tuple(one.channel for one in result.results if one.outcome != "done")
        if not missed:
            return outbox
    retried = replace(delivery, channels=missed, tries=delivery.tries + 1)
    if retried.tries > len(RETRY_DELAYS):
        return replace(outbox, dropped=outbox.dropped + 1)
    retried = replace(retried, due=now + RETRY_DELAYS[retried.tries - 1])
    outbox = replace(outbox, deliveries=(*others, retried))
    if len(outbox.deliveries) > MAX_RETRIED:
        outbox = _cut_retries(outbox, is_current())
    # Meanwhile a matter may have been resolved, or be sent again.
    newer = {one.key for one in outbox.pending}
    return _strip_retries(outbox, newer, number)


def find_wake(outbox: Outbox, now: datetime, under_way: Collection[int]) -> datetime | None:
    """Return when there is something to send, if nothing happens before."""
    times = [
        one.due for one in outbox.deliveries if one.due is not None and one.number not in under_way
    ]
    if outbox.collect_until is not None:
        free = now
        if len(outbox.sent_at) >= MAX_MESSAGES:
            free = sorted(outbox.sent_at)[-MAX_MESSAGES] + MINUTE
        times.append(max(outbox.collect_until, free))
    return min(times, default=None)


def _in_utc(at: datetime) -> datetime:
    """Return a time with its zone: UTC, if it names none.

    Relaunch sends none without. A stranger can, and 0.1.0 kept such ones; compared with another
    they would stop the notifier for good.
    """
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def _list_ready(outbox: Outbox) -> tuple[Notice, ...]:
    """Return the pending notices of matters of which no other message is on its way.

    Which channels that one has reached is known only when it has ended.
    """
    busy = _list_busy(outbox)
    return tuple(one for one in outbox.pending if one.key not in busy)


def _list_busy(outbox: Outbox) -> set[str]:
    return {
        one.notice.key
        for delivery in outbox.deliveries
        if delivery.due is None
        for one in delivery.notices
    }


def _drop_unknown(outbox: Outbox) -> Outbox:
    """Leave out what says that a matter is resolved which no channel has as open."""
    known = {one.key for one in outbox.open if one.channels or one.unknown}
    known |= _list_busy(outbox)
    obsolete = {
        one.key for one in outbox.pending if one.state == "resolved" and one.key not in known
    }
    if not obsolete:
        return outbox
    return replace(
        outbox,
        pending=tuple(one for one in outbox.pending if one.key not in obsolete),
        open=tuple(one for one in outbox.open if one.key not in obsolete),
    )


def _send(outbox: Outbox, batch: tuple[Notice, ...], now: datetime) -> tuple[Outbox, Delivery]:
    known = {one.key: one for one in outbox.open}
    addressed = []
    for notice in batch:
        if notice.state == "open":
            addressed.append(AddressedNotice(notice))
            before = known.get(notice.key, OpenNotice(notice.key, NEVER))
            known[notice.key] = replace(before, at=notice.at)
        else:
            ended = known.pop(notice.key)
            addressed.append(AddressedNotice(notice, ended.channels, ended.unknown))
    if len(addressed) > 1:
        addressed = [replace(one, notice=shorten_notice(one.notice)) for one in addressed]
    delivery = Delivery(outbox.count + 1, tuple(addressed))
    taken = {one.key for one in batch}
    return replace(
        outbox,
        pending=tuple(one for one in outbox.pending if one.key not in taken),
        open=tuple(known.values())[-MAX_OPEN:],
        deliveries=(*outbox.deliveries, delivery),
        sent_at=(*outbox.sent_at, now),
        count=delivery.number,
    ), delivery


def _record_channels(outbox: Outbox, sent: DeliveryResult, now: datetime) -> Outbox:
    failing = {one.channel: one for one in outbox.failing if one.channel in sent.channels}
    reached: dict[str, list[str]] = {}
    for result in sent.results:
        if result.outcome == "done":
            failing.pop(result.channel, None)
        else:
            before = failing.get(result.channel)
            failing[result.channel] = ChannelStatus(
                result.channel,
                before.since if before else now,
                before.failures + 1 if before else 1,
                result.reason,
            )
        if result.outcome != "refused":
            for key in result.keys:
                reached.setdefault(key, []).append(result.channel)
    opened = tuple(
        replace(one, channels=tuple(dict.fromkeys((*one.channels, *reached.get(one.key, ())))))
        for one in outbox.open
    )
    return replace(outbox, failing=tuple(failing.values()), open=opened)


def _record_unknown(outbox: Outbox, delivery: Delivery) -> Outbox:
    """Record that each channel that takes a message may have it."""
    opened = {one.key: one for one in outbox.open}
    for notice in (one.notice for one in delivery.notices if one.notice.state == "open"):
        if (known := opened.get(notice.key)) is not None:
            unknown = UnknownDelivery(notice.cause, notice.reminders)
            opened[notice.key] = replace(known, unknown=_join_unknown(known.unknown, unknown))
    return replace(outbox, open=tuple(opened.values()))


def _join_unknown(
    one: UnknownDelivery | None, other: UnknownDelivery | None
) -> UnknownDelivery | None:
    """Return one that each channel takes which takes any of these."""
    if one is None or other is None:
        return one or other
    cause = one.cause if one.cause is other.cause else None
    return UnknownDelivery(cause, max(one.reminders, other.reminders))


def _cut_retries(outbox: Outbox, is_current: bool) -> Outbox:
    """Leave out the oldest of too many messages that wait for another try.

    Those under way stay, since what comes of them is still to be recorded. 0.1.0 counted them, too.
    """
    waiting = [one.number for one in outbox.deliveries if one.due is not None or not is_current]
    cut = frozenset(waiting[: max(0, len(waiting) - MAX_RETRIED)])
    return replace(
        outbox,
        deliveries=tuple(one for one in outbox.deliveries if one.number not in cut),
        dropped=outbox.dropped + len(cut),
    )


def _strip_retries(outbox: Outbox, keys: Collection[str], number: int | None = None) -> Outbox:
    """Leave notices of these matters out of the messages that are tried again, or of one of them.

    Messages under way stay as they are.
    """
    deliveries = []
    opened = {one.key: one for one in outbox.open}
    for delivery in outbox.deliveries:
        if delivery.due is None or number not in (None, delivery.number):
            deliveries.append(delivery)
            continue
        kept = []
        for one in delivery.notices:
            key = one.notice.key
            if key not in keys:
                kept.append(one)
            elif one.notice.state == "resolved":
                # These channels did not get it: they still have the matter as open.
                missed = one.channels or ()
                if delivery.channels is not None:
                    missed = tuple(name for name in missed if name in delivery.channels)
                before = opened.get(key, OpenNotice(key, NEVER))
                channels = tuple(dict.fromkeys((*before.channels, *missed)))
                unknown = _join_unknown(before.unknown, one.unknown)
                opened[key] = replace(before, channels=channels, unknown=unknown)
        if kept:
            deliveries.append(replace(delivery, notices=tuple(kept)))
    return replace(outbox, deliveries=tuple(deliveries), open=tuple(opened.values()))

"""Which notices are sent, when, to which channels: the notifier's decisions, without a server."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Literal

import pytest
from pydantic import TypeAdapter

from relaunch.evidence.causes import Cause
from relaunch.messages.notices import (
    AddressedNotice,
    ChannelResult,
    Delivery,
    DeliveryResult,
    Notice,
    Outbox,
    UnknownDelivery,
    format_subject,
    format_text,
)
from relaunch.workflows.notifier.outbox import (
    COLLECT_DELAY,
    MAX_MESSAGES,
    MAX_OPEN,
    MAX_PENDING,
    MAX_RETRIED,
    MAX_SINGLE,
    MINUTE,
    RETRY_DELAYS,
    find_wake,
    post,
    record_results,
    take,
)

START = datetime(2026, 11, 25, tzinfo=UTC)
SECOND = timedelta(seconds=1)
Outcome = Literal["done", "refused", "ambiguous"]
OUTBOX = TypeAdapter(Outbox)


def notice(key: str, state: Literal["open", "resolved"] = "open", at: datetime = START) -> Notice:
    return Notice("question", key, f"job {key} waits", "why " * 400, at, state)


class Desk:
    """An outbox with channels that answer at once, by a clock that only tests move."""

    def __init__(self, *channels: str, outcome: Callable[[str], Outcome] = lambda _: "done"):
        self.channels = channels or ("hook",)
        self.outcome = outcome
        self.now = START
        self.outbox = Outbox()
        self.sent: list[tuple[datetime, str, int, tuple[tuple[str, str], ...]]] = []
        """Time, channel, number of the message, and (key, state) of its notices."""

    def post(self, key: str, state: Literal["open", "resolved"] = "open") -> None:
        self.outbox = post(self.outbox, notice(key, state, self.now))
        self.work()

    def work(self) -> None:
        self.outbox, due = take(self.outbox, self.now, ())
        for delivery in due:
            results = []
            for channel in self.channels:
                if delivery.channels is not None and channel not in delivery.channels:
                    continue
                mine = [
                    one.notice
                    for one in delivery.notices
                    if one.channels is None or channel in one.channels
                ]
                if not mine:
                    continue
                outcome = self.outcome(channel)
                if outcome != "refused":
                    said = tuple((one.key, one.state) for one in mine)
                    self.sent.append((self.now, channel, delivery.number, said))
                keys = tuple(one.key for one in mine if one.state == "open")
                results.append(ChannelResult(channel, outcome, "", keys))
            result = DeliveryResult(self.channels, tuple(results))
            self.outbox = record_results(self.outbox, delivery.number, result, self.now)

    def wait(self, time: timedelta) -> None:
        until = self.now + time
        while (wake := find_wake(self.outbox, self.now, ())) is not None and wake <= until:
            self.now = max(self.now, wake)
            self.work()
        self.now = until
        self.work()

    def list_sent(self, channel: str = "hook") -> list[tuple[str, str]]:
        return [one for _, to, _, said in self.sent if to == channel for one in said]

    def most_in_a_minute(self) -> int:
        """Return the most messages that began within one minute, without further tries."""
        first: dict[int, datetime] = {}
        for at, _, number, _ in self.sent:
            first.setdefault(number, at)
        times = sorted(first.values())
        return max(sum(at <= one < at + MINUTE for one in times) for at in times)


def test_a_matter_is_sent_once_and_resolved_once() -> None:
    desk = Desk()
    desk.post("a")
    for state in ("open", "resolved", "resolved"):
        desk.outbox = post(desk.outbox, notice("a", state, START))
        desk.work()
    assert desk.list_sent() == [("a", "open"), ("a", "resolved")]
    assert desk.outbox.open == () == desk.outbox.pending == desk.outbox.deliveries


def test_an_open_matter_with_a_later_time_is_sent_again() -> None:
    desk = Desk()
    desk.post("a")
    desk.wait(SECOND)
    desk.post("a")
    desk.post("a", "resolved")
    assert desk.list_sent() == [("a", "open"), ("a", "open"), ("a", "resolved")]


def test_a_time_without_a_zone_is_one_in_utc() -> None:
    desk = Desk()
    before, after = ((START + sign * SECOND).replace(tzinfo=None) for sign in (-1, 1))
    desk.post("a")
    for at in (before, after, before):
        desk.outbox = post(desk.outbox, notice("a", at=at))
        desk.work()
    assert desk.list_sent() == [("a", "open")] * 2
    # As 0.1.0 kept it.
    (kept,) = desk.outbox.open
    outbox = replace(desk.outbox, open=(replace(kept, at=after),))
    assert post(outbox, notice("a", at=START)) == outbox
    assert post(outbox, notice("a", at=START + MINUTE)) != outbox


def test_a_matter_that_was_never_sent_is_not_resolved() -> None:
    desk = Desk()
    desk.post("a", "resolved")
    assert desk.sent == [] and desk.outbox == Outbox()


def test_500_incidents_in_a_minute_are_at_most_ten_messages() -> None:
    desk = Desk()
    for number in range(500):
        desk.post(f"j{number}")
        desk.wait(timedelta(seconds=60 / 500))
    assert len({number for _, _, number, _ in desk.sent}) <= MAX_MESSAGES
    desk.wait(2 * MINUTE)
    assert sorted(desk.list_sent()) == sorted((f"j{number}", "open") for number in range(500))
    assert desk.most_in_a_minute() <= MAX_MESSAGES
    singles = [said for _, _, _, said in desk.sent if len(said) == 1]
    assert len(singles) >= MAX_SINGLE


def test_what_is_resolved_before_it_is_sent_is_never_sent() -> None:
    desk = Desk()
    for number in range(500):
        desk.post(f"j{number}")
    for number in range(500):
        desk.post(f"j{number}", "resolved")
    desk.wait(5 * MINUTE)
    assert len(desk.list_sent()) == 2 * MAX_SINGLE
    first = [(f"j{number}", "open") for number in range(MAX_SINGLE)]
    assert desk.list_sent()[:MAX_SINGLE] == first
    assert {state for _, state in desk.list_sent()[MAX_SINGLE:]} == {"resolved"}


def test_a_message_that_fails_is_tried_again_and_given_up() -> None:
    desk = Desk("good", "bad", outcome=lambda name: "done" if name == "good" else "ambiguous")
    desk.post("a")
    assert [one.channel for one in desk.outbox.failing] == ["bad"]
    desk.wait(sum(RETRY_DELAYS, MINUTE))
    assert desk.list_sent("good") == [("a", "open")]
    assert desk.list_sent("bad") == [("a", "open")] * (1 + len(RETRY_DELAYS))
    assert desk.outbox.deliveries == () and desk.outbox.dropped == 1
    (failing,) = desk.outbox.failing
    assert (failing.channel, failing.failures) == ("bad", 1 + len(RETRY_DELAYS))
    desk.outcome = lambda _: "done"
    desk.post("b")
    assert desk.outbox.failing == ()


def test_a_channel_that_did_not_get_a_matter_hears_no_more_of_it() -> None:
    desk = Desk("good", "bad", outcome=lambda name: "done" if name == "good" else "refused")
    desk.post("a")
    desk.post("a", "resolved")
    desk.outcome = lambda _: "done"
    desk.wait(sum(RETRY_DELAYS, MINUTE))
    assert desk.list_sent("good") == [("a", "open"), ("a", "resolved")]
    assert desk.list_sent("bad") == [] and desk.outbox.open == ()


def test_what_resolves_a_matter_waits_for_the_message_under_way() -> None:
    outbox, (first,) = take(post(Outbox(), notice("a")), START, ())
    outbox = post(outbox, notice("a", "resolved"))
    outbox, due = take(outbox, START, (first.number,))
    assert due == () and find_wake(outbox, START, (first.number,)) is None
    result = DeliveryResult(("hook",), (ChannelResult("hook", "done", "", ("a",)),))
    outbox = record_results(outbox, first.number, result, START)
    outbox, (second,) = take(outbox, START, ())
    assert [(one.notice.state, one.channels) for one in second.notices] == [("resolved", ("hook",))]


def test_a_message_of_which_nothing_is_known_is_tried_again() -> None:
    outbox, (first,) = take(post(Outbox(), notice("a")), START, ())
    outbox = record_results(outbox, first.number, None, START)
    assert find_wake(outbox, START, ()) == START + RETRY_DELAYS[0]
    outbox, (again,) = take(outbox, START + RETRY_DELAYS[0], ())
    assert (again.number, again.channels, again.tries) == (first.number, None, 1)
    # A worker ended: the next run of the workflow takes up what was under way.
    assert take(outbox, START + RETRY_DELAYS[0], ())[1] == (again,)


def test_a_matter_that_may_have_arrived_is_resolved() -> None:
    """Nothing is known of a message, and the matter ends before it is tried again."""
    asked = replace(notice("a"), cause=Cause.HANG, reminders=1)
    outbox, (first,) = take(post(Outbox(), asked), START, ())
    outbox = record_results(outbox, first.number, None, START)
    ended = notice("a", "resolved")
    outbox, (second,) = take(post(outbox, ended), START, ())
    unknown = UnknownDelivery(Cause.HANG, 1)
    assert second.notices == (AddressedNotice(ended, (), unknown),)
    # If it is open again, and ends before that was sent, it is resolved there, too.
    outbox = record_results(outbox, second.number, None, START)
    outbox = post(outbox, replace(asked, at=START + SECOND))
    outbox, (third,) = take(post(outbox, ended), START, ())
    assert third.notices == (AddressedNotice(ended, (), unknown),)
    done = DeliveryResult(("hook",), (ChannelResult("hook", "done"),))
    assert record_results(outbox, third.number, done, START).open == ()


def test_a_message_under_way_is_not_cut_with_those_that_wait() -> None:
    outbox, (slow,) = take(post(Outbox(), notice("slow")), START, ())
    waiting = tuple(
        Delivery(number, (AddressedNotice(notice(f"j{number}")),), due=START + MINUTE)
        for number in range(2, 2 + MAX_RETRIED)
    )
    outbox = replace(outbox, deliveries=(slow, *waiting), count=1 + MAX_RETRIED)
    outbox, (last,) = take(post(outbox, notice("last")), START, (slow.number,))
    refused = DeliveryResult(("hook",), (ChannelResult("hook", "refused", "", ("last",)),))
    outbox = record_results(outbox, last.number, refused, START)
    numbers = [one.number for one in outbox.deliveries]
    assert numbers == [slow.number, *[one.number for one in waiting[1:]], last.number]
    assert outbox.dropped == 1
    done = DeliveryResult(("hook",), (ChannelResult("hook", "done", "", ("slow",)),))
    outbox = record_results(outbox, slow.number, done, START)
    outbox, (end,) = take(post(outbox, notice("slow", "resolved")), START, ())
    assert [(one.notice.state, one.channels) for one in end.notices] == [("resolved", ("hook",))]


@pytest.mark.long
def test_the_outbox_stays_within_the_servers_limit() -> None:
    desk = Desk(outcome=lambda _: "refused")
    for number in range(6000):
        desk.post(f"{'fleet/question/a-job-with-a-long-name'}/{number}")
        if number % 100 == 0:
            desk.wait(SECOND)
    outbox = desk.outbox
    assert len(outbox.pending) <= MAX_PENDING and len(outbox.open) <= MAX_OPEN
    assert len(outbox.deliveries) <= MAX_RETRIED and outbox.dropped > 0
    assert len(OUTBOX.dump_json(outbox)) < 2 * 1024 * 1024


@pytest.mark.parametrize("seed", range(40))
def test_every_channel_hears_each_matter_in_order(seed: int) -> None:
    """Whatever fails: at most ten messages a minute, and nothing about what is resolved."""
    dice = random.Random(seed)
    outcomes: tuple[Outcome, ...] = ("done", "done", "done", "refused", "ambiguous")
    desk = Desk("one", "two", outcome=lambda _: dice.choice(outcomes))
    opened: dict[str, bool] = defaultdict(bool)
    for _ in range(300):
        key = f"k{dice.randrange(20)}"
        before = len(desk.sent)
        desk.post(key, "resolved" if opened[key] else "open")
        opened[key] = not opened[key]
        desk.wait(timedelta(seconds=dice.choice((0, 0, 1, 5, 30))))
        for _, _, _, said in desk.sent[before:]:
            late = [one for one, state in said if state == "open" and not opened[one]]
            assert late == []
    desk.outcome = lambda _: "done"
    for key in [key for key, is_open in opened.items() if is_open]:
        desk.post(key, "resolved")
    desk.wait(timedelta(hours=1))
    assert desk.most_in_a_minute() <= MAX_MESSAGES
    assert desk.outbox.open == () == desk.outbox.pending == desk.outbox.deliveries
    for channel in desk.channels:
        last: dict[str, str] = {}
        for key, state in desk.list_sent(channel):
            assert state == "open" or key in last, "resolved without having been open"
            last[key] = state
        assert set(last.values()) <= {"resolved"}


def test_a_summary_names_each_notice_and_counts_the_rest() -> None:
    notices = [notice(f"j{number}", at=START + COLLECT_DELAY) for number in range(60)]
    subject = format_subject("lab", [*notices, notice("x", "resolved")])
    assert subject == "relaunch: fleet lab: 60 questions, 1 resolved"
    text = format_text([(one, "http://ui/x") for one in notices])
    assert text.count("http://ui/x") == 50 and text.endswith("- and 10 more")

"""Messages to a real HTTP server and a real mail server, and what is said if they fail."""

from __future__ import annotations

import asyncio
import email
import hashlib
import hmac
import json
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from email.policy import default
from pathlib import Path
from typing import Any

import pytest

from relaunch.activities import channels
from relaunch.activities.channels import SIGNATURE, ChannelError, ChannelSender, Message
from relaunch.messages.notices import Notice, find_grade
from relaunch.spec.fleet import Channel
from tests.receivers import find_port, mail_server, webhook

MESSAGE = Message("relaunch: job llama has failed", "what failed", {"version": 1, "id": "x/1"})
PASSWORD = "correct-horse"
# apprise imports it where Python still has it.
pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated")


@pytest.fixture(autouse=True)
def _without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


async def send(**channel: Any) -> None:
    await ChannelSender().send("it", Channel.model_validate(channel), MESSAGE)


async def test_a_webhook_gets_signed_json(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    with webhook() as received:
        await send(webhook=received.url, secret={"file": str(key)})
        ((headers, body),) = received.requests
    assert json.loads(body) == MESSAGE.body
    assert headers["Content-Type"] == "application/json"
    expected = hmac.new(b"s3cret", body, hashlib.sha256).hexdigest()
    assert headers[SIGNATURE] == f"sha256={expected}"


async def test_a_secret_is_read_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with webhook() as received:
        await send(webhook=received.url)
        for value in ("one", "two"):
            monkeypatch.setenv("HOOK_KEY", value)
            await send(webhook=received.url, secret={"env": "HOOK_KEY"})
        signatures = [headers.get(SIGNATURE) for headers, _ in received.requests]
        address = tmp_path / "address"
        address.write_text(f"{received.url}\n")
        await send(webhook={"file": str(address)})
        assert len(received.requests) == 4
    assert signatures[0] is None and len(set(signatures)) == 3


@pytest.mark.parametrize("status", [301, 302, 404, 429, 500, 502, 503, 504])
async def test_an_answer_other_than_success_is_a_failure(status: int) -> None:
    """After one from 500 on, the receiver may have the message all the same."""
    with webhook(status) as received:
        with pytest.raises(ChannelError) as raised:
            await send(webhook=received.url)
        assert len(received.requests) == 1, "a redirect is not followed"
    assert raised.value.reason == f"it answered {status}"
    assert raised.value.is_ambiguous == (status >= 500)


async def test_a_receiver_that_hangs_is_ambiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "SEND_TIMEOUT_S", 0.3)
    with webhook(hangs=True) as received:
        began = time.monotonic()
        with pytest.raises(ChannelError) as raised:
            await send(webhook=received.url)
        assert time.monotonic() - began < 5
    assert raised.value.is_ambiguous and "0.3 s" in raised.value.reason


async def test_the_import_of_apprise_takes_no_receivers_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    begin = channels._run_in_thread

    def begin_to_send(*work: Any) -> Any:
        order.append("the receiver's time begins")
        return begin(*work)

    monkeypatch.setattr(channels, "_load_apprise", lambda: order.append("apprise is imported"))
    monkeypatch.setattr(channels, "_run_in_thread", begin_to_send)
    with pytest.raises(ChannelError):
        await send(apprise=f"nosuch://{PASSWORD}")
    assert order == ["apprise is imported", "the receiver's time begins"]


async def test_errors_name_the_place_and_repeat_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    empty, bad = tmp_path / "empty", tmp_path / "bad"
    empty.write_text("\n")
    bad.write_text(f"gopher://{PASSWORD}")
    closed = f"http://{PASSWORD}@127.0.0.1:{find_port()}/{PASSWORD}"
    cases = [
        ({"webhook": closed}, "cannot be reached"),
        ({"webhook": {"file": str(tmp_path / "none")}}, str(tmp_path / "none")),
        ({"webhook": {"file": str(empty)}}, "is empty"),
        ({"webhook": {"file": str(bad)}}, "not an HTTP address"),
        ({"webhook": closed, "secret": {"env": "NO_SUCH_KEY"}}, "NO_SUCH_KEY"),
        ({"apprise": f"nosuch://{PASSWORD}"}, "apprise does not know"),
        (
            {"apprise": f"mailto://u:{PASSWORD}@127.0.0.1:{find_port()}?from=a@b.de&to=c@d.de"},
            "",
        ),
    ]
    for channel, sentence in cases:
        with pytest.raises(ChannelError) as raised:
            await send(**channel)
        assert sentence in raised.value.reason and raised.value.reason
        assert PASSWORD not in raised.value.reason


async def test_apprise_sends_a_mail() -> None:
    port = find_port()
    with mail_server(port) as mails:
        await send(apprise=f"mailto://127.0.0.1:{port}?from=relaunch@a.de&to=ada@b.de&format=text")
        (raw,) = mails
    mail = email.message_from_bytes(raw, policy=default)
    assert mail["Subject"] == MESSAGE.subject and "ada@b.de" in mail["To"]
    part = mail.get_body(("plain",))
    assert part is not None and MESSAGE.text in part.get_content()


async def test_a_mail_that_one_of_two_people_got_is_ambiguous() -> None:
    port = find_port()
    with mail_server(port, refused="bob@b.de") as mails:
        with pytest.raises(ChannelError) as raised:
            await send(apprise=f"mailto://127.0.0.1:{port}?from=relaunch@a.de&to=ada@b.de,bob@b.de")
        (raw,) = mails
    assert email.message_from_bytes(raw, policy=default)["To"] == "ada@b.de"
    assert raised.value.is_ambiguous


async def test_apprise_that_gets_no_answer_in_time_is_ambiguous() -> None:
    with webhook(hangs=True) as received:
        with pytest.raises(ChannelError) as raised:
            await send(apprise=f"{received.url.replace('http://', 'json://')}?rto=0.3")
        assert len(received.requests) == 1
    assert raised.value.is_ambiguous


async def test_channels_that_fail_together_keep_their_reasons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channels, "SEND_TIMEOUT_S", 60.0)
    ports, together = (find_port(), find_port()), threading.Barrier(2)
    people = ("ada-lovelace@b.de", "grace-hopper@c.de")
    with (
        mail_server(ports[0], people[0], together),
        mail_server(ports[1], people[1], together),
    ):
        addresses = [
            f"mailto://127.0.0.1:{port}?from=relaunch@a.de&to={who}"
            for port, who in zip(ports, people, strict=True)
        ]
        failed = await asyncio.gather(
            *(send(apprise=address) for address in addresses), return_exceptions=True
        )
    reasons = [one.reason for one in failed if isinstance(one, ChannelError)]
    assert reasons == ['Sending email to "…@…" failed.'] * 2


async def test_apprise_gets_the_gravest_of_what_is_open() -> None:
    question = Notice("question", "k", "job a waits", "Xid 79", datetime.now(UTC))
    failed = replace(question, event="failed")
    grades = (
        ((failed, question), "failure"),
        ((failed,), "warning"),
        ((replace(failed, event="slow_node"),), "info"),
        ((failed, replace(question, state="resolved")), "warning"),
        ((replace(question, state="resolved"),), "success"),
    )
    with webhook() as received:
        address = received.url.replace("http://", "json://")
        for notices, kind in grades:
            message = replace(MESSAGE, grade=find_grade(notices))
            await ChannelSender().send("it", Channel(apprise=address), message)
            assert received.bodies[-1]["type"] == kind


@pytest.mark.parametrize("form", ["", "&format=html"])
async def test_no_markup_of_an_error_acts_in_a_mail(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "<img src=http://e/x.png> <!channel> [a](http://e) @everyone"
    monkeypatch.setitem(globals(), "MESSAGE", Message(f"{said} failed", said, {}))
    port = find_port()
    with mail_server(port) as mails:
        await send(apprise=f"mailto://127.0.0.1:{port}?from=relaunch@a.de&to=ada@b.de{form}")
        (raw,) = mails
    mail = email.message_from_bytes(raw, policy=default)
    body = mail.get_body(("html", "plain"))
    assert body is not None and (body.get_content_subtype() == "html") == bool(form)
    for text in (body.get_content().replace("&nbsp;", " "), mail["Subject"]):
        assert "‹img src=http://e/x.png›" in text and "] (http://e)" in text
        assert not any(mark in text for mark in ("<img", "<!channel", "](", "@everyone"))

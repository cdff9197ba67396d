"""Sends one message to one channel: a webhook, or an address of the library `apprise`. Requests the
URL of a dead man's switch.

Secrets and addresses are read here, on the worker, each time. No error repeats them.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from relaunch.spec.fleet import Channel, Severity, check_http_address
from relaunch.spec.job import SecretReference
from relaunch.text import mute_markup

SEND_TIMEOUT_S = 10.0
"""For one message to one channel, after those before it. A receiver should only store it."""
QUEUE_TIMEOUT_S = 30.0
"""How long a message waits for those before it to the same channel."""
MAX_CONCURRENT = 4
"""Messages at once to one channel. More than these do not wait for a receiver that hangs."""
SIGNATURE = "X-Relaunch-Signature"
MAX_SECRET_BYTES = 64 * 1024
MIN_REDACTED = 4
"""Characters of a part of an address from which on error texts do not repeat it."""


class ChannelError(Exception):
    def __init__(self, reason: str, is_ambiguous: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_ambiguous = is_ambiguous
        """Whether the message may have been delivered all the same."""


@dataclass(frozen=True, slots=True)
class Message:
    subject: str
    text: str
    body: dict[str, Any]
    """The JSON of a webhook."""
    grade: Severity | Literal["resolved"] = "info"
    """The gravest of its open matters."""


NOTIFY_TYPES: dict[Severity | Literal["resolved"], str] = {
    "critical": "failure",
    "warning": "warning",
    "info": "info",
    "resolved": "success",
}
"""What apprise calls them."""


class ChannelSender:
    def __init__(self) -> None:
        self._gates: dict[str, asyncio.Semaphore] = {}

    async def send(self, name: str, channel: Channel, message: Message) -> None:
        """Send a message.

        Raises:
            ChannelError: it was not delivered, or that is not known.
        """
        if channel.webhook is not None:
            await self._run(name, lambda: _send_webhook(channel, message))
            return
        # Not within the time that a receiver has: the first time takes a second of a core, and six
        # where nothing was compiled yet.
        await asyncio.to_thread(_load_apprise)
        await self._run(name, lambda: _send_apprise(channel, message))

    async def ping(self, name: str, url: str | SecretReference) -> None:
        """Request the URL of a dead man's switch.

        Raises:
            ChannelError: it did not accept the request, or that is not known.
        """
        await self._run(name, lambda: _request(_read_url(url), None, {}))

    async def _run(self, name: str, work: Callable[[], None]) -> None:
        """Run what blocks, beside at most three others of that name, and wait for it for 10 s."""
        gate = self._gates.setdefault(name, asyncio.Semaphore(MAX_CONCURRENT))
        try:
            async with asyncio.timeout(QUEUE_TIMEOUT_S):
                await gate.acquire()
        except TimeoutError:
            raise ChannelError("the messages before it hang") from None
        done = _run_in_thread(work, gate.release)
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await asyncio.shield(done)
        except TimeoutError:
            raise ChannelError(f"no answer within {SEND_TIMEOUT_S:g} s", True) from None


def read_secret(reference: SecretReference) -> str:
    """Read a secret, without the line end after it.

    Raises:
        ChannelError: it cannot be read, or is empty.
    """
    if reference.env is not None:
        if value := os.environ.get(reference.env, ""):
            return value
        raise ChannelError(f"the worker's environment has no {reference.env}")
    path = Path(reference.file or "")
    try:
        with path.open("rb") as file:
            value = file.read(MAX_SECRET_BYTES).decode().strip()
    except OSError as error:
        raise ChannelError(f"file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ChannelError(f"file {path} is not UTF-8 text") from None
    if not value:
        raise ChannelError(f"file {path} is empty")
    return value


def sign(body: bytes, secret: str) -> str:
    """Return the value of the signature's header."""
    return f"sha256={hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()}"


def _run_in_thread(work: Callable[[], None], then: Callable[[], None]) -> asyncio.Future[None]:
    """Run `work` in a thread that does not keep the process alive, and call `then` at its end.

    Libraries that send messages block, and some cannot be bounded in time.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: ChannelError | None) -> None:
        then()
        if done.cancelled():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
            done.exception()  # else one that is raised after the timeout is logged

    def run() -> None:
        error: ChannelError | None = None
        try:
            work()
        except ChannelError as raised:
            error = raised
        except Exception as raised:  # of a library, and its text may repeat the address
            error = ChannelError(f"it raised {type(raised).__name__}", True)
        try:
            loop.call_soon_threadsafe(settle, error)
        except RuntimeError:  # the worker has ended
            return

    threading.Thread(target=run, daemon=True, name="relaunch-channel").start()
    return done


def _read_address(address: str | SecretReference | None) -> str:
    return read_secret(address) if isinstance(address, SecretReference) else address or ""


def _read_url(address: str | SecretReference | None) -> str:
    """Return an address that can be requested.

    Raises:
        ChannelError: it cannot be read, or is none.
    """
    url = _read_address(address)
    try:
        check_http_address(url)
    except ValueError as error:
        raise ChannelError(str(error)) from None
    return url


def _send_webhook(channel: Channel, message: Message) -> None:
    url = _read_url(channel.webhook)
    body = json.dumps(message.body).encode()
    headers = {"Content-Type": "application/json"}
    if channel.secret is not None:
        headers[SIGNATURE] = sign(body, read_secret(channel.secret))
    _request(url, body, headers)


def _request(url: str, body: bytes | None, headers: dict[str, str]) -> None:
    """Send a POST with a body, or a GET without one.

    Raises:
        ChannelError: the answer is not one of success, or that is not known.
    """
    import http.client
    import urllib.error
    import urllib.request

    class NoRedirects(urllib.request.HTTPRedirectHandler):
        """A redirected POST would become a GET without its body."""

        def redirect_request(self, *_: Any) -> None:
            return None

    opener = urllib.request.build_opener(NoRedirects())
    method = "GET" if body is None else "POST"
    try:
        headers = {"User-Agent": "relaunch", **headers}
        request = urllib.request.Request(url, body, headers, method=method)
        with opener.open(request, timeout=SEND_TIMEOUT_S):
            return
    except urllib.error.HTTPError as error:
        error.close()
        # From 500 on it has failed itself, or a proxy before it, perhaps after it took the message.
        raise ChannelError(f"it answered {error.code}", error.code >= 500) from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise ChannelError(f"no answer within {SEND_TIMEOUT_S:g} s", True) from None
        raise ChannelError(_redact(f"it cannot be reached: {error.reason}", url)) from None
    except TimeoutError:
        raise ChannelError(f"no answer within {SEND_TIMEOUT_S:g} s", True) from None
    except (OSError, http.client.HTTPException) as error:
        reason = f"the connection broke: {type(error).__name__}"
        raise ChannelError(reason, True) from None
    except ValueError:  # of http.client, for an address with spaces; its text repeats it
        raise ChannelError("its address cannot be used") from None


@cache
def _load_apprise() -> None:
    """Import apprise and the modules for its services, all of which it loads for any address."""
    import apprise

    apprise.Apprise().add("json://localhost")


def _send_apprise(channel: Channel, message: Message) -> None:
    import apprise

    url = _read_address(channel.apprise)
    sender = apprise.Apprise()
    with _listen() as said:
        is_valid = sender.add(url)
        # Without a format, apprise sends a text as the HTML of a mail, and as markup to chats.
        is_sent = is_valid and sender.notify(
            title=mute_markup(message.subject),
            body=mute_markup(message.text),
            body_format=apprise.NotifyFormat.TEXT,
            # Services that know urgency take it from this: critical, warning and info of PagerDuty.
            notify_type=apprise.NotifyType(NOTIFY_TYPES[message.grade]),
        )
    if not is_valid:
        raise ChannelError("apprise does not know an address like this one")
    if not is_sent:
        reason = "; ".join(dict.fromkeys(said))[:300] or "apprise does not say why"
        # It says so, too, if no answer came in time, and if one of several targets took it.
        raise ChannelError(_redact(reason, url), True)


_heard: ContextVar[list[str] | None] = ContextVar("relaunch_heard", default=None)
"""What apprise says of the message that is being sent here."""


class _Listener(logging.Handler):
    """Keeps what apprise says of a message with that message, while others are sent beside it.

    Its logger is one for all of them, and what it says may contain their addresses. What belongs to
    which message is known from the context, not from the thread: apprise sends in other threads.
    """

    def emit(self, record: logging.LogRecord) -> None:
        said = _heard.get()
        if said is not None:
            said += record.getMessage().splitlines()


_LISTENER = _Listener(logging.WARNING)


@contextmanager
def _listen() -> Iterator[list[str]]:
    """Collect what apprise says within the context, instead of having it logged."""
    logger = logging.getLogger("apprise")
    logger.propagate = False  # it may contain the address
    logger.setLevel(logging.WARNING)
    logger.addHandler(_LISTENER)  # once, however often
    said: list[str] = []
    token = _heard.set(said)
    try:
        yield said
    finally:
        _heard.reset(token)


def _redact(text: str, url: str) -> str:
    """Return the text without the parts of an address, which may be passwords or tokens."""
    parts = {*re.split(r"[:/@?&=,]+", url), *re.split(r"[:/@?&=,]+", unquote(url))}
    scheme = urlsplit(url).scheme
    for part in sorted(parts - {scheme}, key=len, reverse=True):
        if len(part) >= MIN_REDACTED:
            text = text.replace(part, "…")
    return text

"""Protocol types: tokens, refusals, lines, and the parsing of an order's fields.

Touches no file and no process.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, NoReturn, Optional, Tuple

VERSION = 1
Json = Dict[str, Any]
Order = Tuple[int, int]
"""(submission, generation), by which the tokens of one job are compared."""


MAX_DIGITS = 18
"""Of a number in a token: 63 bits hold them."""


class Refusal(Exception):
    """An order that this node will not carry out; the answer says why."""

    def __init__(self, why: str, reason: str, **extra: Any) -> None:
        super().__init__(reason)
        self.answer: Json = {"outcome": "refused", "why": why, "reason": reason, **extra}


class NoAnswer(Exception):
    """The outcome of the order is unknown: the command ends without an answer and is retried."""


@dataclass(frozen=True)
class ProcessHandover:
    """An answer, and what the process that gave it becomes afterwards."""

    answer: Json
    become: Callable[[], None]


def now() -> float:
    """Return seconds since boot including suspended time, in which no lease was renewed."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def replace_nonfinite(value: Any) -> Any:
    """Replace numbers that JSON lacks (NaN, infinities) by text that float() reads.

    A loss of NaN is information, not an error.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: replace_nonfinite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [replace_nonfinite(inner) for inner in value]
    return value


def line(value: Json) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    except ValueError:
        return (
            json.dumps(replace_nonfinite(value), separators=(",", ":"), allow_nan=False).encode()
            + b"\n"
        )


@dataclass(frozen=True)
class Token:
    """The token of one launch of a job."""

    namespace: str
    job: str
    submission: int
    generation: int
    server: str = ""
    """The Temporal server that the job belongs to: two servers may have a namespace and a job of
    the same name. Empty if the order did not name it."""

    @property
    def order(self) -> Order:
        return (self.submission, self.generation)

    @property
    def job_path(self) -> str:
        """What distinguishes this job from all others on the node."""
        return job_path(self.server, self.namespace, self.job)

    @property
    def text(self) -> str:
        return f"{self.job_path}/{self.submission}/{self.generation}"

    @property
    def json(self) -> Json:
        return {
            "namespace": self.namespace,
            "job": self.job,
            "submission": self.submission,
            "generation": self.generation,
            **({"server": self.server} if self.server else {}),
        }


def make_sender(token: Token, node: Optional[str], shim: Optional[Json]) -> Json:
    """Return who speaks in a line of a watch: of which token, on which node, below which shim.

    Args:
        token: The generation that the line is of.
        node: This node's name, as the start order gave it; None before that.
        shim: Pid, start time and boot of the shim; None: its record was removed.
    """
    return {"token": token.json, "node": node, "shim": shim}


def job_path(server: str, namespace: str, job: str) -> str:
    return f"{server}/{namespace}/{job}" if server else f"{namespace}/{job}"


def is_number(text: str) -> bool:
    """Return whether a text of others is a number in plain digits, which `int` takes."""
    return text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS


def parse_token(text: str) -> Optional[Token]:
    """Parse `Token.text`; return None if it is not a token."""
    parts = text.split("/")
    if (
        len(parts) not in (4, 5)
        or not all(parts)
        or not (is_number(parts[-2]) and is_number(parts[-1]))
    ):
        return None
    return Token(
        parts[-4], parts[-3], int(parts[-2]), int(parts[-1]), parts[0] if len(parts) == 5 else ""
    )


def refuse_field(name: str, value: Any, expected: str) -> NoReturn:
    raise Refusal(
        "bad_order",
        f"{name} is {json.dumps(replace_nonfinite(value), default=str)[:120]}; expected {expected}",
    )


_REQUIRED: Any = object()


MAX_NOTE = 300
"""Characters of a text that is kept in a journal for people."""


class Fields:
    """Parser of an order's fields; a missing field or a wrong type is refused by name."""

    def __init__(self, order: Any, prefix: str = "") -> None:
        if not isinstance(order, dict):
            raise Refusal("bad_order", f"{prefix.rstrip('.') or 'the order'} is not a JSON object")
        self.order: Json = order
        self.prefix = prefix

    def get(self, name: str, expected: str, default: Any = _REQUIRED) -> Any:
        value = self.order.get(name, default)
        if value is _REQUIRED:
            raise Refusal("bad_order", f"{self.prefix}{name} is missing; expected {expected}")
        return value

    def number(self, name: str, default: Any = _REQUIRED, least: float = 0.0) -> float:
        expected = f"a number of at least {least:g}"
        value = self.get(name, expected, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
            or value < least
        ):
            refuse_field(self.prefix + name, value, expected)
        return float(value)

    def whole(self, name: str, default: Any = _REQUIRED) -> int:
        expected = "a whole number of at least 0"
        value = self.get(name, expected, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            refuse_field(self.prefix + name, value, expected)
        return int(value)

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        value = self.get(name, "text", default)
        if not isinstance(value, str) or not value or "\0" in value:
            refuse_field(self.prefix + name, value, "text that is not empty and has no NUL")
        return str(value)

    def note(self, name: str) -> str:
        """Return a text for the journal that an older controller does not send; empty without."""
        value = self.order.get(name)
        return value[:MAX_NOTE] if isinstance(value, str) else ""

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        value = self.get(name, "true or false", default)
        if not isinstance(value, bool):
            refuse_field(self.prefix + name, value, "true or false")
        return bool(value)

    def items(self, name: str, default: Any = _REQUIRED) -> list[Any]:
        value = self.get(name, "a list", default)
        if not isinstance(value, list):
            refuse_field(self.prefix + name, value, "a list")
        return list(value)

    def strings(self, name: str, default: Any = _REQUIRED) -> list[str]:
        values = self.items(name, default)
        for value in values:
            if not isinstance(value, str) or "\0" in value:
                refuse_field(self.prefix + name, value, "a list of texts without NUL")
        return values

    def fleet(self) -> str:
        """Return the fleet that sent the order as <server>/<namespace>/<fleet>.

        It is empty in orders of controllers from before this field existed.
        """
        return self.text("fleet") if self.order.get("fleet") else ""

    def token(self) -> Token:
        inner = Fields(self.get("token", "an object"), "token.")
        names = [
            inner.text("namespace"),
            inner.text("job"),
            inner.text("server") if inner.order.get("server") else "",
        ]
        for name, value in zip(("namespace", "job", "server"), names):
            if "/" in value or "\n" in value:
                refuse_field(f"token.{name}", value, "a name without a slash or a line break")
        numbers = [inner.whole(name) for name in ("submission", "generation")]
        for name, number in zip(("submission", "generation"), numbers):
            if not is_number(str(number)):  # a search would not find its ranks
                refuse_field(f"token.{name}", number, f"a number of at most {MAX_DIGITS} digits")
        return Token(names[0], names[1], numbers[0], numbers[1], names[2])


def refuse_if_late(command: str, until: Any) -> None:
    """Refuse an order whose caller has given up.

    It is asked for when the order comes, and once more right before what cannot be undone: the
    process that carries it out may have been stopped, or have waited for its disk, for hours.

    Args:
        command: The order.
        until: When its caller gives up, by this node's clock; what is no number: never.

    Raises:
        Refusal: That time has passed.
    """
    is_timed = isinstance(until, (int, float)) and not isinstance(until, bool)
    if is_timed and (at := now()) > until:
        reason = f"this {command} came {at - max(0, until):.1f} s too late to be carried out"
        raise Refusal("late", reason, stamp=at)


def parse_environment(value: Any, name: str) -> dict[str, str]:
    """Parse a mapping of environment variables."""
    variables = Fields(value, f"{name}.").order
    for key, text in variables.items():
        if not key or "=" in key or "\0" in key:
            refuse_field(f"a name in {name}", key, "the name of a variable")
        if not isinstance(text, str) or "\0" in text:
            refuse_field(f"{name}.{key}", text, "text without NUL")
    return variables


def check_version(order: Any) -> Fields:
    fields = Fields(order)
    version = fields.order.get("protocol")
    if version != VERSION or isinstance(version, bool):
        raise Refusal("protocol", f"protocol is {json.dumps(version)}; this agent speaks {VERSION}")
    return fields

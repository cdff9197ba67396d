"""Validated values that users write (names, durations, reasons) and their strict base model."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any, Protocol

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

NAME_PATTERN = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


DURATION_PATTERN = re.compile(
    r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?"
)


MAX_DURATION = timedelta(days=3650)
"""Longer ones are mistakes, and added to a date they could exceed what a date can hold."""


def parse_name(value: str) -> str:
    """Check a name of a job, fleet or node: a workflow id, a folder and a search attribute."""
    if not NAME_PATTERN.fullmatch(value):
        raise ValueError(
            f"{value!r} is not a name: 1 to 63 letters, digits, '.', '_' or '-', "
            "starting and ending with a letter or digit"
        )
    return value


def parse_duration(value: Any) -> Any:
    """Parse `90s`, `5m`, `1h30m`, `2d`; leave other values to pydantic (timedelta, ISO 8601)."""
    if isinstance(value, bool | int | float):
        raise ValueError(f"{value!r} has no unit: write a duration such as 30s, 5m or 1h30m")
    if isinstance(value, str) and value and not value.startswith("P"):
        match = DURATION_PATTERN.fullmatch(value)
        if not match or not any(match.groups()):
            raise ValueError(f"{value!r} is not a duration: write it like 30s, 5m or 1h30m")
        days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
        try:
            return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        except OverflowError:
            raise ValueError(
                f"{value[:30]!r} is too long: at most {duration(MAX_DURATION)}"
            ) from None
    return value


def duration(value: timedelta) -> str:
    """Format a duration as users write it: 90s, 5m, 1h30m, 2d."""
    seconds = value.total_seconds()
    if seconds % 1 or seconds < 60:
        return f"{seconds:g}s"
    parts = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, seconds = divmod(int(seconds), size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def _check_range(value: timedelta) -> timedelta:
    if value < timedelta(0):
        raise ValueError(f"{value} is negative: a duration is 0s or more")
    if value > MAX_DURATION:
        raise ValueError(f"{duration(value)} is too long: at most {duration(MAX_DURATION)}")
    return value


Name = Annotated[str, AfterValidator(parse_name)]


Duration = Annotated[timedelta, BeforeValidator(parse_duration), AfterValidator(_check_range)]


def parse_reason(text: str) -> str:
    """Reject a reason that is given but says nothing.

    Raises:
        ValueError: it is empty or blank.
    """
    if not text.strip():
        raise ValueError("it is empty, expected a clause that says why")
    return text


Reason = Annotated[str, AfterValidator(parse_reason)]
"""Reason of an order that a person gives; it may be left out where the message allows that, but
never blank."""


def check_text(value: Any) -> Any:
    """Refuse what cannot be an argument or a variable of a process.

    Raises:
        ValueError: It is missing, no text, or contains a NUL character.
    """
    if value is None:
        raise ValueError("no value: write one, or '' for an empty text")
    if isinstance(value, list | tuple | dict):
        kind = "keys and values" if isinstance(value, dict) else "a list"
        raise ValueError(f"{kind} instead of text: write text that has brackets in quotes")
    if isinstance(value, bool | int | float):
        raise ValueError(f"{value!r} is no text: write it in quotes")
    if isinstance(value, str) and "\0" in value:
        raise ValueError("a NUL character, which no argument, variable or path can contain")
    return value


Text = Annotated[str, BeforeValidator(check_text)]
"""An argument, a variable's value or a path: what the kernel accepts as one."""


class Pattern(Protocol):
    """A compiled regular expression, from `re` or from RE2."""

    @property
    def pattern(self) -> str: ...

    def search(self, text: str, /) -> Match | None: ...


class Match(Protocol):
    def group(self, group: str | int = 0, /) -> Any: ...

    def groupdict(self) -> dict[str, Any]: ...


def compile_pattern(value: str) -> Pattern:
    """Compile a pattern that a user wrote so that matching time is bounded for every text.

    RE2's time grows with the length of the text and of the pattern and never exponentially, so the
    pattern may run inside a workflow.

    Raises:
        ValueError: it is not a regular expression, or needs what RE2 lacks: lookahead, lookbehind,
            back references.
    """
    import re2

    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is not a regular expression: {error}") from None
    options = re2.Options()
    # would go to stderr, in addition to the error that this function raises
    options.log_errors = False
    try:
        return re2.compile(value, options)  # type: ignore[no-any-return]
    except re2.error as error:
        why = error.args[0].decode() if isinstance(error.args[0], bytes) else str(error)
        without = "it is matched by RE2, which has no look-ahead, look-behind or back references"
        raise ValueError(f"{value!r} cannot be used as a pattern: {why}; {without}") from None


class StrictModel(BaseModel):
    """Base model for data from outside: unknown keys are rejected, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

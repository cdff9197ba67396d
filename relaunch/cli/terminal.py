"""Shared by all commands: common options, the connection to the server, and output."""

from __future__ import annotations

import errno
import json
import os
import select
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeVar, cast

import typer

from relaunch.config import ConfigError, Settings, read_settings
from relaunch.text import escape_controls

if TYPE_CHECKING:
    from rich.console import Console
    from temporalio.client import Client

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Reason = Annotated[str, typer.Option(help="The reason, for the history.")]


def check_reason(text: str) -> str:
    """Return a reason unchanged; refuse a blank one.

    Raises:
        ConfigError: It is blank.
    """
    if not text.strip():
        raise ConfigError("--reason is empty: expected the reason, which the history keeps")
    return text


def check_name(kind: str, name: str) -> str:
    """Return the name of a job, node or fleet unchanged; refuse one that cannot be a name.

    Raises:
        ConfigError: It has other characters, or too many.
    """
    from relaunch.fields import parse_name

    try:
        return parse_name(name)
    except ValueError as error:
        raise ConfigError(f"{kind} {error}") from None


RequiredReason = Annotated[
    str,
    typer.Option("--reason", callback=check_reason, help="The reason, for the history."),
]
Job = Annotated[str, typer.Argument(metavar="JOB")]
Value = TypeVar("Value")


_erasers: list[Callable[[], None]] = []


def can_redraw() -> bool:
    """Return whether standard output is a terminal on which lines can be drawn again."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def set_eraser(erase: Callable[[], None] | None) -> None:
    """Set what erases the lines that are drawn again, before something else is printed."""
    _erasers[:] = [] if erase is None else [erase]


def erase_drawn() -> None:
    """Erase the lines that are drawn again."""
    for erase in _erasers:
        erase()


class GuardedStream:
    """A stream of text on which control characters are written as escapes.

    Nearly all that commands print quotes what others wrote: ranks, nodes, and everyone who can
    send a message to a workflow. Whatever draws on the terminal itself uses `get_bare_stream`.
    """

    def __init__(self, stream: TextIO) -> None:
        self.bare = stream

    def write(self, text: str) -> int:
        self.bare.write(escape_controls(text))
        return len(text)

    def writelines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bare, name)


@contextmanager
def guard_output() -> Iterator[None]:
    """Guard the standard output and the standard error of this process."""
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, TextIOWrapper):  # where a locale lacks a letter, its escape is shown
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = (cast(TextIO, GuardedStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def get_bare_stream(stream: TextIO) -> TextIO:
    """Return the stream on which a command may draw, having escaped what others wrote."""
    return stream.bare if isinstance(stream, GuardedStream) else stream


def list_closed_outputs() -> list[int]:
    """Return which of descriptors 1 and 2 can no longer be written to.

    The terminal was closed, or the program that reads a pipe has ended.
    """
    poll = select.poll()
    for stream in (1, 2):
        poll.register(stream, 0)
    return [stream for stream, _ in poll.poll(0)]  # errors are always reported


def is_closed_output(error: BaseException | None) -> bool:
    """Return whether an error is that of a write to a closed pipe or terminal.

    A file on a disk that fails gives EIO as well, and one on a full disk another error.
    """
    if not isinstance(error, OSError):
        return False
    return error.errno == errno.EPIPE or (error.errno == errno.EIO and bool(list_closed_outputs()))


def make_console(**options: Any) -> Console:
    """Return a console for tables: control characters of all texts in them are escapes."""
    from rich.console import Console
    from rich.text import Text

    class SafeConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(escape_controls(text), **options)

    file = get_bare_stream(sys.stdout)
    return SafeConsole(file=file, markup=False, highlight=False, emoji=False, **options)


def print_columns(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table with one line for each row, however long, for grep."""
    widths = [max(map(len, column)) for column in zip(titles, *lines, strict=True)]
    print("\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in (titles, *lines)))


def say(text: str) -> None:
    erase_drawn()
    print(f"relaunch: {escape_controls(text)}", file=sys.stderr, flush=True)


def print_line(text: str) -> None:
    """Print a line at once, also into a pipe: what is followed is read while it is written."""
    print(text, flush=True)


def run_with_client(work: Callable[[Client, Settings], Coroutine[Any, Any, Value]]) -> Value:
    """Read the settings, connect, and run `work`; return its result."""
    import asyncio

    async def run_connected() -> Value:
        from relaunch.temporal import connect

        settings = read_settings()
        return await work(await connect(settings.state), settings)

    return asyncio.run(run_connected())


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))

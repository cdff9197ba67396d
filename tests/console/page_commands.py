"""What is written on a page of docs/ as a command: whether our command line takes it."""

from __future__ import annotations

import functools
import re
import shlex
import textwrap
from typing import Any

from typer.main import get_command

from relaunch.cli import app


def code_lines(page: str) -> list[str]:
    """Return the lines of a page's code blocks that name no language, without remarks.

    A line that goes on is one.
    """
    fences = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page, re.DOTALL | re.MULTILINE)
    blocks = [text for language, text in fences if not language]
    lines = re.sub(r"\\\n +", "", "\n".join(map(textwrap.dedent, blocks))).splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


@functools.cache
def _build_command() -> Any:
    return get_command(app.app)


def take(line: str) -> None:
    """Parse a line that begins with relaunch, and run nothing.

    Raises click's UsageError: it is no command.
    """
    command = _build_command()
    words = shlex.split(line)[1:]
    context = command.context_class(command, info_name="relaunch")
    while hasattr(command, "resolve_command"):
        name, command, words = command.resolve_command(context, words)
        context = command.context_class(command, info_name=name, parent=context)
    command.make_context(command.name, words, parent=context.parent)

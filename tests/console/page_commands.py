"""What is written on a page of docs/ as a command: whether our command line takes it."""

from __future__ import annotations

import shlex
from typing import Any

from typer.main import get_command

from relaunch.cli import app


def take(line: str) -> None:
    """Parse a line that begins with relaunch, and run nothing. Raises click's UsageError: it is no command."""
    command: Any = get_command(app.app)
    words = shlex.split(line)[1:]
    context = command.context_class(command, info_name="relaunch")
    while hasattr(command, "resolve_command"):
        name, command, words = command.resolve_command(context, words)
        context = command.context_class(command, info_name=name, parent=context)
    command.make_context(command.name, words, parent=context.parent)

"""The text of an environment file: variables for a job's ranks that no workflow history holds.

This module knows the format. The command line writes such files, and the worker reads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

RESERVED_VARIABLES = ("RELAUNCH_", "TORCHELASTIC_")
"""The agent sets these itself, or they would let a job act in the name of another."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
VARIABLES = re.compile(r"[A-Za-z_*][A-Za-z0-9_*]*")
"""The name of a variable, or with `*` for any characters, of several."""


def check_redacted(names: tuple[str, ...]) -> tuple[str, ...]:
    """Validate names of variables whose values are redacted.

    Raises:
        ValueError: One is no name of variables.
    """
    for name in names:
        if not VARIABLES.fullmatch(name):
            # Not the text: it may be the value.
            raise ValueError(
                f"item {names.index(name) + 1} is not the name of a variable: expected names such"
                " as WANDB_API_KEY or *_TOKEN, and not their values"
            )
    return names


def serialize_environment(variables: Mapping[str, str]) -> bytes:
    """Return the content of a file: each variable ends with NUL, as in /proc/PID/environ.

    No value of a variable can contain NUL, but many contain newlines.
    """
    return b"".join(
        f"{name}={value}\0".encode(errors="surrogateescape") for name, value in variables.items()
    )


def parse_environment(content: bytes) -> dict[str, str]:
    """Parse what `serialize_environment` or `env -0` writes, or lines as Docker's `--env-file`.

    In the second form a line is NAME=VALUE without quotes, a comment that begins with #, or blank.

    Raises:
        ValueError: An entry is none of these, or a variable is one that relaunch sets.
    """
    text = content.decode(errors="surrogateescape")
    by_line = "\0" not in text
    entries = text.split("\n") if by_line else text.removesuffix("\0").split("\0")
    found = {}
    for number, entry in enumerate(entries, 1):
        if by_line and (not entry.strip() or entry.startswith("#")):
            continue
        name, equals, value = entry.partition("=")
        # Shells export functions under names that are no identifiers (BASH_FUNC_module%%).
        if not equals or not name or (by_line and not VARIABLE.fullmatch(name)):
            # The entry itself may be a secret.
            raise ValueError(f"line {number} is not NAME=VALUE")
        if name.startswith(RESERVED_VARIABLES):
            raise ValueError(f"line {number} sets {name}, which only relaunch may set")
        found[name] = value
    return found

"""Reads the policies that people name, and changes the policy of a running job.

Every refusal raises `ConfigError` with a one-sentence message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from relaunch.cli import files
from relaunch.cli.documents import Document, read_document
from relaunch.cli.policy_views import short
from relaunch.config import ConfigError
from relaunch.evidence.causes import Cause
from relaunch.fields import duration
from relaunch.spec.policy import Policy, Rung, preset, preset_names
from relaunch.text import count_noun

if TYPE_CHECKING:
    from temporalio.client import Client

CHANGE_TIMEOUT = 10.0
"""Seconds. A live worker answers in milliseconds, and this one has just answered."""


def read(source: str) -> Policy:
    """Read a policy as people name it: a preset or a file.

    Raises:
        ConfigError: It is neither, or cannot be used.
    """
    if source in preset_names():
        return preset(source)
    return files.read_policy(str(_find(source)))


def _find(source: str) -> Path:
    if (path := files.find_file(source)) is None:
        raise ConfigError(
            f"policy {source!r} is neither a preset ({', '.join(preset_names())}) nor a file"
        )
    return path


def parse_cause(word: str) -> Cause:
    try:
        return Cause(word.upper())
    except ValueError:
        raise ConfigError(
            f"--cause: unknown cause {word!r}: expected one of {', '.join(Cause)}"
        ) from None


@dataclass(frozen=True)
class Changes:
    """Keys that override those of a job's policy, and the file they come from."""

    keys: dict[str, Any]
    document: Document | None = None

    def refusal(self, error: ValidationError) -> ConfigError:
        from relaunch.messages.jobs import explain

        where = (
            "--set"
            if self.document is None
            else f"{self.document.place}:{self.document.line(tuple(error.errors()[0]['loc']))}"
        )
        return ConfigError(f"{where}: {explain(error)}")


def read_changes(source: str | None, words: Sequence[str]) -> Changes:
    """Read the changes for `policy change`: a file's keys, a preset, or `--set KEY=VALUE`.

    Raises:
        ConfigError: None or both are given, or one cannot be read.
    """
    if bool(source) == bool(words):
        raise ConfigError("policy change: expected either a file or --set KEY=VALUE")
    if source is None:
        return Changes(_set(words))
    if source in preset_names():
        return Changes({"extends": source})
    document = read_document(_find(source))
    return Changes(document.content, document)


def _set(words: Sequence[str]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for word in words:
        path, equals, written = word.partition("=")
        if not equals or not path or not written:
            raise ConfigError(
                f"--set: {word!r} is not KEY=VALUE: expected a pair such as max_restarts=12 or "
                "timeouts.lost_after=5m"
            )
        value = Document(written, f"--set {path}").content
        parts = path.split(".")
        if len(parts) > 2:
            upper, rest = ".".join(parts[:2]), parts[2:]
            is_key = len(rest) == 1 and not rest[0].isdigit()
            how = f"write '{upper}={{{rest[0]}: {written}}}'" if is_key else "write it in a file"
            raise ConfigError(
                f"--set: {path} has too many levels: {upper} is replaced as a whole; {how}"
            )
        if len(parts) == 1:
            keys[path] = value
        elif isinstance(keys.setdefault(parts[0], {}), dict):
            keys[parts[0]][parts[1]] = value
        else:
            raise ConfigError(
                f"--set: {parts[0]} is set both as a whole and in part: expected one of them"
            )
    return keys


async def change(client: Client, name: str, changes: Changes, reason: str) -> list[str]:
    """Change the policy of a running job; return lines that describe the changes.

    Raises:
        ConfigError: The job does not run, no worker answers for it, or the resulting policy is
            invalid.
    """
    import asyncio

    from temporalio.client import (
        WorkflowUpdateFailedError,
        WorkflowUpdateRPCTimeoutOrCancelledError,
    )
    from temporalio.service import RPCError, RPCStatusCode

    from relaunch.cli.client import whoami
    from relaunch.cli.jobs import handle_of, load_job
    from relaunch.cli.sign import sign_message
    from relaunch.messages.jobs import PolicyMessage, overlay

    now = await load_job(client, name)
    if not now.open:
        raise ConfigError(f"job {name} has ended ({now.phase}): its policy can no longer change")
    if now.state is None:
        raise ConfigError(
            f"job {name}: no worker answers for it, so its policy cannot be changed: start one "
            "(`relaunch up` or `relaunch-worker`), then repeat the command"
        )
    before = now.state.policy
    try:
        after = overlay(before, changes.keys)
    except ValidationError as error:
        raise changes.refusal(error) from None
    except ValueError as error:
        raise ConfigError(f"job {name}: {error}") from None
    if before == after:
        return [f"job {name}: nothing to change, its policy has these values already"]
    message = PolicyMessage(policy=changes.keys, reason=reason, by=whoami())
    late = ConfigError(
        f"job {name}: no answer within {CHANGE_TIMEOUT:g} s; check `relaunch show {name}` before "
        "you repeat the command"
    )
    handle = handle_of(client, name)
    signed = await sign_message(client, handle.id, "change_policy", message)
    try:
        said: str = await asyncio.wait_for(
            handle.execute_update("change_policy", signed, result_type=str),
            CHANGE_TIMEOUT,
        )
    except WorkflowUpdateFailedError as error:
        raise ConfigError(f"job {name}: {getattr(error.cause, 'message', error.cause)}") from None
    except (TimeoutError, WorkflowUpdateRPCTimeoutOrCancelledError):
        raise late from None
    except RPCError as error:
        if error.status != RPCStatusCode.NOT_FOUND:
            raise
        raise ConfigError(f"job {name} has just ended: its policy can no longer change") from None
    return [f"job {name}: {said}", *(f"  {line}" for line in describe_changes(before, after))]


def describe_changes(before: Policy, after: Policy) -> list[str]:
    from relaunch.job.apply import list_changed_keys

    return [
        f"{key}: {_format_value(_get_value(before, key))} → {_format_value(_get_value(after, key))}"
        for key in list_changed_keys(before, after)
    ]


def _get_value(policy: Policy, key: str) -> Any:
    first, _, rest = key.partition(".")
    value: Any = getattr(policy, first)
    if not rest:
        return value
    return value.get(Cause(rest)) if isinstance(value, dict) else getattr(value, rest)


def _format_value(value: Any) -> str:
    match value:
        case None:
            return "not set"
        case timedelta():
            return duration(value)
        case (Rung(), *_):
            return short(value)
        case bool():
            return str(value).lower()
        case BaseModel() | dict() | tuple():
            return count_noun(len(value), "row") if isinstance(value, dict | tuple) else "changed"
        case _:
            return str(value)

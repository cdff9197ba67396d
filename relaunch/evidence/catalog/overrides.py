"""A user's overrides of the catalog, under `catalog:` in a policy.

They are validated here, with one clear sentence for each mistake.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from relaunch.evidence.catalog.dcgm_tables import Advice
from relaunch.evidence.catalog.signals import SIGNALS
from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Role
from relaunch.fields import StrictModel, compile_pattern

MAX_ENTRIES = 200
"""Maximum number of overrides. They are in the job's state: 200 of the longest take 100 KiB."""
MAX_PATTERN = 300
MAX_TEXT = 200
"""Maximum number of characters of a meaning or a reason."""


def _check_exit_key(key: Any) -> Any:
    if key not in SIGNALS.values() and not (
        isinstance(key, str) and re.fullmatch(r"exit (25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)", key)
    ):
        raise ValueError(
            f"{key!r} names no exit: expected a code from 1 to 255 such as 'exit 42',"
            " or a signal such as SIGUSR1"
        )
    if key == "exit 0":
        raise ValueError("'exit 0' is success and means nothing else")
    return key


def _check_xid_code(code: int) -> int:
    if not 1 <= code <= 999:
        raise ValueError(f"{code} is no Xid: expected a number from 1 to 999")
    return code


def _check_dcgm_code(code: int) -> int:
    if not 1 <= code <= 9999:
        raise ValueError(f"{code} is no DCGM error: expected a number from 1 to 9999")
    return code


def _check_cause(role: Role, cause: Cause | None, what: str) -> None:
    if role is Role.ROOT and cause is None:
        raise ValueError(
            f"{what} is a root and names no cause: say which, such as cause: GPU_RESET,"
            " or another role"
        )


Clause = Annotated[str, Field(max_length=MAX_TEXT)]


class XidOverride(StrictModel):
    """`63: {cause: GPU_RESET, reason: "our fleet resets at once"}`."""

    cause: Cause | None = None
    role: Role | None = None
    """Default: root where a cause is given, information where none is."""
    reason: Clause = ""

    @property
    def effective_role(self) -> Role:
        return self.role or (Role.ROOT if self.cause else Role.INFORMATION)

    @model_validator(mode="after")
    def _check_is_effective(self) -> Self:
        if self.cause is None and self.role is None:
            raise ValueError("an Xid is given a cause, a role, or both: this names neither")
        _check_cause(self.effective_role, self.cause, "this Xid")
        return self


class ExitOverride(StrictModel):
    """`"exit 42": {cause: PREEMPTED, meaning: "our scheduler took the node"}`."""

    cause: Cause
    meaning: Clause = Field(min_length=1)
    role: Role | None = None
    """Default: root."""


class LogOverride(StrictModel):
    """A row for a line of a rank's log.

    A row with an id of the catalog replaces that row; a new one is matched before all others.
    """

    id: str
    pattern: str
    """A regular expression in RE2's syntax, searched for anywhere in a line."""
    role: Role = Role.ROOT
    cause: Cause | None = None
    meaning: Clause = Field(min_length=1)

    @field_validator("id")
    @classmethod
    def _check_id(cls, value: str) -> str:
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", value):
            raise ValueError(
                f"{value!r} is no id: expected lower-case letters, digits and _,"
                " such as cuda_oom, at most 40"
            )
        return value

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, value: str) -> str:
        if len(value) > MAX_PATTERN:
            raise ValueError(f"the pattern has {len(value)} characters: at most {MAX_PATTERN}")
        if compile_pattern(value).search(""):
            raise ValueError(
                f"{value!r} matches an empty line, so it would match every line:"
                " it needs at least one character that must be there"
            )
        return value

    @model_validator(mode="after")
    def _check_root(self) -> Self:
        _check_cause(self.role, self.cause, f"the line {self.id}")
        return self


class DcgmOverride(StrictModel):
    """`80: {advice: rma}`."""

    advice: Advice


class CatalogOverrides(StrictModel):
    xid: dict[Annotated[int, AfterValidator(_check_xid_code)], XidOverride] = Field(
        default_factory=dict
    )
    exit: dict[Annotated[str, BeforeValidator(_check_exit_key)], ExitOverride] = Field(
        default_factory=dict
    )
    log: tuple[LogOverride, ...] = ()
    dcgm: dict[Annotated[int, AfterValidator(_check_dcgm_code)], DcgmOverride] = Field(
        default_factory=dict
    )

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        entries = len(self.xid) + len(self.exit) + len(self.log) + len(self.dcgm)
        if entries > MAX_ENTRIES:
            raise ValueError(
                f"{entries} overrides: at most {MAX_ENTRIES},"
                " because they travel in the job's state"
            )
        ids = [line.id for line in self.log]
        if twice := next((id_ for id_ in ids if ids.count(id_) > 1), None):
            raise ValueError(f"the line {twice} is written twice: each id has one row")
        return self


NO_OVERRIDES = CatalogOverrides()

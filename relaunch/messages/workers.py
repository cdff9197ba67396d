"""What a worker says of itself when `relaunch doctor` asks it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class UnusableFile:
    """A fleet file that the worker cannot use as it is now."""

    reason: str
    """With the file, the line where there is one, and what is wrong."""
    fleet: str = ""
    """The fleet that is served by an earlier content; empty: it is not known, and not served."""


@dataclass(frozen=True, slots=True)
class HeartbeatStatus:
    """A dead man's switch, as one worker knows it."""

    fleet: str
    name: str
    """Of the service, without what may be secret."""
    accepted_at: datetime | None = None
    """When it last accepted a request of this worker."""
    failing_since: datetime | None = None
    """Since when this worker, which watches the fleet, brings no request through; None: it does, or
    does not watch."""
    reason: str = ""
    """Why not."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    worker: str
    """Its identity."""
    unusable_files: tuple[UnusableFile, ...] = ()
    heartbeats: tuple[HeartbeatStatus, ...] = ()
    certificate_expiry: str = ""
    """A sentence about a certificate of its connection to the server that has ended or ends within
    14 days; empty: none does."""
    rules: dict[str, str] | None = None
    """A digest of the `access:` section of each fleet that it serves, by the fleet's name; empty:
    the file has none. None: it is of a release that does not say so."""
    untaken: dict[str, dict[str, str]] | None = None
    """What no channel takes of each fleet that has something of that kind, by the fleet's name:
    events, each with which of its matters as a clause, empty for all. None: it is of a release that
    does not say so."""

"""What can go wrong between a caller and AWS, by operation.

For one call, for some, or for all until it is taken back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Kind:
    name: str
    code: str = ""
    message: str = ""
    status: int = 0
    seconds: float = 0.0


THROTTLE = Kind("throttle")
"""ThrottlingException (400); of EC2 RequestLimitExceeded (503). Nothing was applied."""
SERVER_ERROR = Kind(
    "server_error", "ServerException", "Service Unavailable. Please try again later.", 500
)
DENIED = Kind(
    "denied",
    "AccessDeniedException",
    "User: arn:aws:iam::123456789012:user/double is not authorized to perform this.",
    400,
)
RESET = Kind("reset")
"""The connection ends before anything was applied."""
LOST = Kind("lost")
"""It is applied; the connection ends without an answer."""


def slow(seconds: float) -> Kind:
    """It is applied after so long, and answered."""
    return Kind("slow", seconds=seconds)


def failure(reason: str, detail: str = "") -> Kind:
    """HTTP 200 with nothing done and this in `failures`.

    RESOURCE:GPU, AGENT, ATTRIBUTE, MISSING, INACTIVE, ...
    """
    return Kind("failure", reason, detail)


def error(code: str, message: str = "", status: int = 400) -> Kind:
    """Any other error of the API's model; nothing was applied."""
    return Kind("error", code, message or code, status)


_NAMED = {kind.name: kind for kind in (THROTTLE, SERVER_ERROR, DENIED, RESET, LOST)}


@dataclass
class Fault:
    """One that was added; `left` None: until `remove`."""

    operation: str
    kind: Kind
    left: int | None
    when: Callable[[Mapping[str, Any]], bool] | None
    met: int = 0


@dataclass
class Faults:
    _told: list[Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(
        self,
        operation: str,
        kind: Kind | str,
        times: int | None = 1,
        when: Callable[[Mapping[str, Any]], bool] | None = None,
    ) -> Fault:
        """`operation` as "RunTask", "ecs.RunTask", or "ecs.*".

        `times` None: until it is removed; `when` is given the request.
        """
        if isinstance(kind, str) and kind not in _NAMED:
            raise ValueError(
                f"fault {kind!r} has no such name; expected one of {', '.join(_NAMED)}, or slow(), "
                "failure(), error()"
            )
        fault = Fault(operation, _NAMED[kind] if isinstance(kind, str) else kind, times, when)
        with self._lock:
            self._told.append(fault)
        return fault

    def remove(self, fault: Fault) -> None:
        with self._lock:
            self._told.remove(fault)

    def clear(self) -> None:
        with self._lock:
            self._told.clear()

    def take(self, service: str, operation: str, request: Mapping[str, Any]) -> Kind | None:
        """The first that fits; it is spent."""
        with self._lock:
            for fault in self._told:
                if fault.left == 0 or fault.operation not in (
                    operation,
                    f"{service}.{operation}",
                    f"{service}.*",
                ):
                    continue
                if fault.when is not None and not fault.when(request):
                    continue
                fault.met += 1
                if fault.left is not None:
                    fault.left -= 1
                return fault.kind
        return None

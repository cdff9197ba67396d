"""Cancels the job of an interrupted `run`, and says what becomes of that.

A batch system interrupts once, and a person twice at most, so a server that does not answer is
asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from relaunch.config import ConfigError
from relaunch.temporal import explain_refusal
from relaunch.text import printable

RETRY_INTERVAL_S = 2.0
"""Seconds from a try that failed to the next."""


class Cancellation:
    """Tries until the server has taken the cancellation, or refused it."""

    def __init__(
        self,
        cancel: Callable[[], Coroutine[Any, Any, object]],
        job: str,
        say: Callable[[str], None],
    ) -> None:
        """Begin.

        Args:
            cancel: Tries it once; raises ConfigError where it cannot be: the job has ended, say.
            job: The job's name.
            say: Says what went wrong, each error once.
        """
        self._cancel = cancel
        self._job = job
        self._say = say
        self._error = ""
        self._is_refused = False
        self._again = asyncio.Event()
        self.trying = asyncio.create_task(self._try())
        """Never raises."""

    @property
    def is_taken(self) -> bool:
        """Whether the server has said that it has the order."""
        return self.trying.done() and not self.trying.cancelled() and not self._is_refused

    def describe(self) -> str:
        """Return what goes on after the end of this program, as the end of a sentence."""
        if self._is_refused:
            return ""
        if self._error and not self.trying.done():
            return f"; the cancellation of job {self._job} is tried once more"
        return f"; the cancellation of job {self._job} continues"

    def hurry(self) -> None:
        """Try again now, if the next try would be later."""
        self._again.set()

    def give_up(self) -> None:
        """End all tries, and say so if the server has not answered one."""
        if not self.trying.done():
            self.trying.cancel()
            self._tell(
                f"the server did not say that it cancels job {self._job}: "
                f"`relaunch cancel {self._job}` asks it again"
            )

    async def _try(self) -> None:
        while True:
            self._again.clear()
            try:
                await self._cancel()
            except ConfigError as error:
                self._is_refused = True
                self._tell(str(error))
                return
            except Exception as error:  # whatever it is: the next try may succeed
                self._report(error)
            else:
                if self._error:
                    self._tell(f"the server has taken the cancellation of job {self._job}")
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_INTERVAL_S):
                    await self._again.wait()

    def _report(self, error: Exception) -> None:
        why = explain(error)
        if why != self._error:
            self._error = why
            self._tell(f"job {self._job} is not cancelled yet, and this is tried again: {why}")

    def _tell(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is closed, which ends no tries
            self._say(text)


def explain(error: BaseException) -> str:
    """Return a sentence for whatever a call of the server raised."""
    from temporalio.service import RPCError  # imported by now, and not before the ranks start

    if isinstance(error, RPCError):
        error = explain_refusal(error)
    of = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    return printable(f"{of}{error}")

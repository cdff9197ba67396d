"""What a repair and its fleet tell each other: that it began, that it ended, and whether it may act on its node now.

The wait is here and not in `relaunch.repair.machine`: it is between two workflows, whoever may repeat, lose or invent its messages. That
machine hears only what it comes to: the order is refused, or the node has to be looked at again before it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, Literal

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from pydantic import TypeAdapter, ValidationError

    from relaunch.activities.fleet import FleetActivities, TellFleetInput
    from relaunch.pool.facts import RepairBegan, RepairEnded
    from relaunch.pool.messages import Permit, PermitRequest
    from relaunch.repair.state import Permitted, Slept
    from relaunch.workflows.training_job.commands import KEEP_TRYING

PERMIT = TypeAdapter(Permit)
TELL_WITHIN = timedelta(seconds=30)
"""For a fleet to take what it is told. A repair ends without it; it only never acts without it."""
LAST_WORD = timedelta(seconds=10)
"""Of those, for how a repair ended: a job that waits for it waits 15 s longer than the repair itself may take."""
ONE_TRY = timedelta(seconds=10)
"""Of those; the server answers in milliseconds."""
ASK_AGAIN = timedelta(minutes=5)
"""A fleet that was terminated and began anew knows nothing of what it was asked."""
SOON = timedelta(seconds=5)
"""A leave that came later may be about a node that somebody has begun to use: it is looked at again."""
LASTS = timedelta(minutes=1)
"""A leave, while the node is looked at again. One that is older may have been overtaken by the fleet's breaker."""


class Permits:
    """The line of one repair to its fleet."""

    def __init__(self, fleet: str, node: str) -> None:
        self._fleet = fleet
        self._node = node
        self._seq = 0
        self._answer: Permit | None = None
        self._lasts: tuple[str, datetime] | None = None
        """What a leave was for that came late, and until when it lasts."""
        self.waits = ""
        """For what leave it waits; empty: for none."""

    async def tell(
        self,
        signal: Literal["repair_began", "repair_wanted", "repair_ended"],
        message: RepairBegan | PermitRequest | RepairEnded,
        within: timedelta = TELL_WITHIN,
    ) -> None:
        try:
            await workflow.execute_activity_method(
                FleetActivities.tell_fleet,
                TellFleetInput(self._fleet, signal, message),
                start_to_close_timeout=min(ONE_TRY, within),
                schedule_to_close_timeout=within,
                retry_policy=KEEP_TRYING,
                summary=f"tell fleet {self._fleet}: {signal}",
            )
        except ActivityError as error:
            workflow.logger.warning("fleet %s could not be told %s: %s", self._fleet, signal, error.cause or error)

    def hear(self, message: Any) -> None:
        """Take an answer; whatever answers nothing that is asked now is ignored."""
        try:
            permit = PERMIT.validate_python(message)
        except ValidationError:
            workflow.logger.info("a permit cannot be read: %.200r", message)
            return
        if permit.run == workflow.info().run_id and permit.seq == self._seq and self._answer is None:
            self._answer = permit

    async def ask(
        self,
        step: Literal["reset", "reboot"],
        what: str,
        reason: str,
        until: datetime,
        heard: Callable[[], bool],
        show: Callable[[], None],
        power: bool = False,
        restarts: int = 0,
        job: str = "",
    ) -> Permitted | Slept | None:
        """Ask for leave to do one thing, and wait for the answer.

        Args:
            step: What it is to the fleet's limits.
            what: In words.
            reason: Why.
            until: When no answer is one.
            heard: Whether somebody has said something meanwhile.
            show: Called when the wait begins.
            power: The reboot is a power cycle.
            restarts: What is known of reboots of this node lately.
            job: Which ordered the repair and waits for it.

        Returns:
            None: it may be ordered now. Slept: something was heard that comes first.
        """
        asked_at = workflow.now()
        (left_for, lasts_until), self._lasts = self._lasts or ("", asked_at), None
        if left_for == what and asked_at < lasts_until:
            return None
        self._answer = None
        self._seq += 1
        info = workflow.info()
        request = PermitRequest(
            info.workflow_id,
            info.run_id,
            self._seq,
            self._node,
            step,
            reason,
            asked_at,
            power=power,
            restarts=restarts,
            job=job,
        )
        self.waits = f"it waits for the permission of fleet {self._fleet} to {what}, until {until:%Y-%m-%d %H:%M:%S} UTC"
        show()
        while self._answer is None and not heard() and (left := until - workflow.now()) > timedelta(0):
            await self.tell("repair_wanted", request, min(TELL_WITHIN, left))
            await self._answered(until, heard)
        self.waits = ""
        if heard():
            return Slept()
        if self._answer is None:
            return Permitted(False, f"it did not answer until {until:%H:%M} UTC")
        if not self._answer.allowed:
            return Permitted(False, self._answer.reason)
        if workflow.now() - asked_at <= SOON:
            return None
        self._lasts = what, workflow.now() + LASTS
        return Permitted(True, self._answer.reason)

    async def why_not(self, reason: str, heard: Callable[[], bool], show: Callable[[], None], job: str) -> str:
        """Ask what speaks against a repair that will not be; empty: nothing does, or nobody says so in time."""
        until = workflow.now() + TELL_WITHIN
        await self.ask("reset", "know who else has the node", reason, until, heard, show, job=job)
        return self._answer.reason if self._answer is not None and not self._answer.allowed else ""

    async def _answered(self, until: datetime, heard: Callable[[], bool]) -> None:
        left = max(timedelta(0), min(ASK_AGAIN, until - workflow.now()))
        summary = f"for the permission of fleet {self._fleet}"
        with suppress(TimeoutError):
            await workflow.wait_condition(lambda: self._answer is not None or heard(), timeout=left, timeout_summary=summary)

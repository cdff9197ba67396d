"""Messages between a repair and its fleet: that it began, that it ended, and whether it may act on
its node now.

The wait for a permit is here and not in `relaunch.repair.machine`: it is between two workflows, and
either may repeat, lose or make up messages. The state machine gets only the result: the order is
refused, or the node has to be probed again before the order is given.
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
    from relaunch.pool.events import RepairResult, RepairStart
    from relaunch.pool.messages import Permit, PermitRequest
    from relaunch.repair.state import Permitted, Slept
    from relaunch.workflows.training_job.commands import KEEP_TRYING

PERMIT = TypeAdapter(Permit)
TELL_WITHIN = timedelta(seconds=30)
"""For a fleet to accept a message. A repair ends without it, but never acts without a permit."""
LAST_WORD = timedelta(seconds=10)
"""As `TELL_WITHIN`, for the end of a repair: a job waits for it 15 s longer than the repair itself
may take."""
ONE_TRY = timedelta(seconds=10)
"""Timeout of one attempt; the server answers in milliseconds."""
ASK_AGAIN = timedelta(minutes=5)
"""How often a request is repeated: a fleet that was terminated and restarted does not know it."""
SOON = timedelta(seconds=5)
"""A permit that comes later than this is not used at once: a job may have begun to use the node, so
it is probed again."""
LASTS = timedelta(minutes=1)
"""How long such a permit stays valid while the node is probed again. An older one may be out of
date because the fleet's breaker has opened."""


class Permits:
    """Sends the messages of one repair to its fleet, and takes the answers."""

    def __init__(self, fleet: str, node: str) -> None:
        self._fleet = fleet
        self._node = node
        self._seq = 0
        self._answer: Permit | None = None
        self._lasts: tuple[str, datetime] | None = None
        """The step that a late permit is for, and until when it is valid."""
        self.waits = ""
        """The permit that the repair waits for; empty if none."""

    async def tell(
        self,
        signal: Literal["repair_began", "repair_wanted", "repair_ended"],
        message: RepairStart | PermitRequest | RepairResult,
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
            workflow.logger.warning(
                "fleet %s could not be told %s: %s", self._fleet, signal, error.cause or error
            )

    def hear(self, message: Any) -> None:
        """Take an answer; ignore one that does not belong to the open request."""
        try:
            permit = PERMIT.validate_python(message)
        except ValidationError:
            workflow.logger.info("a permit cannot be read: %.200r", message)
            return
        if (
            permit.run == workflow.info().run_id
            and permit.seq == self._seq
            and self._answer is None
        ):
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
        """Ask for permission for one step, and wait for the answer.

        Args:
            step: The kind that the fleet's limits apply to.
            what: The step in words.
            reason: Why it is needed.
            until: When a missing answer counts as a refusal.
            heard: Returns whether another message has arrived meanwhile.
            show: Called when the wait begins.
            power: Whether the reboot is a power cycle.
            restarts: Known recent reboots of this node.
            job: The job that ordered the repair and waits for it.

        Returns:
            None: the order may be given now. Slept: another message has arrived and comes first.
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
        while (
            self._answer is None and not heard() and (left := until - workflow.now()) > timedelta(0)
        ):
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

    async def why_not(
        self, reason: str, heard: Callable[[], bool], show: Callable[[], None], job: str
    ) -> str:
        """Ask the fleet what speaks against a repair that is already refused.

        Returns an empty string if nothing does, or if no answer comes in time.
        """
        until = workflow.now() + TELL_WITHIN
        await self.ask("reset", "know who else has the node", reason, until, heard, show, job=job)
        return self._answer.reason if self._answer is not None and not self._answer.allowed else ""

    async def _answered(self, until: datetime, heard: Callable[[], bool]) -> None:
        left = max(timedelta(0), min(ASK_AGAIN, until - workflow.now()))
        summary = f"for the permission of fleet {self._fleet}"
        with suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: self._answer is not None or heard(), timeout=left, timeout_summary=summary
            )

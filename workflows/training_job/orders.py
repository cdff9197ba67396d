"""Orders of people to a job: each is checked by the rules of its fleet before it is taken."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from relaunch.access.orders import (
        UNNAMED,
        OrderVerdict,
        PersonOrder,
        UsedProof,
        clean_name,
    )
    from relaunch.activities.access import AccessActivities, CheckOrderInput
    from relaunch.messages.jobs import OrdersCarried
    from relaunch.text import escape_markdown
    from relaunch.workflows.patches import RepeatedPatch
    from relaunch.workflows.training_job.commands import KEEP_TRYING
    from relaunch.workflows.training_job.session import Session

ORDERS_PATCH = "check-orders"
"""Marks where the first order of a run is checked before it is taken: 0.1.0 took each unchecked."""
CHECK_TIMEOUT = timedelta(seconds=10)
"""Of one attempt; the worker computes for a millisecond."""
MAX_OUTCOMES = 20


@dataclass(frozen=True, slots=True)
class OrderOutcome:
    """What became of an order, for the person who waits for it."""

    number: int
    """Rises with each order of a run."""
    name: str
    """The signal: `cancel`."""
    by: str
    """The caller as the order says."""
    refusal: str
    """Empty: it was taken."""


class Orders:
    def __init__(self, session: Session, carried: OrdersCarried) -> None:
        self._session = session
        self._used: tuple[UsedProof, ...] = carried.used
        self._gate = asyncio.Lock()
        """Orders are taken in the sequence in which they came."""
        self.outcomes: list[OrderOutcome] = []
        self._count = 0
        self._checks = RepeatedPatch(ORDERS_PATCH)

    @property
    def carried(self) -> OrdersCarried:
        return OrdersCarried(self._used)

    def has_to_check(self) -> bool:
        """Return whether the order that has just come is checked. It is asked once for each."""
        return self._checks.is_reached()

    async def check(self, name: str, order: PersonOrder) -> OrderVerdict:
        """Return whether the caller may give the order."""
        async with self._gate:
            verdict = await workflow.execute_activity_method(
                AccessActivities.check_order,
                CheckOrderInput(self._session.job.spec.fleet, order, workflow.now(), self._used),
                start_to_close_timeout=CHECK_TIMEOUT,
                retry_policy=KEEP_TRYING,
                summary=escape_markdown(
                    f"whether {clean_name(order.by) or UNNAMED} may {order.what}"[:150]
                )[:200],
            )
            self._used = verdict.used
        self._count += 1
        outcome = OrderOutcome(self._count, name, order.by, verdict.refusal)
        self.outcomes = [*self.outcomes, outcome][-MAX_OUTCOMES:]
        return verdict

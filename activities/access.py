"""Whether a person may give an order to a job, by the file of the job's fleet."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from temporalio import activity

from relaunch.access.orders import OrderVerdict, PersonOrder, UsedProof, check_order
from relaunch.backends.base import Fleets


@dataclass(frozen=True, slots=True)
class CheckOrderInput:
    fleet: str
    order: PersonOrder
    now: datetime
    """The time of the workflow."""
    used: tuple[UsedProof, ...] = ()


class AccessActivities:
    def __init__(self, fleets: Fleets) -> None:
        self._fleets = fleets

    @activity.defn
    async def check_order(self, input: CheckOrderInput) -> OrderVerdict:
        """Check an order by the rules as the fleet file has them now.

        Where this worker has no fleet of that name there are no rules. A file that cannot be used
        and never could holds the order back until it is mended.
        """
        try:
            access = self._fleets.spec(input.fleet).access
        except KeyError:
            access = None
        return check_order(access, input.fleet, input.order, input.now, input.used)

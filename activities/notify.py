"""Tells people what cannot wait until somebody looks. Whether it has a way to, a fleet's backend knows."""

from __future__ import annotations

from dataclasses import dataclass

from temporalio import activity

from relaunch.activities.stop import beating
from relaunch.backends.base import BackendError, Fleets, TellsPeople


@dataclass(frozen=True, slots=True)
class Notice:
    fleet: str
    subject: str
    text: str


class PeopleActivities:
    def __init__(self, fleets: Fleets) -> None:
        self._fleets = fleets

    @activity.defn
    async def tell_people(self, notice: Notice) -> str:
        """Tell them once, or now and then twice: an answer that was lost is no proof. Returns what became of it, a clause."""
        try:
            backend = self._fleets.backend(notice.fleet)
        except KeyError as error:
            return str(error.args[0])
        if not isinstance(backend, TellsPeople):
            return f"fleet {notice.fleet} has no way to tell people"
        async with beating():
            try:
                said = await backend.tell_people(notice.subject, notice.text)
            except BackendError as error:
                activity.logger.warning("%s: people could not be told: %s", notice.subject, error.reason)
                raise
        return said

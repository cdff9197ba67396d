"""Notifies people of events that cannot wait until they look.

The fleet's backend knows whether it has a way to.
"""

from __future__ import annotations

from dataclasses import dataclass

from temporalio import activity

from relaunch.activities.stop import send_heartbeats
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
        """Notify people. Return the outcome as a clause.

        They may be notified twice: if the answer is lost, the notification is sent again.
        """
        try:
            backend = self._fleets.backend(notice.fleet)
        except KeyError as error:
            return str(error.args[0])
        if not isinstance(backend, TellsPeople):
            return f"fleet {notice.fleet} has no way to notify people"
        async with send_heartbeats():
            try:
                outcome = await backend.tell_people(notice.subject, notice.text)
            except BackendError as error:
                activity.logger.warning(
                    "%s: the notice could not be sent, and is retried: %s",
                    notice.subject,
                    error.reason,
                )
                raise
        return outcome

"""Writes the quarantines of a fleet as attributes of its container instances.

Every launch checks the attribute, including launches of another fleet. This module does not decide
which nodes are quarantined.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from relaunch.backends.base import Unreachable
from relaunch.backends.ecs.aws import AwsError
from relaunch.backends.ecs.cluster import Cluster, UnknownInstance
from relaunch.backends.ecs.legacy_tables import TableMirror
from relaunch.backends.ecs.tasks import QUARANTINE
from relaunch.job.state import JobState
from relaunch.pool.state import FleetState, NodeStatus
from relaunch.spec.fleet import FleetNode

TRUSTED_FOR = 300.0
"""Seconds for which a written attribute is assumed to be present. Meanwhile another user may have
changed it, or an agent may have registered again.
"""


class Marks:
    """Writer of the quarantine attributes and, if the fleet file names any, of the tables.

    Both follow the state of the fleet in the same way.
    """

    def __init__(
        self,
        fleet: str,
        cluster: Cluster,
        node: Callable[[str], FleetNode],
        tables: TableMirror | None,
    ) -> None:
        self._fleet = fleet
        self._cluster = cluster
        self._node = node
        self._tables = tables
        self._written: dict[str, tuple[bool, float]] = {}
        self.wants_jobs = tables is not None

    async def job(self, state: JobState, seq: int, terminated: bool) -> bool:
        return await self._tables.job(state, seq, terminated) if self._tables is not None else True

    async def nodes(self, state: FleetState, seq: int) -> None:
        """Bring attributes and tables up to date.

        Raises:
            Unreachable: Not everything was written.
        """
        # Skip nodes in use: a job that may stay on its node is launched again there, and the fleet
        # places no other job there.
        used = {place.node for claim in state.claims for place in claim.places}
        wanted = {
            record.name: record.status is NodeStatus.QUARANTINED and record.name not in used
            for record in state.nodes
            if not record.is_removed
        }
        now = time.monotonic()
        new = [
            name
            for name, quarantined in wanted.items()
            if not self._is_written(name, quarantined, now)
        ]
        try:
            await asyncio.gather(*(self._write(name, wanted[name]) for name in new))
        except AwsError as error:
            raise Unreachable(
                self._fleet, f"quarantines were not written: {error.reason}"
            ) from error
        if self._tables is not None:
            await self._tables.nodes(state, seq)

    def _is_written(self, name: str, quarantined: bool, now: float) -> bool:
        written, at = self._written.get(name, (False, now - TRUSTED_FOR))
        return written == quarantined and now - at < TRUSTED_FOR

    async def _write(self, name: str, quarantined: bool) -> None:
        try:
            instance = await self._cluster.instance(self._node(name).address)
        except (UnknownInstance, KeyError):
            return  # no instance on which a rank could be launched
        present = instance.attributes.get(QUARANTINE)
        if quarantined and present is None:
            await self._cluster.put_attributes(instance.arn, {QUARANTINE: self._fleet})
        # an attribute that a user set is left alone
        elif not quarantined and present == self._fleet:
            await self._cluster.put_attributes(instance.arn, {QUARANTINE: None})
        self._written[name] = quarantined, time.monotonic()

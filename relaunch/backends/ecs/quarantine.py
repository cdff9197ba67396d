"""Writes a fleet's quarantines onto its instances, where every launch looks, also one of another fleet. It quarantines nothing itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from relaunch.backends.base import Unreachable
from relaunch.backends.ecs.aws import AwsError
from relaunch.backends.ecs.cluster import Cluster, UnknownInstance
from relaunch.backends.ecs.legacy_tables import FleetMirror
from relaunch.backends.ecs.tasks import QUARANTINE
from relaunch.job.state import JobState
from relaunch.pool.state import FleetState, NodeStatus
from relaunch.spec.fleet import FleetNode

TRUSTED_FOR = 300.0
"""Seconds for which what was written is taken to be there: somebody else may have written since, or an agent have registered anew."""


class Marks:
    """And what keeps the tables, if some are named: both follow the fleet in the same way."""

    def __init__(self, fleet: str, cluster: Cluster, node: Callable[[str], FleetNode], tables: FleetMirror | None) -> None:
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
            Unreachable: not all of it was written.
        """
        # A job that may stay is launched again where it is: the fleet lets nobody else there.
        used = {place.node for claim in state.claims for place in claim.places}
        wanted = {
            record.name: record.standing is NodeStatus.QUARANTINED and record.name not in used for record in state.nodes if not record.gone
        }
        now = time.monotonic()
        new = [name for name, quarantined in wanted.items() if not self._is_written(name, quarantined, now)]
        try:
            await asyncio.gather(*(self._write(name, wanted[name]) for name in new))
        except AwsError as error:
            raise Unreachable(self._fleet, f"quarantines were not written: {error.reason}") from error
        if self._tables is not None:
            await self._tables.nodes(state, seq)

    def _is_written(self, name: str, quarantined: bool, now: float) -> bool:
        written, at = self._written.get(name, (False, now - TRUSTED_FOR))
        return written == quarantined and now - at < TRUSTED_FOR

    async def _write(self, name: str, quarantined: bool) -> None:
        try:
            instance = await self._cluster.instance(self._node(name).address)
        except (UnknownInstance, KeyError):
            return  # there is nothing that could be launched on
        present = instance.attributes.get(QUARANTINE)
        if quarantined and present is None:
            await self._cluster.put_attributes(instance.arn, {QUARANTINE: self._fleet})
        elif not quarantined and present == self._fleet:  # a person's own mark is that person's
            await self._cluster.put_attributes(instance.arn, {QUARANTINE: None})
        self._written[name] = quarantined, time.monotonic()

"""The dead man's handle as arithmetic: until when a generation may live unasked, and whose word prolongs it.

Reads no clock and stops nobody.
"""

from __future__ import annotations

from typing import Iterable


class Lease:
    """All times are this node's CLOCK_BOOTTIME."""

    def __init__(self, started: float, lease: float, fence_after: float, fences: bool) -> None:
        self.lease = lease
        self.fence_after = fence_after
        self.fences = fences
        self.renewed = False
        self.leased_until = started + lease
        self.alive_until = started + lease

    def renew(self, stamp: float, now: float) -> bool:
        """Take a renewal for what it proves: that its sender heard us at `stamp`.

        One from the future is not ours, and one that is past even its fence must not count as the first.
        """
        if stamp > now or stamp + self.lease + self.fence_after <= now:
            return False
        until = stamp + self.lease
        self.leased_until = max(self.leased_until, until) if self.renewed else until
        self.renewed = True
        self.alive_until = max(self.alive_until, self.leased_until + self.fence_after)
        return True

    def vouched(self, asked: float) -> None:
        """Take the word of the peers, which is as old as the question was."""
        if self.renewed:
            self.alive_until = max(self.alive_until, asked + self.fence_after)

    def set_times(self, leased_until: float, alive_until: float, renewed: bool) -> None:
        """Take over what the keeper, which decides, has."""
        self.leased_until = leased_until
        self.alive_until = alive_until
        self.renewed = renewed

    @property
    def ends(self) -> float | None:
        """When the handle falls, or None when it cannot."""
        return self.alive_until if self.fences or not self.renewed else None

    def left(self, now: float) -> float | None:
        return None if self.ends is None else max(0.0, self.leased_until - now)

    def fenced(self, now: float) -> tuple[str, str] | None:
        """Return why and because, once nobody may be presumed to know better."""
        if self.ends is None or now < self.ends:
            return None
        if not self.renewed:
            return "never_watched", f"nobody watched this generation within {self.lease:g} s of its start"
        return (
            "isolated",
            f"no renewal for {now - self.leased_until + self.lease:.1f} s; "
            f"for {self.fence_after:g} s no peer was leased, nor were all peers alive",
        )


class Vouchers:
    """What the peers of a generation said last.

    One that is leased vouches alone: the controller still holds the gang. Those that are merely alive vouch only all together:
    then the controller is away and the gang is whole. Else two lost nodes would keep each other alive for ever.
    """

    def __init__(self, peers: Iterable[str]) -> None:
        self._asked: dict[str, float | None] = dict.fromkeys(peers)
        """When the newest question was sent that each answered with `alive`."""

    def answered(self, peer: str, asked: float, alive: bool, leased: bool) -> float | None:
        """Return the time as of which the gang is vouched for, if it is."""
        if not alive:
            return None
        self._asked[peer] = asked
        if leased:
            return asked
        times = list(self._asked.values())
        known = [time for time in times if time is not None]
        return min(known) if len(known) == len(times) else None

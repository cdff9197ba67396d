"""The arithmetic of a generation's lease: when it expires, and what extends it.

A generation fences itself (stops its own ranks) if it gets no renewal within its first lease.
After a renewal it fences itself, if `fences` is set, when its lease has expired and no peer has
vouched for it during the last `fence_after` seconds.
This module reads no clock and stops no process.
"""

from __future__ import annotations

from typing import Dict, Iterable, List, Tuple

CLOCK_TOLERANCE = 0.25
"""Seconds by which two clocks may appear to differ before a standstill of one is assumed."""
CLOCK_DRIFT = 0.001
"""Allowed drift, as a fraction of the time compared: NTP may slew each clock by up to 500 ppm."""
MAX_STANDSTILLS = 64
"""Number of standstills to remember. A timestamp from before all of them is too old to renew."""
CLOCK_WINDOW = 60.0
"""Seconds for which a reference measurement is used, so that the allowed drift stays small."""


class Lease:
    """The lease of one generation. All times are seconds of this node's CLOCK_BOOTTIME."""

    def __init__(self, started: float, lease: float, fence_after: float, fences: bool) -> None:
        self.lease = lease
        self.fence_after = fence_after
        self.fences = fences
        self.renewed = False
        self.leased_until = started + lease
        self.alive_until = started + lease

    def renew(self, stamp: float, now: float) -> bool:
        """Renew the lease as of `stamp`; return whether the renewal was accepted.

        A renewal proves only that its sender received our heartbeat of time `stamp`. A stamp in the
        future cannot be from this node's clock. One that is older than lease and fence together is
        refused, so that it does not count as the first renewal.
        """
        if stamp > now or stamp + self.lease + self.fence_after <= now:
            return False
        until = stamp + self.lease
        self.leased_until = max(self.leased_until, until) if self.renewed else until
        self.renewed = True
        self.alive_until = max(self.alive_until, self.leased_until + self.fence_after)
        return True

    def shorten(self, lost: float) -> None:
        """Move all deadlines earlier by the seconds for which this node's clock stood still.

        The clock stands still while the machine is paused.
        """
        self.leased_until -= lost
        self.alive_until -= lost

    def extend(self, asked: float) -> bool:
        """Extend the fence because peers vouched, as of the time of the question.

        Return whether it is later than before.
        """
        until = asked + self.fence_after
        if not self.renewed or until <= self.alive_until:
            return False
        self.alive_until = until
        return True

    def set_times(self, leased_until: float, alive_until: float, renewed: bool) -> None:
        """Copy the times of the shim's lease, which is authoritative."""
        self.leased_until = leased_until
        self.alive_until = alive_until
        self.renewed = renewed

    @property
    def ends(self) -> float | None:
        """Return when the fence is due, or None if never.

        Before the first renewal it is always due at some time; afterwards only if `fences` is set.
        """
        return self.alive_until if self.fences or not self.renewed else None

    def find_fence_reason(self, now: float) -> tuple[str, str] | None:
        """Return (code, reason) if the fence is due, else None."""
        if self.ends is None or now < self.ends:
            return None
        if not self.renewed:
            return (
                "never_watched",
                f"no controller watched this generation within {self.lease:g} s of its start",
            )
        return (
            "isolated",
            f"no renewal for {now - self.leased_until + self.lease:.1f} s; "
            f"for {self.fence_after:g} s no peer was leased, nor were all peers alive",
        )


def measure_standstill(stamp: float, age: float, now: float) -> float:
    """Return the seconds for which this node's clock stood still since `stamp`.

    Return 0 if the difference is within the tolerance.

    Args:
        stamp: This node's clock when it sent a heartbeat.
        age: Seconds since the receiver got that heartbeat, by the receiver's clock. Without a
            standstill this is never more than the time that has passed here.
        now: This node's clock.
    """
    lost = age - (now - stamp)
    return lost if lost > CLOCK_TOLERANCE + CLOCK_DRIFT * age else 0.0


class Standstills:
    """A record of this clock's standstills, used to correct timestamps taken before them.

    After a standstill, an earlier timestamp seems younger than it is. Renewals wait in the sockets
    of a paused machine, each with the age that it had when it was sent.
    """

    def __init__(self) -> None:
        self._standstills: List[Tuple[float, float]] = []
        """(this node's clock when the standstill was found, its length in seconds)."""

    def add(self, at: float, lost: float) -> None:
        self._standstills = [*self._standstills, (at, lost)][-MAX_STANDSTILLS:]

    def correct(self, moment: float) -> float:
        """Return a time of this clock minus the length of each standstill found after it."""
        return moment - sum(lost for at, lost in self._standstills if moment < at)


class PeerClocks:
    """A comparison of this node's clock with its peers' clocks, which run while it is paused.

    One peer is enough to detect a standstill. Two clocks that agree prove nothing: both machines
    may have been paused together, such as virtual machines on one host. Network delay never counts
    as lost time, because the advance of a peer's clock is compared with the longest time that can
    have passed here.
    """

    def __init__(self) -> None:
        self._first: Dict[str, Tuple[float, float]] = {}
        """The reference measurement, by peer: (this clock at the question, the peer's clock)."""

    def compare(self, peer: str, asked: float, answered: float, stamp: float) -> float:
        """Return the seconds for which this node's clock stood still, 0 if it did not.

        Args:
            peer: The name of the peer.
            asked: This node's clock when the question was sent.
            answered: This node's clock when the answer was read.
            stamp: The peer's clock when it answered.
        """
        first_asked, first_stamp = self._first.get(peer, (asked, stamp))
        passed = answered - first_asked
        lost = stamp - first_stamp - passed
        if lost > CLOCK_TOLERANCE + CLOCK_DRIFT * passed:
            self.forget()
        else:
            lost = 0.0
        # A clock that went backwards belongs to another boot.
        if peer not in self._first or stamp < first_stamp or passed > CLOCK_WINDOW:
            self._first[peer] = (asked, stamp)
        return lost

    def forget(self) -> None:
        """Drop the reference measurements, because this node's clock has stood still since."""
        self._first.clear()


class Vouchers:
    """The latest answers of a generation's peers, and what they vouch for.

    One peer with a current lease is enough: the controller still renews the gang. Peers that are
    alive without a lease vouch only if all of them are: then the controller is unreachable but the
    gang is complete. Otherwise two isolated nodes would keep each other alive forever.
    """

    def __init__(self, peers: Iterable[str]) -> None:
        self._asked: dict[str, float | None] = dict.fromkeys(peers)
        """When the newest question answered `alive` was sent, by peer; None if there is none."""

    def forget(self) -> None:
        """Drop all answers: their age is unknown because this node's clock stood still."""
        self._asked = dict.fromkeys(self._asked)

    def record_answer(self, peer: str, asked: float, alive: bool, leased: bool) -> float | None:
        """Record an answer; return the time as of which the gang is vouched for, or None."""
        if not alive:
            return None
        self._asked[peer] = asked
        if leased:
            return asked
        times = list(self._asked.values())
        known = [time for time in times if time is not None]
        return min(known) if len(known) == len(times) else None

"""The dead man's handle as arithmetic: until when a generation may live unasked, and whose word prolongs it.

Reads no clock and stops nobody.
"""

from __future__ import annotations

from typing import Dict, Iterable, List, Tuple

CLOCK_TOLERANCE = 0.25
"""Seconds by which two clocks may seem to differ before one of them is said to have stood still."""
CLOCK_DRIFT = 0.001
"""Of the time between two comparisons: both clocks may be steered by as much as 500 ppm."""
MAX_STANDSTILLS = 64
"""That are remembered; a stamp from before so many is too old to renew anything."""
CLOCK_WINDOW = 60.0
"""Seconds that a first comparison counts, so that the drift allowed for stays small."""


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

    def shift(self, lost: float) -> None:
        """Count time for which this node's clock stood still, as that of a machine that was paused: all ends come earlier."""
        self.leased_until -= lost
        self.alive_until -= lost

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
        """Return why and the reason, once nobody may be presumed to know better."""
        if self.ends is None or now < self.ends:
            return None
        if not self.renewed:
            return "never_watched", f"nobody watched this generation within {self.lease:g} s of its start"
        return (
            "isolated",
            f"no renewal for {now - self.leased_until + self.lease:.1f} s; "
            f"for {self.fence_after:g} s no peer was leased, nor were all peers alive",
        )


def measure_standstill(stamp: float, age: float, now: float) -> float:
    """Return the seconds for which this node's clock stood still since `stamp`, 0 if that cannot be said.

    Args:
        stamp: this node's clock when it sent a heartbeat.
        age: seconds that its receiver has had that heartbeat, by the receiver's clock; no more than have passed here.
        now: this node's clock.
    """
    lost = age - (now - stamp)
    return lost if lost > CLOCK_TOLERANCE + CLOCK_DRIFT * age else 0.0


class Standstills:
    """What each time of this node's clock is worth after the clock has stood still.

    A stamp from before, or the time of a question, seems younger than it is. Renewals wait in the
    sockets of a paused machine, each with the age that it had when it was sent.
    """

    def __init__(self) -> None:
        self._found: List[Tuple[float, float]] = []
        """This node's clock when a standstill was found, and its length in seconds."""

    def add(self, at: float, lost: float) -> None:
        self._found = [*self._found, (at, lost)][-MAX_STANDSTILLS:]

    def correct(self, moment: float) -> float:
        """Return a time of this clock, earlier by each standstill that was found after it."""
        return moment - sum(lost for at, lost in self._found if moment < at)


class PeerClocks:
    """Compares this node's clock with those of its peers, which go on while this machine is paused.

    One peer is enough: two that agree may have been paused together, as machines on one host are. A delay on the way never
    counts as lost time: what a peer's clock advanced is compared with the longest time that can have passed here.
    """

    def __init__(self) -> None:
        self._first: Dict[str, Tuple[float, float]] = {}
        """By peer, of the comparison that later ones refer to: when this node asked, and the peer's clock."""

    def compare(self, peer: str, asked: float, answered: float, stamp: float) -> float:
        """Return the seconds for which this node's clock stood still, 0 if it did not.

        Args:
            peer: the name of the peer.
            asked: this node's clock when the question was sent.
            answered: this node's clock when the answer was read.
            stamp: the peer's clock in between.
        """
        first_asked, first_stamp = self._first.get(peer, (asked, stamp))
        passed = answered - first_asked
        lost = stamp - first_stamp - passed
        if lost > CLOCK_TOLERANCE + CLOCK_DRIFT * passed:
            self.forget()
        else:
            lost = 0.0
        # A clock that is lower than before is that of another boot.
        if peer not in self._first or stamp < first_stamp or passed > CLOCK_WINDOW:
            self._first[peer] = (asked, stamp)
        return lost

    def forget(self) -> None:
        """Forget what was measured with a clock that stood still since."""
        self._first.clear()


class Vouchers:
    """What the peers of a generation said last.

    One that is leased vouches alone: the controller still holds the gang. Those that are merely alive vouch only all together:
    then the controller is away and the gang is whole. Else two lost nodes would keep each other alive for ever.
    """

    def __init__(self, peers: Iterable[str]) -> None:
        self._asked: dict[str, float | None] = dict.fromkeys(peers)
        """When the newest question was sent that each answered with `alive`."""

    def forget(self) -> None:
        """Forget answers whose age is not known any more, because this node's clock stood still."""
        self._asked = dict.fromkeys(self._asked)

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

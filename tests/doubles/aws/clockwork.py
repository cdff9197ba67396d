"""The clock of the double, which tests can put forward, and one thread for what happens later.

Delays are of the real clock.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable


class Clockwork:
    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._ahead = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._woken = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="aws-double-clockwork", daemon=True)
        self._thread.start()

    def now(self) -> float:
        """Unix time as AWS has it."""
        return time.time() + self._ahead

    def advance(self, seconds: float) -> None:
        """Only what AWS forgets with time changes by this: stopped tasks and client tokens."""
        self._ahead += seconds

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Call it after so long, with the lock held."""
        with self._woken:
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._count), action))
            self._woken.notify()

    def close(self) -> None:
        with self._woken:
            self._over = True
            self._woken.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._woken:
                while not self._over and (not self._due or self._due[0][0] > time.monotonic()):
                    self._woken.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._over:
                    return
                action = heapq.heappop(self._due)[2]
            with self._lock:
                action()

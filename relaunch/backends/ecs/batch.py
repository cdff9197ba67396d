"""Combines concurrent requests for the same kind of object into one call. Nothing is cached.

An answer always reflects a call that was made after the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Generic, TypeVar

GATHER = 0.05
"""Seconds to collect requests: far below what a user or a poll notices, and a gang of hundreds
makes its requests within it.
"""
ALONGSIDE = 2
"""Calls in flight at once; requests that arrive meanwhile are collected for the next call. AWS
limits the rate of calls: with one call per request, a hundred jobs launched together would wait for
one another until their launches time out. Two, so that one lost answer does not delay all requests.
"""

K = TypeVar("K")
V = TypeVar("V")


class Batch(Generic[K, V]):
    def __init__(self, ask: Callable[[tuple[K, ...]], Awaitable[Mapping[K, V]]]) -> None:
        """Create a batch. `ask` returns a value for every key, or raises."""
        self._ask = ask
        self._waiting: dict[K, list[asyncio.Future[V]]] = {}
        self._next: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(ALONGSIDE)

    async def get(self, key: K) -> V:
        """Return the value of a key. Raise what `ask` raises."""
        future: asyncio.Future[V] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(future)
        if self._next is None:
            self._next = asyncio.create_task(self._run())
            self._running.add(self._next)
            self._next.add_done_callback(self._running.discard)
        return await future

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _run(self) -> None:
        waiting: dict[K, list[asyncio.Future[V]]] = {}
        try:
            await asyncio.sleep(GATHER)
            async with self._room:
                waiting, self._waiting, self._next = self._waiting, {}, None
                found = await self._ask(tuple(waiting))
        except asyncio.CancelledError:
            for future in _open((waiting or self._waiting).values()):
                future.cancel()
            raise
        except Exception as error:  # passed on to every caller of `get`
            for future in _open(waiting.values()):
                future.set_exception(error)
        else:
            for key, futures in waiting.items():
                for future in _open([futures]):
                    future.set_result(found[key])


def _open(lists: Iterable[list[asyncio.Future[V]]]) -> list[asyncio.Future[V]]:
    """Return the futures whose caller still waits."""
    return [future for futures in lists for future in futures if not future.done()]

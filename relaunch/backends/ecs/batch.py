"""Asks once for what several want to know at the same moment. Remembers nothing: whoever asks is told what holds after he asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Generic, TypeVar

GATHER = 0.05
"""Seconds to wait for others: far below what a person or a poll notices, and a gang of hundreds asks within it."""
ALONGSIDE = 2
"""Asks under way at once; whoever comes meanwhile is gathered into the next. Calls are limited: were each asked for by himself, those of
a hundred jobs that are launched together would wait for one another until their launches have run out of time. Two, so that a lost answer
does not hold up everybody."""

K = TypeVar("K")
V = TypeVar("V")


class Batch(Generic[K, V]):
    def __init__(self, ask: Callable[[tuple[K, ...]], Awaitable[Mapping[K, V]]]) -> None:
        """`ask` answers for every key, or raises."""
        self._ask = ask
        self._waiting: dict[K, list[asyncio.Future[V]]] = {}
        self._next: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(ALONGSIDE)

    async def get(self, key: K) -> V:
        """Raises what `ask` raises."""
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
        except Exception as error:  # handed to each who asked
            for future in _open(waiting.values()):
                future.set_exception(error)
        else:
            for key, futures in waiting.items():
                for future in _open([futures]):
                    future.set_result(found[key])


def _open(lists: Iterable[list[asyncio.Future[V]]]) -> list[asyncio.Future[V]]:
    """Those whose caller still waits."""
    return [future for futures in lists for future in futures if not future.done()]

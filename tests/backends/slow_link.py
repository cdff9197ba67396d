"""A slow link between a controller and its nodes.

A relay in a separate process holds back each byte for so long.

It plays distance only: nothing is lost, and there is no limit to how much fits in.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Way:
    """A relay of connections to `near` on to `far`: addresses with ports."""

    near: tuple[str, int]
    far: tuple[str, int]


@contextmanager
def slow_links(ways: Sequence[Way], delay: float) -> Iterator[None]:
    """Relay each byte `delay` seconds late each way: a round trip is longer by twice that."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    relay = context.Process(target=_relay, args=(tuple(ways), delay, far), daemon=True)
    relay.start()
    try:
        if not near.poll(30) or near.recv() != "listens":
            raise RuntimeError("the relay does not listen")
        yield
    finally:
        relay.kill()
        relay.join()


def _relay(ways: Sequence[Way], delay: float, ready: object) -> None:
    asyncio.run(_serve(ways, delay, ready))


async def _serve(ways: Sequence[Way], delay: float, ready: object) -> None:
    async def serve(way: Way) -> asyncio.Server:
        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(delay)
            try:
                far_reader, far_writer = await asyncio.open_connection(*way.far)
            except OSError:
                writer.close()
                return
            await asyncio.gather(
                _hold_back(reader, far_writer, delay), _hold_back(far_reader, writer, delay)
            )

        return await asyncio.start_server(accepted, *way.near, backlog=64)

    servers = [await serve(way) for way in ways]
    ready.send("listens")  # type: ignore[attr-defined]
    await asyncio.gather(*(server.serve_forever() for server in servers))


async def _hold_back(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float
) -> None:
    clock = asyncio.get_running_loop().time
    waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def read() -> None:
        data = b"begin"
        while data:
            try:
                data = await reader.read(CHUNK)
            except ConnectionError:
                data = b""
            waiting.put_nowait((clock() + delay, data))

    reading = asyncio.create_task(read())
    while True:
        due, data = await waiting.get()
        await asyncio.sleep(due - clock())
        if not data:
            break
        writer.write(data)
    writer.close()
    await reading

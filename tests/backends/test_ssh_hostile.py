"""A node that sends nonsense, sends without end or takes nothing.

One sentence, that node's session closed, and no other node waits.

The servers are real; what answers on them is a double of the node's python3, which says what it is
told.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio
from paramiko import SSHException

from relaunch.backends.base import Unreachable
from relaunch.backends.ssh import backend as ssh_backend
from relaunch.backends.ssh import channel as ssh_channel
from relaunch.backends.ssh.backend import SshBackend
from relaunch.backends.ssh.channel import ChannelPipe
from tests.backends.ssh_site import Site, python_double, reason, site
from tests.backends.test_contract import reached

__all__ = ["site"]
pytestmark = pytest.mark.asyncio

HAVE = (
    "import os, sys\nsay = lambda text: os.write(1, text)\nsys.stdin.readline()\n"
    'say(b"\\nrelaunch-agent {\\"have\\": 1}\\n")\n'
)
HELLO = HAVE + 'say(b\'{"session": {"protocol": 1}}\\n\')\n'
FOR_EVER = "while True:\n    say(data)\n"
# Reads nothing, and ends when its session is closed: sshd does not end a command for that.
READS_NOTHING = (
    "import select\nend = select.poll()\nend.register(0, select.POLLRDHUP)\nend.poll()\n"
)
PATIENCE = 120.0
LONGEST_PAUSE = 1.0
"""Seconds for which the loop may stand still while it has a processor; a flood that is not bounded
stops it for good."""
MOST_MEMORY = 200 * 1024
"""KiB: what the limits of a session allow, and what an interpreter takes for it. A flood brings
that in a second."""


@pytest_asyncio.fixture(autouse=True)
async def doubles_end(tmp_path: Path) -> AsyncIterator[None]:
    """See to it that what answers on a node ends with its test."""
    yield

    def find_left() -> list[str]:
        found = []
        for one in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # it has ended
                found.append(one.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        return [command for command in found if f"{tmp_path}/" in command]

    deadline = time.monotonic() + PATIENCE
    while find_left():
        assert time.monotonic() < deadline, f"still there: {find_left()}"
        await asyncio.sleep(0.02)


def read_run_delay() -> float:
    """Return the seconds for which this thread could have run and had no processor; 0: unknown."""
    with suppress(OSError):  # a kernel without it
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


async def while_others_go_on(asking: SshBackend) -> str:
    """Ask, and see to it that the loop goes on and memory stays bounded meanwhile.

    Return why no answer came.
    """
    pauses = []

    async def tick() -> None:
        while True:
            began, before = time.monotonic(), read_run_delay()
            await asyncio.sleep(0.005)
            pauses.append(time.monotonic() - began - (read_run_delay() - before))

    ticking = asyncio.create_task(tick())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        async with asyncio.timeout(PATIENCE):
            return await reason(asking)
    finally:
        ticking.cancel()
        assert max(pauses, default=0.0) < LONGEST_PAUSE
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_MEMORY


@pytest.mark.long_after(variants=4)
@pytest.mark.parametrize(
    ("program", "said"),
    [
        pytest.param(
            'import os, sys\nsay = lambda text: os.write(1, text)\ndata = b"garbage\\n" * 1000\n'
            + FOR_EVER,
            "the agent could not be started: the login shell printed more than 65536 bytes first: ",
            id="garbage without end",
        ),
        pytest.param(
            'import os, sys\nsay = lambda text: os.write(1, text)\ndata = b"x" * 65536\n'
            + FOR_EVER,
            "the agent could not be started: ",
            id="a line without end instead of an agent",
        ),
        pytest.param(
            HAVE + 'say(b"hello?\\n")\n',
            "the agent could not be started: b'hello?\\n'",
            id="no greeting",
        ),
        pytest.param(
            HAVE + 'say(b"[" * 100000 + b"\\n")\n',
            "the agent could not be started: ",
            id="a greeting that is deep",
        ),
        pytest.param(
            HAVE + 'say(b\'{"outcome": "refused", "reason": "its state is broken"}\\n\')\n',
            "the agent could not be started: its state is broken",
            id="an agent that refuses",
        ),
        pytest.param(
            HELLO + 'sys.stdin.readline()\nsay(b"what?\\n")\n' + READS_NOTHING,
            "the agent said b'what?\\n', expected a JSON object with an id (during list)",
            id="no JSON",
        ),
        pytest.param(
            HELLO + 'say(b\'{"id": 77, "line": {}}\\n\')\n' + READS_NOTHING,
            "the agent answered order '77', which was not sent",
            id="an answer to no order",
        ),
        pytest.param(
            HELLO + 'sys.stdin.readline()\nsay(b\'{"id": 1, "li\')\n',
            'the agent said b\'{"id": 1, "li\', expected a JSON object with an id (during list)',
            id="it ends in the middle of a line",
        ),
        pytest.param(
            HELLO + 'sys.stdin.readline()\ndata = b"x" * 65536\n' + FOR_EVER,
            "the agent said a line of more than 8388608 bytes (during list)",
            id="a line without end",
        ),
        pytest.param(
            HELLO
            + 'sys.stdin.readline()\ndata = b\'{"id": 1, "line": {"a": 1}}\\n\' * 2000\n'
            + FOR_EVER,
            "no answer to list within",
            id="an answer without end",
        ),
    ],
)
async def test_what_a_node_says_instead_of_answering_is_one_sentence(
    site: Site, program: str, said: str
) -> None:
    host = site.host(start=False)
    python_double(host, program)
    host.start()
    # Only what is said without end is ended by the clock; the rest is as fast as the machine is.
    within = 3.0 if said.startswith("no answer") else PATIENCE / 2
    backend = site.backend(host, answer_within=within)
    assert (await while_others_go_on(backend)).startswith(said)


async def test_a_node_that_takes_no_orders_is_given_up(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_channel, "SEND_TIMEOUT", 0.5)
    host = site.host(start=False)
    python_double(host, HELLO + READS_NOTHING)
    host.start()
    backend = site.backend(host, answer_within=20.0)
    with pytest.raises(
        Unreachable, match=r"the node (has taken nothing for 0\.5 s|takes no orders)"
    ):
        # More than the window of its channel: what does not fit waits here, and not for ever.
        await backend.reboot("n1", "r1", "b1", "x" * 6 * 1024 * 1024)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            '{"outcome": "refused", "reason": "its state is broken"}',
            "the agent could not be started: its state is broken",
        ),
        ('{"session": {"protocol": 99}}', "the agent speaks protocol 99, expected 1"),
    ],
)
async def test_a_node_in_backoff_keeps_the_reason_of_its_agent(
    site: Site, monkeypatch: pytest.MonkeyPatch, line: str, said: str
) -> None:
    monkeypatch.setattr(ssh_backend, "BACKOFF", (600.0, 600.0))
    monkeypatch.setattr(ssh_backend, "SHORT_LIFE", 600.0)
    host = site.host(start=False)
    python_double(host, HAVE + f"say(b'{line}\\n')\nsys.exit(1)\n")
    host.start()
    backend = site.backend(host)
    assert [await reason(backend) for _ in range(3)] == [said] * 3
    assert host.logins() == 1


async def test_a_session_that_hears_and_cannot_speak_is_given_up(site: Site) -> None:
    host = site.host()
    backend = site.backend(host)
    await backend.list("n1")
    transport = backend._newest["n1"]._connection.transport
    transport.clear_to_send_timeout = 0.2
    host.signal(signal.SIGSTOP)
    rekeying = asyncio.create_task(asyncio.to_thread(transport.renegotiate_keys))
    try:
        async with asyncio.timeout(PATIENCE):
            while transport.clear_to_send.is_set():  # noqa: ASYNC110  (it sends no event)
                await asyncio.sleep(0.01)
        assert (await reason(backend)).startswith("nothing can be sent to the node: Key-exchange ")
    finally:
        host.signal(signal.SIGCONT)
    with pytest.raises((SSHException, EOFError)):
        await rekeying
    assert (await reached(lambda: backend.list("n1")))["outcome"] == "done"


async def test_lines_of_which_a_part_was_lost_are_not_read(site: Site) -> None:
    """paramiko loses what it has read from a channel if it cannot say that there is room again."""
    host, go = site.host(start=False), site.folder / "go"
    wait = f"import time\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.01)\n"
    python_double(host, HAVE + wait + 'os.write(1, b"%0999d\\n" % 7 * 1500)\n' + READS_NOTHING)
    host.start()
    backend = site.backend(host)
    pipe = await backend._open(backend.node("n1"))
    transport = pipe._connection.transport
    transport.clear_to_send_timeout = 0.2
    transport.clear_to_send.clear()  # as while new keys are exchanged
    go.touch()
    async with asyncio.timeout(PATIENCE):
        lines = {line async for line in _lines(pipe)}
    assert lines == {b"%0999d\n" % 7}
    assert (pipe.ended or "").startswith("what the node says cannot be read: Key-exchange ")


async def test_a_long_line_after_a_short_one_is_read_to_its_end(site: Site) -> None:
    """Taken ahead: the short line and the beginning of the long one. The rest is in the channel."""
    host = site.host(start=False)
    size = 4 * ssh_channel.AHEAD
    say = f"sys.stdout.write('short\\n' + 'x' * {size} + '\\n')\nsys.stdout.flush()\n"
    python_double(host, HAVE + say + READS_NOTHING)
    host.start()
    backend = site.backend(host)
    pipe = await backend._open(backend.node("n1"))

    async def all_has_come() -> None:
        """Wait until nothing is left that would wake the pipe."""
        left = pipe._channel.in_buffer
        while len(pipe._data) + len(left) < size + 7 or pipe._woken:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async with asyncio.timeout(PATIENCE):
        await all_has_come()
        assert [len(await pipe.readline()) for _ in range(2)] == [6, size + 1]
    pipe.kill()


async def _lines(pipe: ChannelPipe) -> AsyncIterator[bytes]:
    while line := await pipe.readline():
        yield line


async def test_an_agent_that_ends_at_once_is_not_logged_in_to_always(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_backend, "BACKOFF", (60.0, 60.0))
    monkeypatch.setattr(ssh_backend, "SHORT_LIFE", 60.0)
    host = site.host(start=False)
    python_double(host, HELLO + "sys.stdin.readline(); sys.exit(3)\n")
    host.start()
    backend = site.backend(host)
    assert (await reason(backend)).endswith("with 3 (during list)")
    for _ in range(3):
        assert (await reason(backend)).endswith("ended with 3")
    assert host.logins() == 1


async def test_endless_lines_for_commands_that_are_over_end_a_session(
    site: Site,
) -> None:
    host = site.host(start=False)
    answer = 'say(b\'{"id": 1, "line": {"outcome": "done"}}\\n{"id": 1, "exit": 0}\\n\')\n'
    flood = 'data = b\'{"id": 1, "line": {"a": 1}}\\n\' * 2000\n' + FOR_EVER
    python_double(
        host, HELLO + "sys.stdin.readline()\n" + answer + "sys.stdin.readline()\n" + flood
    )
    host.start()
    backend = site.backend(host)
    assert (await backend.list("n1"))["outcome"] == "done"
    assert "10000 lines" in await while_others_go_on(backend)


@pytest.mark.long
async def test_a_hostile_node_does_not_affect_other_nodes(site: Site) -> None:
    bad, good = site.host(start=False), site.host()
    python_double(bad, HELLO + 'sys.stdin.readline()\ndata = b"x" * 65536\n' + FOR_EVER)
    bad.start()
    hostile, honest = site.backend(bad), site.backend(good)
    await honest.list("n1")
    asking = asyncio.create_task(reason(hostile))
    while not asking.done():
        async with asyncio.timeout(60):
            assert (await honest.list("n1"))["outcome"] == "done"
    assert " 8388608 bytes" in await asking

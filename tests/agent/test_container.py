"""The agent inside a rank's container.

Real processes, its port on loopback, and a controller's side of the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from real_node import PATIENCE, is_alive, python_command, wait_for

from relaunch.agent.container.container import ASKED_TO_GO, MISUSED, NOT_FOUND
from relaunch.agent.container.port import HANDSHAKE_TIMEOUT
from relaunch.agent.container.tls import Secret
from relaunch.backends.base import Refusal, Unreachable
from relaunch.backends.ecs import wire
from relaunch.backends.local_power import processes_of, signal_all
from relaunch.backends.session import AgentSession
from relaunch.generation import Token
from tests.agent_key import make_key, make_parts
from tests.chaos.world import free_port

KEY = make_key()
TOKEN = Token("default", "job", 1, 1)
FOR_EVER = ["sleep", "1000"]
FOR_LONG = f"""
import runpy, sys
sys.path.insert(0, {{agent!r}})
from relaunch.agent.container import container, port
container.LINGER = port.HANDSHAKE_TIMEOUT = {100 * PATIENCE}
sys.argv[0] = {{agent!r}}
runpy.run_path({{agent!r}}, run_name="__main__")
"""
"""Starts the agent with waits that end in no test, so that none can be taken for a slow machine."""
OLD_PYTHON = Path("~/.pyenv/versions/3.8.18/bin/python3.8").expanduser()


class Container:
    def __init__(
        self,
        folder: Path,
        agent: Path,
        command: list[str],
        ranks: int,
        env: Mapping[str, str],
        before: list[str],
        python: str,
        **order: Any,
    ):
        token = {
            "namespace": TOKEN.namespace,
            "job": TOKEN.job,
            "submission": TOKEN.submission,
            "generation": TOKEN.generation,
        }
        self.port = free_port()
        numbers = [4 + index for index in range(ranks)]
        given = {
            "token": token,
            "ranks": numbers,
            "rank_env": [
                {"RANK": str(rank), "LOCAL_RANK": str(index)} for index, rank in enumerate(numbers)
            ],
            "log_pattern": None,
            "stop_grace": 1.0,
            "heartbeat": 0.2,
            "port": self.port,
            **order,
        }
        self.state = folder / "state"
        environment = {
            "PATH": os.environ["PATH"],
            "RELAUNCH_AGENT_STATE": str(self.state),
            "RELAUNCH_AGENT_KEY": KEY,
            "RELAUNCH_ORDER": json.dumps(given),
            **env,
        }
        self.output = folder / "output"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*before, python, "-S", str(agent), "container", *command],
                env={name: value for name, value in environment.items() if value},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def printed(self) -> str:
        return self.output.read_text()

    @property
    def folder(self) -> Path:
        """Of the one generation."""
        found: Path = wait_for(lambda: next(iter(self.state.glob("jobs/*/1-1")), None))
        return found

    def pids(self) -> list[int]:
        def started() -> Any:
            path = self.folder / "started.json"
            return path.exists() and json.loads(path.read_text())["pids"]

        return [pid for pid, _ in wait_for(started).values()]

    def ended(self) -> int:
        return self.process.wait(PATIENCE)

    def listens(self) -> bool:
        with socket.socket() as caller:
            return caller.connect_ex(("127.0.0.1", self.port)) == 0

    def session(self, key: str = KEY) -> AgentSession:
        return AgentSession("n1", lambda: wire.connect("n1", "127.0.0.1", self.port, Secret(key)))


Make = Callable[..., Container]


@pytest.fixture
def make(tmp_path: Path, agent: Path) -> Iterator[Make]:
    made: list[Container] = []

    def make(
        command: list[str],
        ranks: int = 1,
        env: Mapping[str, str] | None = None,
        before: list[str] | None = None,
        python: str = sys.executable,
        waits: str = "",
        **order: Any,
    ) -> Container:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        program = agent
        if waits:
            program = folder / "agent.py"
            program.write_text(waits.format(agent=str(agent)))
        made.append(
            Container(folder, program, command, ranks, env or {}, before or [], python, **order)
        )
        return made[-1]

    yield make
    for one in made:
        one.process.kill()
        one.process.wait()
        # What a container's end takes along with it.
        while left := processes_of(
            one.state, b"RELAUNCH_AGENT_STATE"
        ):  # some are forked while others are killed
            signal_all(left, signal.SIGKILL)


def in_shell(text: str) -> list[str]:
    return ["sh", "-c", text]


async def watched(
    container: Container, enough: Callable[[Mapping[str, Any]], bool] = lambda line: "end" in line
) -> list[Mapping[str, Any]]:
    wait_for(container.listens)
    session, lines = container.session(), []
    try:
        async with asyncio.timeout(PATIENCE), session.watch(TOKEN, 0, 0.2) as stream:
            async for line in stream.lines():
                lines.append(line)
                if enough(line):
                    break
    finally:
        await session.close()
    return lines


def test_only_ranks_have_the_limit_of_cores_of_the_container(make: Make) -> None:
    # As with which `core_pattern` gets no core of the agent: tests/agent/test_cores.py.
    container = make(["sleep", "1000"], before=["prlimit", f"--core={1 << 40}:"])
    limits = [resource.prlimit(pid, resource.RLIMIT_CORE)[0] for pid in container.pids()]
    assert limits == [1 << 40]
    assert resource.prlimit(container.process.pid, resource.RLIMIT_CORE)[0] == 1


# --- how it ends


@pytest.mark.parametrize(("ends", "code"), [("exit 0", 0), ("exit 93", 93), ("kill -9 $$", 137)])
def test_it_ends_as_its_rank_ended(make: Make, ends: str, code: int) -> None:
    container = make(["--", *in_shell(f"echo here; {ends}")], env={"RELAUNCH_AGENT_KEY": ""})
    assert container.ended() == code
    assert "here\n" in container.printed
    assert "RELAUNCH_AGENT_KEY " in container.printed


def test_the_first_failed_rank_gives_the_code_and_lines_name_it(make: Make, tmp_path: Path) -> None:
    # The second catches what the failure of the first causes, and ends with another code.
    script = (
        'echo "I am $RANK/$LOCAL_RANK of $WORLD_SIZE on '
        '$RELAUNCH_NODE${RELAUNCH_ORDER}${RELAUNCH_AGENT_KEY}"; '
    )
    script += 'trap "exit 9" TERM; test $RANK = 5 && touch "$SAID"; '
    script += (
        'if [ $RANK = 4 ]; then while [ ! -e "$SAID" ]; do sleep 0.02; done; exit 7; fi; while :; '
        "do sleep 0.05; done"
    )
    container = make(
        in_shell(script),
        ranks=2,
        env={"WORLD_SIZE": "8", "RELAUNCH_NODE": "n1", "SAID": str(tmp_path / "said")},
        port=None,
    )
    assert container.ended() == 7
    assert sorted(line for line in container.printed.splitlines() if "I am" in line) == [
        "[rank 4] I am 4/0 of 8 on n1",
        "[rank 5] I am 5/1 of 8 on n1",
    ]


def test_all_output_is_there_at_the_end_in_order_and_once(make: Make) -> None:
    container = make(
        python_command(
            "import sys\nfor n in range(50000): print(n)\nsys.stdout.write('no newline')"
        ),
        port=None,
    )
    assert container.ended() == 0
    assert container.printed == "".join(f"{number}\n" for number in range(50000)) + "no newline"


def test_who_is_asked_to_go_stops_its_ranks_and_ends_with_143(make: Make) -> None:
    container = make(
        in_shell('trap "echo saved; exit 0" TERM; echo ready; while :; do sleep 0.05; done'),
        ranks=2,
        waits=FOR_LONG,
    )
    pids = container.pids()
    wait_for(lambda: container.printed.count("ready") == 2)
    container.process.send_signal(signal.SIGTERM)
    assert container.ended() == ASKED_TO_GO, "it waits for a watcher"
    assert container.printed.count("saved") == 2 and not any(map(is_alive, pids))


def test_ranks_that_ignore_a_stop_are_killed_after_their_grace(make: Make) -> None:
    container = make(
        in_shell('trap "" TERM; echo ready; while :; do sleep 0.05; done'),
        stop_grace=0.2,
        port=None,
    )
    wait_for(lambda: "ready" in container.printed)
    container.process.send_signal(signal.SIGTERM)
    assert container.ended() == ASKED_TO_GO and not any(map(is_alive, container.pids()))


def test_ranks_whose_shim_was_killed_end_it_with_137(make: Make) -> None:
    container = make(in_shell("echo ready; exec sleep 1000"), port=None)
    pids = container.pids()
    # What ranks print is copied once their start was answered: a shim killed before that leaves a
    # failed start, 126.
    wait_for(lambda: "ready" in container.printed)
    os.kill(json.loads((container.folder / "shim.json").read_text())["pid"], signal.SIGKILL)
    assert container.ended() == 137 and not any(map(is_alive, pids))


def test_without_an_order_the_command_runs_as_without_agent(make: Make) -> None:
    container = make(in_shell("echo $$; exit 3"), env={"RELAUNCH_ORDER": ""})
    assert container.ended() == 3
    assert container.printed == f"{container.process.pid}\n"
    assert make(["no-such-program"], env={"RELAUNCH_ORDER": ""}).ended() == NOT_FOUND


def test_what_cannot_be_started_says_why(make: Make) -> None:
    missing = make(["no-such-program"])
    assert missing.ended() == NOT_FOUND
    assert "command no-such-program" in missing.printed
    torn = make(FOR_EVER, env={"RELAUNCH_ORDER": "{"})
    assert torn.ended() == MISUSED
    assert "RELAUNCH_ORDER is '{'" in torn.printed
    assert make([]).ended() == MISUSED


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="a PID namespace needs root and unshare",
)
def test_as_first_process_it_reaps_orphans_and_forwards_sigterm(make: Make) -> None:
    # Its grandchild outlives the rank, and would be a zombie or a survivor if it were not reaped.
    orphan = "(setsid sh -c 'trap \"\" TERM; sleep 0.1' &) ; echo $$; exit 5"
    before = ["unshare", "-pf", "--mount-proc", "--kill-child"]
    container = make(in_shell(orphan), before=before, port=None)
    assert container.ended() == 5
    asked = make(
        in_shell("trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done"),
        before=before,
        port=None,
    )
    wait_for(lambda: "ready" in asked.printed)
    (first,) = (
        Path(f"/proc/{asked.process.pid}/task/{asked.process.pid}/children").read_text().split()
    )
    assert os.readlink(f"/proc/{first}/ns/pid") != os.readlink("/proc/self/ns/pid")
    os.kill(int(first), signal.SIGTERM)
    assert asked.ended() == ASKED_TO_GO
    assert "saved" in asked.printed


# --- what it tells


async def test_a_client_with_the_key_sees_progress_end_and_error_file(
    make: Make, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    code = f"""
import json, os, time
rank = os.environ['RANK']
with open(os.environ['RELAUNCH_PROGRESS_FILE'], 'w') as file: \
json.dump({{'step': 12, 'loss': 3.5}}, file)
print('about to fail', flush=True)
while not os.path.exists({str(go)!r}): time.sleep(0.01)
if rank == '5':
    message = {{'message': {{'message': 'RuntimeError: of the rank', \
'extraInfo': {{'timestamp': '1'}}}}}}
    with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file: json.dump(message, file)
    os._exit(1)
time.sleep(1000)
"""
    container = make(python_command(code), ranks=2, waits=FOR_LONG)
    seen: list[Mapping[str, Any]] = []

    def enough(line: Mapping[str, Any]) -> bool:
        seen.append(line)
        steps = {
            rank: one.get("step")
            for rank, one in (line.get("heartbeat") or {}).get("progress", {}).items()
        }
        if steps == {"4": 12, "5": 12}:
            go.touch()
        return "end" in line

    await watched(container, enough)
    assert seen[0]["hello"]["ranks"] == [4, 5]
    failed = next(line["observation"] for line in seen if "observation" in line)
    assert (failed["rank"], failed["exit_code"], failed["stopped"]) == (5, 1, False)
    assert failed["error"]["message"]["message"] == "RuntimeError: of the rank" and failed[
        "log_tail"
    ] == ["about to fail"]
    assert "end" in seen[-1]
    # Its watcher has the end, so it waits for no other.
    assert container.ended() == 1


async def test_a_client_can_read_logs_stacks_and_probes_but_not_order(make: Make) -> None:
    container = make(in_shell("echo one; exec sleep 1000"))
    wait_for(container.listens)
    (pid,) = container.pids()
    session = container.session()
    async with asyncio.timeout(PATIENCE):
        logs = await session.logs(TOKEN, None, 65536, 5.0, None)
        assert not isinstance(logs, Refusal) and [chunk.data for chunk in logs.chunks] == ["one\n"]
        stacks = await session.stacks(TOKEN, 4)
        assert not isinstance(stacks, Refusal) and stacks["stacks"][0]["pid"] == pid
        assert (await session.list())["jobs"][0]["generations"][0]["ranks"] == [
            {"rank": 4, "pid": pid, "alive": True}
        ]
        assert (await session.probe(10.0, None))["jobs"]
        link = await session._open()
        for command in (
            "stop",
            "prepare",
            "start",
            "reboot",
            "diagnose",
            "reset-gpus",
            "preflight",
            "meet",
            None,
        ):
            number, inbox = link.begin()
            await link.send({"id": number, "command": command, "order": {"protocol": 1}})
            answer = (await link.receive(inbox, 5.0, "it"))["line"]
            assert answer["outcome"] == "refused" and "only answers questions" in answer["reason"]
        await session.close()
    assert is_alive(pid)


ORDER = {"id": 1, "command": "list", "order": {"protocol": 1}}
LIST = json.dumps(ORDER).encode() + b"\n"
ALERT, APPLICATION_DATA = 21, 23
"""Types of records of TLS."""


async def test_who_has_another_key_or_none_learns_nothing(make: Make) -> None:
    container = make(FOR_EVER)
    wait_for(container.listens)
    with pytest.raises(Unreachable, match=r"certificate .* ecs\.agent_key"):
        await container.session(make_key()).list()
    key, certificate = make_parts()
    ours = "".join(Secret(KEY)._certificates)
    # The key pair of another, with our certificate beside it: the agent is believed, and believes
    # not.
    with pytest.raises(Unreachable):
        await container.session(f"{key}{certificate}{ours}").list()
    refused = await _connected(container, f"{key}{certificate}{ours}")
    assert await refused.readline() == b""
    assert "refused the certificate" in str(refused.ended)
    # A certificate that was signed with our own key, and no certificate at all.
    key, certificate = make_parts(issuer=KEY)
    signed = await _connected(container, f"{key}{certificate}{ours}")
    assert await signed.readline() == b""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=ours)
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", container.port, ssl=context, server_hostname=""
    )
    writer.write(LIST)
    answer = b""
    with contextlib.suppress(ssl.SSLError, ConnectionResetError):
        async with asyncio.timeout(PATIENCE):
            answer = await reader.read()
    assert answer == b""
    writer.transport.abort()
    assert (await container.session().list())["outcome"] == "done"


async def _connected(container: Container, key: str) -> wire.WirePipe:
    return await wire.connect("n1", "127.0.0.1", container.port, Secret(key))


@pytest.mark.long_after(variants=2)
@pytest.mark.parametrize(
    "said",
    [
        LIST,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x40\x00" + b"\xff" * 16384,  # a handshake message of garbage
        b"\x17\x03\x03\x00\x20" + b"\0" * 32,  # data before any handshake
        b"\0" * 100_000,
    ],
    ids=["an order", "HTTP", "a handshake", "data", "zeros"],
)
async def test_a_client_without_tls_gets_no_answer_and_delays_no_other(
    make: Make, said: bytes
) -> None:
    container = make(FOR_EVER)
    wait_for(container.listens)
    reader, writer = await asyncio.open_connection("127.0.0.1", container.port)
    writer.write(said)
    try:
        async with asyncio.timeout(PATIENCE):
            answer = await reader.read()
    except ConnectionResetError:  # it did not read all of that
        answer = b""
    assert answer == b"" or (answer[0] == ALERT and len(answer) <= 7 * 2)
    writer.transport.abort()
    assert (await container.session().list())["outcome"] == "done"
    assert "Traceback" not in container.printed


async def test_an_unfinished_handshake_is_closed_and_delays_no_stop(
    make: Make,
) -> None:
    container = make(in_shell("trap 'exit 0' TERM; echo ready; while :; do sleep 0.05; done"))
    wait_for(lambda: "ready" in container.printed and container.listens())
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = Secret(KEY).client_context().wrap_bio(incoming, outgoing)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    hello = outgoing.read()

    async def silent(first: bytes, drip: bytes = b"") -> float:
        reader, writer = await asyncio.open_connection("127.0.0.1", container.port)
        began = time.monotonic()
        writer.write(first)
        reading = asyncio.create_task(reader.read())
        for byte in drip:
            if not reading.done():
                writer.write(bytes([byte]))
                await asyncio.wait({reading}, timeout=0.2)
        with contextlib.suppress(ConnectionResetError):
            await reading
        writer.transport.abort()
        return time.monotonic() - began

    waiting = [
        asyncio.create_task(one)
        for one in (
            silent(b""),
            silent(hello[:3]),
            silent(hello[: len(hello) // 2]),
            silent(hello),  # and never the rest
            silent(b"", hello + b"\0" * 100),  # a byte each 0.2 s
        )
    ]
    await asyncio.sleep(0.1)
    # All of them are waited for by processes of their own.
    assert (await container.session().list())["outcome"] == "done"
    async with asyncio.timeout(PATIENCE):
        took = await asyncio.gather(*waiting)
    assert min(took) > HANDSHAKE_TIMEOUT - 0.5
    # The drip alone would take a minute.
    assert max(took) < HANDSHAKE_TIMEOUT + 15


def test_callers_that_say_nothing_do_not_delay_the_end(make: Make) -> None:
    command = in_shell("trap 'exit 0' TERM; echo ready; while :; do sleep 0.05; done")
    container = make(command, waits=FOR_LONG)
    wait_for(lambda: "ready" in container.printed and container.listens())
    with contextlib.ExitStack() as held:
        for _ in range(20):
            held.enter_context(socket.create_connection(("127.0.0.1", container.port)))
        container.process.send_signal(signal.SIGTERM)
        assert container.ended() == ASKED_TO_GO


Answers = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@contextlib.asynccontextmanager
async def _serving(answers: Answers, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Answer connections to a port, and wait at the end until each has been answered."""
    tasks = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        with contextlib.suppress(OSError):
            await answers(reader, writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server, asyncio.timeout(PATIENCE):
        yield server.sockets[0].getsockname()[1]
        await asyncio.gather(*[task for task in tasks if task is not None])


async def _is_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def _impostor(answers: Answers, context: ssl.SSLContext | None = None) -> str:
    """Connect to what answers so, and return why that failed."""
    async with _serving(answers, context) as port:
        with pytest.raises(Unreachable) as failed:
            await wire.connect("n1", "127.0.0.1", port, Secret(KEY))
    return failed.value.reason


async def test_who_listens_without_the_key_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'{"session": {"protocol": 1}}\n')
        await reader.read()

    async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pass

    ours = "".join(Secret(KEY)._certificates)
    foreign = "presents a certificate that is not in ecs.agent_key"
    assert foreign in await _impostor(_is_silent, Secret(make_key()).server_context())
    key, certificate = make_parts(issuer=KEY)
    signed = Secret(f"{key}{certificate}{ours}").server_context()
    assert foreign in await _impostor(_is_silent, signed)
    old = Secret(KEY).server_context()
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert "TLS handshake" in await _impostor(_is_silent, old)
    assert "not speak TLS" in await _impostor(plain)
    assert "TLS handshake" in await _impostor(closes)
    monkeypatch.setattr(wire, "HANDSHAKE_TIMEOUT", 0.3)
    assert "within 0.3 s" in await _impostor(_is_silent)


async def test_an_expired_or_not_yet_valid_certificate_is_named() -> None:
    for begins, ends, said in (
        (timedelta(days=-9), timedelta(days=-1), "has expired: exchange the agent key"),
        (timedelta(days=1), timedelta(days=9), "is not valid yet: is the clock"),
    ):
        secret = Secret(make_key(begins, ends))
        async with _serving(_is_silent, secret.server_context()) as port:
            with pytest.raises(Unreachable, match=said):
                await wire.connect("n1", "127.0.0.1", port, secret)


class Between:
    """Passes records of TLS on between a controller and a container, and can spoil them."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.sent: list[bytes] = []
        """Records of the controller, as it sent them."""
        self.spoil_sent: Callable[[bytes], bytes] = lambda record: record
        self.spoil_answer: Callable[[bytes], bytes] = lambda record: record

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self.port)

        async def carry_orders() -> None:
            while record := await _record(reader):
                self.sent.append(record)
                back.write(self.spoil_sent(record))

        async def carry_answers() -> None:
            while record := await _record(there):
                writer.write(self.spoil_answer(record))

        carrying = [asyncio.create_task(carry_orders()), asyncio.create_task(carry_answers())]
        await asyncio.wait(carrying, return_when=asyncio.FIRST_COMPLETED)
        for task in carrying:
            task.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)
        back.close()
        with contextlib.suppress(OSError):
            await back.wait_closed()


async def _record(reader: asyncio.StreamReader) -> bytes:
    try:
        head = await reader.readexactly(5)
        return head + await reader.readexactly(int.from_bytes(head[3:], "big"))
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


@contextlib.asynccontextmanager
async def _between(container: Container) -> AsyncIterator[tuple[Between, wire.WirePipe]]:
    between = Between(container.port)
    async with _serving(between.serve) as port:
        pipe = await wire.connect("n1", "127.0.0.1", port, Secret(KEY))
        async with asyncio.timeout(PATIENCE):
            assert b'"session"' in await pipe.readline()
            yield between, pipe
        pipe.kill()
        await pipe.wait()


def _flipped(record: bytes) -> bytes:
    return record[:-1] + bytes([record[-1] ^ 1])


async def _list_answered(pipe: wire.WirePipe) -> None:
    await pipe.write(LIST)
    while b'"exit"' not in await pipe.readline():
        pass


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize("spoil", ["replayed", "changed", "left out", "of another connection"])
async def test_a_record_out_of_sequence_ends_the_connection(make: Make, spoil: str) -> None:
    container = make(FOR_EVER)
    wait_for(container.listens)
    async with _between(container) as (between, pipe), _between(container) as (other, aside):
        await _list_answered(pipe)
        await _list_answered(aside)
        last = other.sent[-1]
        assert last[0] == APPLICATION_DATA
        if spoil == "replayed":
            between.spoil_sent = lambda record: between.sent[-2] + record
        elif spoil == "changed":
            between.spoil_sent = _flipped
        elif spoil == "of another connection":
            between.spoil_sent = lambda record: last
        else:
            between.spoil_sent = lambda record: b""
            await pipe.write(LIST)
            await asyncio.sleep(0.1)
            between.spoil_sent = lambda record: record
        await pipe.write(LIST)
        assert await pipe.readline() == b"", "it was carried out"
        assert pipe.ended is not None
        await _list_answered(aside)


async def test_a_whole_connection_that_is_repeated_starts_nothing(make: Make) -> None:
    container = make(FOR_EVER)
    wait_for(container.listens)
    async with _between(container) as (between, pipe):
        await _list_answered(pipe)
        recorded = b"".join(between.sent)
    reader, writer = await asyncio.open_connection("127.0.0.1", container.port)
    writer.write(recorded)
    records = []
    async with asyncio.timeout(PATIENCE):
        while record := await _record(reader):
            records.append(record)
    # The agent's half of a new handshake and an alert; the first line of a session is longer than
    # that.
    assert [record[0] for record in records].count(ALERT) <= 1
    assert records[-1][0] == ALERT or len(records[-1]) <= 5 + 2 + 1 + 16
    writer.transport.abort()


async def test_bytes_changed_towards_the_controller_end_the_session(
    make: Make,
) -> None:
    container = make(FOR_EVER)
    wait_for(container.listens)
    async with _between(container) as (between, pipe):
        between.spoil_answer = _flipped
        await pipe.write(LIST)
        assert await pipe.readline() == b""
        assert pipe.ended is not None and "was changed" in pipe.ended


async def test_lines_of_an_agent_that_is_killed_after_them_are_read() -> None:
    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"one\ntwo\nthr")
        await writer.drain()
        # The socket closes without TLS's own end, as that of a process that was killed.
        writer.get_extra_info("socket")._sock.shutdown(socket.SHUT_RDWR)

    async with _serving(dies, Secret(KEY).server_context()) as port:
        pipe = await wire.connect("n1", "127.0.0.1", port, Secret(KEY))
        await asyncio.sleep(0.2)
        assert [await pipe.readline() for _ in range(3)] == [b"one\n", b"two\n", b""]
        assert pipe.ended is not None and "closed the connection" in pipe.ended
        pipe.kill()
        await pipe.wait()


async def test_a_line_without_end_is_not_taken(make: Make) -> None:
    container = make(FOR_EVER)
    wait_for(container.listens)
    pipe = await _connected(container, KEY)
    async with asyncio.timeout(PATIENCE):
        assert b'"session"' in await pipe.readline()
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                await pipe.write(b"x" * 65536)
        assert await pipe.readline() == b""
    pipe.kill()
    await pipe.wait()
    assert (await container.session().list())["outcome"] == "done"


async def test_while_keys_are_exchanged_both_are_accepted(make: Make) -> None:
    old, new = make_parts(), make_parts()
    before = make(FOR_EVER, env={"RELAUNCH_AGENT_KEY": "".join(old)})
    after = make(FOR_EVER, env={"RELAUNCH_AGENT_KEY": "".join(new) + old[1]})
    for container in (before, after):
        wait_for(container.listens)
        # The worker first goes on with the old key, and accepts the new one.
        session = container.session("".join(old) + new[1])
        assert (await session.list())["outcome"] == "done"
        await session.close()
    # Then it has the new one: containers of before the exchange are no longer reached.
    session = after.session("".join(new))
    assert (await session.list())["outcome"] == "done"
    await session.close()
    with pytest.raises(Unreachable, match="presents a certificate"):
        await before.session("".join(new)).list()


@pytest.mark.skipif(not OLD_PYTHON.exists(), reason="no Python 3.8 here")
async def test_an_agent_on_python_3_8_is_reached(make: Make) -> None:
    container = make(FOR_EVER, python=str(OLD_PYTHON))
    wait_for(container.listens)
    session = container.session()
    assert (await session.list())["outcome"] == "done"
    await session.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
def test_the_command_that_makes_a_key_makes_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "ecs.md").read_text()
    command = page[page.index("openssl req -x509") :].partition(" > agent-key.pem")[0]
    made = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=PATIENCE)
    assert Secret(made.stdout).server_context() and Secret(made.stdout).client_context()


def test_without_the_module_ssl_the_ranks_run_all_the_same(make: Make, tmp_path: Path) -> None:
    (tmp_path / "ssl.py").write_text('raise ImportError("no OpenSSL in this build")\n')
    container = make(in_shell("echo here; exit 5"), env={"PYTHONPATH": str(tmp_path)})
    assert container.ended() == 5
    assert "here\n" in container.printed
    assert "no port" in container.printed


def _locked() -> str:
    """A private key that only its password opens."""
    key = serialization.load_pem_private_key(KEY.encode(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    ).decode()


@pytest.mark.long_after(variants=3)
@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("", "is not set"),
        (" \n", "is not set"),
        ("a key of the MAC that was here before", "has no private keys in PEM"),
        (make_parts()[0], "has no certificate in PEM"),
        (make_parts()[1], "has no private keys in PEM"),
        (make_key() + make_parts()[0], "has 2 private keys in PEM"),
        (make_parts()[0] + make_parts()[1], "not that of its private key"),
        (_locked() + make_parts()[1], "cannot be read"),
        (KEY.replace("MI", "##"), "cannot be read"),
    ],
    ids=[
        "empty",
        "blank",
        "no PEM",
        "key alone",
        "certificate alone",
        "two keys",
        "foreign",
        "locked",
        "garbled",
    ],
)
def test_without_a_key_that_can_be_used_no_port_is_opened(
    make: Make, key: str, reason: str
) -> None:
    container = make(FOR_EVER, env={"RELAUNCH_AGENT_KEY": key})
    wait_for(lambda: "no port is opened" in container.printed)
    assert container.pids() and not container.listens()
    assert f"RELAUNCH_AGENT_KEY {reason}" in container.printed or (
        "RELAUNCH_AGENT_KEY has a" in container.printed and reason in container.printed
    )
    assert len(container.printed.splitlines()) == 1, "one sentence"


@pytest.mark.long
async def test_a_port_in_use_is_opened_once_it_is_free(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        container = make(in_shell("sleep 6.5; exit 4"), port=other.getsockname()[1])
        wait_for(lambda: "cannot be opened" in container.printed)
    container.port = json.loads(
        Path(f"/proc/{container.process.pid}/environ")
        .read_text()
        .partition("RELAUNCH_ORDER=")[2]
        .partition("\0")[0]
    )["port"]
    exits = [
        line["observation"]["exit_code"]
        for line in await watched(container)
        if "observation" in line
    ]
    assert exits == [4]


async def test_a_watcher_that_reconnects_learns_the_end(
    make: Make,
) -> None:
    container = make(in_shell("while test ! -e go; do sleep 0.02; done; exit 6"))
    await watched(container, lambda line: "hello" in line)
    (pid,) = container.pids()
    (Path(os.readlink(f"/proc/{pid}/cwd")) / "go").touch()
    wait_for(lambda: not is_alive(pid))
    try:
        lines = await watched(container)
    finally:
        Path("go").unlink()
    assert [line["observation"]["exit_code"] for line in lines if "observation" in line] == [6]
    assert container.ended() == 6


def test_a_relative_state_folder_belongs_to_this_container(make: Make, tmp_path: Path) -> None:
    def in_its_folder(number: int) -> dict[str, Any]:
        inside = ["sh", "-c", 'cd "$0" && exec "$@"', str(tmp_path / str(number))]
        return {"env": {"RELAUNCH_AGENT_STATE": "state"}, "before": inside}

    first = make(FOR_EVER, **in_its_folder(0))
    assert first.pids()
    second = make(["true"], **in_its_folder(1))
    assert second.ended() == 0, second.printed
    first.process.terminate()
    first.ended()

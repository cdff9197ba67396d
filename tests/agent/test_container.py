"""The agent inside a rank's container: real processes, its port on loopback, and a controller's own side of the wire."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from real_node import PATIENCE, is_alive, python_command, wait_for

from relaunch.agent.container.container import ASKED_TO_GO, LINGER, MISUSED, NOT_FOUND
from relaunch.backends.base import Refused, Unreachable
from relaunch.backends.ecs import wire
from relaunch.backends.local_power import processes_of, signal_all
from relaunch.backends.session import AgentSession
from relaunch.generation import Token
from tests.chaos.world import free_port

KEY = "a key of the tests, long enough"
TOKEN = Token("default", "job", 1, 1)
FOR_EVER = ["sleep", "1000"]


class Container:
    def __init__(
        self,
        folder: Path,
        agent: Path,
        command: list[str],
        ranks: int,
        env: Mapping[str, str],
        before: list[str],
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
                [*before, sys.executable, "-S", str(agent), "container", *command],
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
        return AgentSession("n1", lambda: wire.connect("n1", "127.0.0.1", self.port, key.encode()))


Make = Callable[..., Container]


@pytest.fixture
def make(tmp_path: Path, agent: Path) -> Iterator[Make]:
    made: list[Container] = []

    def make(
        command: list[str],
        ranks: int = 1,
        env: Mapping[str, str] | None = None,
        before: list[str] | None = None,
        **order: Any,
    ) -> Container:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Container(folder, agent, command, ranks, env or {}, before or [], **order))
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


# --- how it ends


@pytest.mark.parametrize(("ends", "code"), [("exit 0", 0), ("exit 93", 93), ("kill -9 $$", 137)])
def test_it_ends_as_its_rank_ended(make: Make, ends: str, code: int) -> None:
    container = make(["--", *in_shell(f"echo here; {ends}")], env={"RELAUNCH_AGENT_KEY": ""})
    assert container.ended() == code
    assert "here\n" in container.printed
    assert "RELAUNCH_AGENT_KEY is not set: no port is opened" in container.printed


def test_of_several_ranks_the_first_that_failed_gives_the_code_and_each_line_names_its_rank(
    make: Make, tmp_path: Path
) -> None:
    # The second catches what the failure of the first brings it, and ends with a code of its own.
    script = 'echo "I am $RANK/$LOCAL_RANK of $WORLD_SIZE on $RELAUNCH_NODE${RELAUNCH_ORDER}${RELAUNCH_AGENT_KEY}"; '
    script += 'trap "exit 9" TERM; test $RANK = 5 && touch "$SAID"; '
    script += 'if [ $RANK = 4 ]; then while [ ! -e "$SAID" ]; do sleep 0.02; done; exit 7; fi; while :; do sleep 0.05; done'
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


def test_all_that_was_printed_is_there_when_it_ends_in_order_and_once(make: Make) -> None:
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
    )
    pids = container.pids()
    wait_for(lambda: container.printed.count("ready") == 2)
    asked = time.monotonic()
    container.process.send_signal(signal.SIGTERM)
    assert container.ended() == ASKED_TO_GO
    assert time.monotonic() - asked < LINGER, "it waited for a watcher"
    assert container.printed.count("saved") == 2 and not any(map(is_alive, pids))


def test_ranks_that_do_not_go_when_asked_are_killed_after_their_grace(make: Make) -> None:
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
    # What ranks print is copied once their start was answered: a shim killed before that leaves a failed start, 126.
    wait_for(lambda: "ready" in container.printed)
    os.kill(json.loads((container.folder / "shim.json").read_text())["pid"], signal.SIGKILL)
    assert container.ended() == 137 and not any(map(is_alive, pids))


def test_without_an_order_the_command_runs_as_if_the_agent_were_not_there(make: Make) -> None:
    container = make(in_shell("echo $$; exit 3"), env={"RELAUNCH_ORDER": ""})
    assert container.ended() == 3
    assert container.printed == f"{container.process.pid}\n"
    assert make(["no-such-program"], env={"RELAUNCH_ORDER": ""}).ended() == NOT_FOUND


def test_what_cannot_be_started_says_why(make: Make) -> None:
    missing = make(["no-such-program"])
    assert missing.ended() == NOT_FOUND
    assert "the command no-such-program is not found" in missing.printed
    torn = make(FOR_EVER, env={"RELAUNCH_ORDER": "{"})
    assert torn.ended() == MISUSED
    assert "RELAUNCH_ORDER is '{'; expected a JSON object" in torn.printed
    assert make([]).ended() == MISUSED


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="a PID namespace needs root and unshare",
)
def test_as_the_first_process_it_reaps_orphans_and_passes_on_that_it_shall_go(make: Make) -> None:
    # Its grandchild outlives the rank, and would be a zombie or a survivor where nobody reaps.
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


async def test_who_has_the_key_sees_progress_the_end_and_the_error_file(
    make: Make, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    code = f"""
import json, os, time
rank = os.environ['RANK']
with open(os.environ['RELAUNCH_PROGRESS_FILE'], 'w') as file: json.dump({{'step': 12, 'loss': 3.5}}, file)
print('about to fail', flush=True)
while not os.path.exists({str(go)!r}): time.sleep(0.01)
if rank == '5':
    message = {{'message': {{'message': 'RuntimeError: of the rank', 'extraInfo': {{'timestamp': '1'}}}}}}
    with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file: json.dump(message, file)
    os._exit(1)
time.sleep(1000)
"""
    container = make(python_command(code), ranks=2)
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
    # Told, it does not wait for anybody else.
    told = time.monotonic()
    assert container.ended() == 1
    assert time.monotonic() - told < 2.5


async def test_logs_stacks_list_and_probe_are_told_and_nothing_can_be_ordered(make: Make) -> None:
    container = make(in_shell("echo one; exec sleep 1000"))
    wait_for(container.listens)
    (pid,) = container.pids()
    session = container.session()
    async with asyncio.timeout(PATIENCE):
        logs = await session.logs(TOKEN, None, 65536, 5.0, None)
        assert not isinstance(logs, Refused) and [chunk.data for chunk in logs.chunks] == ["one\n"]
        stacks = await session.stacks(TOKEN, 4)
        assert not isinstance(stacks, Refused) and stacks["stacks"][0]["pid"] == pid
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
            assert answer["outcome"] == "refused" and "is asked and not ordered" in answer["reason"]
        await session.close()
    assert is_alive(pid)


async def test_who_has_another_key_or_none_learns_nothing(make: Make) -> None:
    container = make(FOR_EVER)
    wait_for(container.listens)
    with pytest.raises(Unreachable, match="has another key"):
        await container.session("another key of the same length").list()
    reader, writer = await asyncio.open_connection("127.0.0.1", container.port)
    assert list(json.loads(await reader.readline())) == ["challenge"]
    writer.write(b'{"id": 1, "command": "list", "order": {"protocol": 1}}\n')
    async with asyncio.timeout(PATIENCE):
        assert await reader.read() == b""
    writer.close()
    assert (await container.session().list())["outcome"] == "done"


async def test_who_listens_without_the_key_is_not_believed() -> None:
    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps({"challenge": "0" * 64}).encode() + b"\n")
        await reader.readline()
        writer.write(json.dumps({"mac": "0" * 64}).encode() + b"\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(pretend, "127.0.0.1", 0)
    async with server:
        with pytest.raises(Unreachable, match="does not have the key"):
            await wire.connect("n1", "127.0.0.1", server.sockets[0].getsockname()[1], KEY.encode())


async def test_a_line_that_is_not_its_senders_next_one_ends_the_connection(make: Make) -> None:
    container = make(FOR_EVER)
    wait_for(container.listens)
    for spoil in ("replayed", "changed", "reordered", "of another connection"):
        await _spoiled(container, spoil)


async def _spoiled(container: Container, spoil: str) -> None:
    pipe, other = [
        await wire.connect("n1", "127.0.0.1", container.port, KEY.encode()) for _ in range(2)
    ]
    texts = [
        json.dumps({"id": number, "command": "list", "order": {"protocol": 1}}).encode()
        for number in (1, 2, 3)
    ]
    sealed = [b"%s %s\n" % (pipe._outgoing.mac(text), text) for text in texts]
    bad = {
        "replayed": sealed[0],
        "changed": sealed[1].replace(b"list", b"logs"),
        "reordered": sealed[2],
        "of another connection": b"%s %s\n" % (other._outgoing.mac(texts[1]), texts[1]),
    }[spoil]
    async with asyncio.timeout(PATIENCE):
        assert b'"session"' in await pipe.readline()
        pipe._writer.write(sealed[0])
        while b'"exit"' not in await pipe.readline():
            pass
        pipe._writer.write(bad)
        assert await pipe.readline() == b""
        assert pipe.ended is not None and "closed the connection" in pipe.ended
    for one in (pipe, other):
        one.kill()
        await one.wait()


async def test_a_line_that_was_changed_on_its_way_to_the_controller_ends_the_session(
    make: Make,
) -> None:
    container = make(FOR_EVER)
    wait_for(container.listens)

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", container.port)
        writer.write(await there.readline())
        back.write(await reader.readline())
        writer.write(await there.readline())
        writer.write((await there.readline()).replace(b'"protocol":1', b'"protocol":2'))
        for one in (back, writer):
            one.close()
            await one.wait_closed()

    server = await asyncio.start_server(between, "127.0.0.1", 0)
    async with server:
        pipe = await wire.connect(
            "n1", "127.0.0.1", server.sockets[0].getsockname()[1], KEY.encode()
        )
        assert await pipe.readline() == b""
        assert pipe.ended is not None and "not of the agent" in pipe.ended
        pipe.kill()
        await pipe.wait()


@pytest.mark.parametrize("key", ["", "short"])
def test_without_a_key_that_can_be_trusted_no_port_is_opened(make: Make, key: str) -> None:
    container = make(FOR_EVER, env={"RELAUNCH_AGENT_KEY": key})
    wait_for(lambda: "no port is opened" in container.printed)
    assert container.pids() and not container.listens()


@pytest.mark.long
async def test_a_port_that_another_has_is_opened_once_that_one_has_gone(
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


async def test_a_watcher_that_lost_its_connection_is_told_the_end_when_it_is_back(
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


def test_a_relative_state_folder_is_not_mistaken_for_another_containers(
    make: Make, tmp_path: Path
) -> None:
    def in_its_folder(number: int) -> dict[str, Any]:
        inside = ["sh", "-c", 'cd "$0" && exec "$@"', str(tmp_path / str(number))]
        return {"env": {"RELAUNCH_AGENT_STATE": "state"}, "before": inside}

    first = make(FOR_EVER, **in_its_folder(0))
    assert first.pids()
    second = make(["true"], **in_its_folder(1))
    assert second.ended() == 0, second.printed
    first.process.terminate()
    first.ended()

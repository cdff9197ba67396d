"""A session whose agent answers nonsense, dies or is silent.

Each is an exception of `relaunch.backends.base`, and soon.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from relaunch.backends.base import (
    BackendError,
    ProtocolError,
    Refusal,
    StartedRanks,
    StartOrder,
    StopOrder,
    StopProof,
    Unreachable,
    WarmOrder,
)
from relaunch.backends.pipe import ProcessPipe
from relaunch.backends.session import NOT_AHEAD, AgentSession
from relaunch.generation import Token

pytestmark = pytest.mark.asyncio

AGENT = """
import json, sys
print(json.dumps({"session": {"protocol": 1}}), flush=True)
answers = json.loads(sys.argv[1])
for line in sys.stdin:
    order = json.loads(line)
    answer = answers.get(order["command"])
    if answer == "die":
        break
    if answer is not None:
        print(json.dumps({"id": order["id"], "line": order["order"] \
if answer == "echo" else answer}), flush=True)
        print(json.dumps({"id": order["id"], "ended": True}), flush=True)
"""
"""A double of the agent: sends the answers that it was given, is silent on other orders, and exits
where the answer would be `die`."""

PATIENCE = 60.0
"""Seconds before a test says that something does not happen: the machine may be busy."""
Open = Callable[..., AgentSession]
BOOT = {"outcome": "done", "boot_id": "b1"}
TOKEN = Token("default", "llama", 1, 1)


@pytest_asyncio.fixture
async def opened() -> AsyncIterator[Open]:
    sessions: list[AgentSession] = []

    def made(
        answers: dict[str, Any], program: str = AGENT, answer_within: float = 5.0
    ) -> AgentSession:
        async def connect() -> ProcessPipe:
            words = (sys.executable, "-S", "-c", program, json.dumps(answers))
            return await ProcessPipe.start(*words, env=os.environ)

        sessions.append(AgentSession("n1", connect, answer_within))
        return sessions[-1]

    yield made
    for session in sessions:
        await session.close()


async def ask(session: AgentSession, command: str, within: float = 1.0) -> object:
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "probe": lambda: session.probe(within, 60.0),
        "diagnose": lambda: session.diagnose("r1", 2, within),
        "reset-gpus": lambda: session.reset_gpus("r1", "b1", ("00000000:1B:00.0",), within),
        "reboot": lambda: session.reboot("r1", "b1", "Xid 79"),
    }
    return await calls[command]()


async def test_the_secrets_of_a_job_are_variables_of_its_ranks(opened: Open) -> None:
    echo = '{"outcome": "refused", "why": "env", "reason": json.dumps(order["order"]["env"])}'
    session = opened({}, AGENT.replace('answers.get(order["command"])', echo))
    start = StartOrder(
        TOKEN,
        "n1",
        ("train",),
        None,
        {"A": "1"},
        (),
        (),
        0.0,
        "5ec7e7",
        fences=True,
        secrets={"B": "2"},
    )
    answer = await session.start(start)
    assert isinstance(answer, Refusal) and json.loads(answer.reason) == {"A": "1", "B": "2"}


@pytest.mark.parametrize(
    ("command", "order"),
    [
        ("probe", {"within": 1.0, "kernel_since": 60.0}),
        ("diagnose", {"id": "r1", "level": 2, "within": 1.0}),
        ("reset-gpus", {"id": "r1", "boot_id": "b1", "gpus": ["00000000:1B:00.0"], "within": 1.0}),
        ("reboot", {"id": "r1", "boot_id": "b1", "reason": "Xid 79"}),
    ],
)
async def test_an_order_is_sent_as_the_protocol_has_it(
    opened: Open, command: str, order: dict[str, Any]
) -> None:
    with pytest.raises(ProtocolError) as refused:
        await ask(opened({command: "echo"}), command)
    assert (
        str({"protocol": 1, **order}) in refused.value.reason
    )  # the echo is no answer, and is named


@pytest.mark.parametrize(
    ("command", "answer", "named"),
    [
        ("probe", [1], "expected an outcome"),
        ("probe", {"outcome": "done"}, "boot_id is missing"),
        ("probe", {"outcome": "done", "boot_id": 7}, "boot_id is 7"),
        (
            "probe",
            {"outcome": "refused", "why": "busy", "reason": "no"},
            "changes nothing and was refused: no",
        ),
        ("diagnose", {**BOOT, "stdout": ""}, "exit_code"),
        ("diagnose", {**BOOT, "exit_code": "0", "stdout": ""}, "exit_code is '0'"),
        ("diagnose", {**BOOT, "exit_code": True, "stdout": ""}, "exit_code is True"),
        ("diagnose", {**BOOT, "exit_code": 0}, "stdout is missing"),
        ("diagnose", {"outcome": "refused"}, "why is missing"),
        ("diagnose", {**BOOT, "missing": 7}, "missing is 7"),
        ("probe", {**BOOT, "load": float("nan")}, "expected finite numbers"),
        ("probe", {**BOOT, "memory": {"total": 10**40}}, "a whole number of 133 bits"),
        ("reset-gpus", {**BOOT, "exit_code": 0, "output": 1}, "output is 1"),
        (
            "reset-gpus",
            {"outcome": "refused", "why": "protocol", "reason": "version 2"},
            "version 2",
        ),
        ("reboot", {"outcome": "done", "boot_id": ""}, "boot_id is ''"),
        (
            "reboot",
            {"outcome": "refused", "why": "held", "reason": "x", "highest": 3},
            "highest is 3",
        ),
    ],
)
async def test_an_answer_that_makes_no_sense_is_said_to(
    opened: Open, command: str, answer: Any, named: str
) -> None:
    with pytest.raises(ProtocolError) as refused:
        await ask(opened({command: answer}), command)
    assert named in refused.value.reason


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("probe", BOOT),
        ("diagnose", {**BOOT, "exit_code": None, "stdout": ""}),
        ("diagnose", {**BOOT, "missing": "dcgmi is not on this node's PATH"}),
        ("reset-gpus", {**BOOT, "exit_code": 0, "output": "All done."}),
        ("reboot", {**BOOT, "already": True}),
    ],
)
async def test_an_answer_that_makes_sense_is_passed_on_whole(
    opened: Open, command: str, answer: dict[str, Any]
) -> None:
    assert await ask(opened({command: answer}), command) == answer


async def test_a_refusal_carries_the_present_boot_id(opened: Open) -> None:
    answer = {
        "outcome": "refused",
        "why": "boot_changed",
        "reason": "this node runs boot b2",
        "boot_id": "b2",
    }
    assert await ask(opened({"reboot": answer}), "reboot") == Refusal(
        "n1", "boot_changed", "this node runs boot b2", boot_id="b2"
    )


async def test_a_long_diagnosis_of_a_silent_node_is_broken_off(
    opened: Open,
) -> None:
    session = opened({}, answer_within=0.5)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(Unreachable):
            await ask(session, "diagnose", within=100 * PATIENCE)


async def test_a_long_diagnosis_is_awaited_while_the_node_answers(opened: Open) -> None:
    session = opened({"list": {"outcome": "done", "jobs": []}}, answer_within=0.5)
    began = time.monotonic()
    with pytest.raises(Unreachable, match=r"diagnose within 1\.5 s"):
        await ask(session, "diagnose", within=1.0)
    assert time.monotonic() - began >= 1.5


async def test_an_order_as_the_session_dies_waits_for_no_answer(
    opened: Open,
) -> None:
    session = opened({"probe": BOOT, "list": "die"})
    await ask(session, "probe")
    for _ in range(20):
        dying = asyncio.create_task(session.list())
        await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE):
            while True:  # whatever moment of its end an order meets
                try:
                    await ask(session, "probe", within=100 * PATIENCE)
                except BackendError:
                    continue
                else:
                    break
        with pytest.raises(Unreachable):
            await dying


async def test_an_agent_that_dies_before_it_greets_is_unreachable(opened: Open) -> None:
    session = opened({}, program="raise SystemExit(1)")
    for _ in range(5):
        with pytest.raises(Unreachable, match="could not be started"):
            await ask(session, "probe")
        assert not session.is_open


async def test_a_session_is_open_from_its_first_order_to_its_end(opened: Open) -> None:
    session = opened({"probe": BOOT, "list": "die"})
    assert not session.is_open
    await ask(session, "probe")
    assert session.is_open
    with pytest.raises(Unreachable):
        await session.list()
    assert not session.is_open


async def test_bytes_that_are_no_text_arrive_as_storable_text(opened: Open) -> None:
    session = opened(
        {"diagnose": {**BOOT, "exit_code": 0, "stdout": "half \ud800 and \U0001f600", "stderr": ""}}
    )
    answer = await session.diagnose("r1", 2, 1.0)
    assert isinstance(answer, dict)
    assert answer["stdout"] == "half ? and \U0001f600"


async def test_orders_fail_with_their_session_whose_output_is_held(
    opened: Open, tmp_path: Path
) -> None:
    # A child has the agent's output open until the test ends.
    until = tmp_path / "until"
    os.mkfifo(until)
    child = f"import subprocess; subprocess.Popen(['cat', {str(until)!r}])\n"
    session = opened({"list": "die"}, program=child + AGENT, answer_within=100 * PATIENCE)
    try:
        async with asyncio.timeout(PATIENCE):
            orders = ask(session, "probe"), ask(session, "diagnose"), session.list()
            failed = await asyncio.gather(*orders, return_exceptions=True)
    finally:
        until.open("w").close()
    reasons = [one.reason for one in failed if isinstance(one, Unreachable)]
    expected = [f"the session has ended (during {name})" for name in ("probe", "diagnose", "list")]
    assert reasons == expected


async def test_a_broken_session_waits_for_no_child_of_its_agent(
    opened: Open, tmp_path: Path
) -> None:
    # The children have the agent's output open until the test ends.
    until = tmp_path / "until"
    os.mkfifo(until)
    child = f"import subprocess; subprocess.Popen(['cat', {str(until)!r}])\n"
    noise = AGENT.replace(
        "for line in sys.stdin:", "for line in sys.stdin:\n    print('noise', flush=True)"
    )
    session = opened({}, program=child + noise)
    try:
        for _ in range(2):
            with pytest.raises(BackendError):
                await ask(session, "reboot")
        async with asyncio.timeout(PATIENCE):
            await session.close()
            while readers := [
                task for task in asyncio.all_tasks() if task.get_name() == "session n1"
            ]:
                await asyncio.gather(*readers)
    finally:
        until.open("w").close()


async def fill(pipe: ProcessPipe) -> None:
    while True:
        await pipe.write(b"x" * 2**16)


async def test_a_pipe_that_breaks_is_no_error_in_the_log() -> None:
    said: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
    pipe = await ProcessPipe.start(sys.executable, "-S", "-c", "", env=os.environ)
    with pytest.raises(ConnectionError):
        await fill(pipe)
    await pipe.wait()
    del pipe
    await asyncio.sleep(0)
    gc.collect()
    assert said == []


async def test_an_order_to_a_retired_session_is_never_broken_off(opened: Open) -> None:
    session = opened(
        {"list": {"outcome": "done", "jobs": []}, "stop": {"outcome": "done", "stopped": []}}
    )
    await session.list()
    session.retire()
    assert not session.is_open
    for _ in range(2):  # each in a session that is closed after it
        await session.list()
        assert not session.is_open
        assert await session.stop(StopOrder(TOKEN, 1.0, 1.0)) == StopProof("n1")


async def test_a_late_order_to_a_retired_session_is_given_again(
    opened: Open, tmp_path: Path
) -> None:
    late = {"outcome": "refused", "why": "late", "reason": "too late", "stamp": 1.0}
    path = tmp_path / "asked"
    first = f"""
import os
def answer(command):
    if os.path.exists({str(path)!r}):
        return {BOOT!r}
    open({str(path)!r}, "w").close()
    return {late!r}
"""
    session = opened({}, first + AGENT.replace("answers.get(", "answer("))
    session.retire()
    assert await ask(session, "reboot") == BOOT


async def test_a_retired_session_says_that_0_1_0_imports_nothing(opened: Open) -> None:
    session = opened({"start": {"outcome": "done", "pids": {}, "already": False}})
    session.retire()
    start = StartOrder(
        TOKEN, "n1", ("train",), None, {}, (), (), 0.0, "5ec7e7", fences=True, warm=("torch",)
    )
    started = await session.start(start)
    assert isinstance(started, StartedRanks) and started.cold == NOT_AHEAD
    refused = await session.warm(WarmOrder(TOKEN, "default", 60.0, ("train",), None, {}, (), ()))
    assert isinstance(refused, Refusal) and refused.reason == NOT_AHEAD
    assert not session.is_open


async def test_an_order_to_a_spare_names_variables_to_redact(opened: Open) -> None:
    echo = '{"outcome": "refused", "why": "env", "reason": order["order"]["redact"][0]}'
    program = AGENT.replace('{"protocol": 1}', '{"protocol": 1, "key": "0" * 32}')
    session = opened({}, program.replace('answers.get(order["command"])', echo))
    order = WarmOrder(TOKEN, "lab", 60.0, ("t",), None, {}, (), ("torch",), redact=("TOKEN",))
    refused = await session.warm(order)
    assert isinstance(refused, Refusal) and refused.reason == "TOKEN"


class StuckPipe:
    """A pipe whose node takes nothing more once a command is to be closed."""

    def __init__(self, pipe: ProcessPipe) -> None:
        self._pipe = pipe
        self.is_stuck = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    async def write(self, data: bytes) -> None:
        if b'"close"' in data:
            self.is_stuck.set()
            await asyncio.Event().wait()
        await self._pipe.write(data)


async def test_a_watch_cancelled_twice_closes_a_retired_session() -> None:
    pipes: list[StuckPipe] = []

    async def connect() -> StuckPipe:
        words = (sys.executable, "-S", "-c", AGENT, "{}")
        pipes.append(StuckPipe(await ProcessPipe.start(*words, env=os.environ)))
        return pipes[-1]

    session, is_watching = AgentSession("n1", connect, 100 * PATIENCE), asyncio.Event()

    async def watch() -> None:
        async with session.watch(TOKEN, 0, 1.0):
            is_watching.set()
            await asyncio.Event().wait()

    watching = asyncio.create_task(watch())
    async with asyncio.timeout(PATIENCE):
        await is_watching.wait()
        session.retire()
        assert session.is_open
        watching.cancel()
        await pipes[0].is_stuck.wait()
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
        assert not session.is_open
        await pipes[0].wait()

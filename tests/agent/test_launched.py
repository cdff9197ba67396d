"""Ranks below a launcher are fenced, followed and reported as those that the node starts itself.

The launcher is a double of torchrun, and where there is a Python with torch, torchrun and
ft_launcher themselves.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from real_node import Json, Node, expect_done, is_alive, python_command, token, wait_for

from relaunch.activities.observations import read_observations
from relaunch.agent.ranks.launched import leave_tracker
from relaunch.evidence.observations import RankExited
from relaunch.job.launchers import launcher_command
from relaunch.spec.job import JobSpec
from tests.torch_python import PYTHON

TORCH = Path(shutil.which(PYTHON) or PYTHON).parent
"""Where its torchrun is, and its ft_launcher."""
DOUBLE = Path(__file__).parents[1] / "doubles" / "torchrun.py"
PROCESS = 2
"""The launcher's number, behind those of its two ranks."""
STEPS = """import os, time
open(os.environ['RELAUNCH_PROGRESS_FILE'], 'w').write(str(10 + int(os.environ['RANK'])))
print('up', os.environ['RANK'], flush=True)
time.sleep(1000)"""


def code(text: str) -> list[str]:
    """The command of a rank, which does not begin with a python.

    Then that one would be asked for the launcher.
    """
    return ["env", *python_command(text)]


def read(told: Json) -> RankExited:
    """The first of what a launcher's end tells."""
    seen = read_observations("n1", told, datetime.now(UTC))[0]
    assert isinstance(seen, RankExited)
    return seen


REAL = [
    pytest.param(
        name,
        marks=[
            pytest.mark.long,
            pytest.mark.timeout(600),
            pytest.mark.needs_module(module),
        ],
    )
    for name, module in (
        ("torchrun", "torch.distributed"),
        ("ft_launcher", "nvidia_resiliency_ext.fault_tolerance"),
    )
]
every_launcher = pytest.mark.parametrize("kind", ["double", *REAL])


@dataclass
class Launch:
    """One node whose ranks a launcher starts."""

    node: Node
    kind: str
    programs: Path
    port: int = 0

    def run(
        self,
        command: list[str],
        env: Json | None = None,
        *,
        of: int = 1,
        group_rank: int = 0,
        port: int = 0,
        separate_stderr: bool = False,
    ) -> int:
        """Prepare and start generation 1 on one of so many nodes; return the pid of the launcher.

        Group rank 0 says the port.
        """
        launcher = "torchrun" if self.kind == "double" else self.kind
        spec = JobSpec.model_validate(
            {
                "name": "j",
                "command": command,
                "nodes": of,
                "nproc_per_node": 2,
                "launcher": launcher,
            }
        )
        process = PROCESS * of + group_rank
        self.port = port or int(expect_done(self.node.prepare(1, [process]))["master_port"])
        if port:
            expect_done(self.node.prepare(1, [process]))
        told = launcher_command(spec, group_rank, of, ("127.0.0.1", self.port), "127.0.0.1", "j-1")
        first = str(self.programs if self.kind == "double" else TORCH)
        ranks = [2 * group_rank, 2 * group_rank + 1]
        started = self.node.start(
            1,
            list(told.launcher),
            1,
            env={"PATH": f"{first}{os.pathsep}{os.environ['PATH']}", **(env or {})},
            separate_stderr=separate_stderr,
            launched={
                "command": list(told.rank),
                "ranks": ranks,
                "env": {"TORCHELASTIC_RESTART_COUNT": "4", "WANDB_RUN_ID": "run"},
            },
        )
        return int(expect_done(started)["pids"][str(process)])

    def ranks(self) -> dict[int, int]:
        """pid by rank, once both have said that they run."""

        def both() -> dict[int, int]:
            found = {
                int(path.stem[5:]): int(json.loads(path.read_text())["pid"])
                for path in folder.glob("rank_*.json")
            }
            return (
                found
                if len(found) == 2 and all("up" in self.node.log(rank) for rank in found)
                else {}
            )

        folder = self.node.folder() / "launched"
        ranks: dict[int, int] = wait_for(both, "no ranks", 60)
        return ranks


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "launchers"
    folder.mkdir()
    (folder / "torchrun").write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S {shlex.quote(str(DOUBLE))} "$@"\n'
    )
    (folder / "torchrun").chmod(0o755)
    return folder


@pytest.fixture
def launch(node: Node, programs: Path) -> Launch:
    return Launch(node, "double", programs)


def token_pids(node: Node) -> list[int]:
    """Everything of the generation."""
    own = f"RELAUNCH_TOKEN={'/'.join(str(part) for part in token(1).values())}".encode()
    found = []
    for pid in node.list_processes():
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if own in variables:
            found.append(pid)
    return found


@every_launcher
def test_s3_1_launched_ranks_have_own_files_and_know_the_launch(launch: Launch, kind: str) -> None:
    launch.kind = kind
    tells = STEPS.replace(
        "time.sleep(1000)",
        "print(os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['WANDB_RUN_ID'], "
        "os.getpid(), flush=True); "
        "time.sleep(1000)",
    )
    launcher = launch.run(code(tells))
    ranks = launch.ranks()
    heartbeat = launch.node.watch().read_until("heartbeat", lambda beat: len(beat["progress"]) == 2)
    assert {rank: told["step"] for rank, told in heartbeat["progress"].items()} == {
        "0": 10,
        "1": 11,
    }
    assert heartbeat["alive"] == [PROCESS]
    for rank, pid in ranks.items():
        said = f"up {rank}\n4 {('run', 'run-1')[rank]} {pid}\n"
        wait_for(lambda rank=rank, said=said: launch.node.log(rank) == said)
        assert os.getpgid(pid) != os.getpgid(launcher)


@pytest.mark.parametrize(
    ("own", "run"),
    [
        ({}, "run-1"),
        ({"WANDB_RUN_ID": "", "OTHER": "x"}, "run-1"),
        ({"WANDB_RUN_ID": "run", "WANDB_RESUME": "allow"}, "run-1"),
        ({"WANDB_RUN_ID": "mine"}, None),
        ({"WANDB_RESUME": "never"}, None),
    ],
)
def test_a_run_that_the_user_names_stays(own: dict[str, str], run: str | None) -> None:
    given = {"WANDB_RUN_ID": "run-1", "WANDB_RESUME": "allow", "RANK": "1"}
    left = leave_tracker(given, own)
    assert (left.get("WANDB_RUN_ID"), left["RANK"]) == (run, "1")
    assert ("WANDB_RESUME" in left) is (run is not None)


@every_launcher
@pytest.mark.parametrize(
    ("ends", "exit_code", "number"),
    [("os.kill(os.getpid(), 9)", None, 9), ("os._exit(93)", 93, None)],
)
def test_the_end_of_the_first_failed_rank_is_reported(
    launch: Launch, kind: str, ends: str, exit_code: int | None, number: int | None
) -> None:
    launch.kind = kind
    launch.run(
        code(
            f"import os, time\nprint('up', flush=True)\nif os.environ['RANK'] == '1': {ends}\n"
            "time.sleep(1000)"
        )
    )
    told = launch.node.watch().read_observation("RankExited")
    assert (told["rank"], told["launcher"], told["exit_code"]) == (PROCESS, True, 1)
    seen = read(told)
    assert (seen.rank, seen.local_rank, seen.exit_code, seen.signal, seen.launcher) == (
        1,
        1,
        exit_code,
        number,
        False,
    )
    assert seen.log_tail == ("up",)
    wait_for(lambda: not token_pids(launch.node))


@every_launcher
def test_an_error_of_a_rank_arrives_from_a_launchers_file(launch: Launch, kind: str) -> None:
    launch.kind = kind
    error = {
        "message": {
            "message": "ValueError: loss is NaN",
            "extraInfo": {"py_callstack": "Traceback", "timestamp": "1785571200"},
        }
    }
    fails = """import os, sys, time
print('up', flush=True)
if os.environ['RANK'] == '0':
    open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write(os.environ['SAY'])
    sys.exit(1)
time.sleep(1000)"""
    launch.run(code(fails), env={"SAY": json.dumps(error)})
    told = launch.node.watch().read_observation("RankExited")
    seen = read(told)
    assert seen.error is not None
    assert (seen.rank, seen.exit_code, seen.error.message) == (0, 1, "ValueError: loss is NaN")


@every_launcher
@pytest.mark.parametrize("victim", ["launcher", "shim"])
def test_no_rank_outlives_its_launcher_or_its_shim(launch: Launch, kind: str, victim: str) -> None:
    launch.kind = kind
    launcher = launch.run(code(STEPS))
    ranks = launch.ranks()
    watch = launch.node.watch()
    watch.read_until("heartbeat")
    os.kill(launcher if victim == "launcher" else launch.node.pid("shim"), signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, ranks.values())), "a rank lives on", 3)
    if victim == "launcher":
        seen = watch.read_observation("RankExited")
        assert (seen["rank"], seen["signal"], seen["launcher"]) == (PROCESS, 9, True)
    else:
        assert "ranks [2]" in watch.read_observation("ShimDied")["reason"]
    wait_for(lambda: not token_pids(launch.node))


def test_killing_supervisor_or_session_spares_launched_ranks(
    launch: Launch,
) -> None:
    launch.run(code(STEPS))
    ranks = launch.ranks()
    watch = launch.node.watch()
    watch.read_until("heartbeat")
    os.kill(launch.node.pid("supervisor"), signal.SIGKILL)
    beat = watch.read_until("heartbeat", lambda beat: len(beat["progress"]) == 2)
    assert beat["alive"] == [PROCESS]
    launch.node.session().kill()
    launch.node.await_session_end()
    assert launch.node.watch().read_until("heartbeat")["alive"] == [PROCESS]
    assert all(map(is_alive, ranks.values()))


@every_launcher
def test_an_order_to_stop_ends_the_launcher_and_every_rank(launch: Launch, kind: str) -> None:
    launch.kind = kind
    launch.run(code("import signal; signal.signal(15, signal.SIG_IGN)\n" + STEPS))
    ranks = launch.ranks()
    expect_done(launch.node.stop(stop_grace=0.3))
    assert not any(map(is_alive, ranks.values()))
    assert not token_pids(launch.node)


@every_launcher
def test_a_launcher_whose_ranks_end_well_ends_well(launch: Launch, kind: str) -> None:
    launch.kind = kind
    launch.run(
        [
            "sh",
            "-c",
            'test "$0" = \'$HOME ${local_rank} $$\' && echo "$RANK is fine"',
            "$HOME ${local_rank} $$",
        ]
    )
    told = launch.node.watch().read_observation("RankExited")
    assert (told["rank"], told["exit_code"], told["launcher"]) == (PROCESS, 0, True), (
        launch.node.log(0) + launch.node.log(PROCESS)
    )


@pytest.mark.long
def test_a_launcher_that_outlives_its_failed_rank_is_ended(launch: Launch) -> None:
    launch.run(code(STEPS), env={"DOUBLE_LINGERS": "1000"})
    os.kill(launch.ranks()[1], signal.SIGKILL)
    told = launch.node.watch().read_observation("RankExited")
    seen = read(told)
    assert (told["launcher"], seen.rank, seen.signal, seen.stopped) == (True, 1, 9, False)


@pytest.mark.parametrize("kind", REAL[1:])
def test_ft_launcher_waits_for_other_nodes_and_is_not_waited_for(
    make_node: Callable[..., Node], programs: Path, kind: str
) -> None:
    first, second = (Launch(make_node(name), kind, programs) for name in ("n1", "n2"))
    first.run(code(STEPS), of=2)
    second.run(code(STEPS), of=2, group_rank=1, port=first.port)
    numbers = {**second.ranks(), **first.ranks()}
    assert sorted(numbers) == [0, 1, 2, 3]
    rank, pid = next(iter(first.ranks().items()))
    os.kill(pid, signal.SIGKILL)
    seen = read(first.node.watch().read_observation("RankExited"))
    assert (seen.rank, seen.signal, seen.stopped) == (rank, 9, False)


def test_ranks_below_a_launcher_may_have_a_stderr_of_their_own(launch: Launch) -> None:
    command = code("import sys, time; print(1); print(2, file=sys.stderr); time.sleep(1000)")
    launch.run(command, separate_stderr=True)
    logs = launch.node.folder() / "logs"
    wait_for((logs / "rank_1.stderr.log").exists)
    wait_for(lambda: (logs / "rank_1.stderr.log").read_text() == "2\n")
    answer = expect_done(launch.node.order("logs", token=token(1), stream="stderr"))
    assert set(answer["sizes"]) <= {"0", "1"}, "the launcher's output stays together"


def test_stacks_and_logs_are_those_of_the_ranks(launch: Launch) -> None:
    launch.run(code(STEPS))
    pids = launch.ranks()
    answer = expect_done(launch.node.order("stacks", token=token(1), rank=1))
    assert [(one["rank"], one["pid"]) for one in answer["stacks"]] == [(1, pids[1])]
    assert answer["stacks"][0]["processes"][0]["pid"] == pids[1]
    answer = expect_done(
        launch.node.order("logs", token=token(1), offsets=None, max_bytes=1000, wait=0.0)
    )
    assert {chunk["rank"]: chunk["data"] for chunk in answer["chunks"]} == {
        0: "up 0\n",
        1: "up 1\n",
    }


def test_a_launcher_that_fails_before_it_has_ranks_is_reported(launch: Launch) -> None:
    (launch.programs / "torchrun").write_text("#!/bin/sh\necho no module named torch >&2\nexit 1\n")
    launch.run(code(STEPS))
    told = launch.node.watch().read_observation("RankExited")
    assert (told["launcher"], told["launched"], told["log_tail"]) == (
        True,
        [],
        ["no module named torch"],
    )
    seen = read(told)
    assert (seen.rank, seen.exit_code, seen.launcher) == (PROCESS, 1, True)


def test_an_order_with_wrong_names_for_ranks_is_refused_by_name(launch: Launch) -> None:
    launch.node.prepare(1, [PROCESS])
    for launched, reason in (
        (
            {"command": [], "ranks": [0], "env": {}},
            "launched.command is []; expected a program and its arguments",
        ),
        (
            {"command": ["true"], "ranks": [-1], "env": {}},
            "launched.ranks is [-1]; expected global ranks of at least 0",
        ),
        (
            {"command": ["true"], "ranks": [0], "env": {"A": 1}},
            "launched.env.A is 1; expected text without NUL",
        ),
    ):
        answer = launch.node.start(1, ["torchrun"], 1, launched=launched)
        assert answer is not None
        assert (answer["why"], answer["reason"]) == ("bad_order", reason)


def test_a_missing_command_of_ranks_is_reported_in_their_output(launch: Launch) -> None:
    launch.run(["no-such-program"])
    told = launch.node.watch().read_observation("RankExited")
    tails = [one["log_tail"] for one in told["launched"]]
    # The launcher ends the second rank for the first one, maybe before it has written anything.
    assert any(tails) and all("no-such-program" in tail[-1] for tail in tails if tail)
    assert "exitcode  : 127" in "\n".join(told["log_tail"])


def test_a_process_that_no_launcher_started_becomes_no_rank(launch: Launch, agent: Path) -> None:
    launch.run(code(STEPS))
    launch.ranks()
    environment = {
        **os.environ,
        "RELAUNCH_TOKEN": "default/j/1/1",
        "RELAUNCH_NODE_STATE": str(launch.node.state.resolve()),
        "RANK": "0",
    }
    for changes, reason in (
        ({}, "its launcher is gone"),
        ({"RANK": "x"}, "RANK is 'x'; expected the number that the launcher gives"),
        (
            {"RELAUNCH_TOKEN": "j"},
            "RELAUNCH_TOKEN is 'j'; expected the one that the launcher was started with",
        ),
        ({"RELAUNCH_TOKEN": "default/j/1/7"}, "the shim of its generation is gone"),
    ):
        command = [sys.executable, "-I", "-S", str(agent), "rank", "--", "true"]
        ended = subprocess.run(
            command, env={**environment, **changes}, capture_output=True, text=True
        )
        assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
        assert ended.stderr.endswith(f": {reason}\n")

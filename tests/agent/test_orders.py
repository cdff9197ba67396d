"""The two rounds of a launch, stop, and every refusal."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from real_node import (
    PATIENCE,
    Node,
    expect_done,
    is_alive,
    python_command,
    read_name,
    refusal,
    token,
    wait_for,
)

from relaunch.agent.protocol import Refusal
from relaunch.agent.ranks import peers, spawn
from relaunch.spec import job

OLD_PYTHON = Path("~/.pyenv/versions/3.8.18/bin/python3.8").expanduser()


def why(answer: Any) -> str:
    assert answer is not None
    return f"{answer['outcome']} {answer.get('why', '')}".strip()


def test_s2_2_a_start_that_comes_again_starts_no_rank_again(node: Node) -> None:
    prepared = node.prepare()
    assert prepared is not None
    assert prepared["outcome"] == "done"
    assert prepared["stopped"] == []
    assert prepared["master_port"] != prepared["peer_port"]
    assert len(bytes.fromhex(prepared["nonce"])) >= 16
    assert prepared == node.prepare()
    started = node.start()
    assert started is not None
    assert started["already"] is False
    assert set(started["pids"]) == {"0", "1"}
    assert all(map(is_alive, started["pids"].values()))
    assert node.start() == {**started, "already": True}
    assert node.prepare() == prepared
    assert expect_done(node.stop())["stopped"] == [[1, 1]]
    assert not any(map(is_alive, started["pids"].values()))
    wait_for(
        lambda: expect_done(node.stop())["stopped"] == [],
        "the shim ends a moment after it has said that its ranks are gone",
    )


def test_a_higher_generation_takes_the_place_of_a_lower_one(node: Node) -> None:
    pids = node.run(1)
    prepared = node.prepare(2)
    assert prepared is not None
    assert prepared["stopped"] == [[1, 1]]
    assert not any(map(is_alive, pids.values()))
    refused = node.prepare(1)
    assert refused is not None
    assert (refused["why"], refused["highest"]) == ("not_above", [1, 2])
    assert why(node.start(1)) == "refused not_above"
    assert why(node.order("start", **start_order(token(3)))) == "refused not_prepared"


def start_order(of: dict[str, Any], **more: Any) -> dict[str, Any]:
    order: dict[str, Any] = {
        "token": of,
        "command": ["true"],
        "workdir": None,
        "env": {},
        "rank_env": [{}, {}],
    }
    return {
        **order,
        "peers": [],
        "prepared": 0.0,
        "node": "n1",
        "secret": "ab",
        "fences": True,
        "log_pattern": None,
        **more,
    }


def test_a_later_submission_is_above_all_earlier_generations(node: Node) -> None:
    node.run(7)
    assert why(node.prepare(1, token=token(1, submission=2))) == "done"
    assert why(node.prepare(8)) == "refused not_above"


def test_jobs_do_not_touch_each_other(node: Node) -> None:
    first = node.run(1)
    assert why(node.prepare(1, token=token(9, job="other"))) == "done"
    assert why(node.stop(1, token=token(9, job="other"))) == "done"
    assert all(map(is_alive, first.values()))


def test_stop_forbids_for_ever_and_everything_below(node: Node) -> None:
    assert expect_done(node.stop(5))["stopped"] == []
    for generation in (4, 5):
        assert why(node.prepare(generation)) == "refused stopped"
        assert why(node.start(generation)) == "refused stopped"
    assert why(node.prepare(6)) == "done"
    assert why(node.stop(2)) == "done"
    assert why(node.start(6)) == "done"


def test_a_generation_is_launched_once(node: Node) -> None:
    pids = node.run(1, ["true"], lease=0.3)
    shim = node.pid("shim")
    wait_for(lambda: not is_alive(shim), "a shim that is no longer wanted stays")
    assert why(node.prepare(1)) == "refused not_above"
    started = node.start(1)
    assert started == {"outcome": "done", "pids": pids, "already": True}


def test_the_generation_before_may_be_killed_without_its_grace(node: Node) -> None:
    stubborn = ["sh", "-c", "trap '' TERM; echo armed; while :; do sleep 0.05; done"]
    pids = node.run(1, stubborn, ranks=1, stop_grace=600.0)
    wait_for(lambda: "armed" in node.log(0, 1))
    expect_done(node.prepare(2, stop_grace=600.0, older_grace=0.0))
    assert not any(map(is_alive, pids.values()))
    kept = json.loads((node.folder(2) / "order.json").read_text())
    assert (kept["stop_grace"], "older_grace" in kept) == (600.0, False), "its own is as ordered"
    assert refusal(node.prepare(3, older_grace=-1)) == "bad_order"


def test_a_prepared_generation_expires_and_may_be_prepared_again(node: Node) -> None:
    node.prepare(1, valid_for=0.2)
    shim = node.pid("shim")
    wait_for(lambda: not is_alive(shim))
    assert why(node.start(1)) == "refused expired"
    assert why(node.prepare(1)) == "done"
    assert why(node.start(1)) == "done"


def test_a_start_goes_with_its_own_preparation(node: Node) -> None:
    first = node.prepare(1, valid_for=0.2)
    assert first is not None
    shim = node.pid("shim")
    wait_for(lambda: not is_alive(shim))

    def prepare_again() -> dict[str, Any] | None:
        # The supervisor that it had just forked may hold its lock for a moment.
        answer = node.prepare(1)
        assert answer is not None
        return answer if answer["nonce"] != first["nonce"] else None

    second: dict[str, Any] = wait_for(prepare_again)
    assert why(node.start(1, prepared=first["stamp"])) == "refused expired"
    assert why(node.start(1, prepared=second["stamp"])) == "done"


def test_a_shim_that_died_before_the_start_is_not_prepared(node: Node) -> None:
    node.prepare(1)
    os.kill(node.pid("shim"), signal.SIGKILL)
    # A supervisor that it has just forked holds its lock and sockets until it has closed them: an
    # order given meanwhile has no answer, and a controller gives it again.
    assert why(wait_for(lambda: node.start(1))) == "refused not_prepared"
    assert why(node.prepare(1)) == "done"


def test_a_job_may_state_the_limits_that_an_agent_sets() -> None:
    # Twice, because the agent has the standard library only.
    assert spawn.LIMITS == job.LIMITS


def test_ranks_get_only_the_environment_and_umask_ordered(node: Node, tmp_path: Path) -> None:
    code = (
        "import json, os, resource; umask = os.umask(0);"
        " limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, 4)];"
        " json.dump([dict(os.environ), umask, limits], open('found', 'w'))"
    )
    # An absolute path: there is no PATH.
    command = [sys.executable, "-c", code]
    more = {
        "inherit_env": False,
        "umask": "026",
        "env": {"A": "1"},
        "limits": {"nofile": 300, "core": 4096},
    }
    pid = node.run(1, command, ranks=1, workdir=str(tmp_path), **more)["0"]
    wait_for(lambda: not is_alive(pid))
    environment, umask, limits = json.loads((tmp_path / "found").read_text())
    assert limits == [300, 4096]
    ours = {name for name in environment if not name.startswith(("RELAUNCH_", "TORCH"))}
    # LC_CTYPE: Python
    assert (ours - {"LC_CTYPE"}, umask) == ({"A", "PYTHONUNBUFFERED"}, 0o026)


def test_a_default_of_the_order_gives_way_to_the_node(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("OMP_NUM_THREADS", "6"), ("BLANK", ""), ("OF_JOB", "node")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ONLY_HERE", raising=False)
    defaults = ["OMP_NUM_THREADS", "BLANK", "ONLY_HERE"]
    env = {**dict.fromkeys(defaults, "1"), "OF_JOB": "job"}
    code = f"import os; print([os.environ[name] for name in {list(env)}])"
    for number, more in enumerate(({}, {"inherit_env": False}), 1):
        command = [sys.executable, "-c", code]
        node.run(number, command, ranks=1, env=env, env_defaults=defaults, **more)
        wait_for(lambda number=number: len(node.journal(number)) == 1)  # type: ignore[misc]
    logs = [node.folder(number) / "logs" / "rank_0.log" for number in (1, 2)]
    assert [log.read_text() for log in logs] == [
        "['6', '', '1', 'job']\n",
        "['1', '1', '1', 'job']\n",
    ]


@pytest.mark.long_after(variants=2)
@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"command": ["no-such-program"]}, "command_not_found"),
        ({"command": ["./no-such-program"]}, "command_not_found"),
        ({"workdir": "/no/such/folder"}, "workdir_missing"),
        ({"workdir": "/etc/passwd"}, "workdir_missing"),
        ({"command": ["/etc/passwd"]}, "cannot_start"),
        ({"limits": {"nofile": 2**40}}, "cannot_start"),  # more than the kernel has for root
        ({"rank_env": [{}, {"PATH": "/nowhere"}]}, "command_not_found"),
    ],
)
def test_ranks_that_cannot_start_are_refused_by_name(
    node: Node, more: dict[str, Any], expected: str
) -> None:
    node.prepare()
    answer = node.start(**{"command": ["sleep", "1000"], **more})
    assert why(answer) == f"refused {expected}"
    assert node.start(**{"command": ["sleep", "1000"], **more}) == answer
    shim = node.pid("shim")
    wait_for(lambda: not is_alive(shim))
    wait_for(lambda: not node.list_leftovers())


BAD_ORDERS: list[tuple[dict[str, Any], str]] = [
    ({"protocol": 2}, "protocol"),
    ({"protocol": None}, "protocol"),
    ({"token": None}, "bad_order"),
    ({"token": {**token(1), "generation": -1}}, "bad_order"),
    ({"token": {**token(1), "job": "a/b"}}, "bad_order"),
    ({"token": {**token(1), "submission": True}}, "bad_order"),
    ({"ranks": []}, "bad_order"),
    ({"ranks": [0, 0]}, "bad_order"),
    ({"ranks": ["0"]}, "bad_order"),
    ({"lease": 0}, "bad_order"),
    ({"lease": "60"}, "bad_order"),
    ({"address": "192.0.2.77"}, "address_not_ready"),
]


def test_bad_orders_are_refused_with_a_sentence(node: Node) -> None:
    for order, expected in BAD_ORDERS:
        answer = node.prepare(1, **order)
        assert why(answer) == f"refused {expected}", order
        assert answer is not None
        assert len(answer["reason"]) > 10, answer


@pytest.mark.long_after(variants=3)
@pytest.mark.parametrize(
    "more",
    [
        {"command": []},
        {"command": "train.py"},
        {"env": {"A": 1}},
        {"rank_env": [{}]},
        {"secret": "xyz"},
        {"prepared": None},
        {"log_pattern": "step ("},
        {"log_pattern": "step"},
        {"peers": [{"node": "n2"}]},
        {"fences": "yes"},
    ],
)
def test_bad_start_orders_leave_the_generation_prepared(node: Node, more: dict[str, Any]) -> None:
    node.prepare()
    assert why(node.start(**more)) == "refused bad_order"
    assert why(node.start()) == "done"


@pytest.mark.parametrize(
    ("number", "expected"),
    [(socket.EAI_AGAIN, "address_not_ready"), (socket.EAI_NONAME, "cannot_start")],
)
def test_a_silent_resolver_says_nothing_about_a_name(
    monkeypatch: pytest.MonkeyPatch, number: int, expected: str
) -> None:
    """The resolver is a double: which of the two errors a real one gives is its machine's."""

    def fail(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(number, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(Refusal) as refused:
        peers.resolve("n2.example", 0)
    assert refused.value.answer["why"] == expected
    assert "n2.example" in refused.value.answer["reason"]


def test_noise_on_a_session_is_answered_and_does_not_end_it(node: Node) -> None:
    process = node.session()
    assert process.stdin is not None
    process.stdin.write(b"not json\n[1]\n")
    process.stdin.flush()
    assert why(node.order("dance")) == "refused bad_order"
    assert why(node.order("list")) == "done"


def test_one_command_a_process_answers_on_python_3_8(node: Node) -> None:
    interpreter = str(OLD_PYTHON) if OLD_PYTHON.exists() else sys.executable
    call = [interpreter, str(node.agent), "list"]
    for given, expected in (
        (b'{"protocol":\n1}', "done"),
        (b"nonsense", "refused"),
        (b"", "refused"),
    ):
        done = subprocess.run(
            call, input=given, capture_output=True, env=node.environment, timeout=100
        )
        assert (done.returncode, json.loads(done.stdout)["outcome"]) == (0, expected)


@pytest.mark.skipif(not OLD_PYTHON.exists(), reason="no Python 3.8 here")
def test_a_whole_life_on_python_3_8(make_node: Any) -> None:
    node = make_node("old", interpreter=str(OLD_PYTHON))
    pids = node.run(1)
    watch = node.watch()
    os.kill(pids["1"], signal.SIGKILL)
    assert watch.read_observation("RankExited")["signal"] == 9
    assert why(node.stop()) == "done"


def test_a_state_folder_of_another_user_is_refused(node: Node) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(node.state, 65534, 65534)
    call = [sys.executable, str(node.agent), "list"]
    done = subprocess.run(
        call, input=b'{"protocol":1}', capture_output=True, env=node.environment, timeout=100
    )
    assert json.loads(done.stdout)["why"] == "cannot_start"


def test_only_the_newest_ten_generations_keep_their_folders(node: Node) -> None:
    for generation in range(1, 13):
        node.prepare(generation)
    assert sorted(int(path.name[2:]) for path in node.folder().parent.glob("1-*")) == list(
        range(3, 13)
    )


def test_a_state_path_longer_than_a_socket_address_works(make_node: Any) -> None:
    node = make_node("/".join(["deep" * 10] * 4))
    assert len(str(node.state)) > 108
    node.run(1)
    assert node.watch().read_until("hello")["state"] == "running"
    shim = node.pid("shim")
    assert why(node.stop()) == "done"
    wait_for(lambda: not is_alive(shim))  # until then it makes again what is removed
    shutil.rmtree(node.state / "jobs")


def test_a_state_folder_removed_under_a_session_is_made_again(node: Node) -> None:
    assert why(node.order("list")) == "done"
    shutil.rmtree(node.state)
    assert why(node.stop()) == "done"
    shutil.rmtree(node.state)
    assert all(map(is_alive, node.run(2).values()))
    assert node.state.stat().st_mode & 0o777 == 0o700


def test_the_environment_of_a_rank(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of another launcher")
    monkeypatch.setenv("RELAUNCH_SECRET", "of the session")
    monkeypatch.setenv("KEPT", "from the session")
    code = (
        "import json,os; print(json.dumps([dict(os.environ), os.getcwd(), os.getsid(0) == "
        "os.getpid()]))"
    )
    monkeypatch.setenv("WANDB_RUN_ID", "of the shell")
    own = [{"RANK": "0"}, {"RANK": "1", "BOTH": "own", "WANDB_RUN_ID": "of the submission"}]
    node.run(1, python_command(code), env={"BOTH": "common"}, rank_env=own, workdir=str(tmp_path))
    wait_for(lambda: node.log(0).endswith("\n") and node.log(1).endswith("\n"))
    first, second = json.loads(node.log(0)), json.loads(node.log(1))
    environment = second[0]
    assert (first[0]["RANK"], first[0]["BOTH"], environment["RANK"], environment["BOTH"]) == (
        "0",
        "common",
        "1",
        "own",
    )
    assert environment["KEPT"] == "from the session"
    assert environment["WANDB_RUN_ID"] == "of the shell"
    assert "RELAUNCH_SECRET" not in environment
    assert "TORCHELASTIC_RUN_ID" not in environment
    assert environment["RELAUNCH_TOKEN"] == "default/j/1/1"
    assert environment["RELAUNCH_NODE_STATE"] == str(node.state)
    assert environment["TORCHELASTIC_ERROR_FILE"] == str(node.folder() / "errors/rank_1.json")
    assert environment["RELAUNCH_PROGRESS_FILE"] == str(node.folder() / "progress/rank_1")
    assert second[1:] == [str(tmp_path), True]


@pytest.mark.long_after(variants=2)
@pytest.mark.parametrize(
    ("of_node", "of_job", "found"),
    [(None, {}, "1"), ("", {}, ""), ("x", {}, "x"), ("x", {"PYTHONUNBUFFERED": ""}, "")],
)
def test_output_is_unbuffered_unless_node_or_job_say_else(
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
    of_node: str | None,
    of_job: dict[str, str],
    found: str,
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    if of_node is not None:
        monkeypatch.setenv("PYTHONUNBUFFERED", of_node)
    node.run(1, ["/bin/sh", "-c", 'echo "found $PYTHONUNBUFFERED."'], ranks=1, env=of_job)
    wait_for(lambda: node.log(0) == f"found {found}.\n")


def test_a_rank_starts_with_default_signals_and_descriptors(node: Node) -> None:
    node.run(
        1, ["sh", "-c", "ls -l /proc/self/fd; grep -E 'Sig(Ign|Blk)' /proc/self/status"], ranks=1
    )
    wait_for(lambda: "SigIgn" in node.log())
    masks = dict(re.findall(r"(Sig\w+):\s*([0-9a-f]{16})\n", node.log()))
    # 32 and 33 are libc's own, and no program can change them; make (by posix_spawn) passes them as
    # ignored.
    assert {name: int(mask, 16) & 0x7FFFFFFF for name, mask in masks.items()} == {
        "SigBlk": 0,
        "SigIgn": 0,
    }
    assert node.log().count("->") == 4  # three, and the listing's own


# A rank is unbuffered: its `print` would write a line and its end one after the other, and so be
# two answers now and then.
PRINTS_ON_SIGNAL = """
import os
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
os.write(1, b"ready\\n")
while True:
    signal.sigwait({signal.SIGUSR1})
    os.write(1, b"more\\n")
"""


def test_a_command_that_comes_again_keeps_its_child(node: Node) -> None:
    def list_idle() -> set[int]:
        return {pid for pid in node.list_processes() if read_name(pid) == "relaunch-idle"}

    pid = node.run(1, python_command(PRINTS_ON_SIGNAL), ranks=1)["0"]
    answer = expect_done(node.order("logs", token=token(1), wait=PATIENCE))
    for _ in range(2):
        offsets = {"0": answer["chunks"][0]["next"]}
        reading = node.begin("logs", token=token(1), wait=PATIENCE, offsets=offsets)
        # One reads, and two were forked ahead for a launch.
        wait_for(lambda: "relaunch-order" in map(read_name, node.list_processes()))
        before = wait_for(lambda: list_idle() if len(list_idle()) == 2 else None)
        os.kill(pid, signal.SIGUSR1)
        answer = expect_done(reading.read_rest()[-1])
        wait_for(lambda: len(list_idle()) == 3)
        assert before < list_idle()


def test_waiting_children_serve_again_and_killed_ones_return(
    node: Node,
) -> None:
    def spares() -> set[int]:
        return {pid for pid in node.list_processes() if read_name(pid) == "relaunch-idle"}

    assert why(node.order("list")) == "done"
    before = wait_for(lambda: spares() if len(spares()) == 2 else None)
    for _ in range(5):
        assert why(node.order("list")) == "done"
    # A third one was forked where an answer took long.
    wait_for(lambda: before <= spares())
    killed = spares()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, killed)))
    assert why(node.order("list")) == "done"
    assert why(node.prepare(1)) == "done"
    wait_for(lambda: len(spares()) == 2)
    assert not spares() & {*killed, node.pid("shim")}


def test_a_start_after_an_order_to_stop_launches_nothing(node: Node) -> None:
    prepared = node.prepare(1)
    assert prepared is not None
    os.kill(node.pid("shim"), signal.SIGSTOP)
    with node.connect_to_shim() as late:
        late.sendall(json.dumps({"stop": {"stop_grace": 1.0, "reason": "a test"}}).encode() + b"\n")
        order = {**start_order(token(1), prepared=prepared["stamp"]), "command": ["sleep", "1000"]}
        late.sendall(json.dumps({"start": order}).encode() + b"\n")
        os.kill(node.pid("shim"), signal.SIGCONT)
        answers = [json.loads(line) for line in late.makefile("rb")]
    assert [answer.get("why") for answer in answers if "outcome" in answer] == ["expired"]
    wait_for(lambda: not is_alive(node.pid("shim")))
    assert not (node.folder() / "started.json").exists()


def test_a_brief_list_has_little_of_what_is_over(node: Node) -> None:
    for generation in (1, 2, 3):
        expect_done(node.prepare(generation))
        expect_done(node.stop(generation))
    expect_done(node.prepare(4))
    pids = expect_done(node.start(4))["pids"]
    for over in (token(1, job="over"), token(2, job="over")):
        expect_done(node.prepare(token=over))
        expect_done(node.stop(token=over))
    everything = expect_done(node.order("list"))["jobs"]
    assert {one["job"]: len(one["generations"]) for one in everything} == {"j": 4, "over": 2}

    def list_briefly() -> dict[str, Any]:
        return {one["job"]: one for one in expect_done(node.order("list", brief=True))["jobs"]}

    def list_states() -> list[str]:
        return [one["state"] for job in list_briefly().values() for one in job["generations"]]

    wait_for(lambda: sorted(list_states()) == ["gone", "running"])  # a stop is answered before that
    jobs = list_briefly()
    (running,), ended = jobs["j"]["generations"], jobs["over"]["generations"]
    assert (running["generation"], running["state"]) == (4, "running")
    assert {str(one["rank"]): one["pid"] for one in running["ranks"]} == pids
    assert ended == [{"submission": 1, "generation": 2, "state": "gone", "ranks": []}]
    assert (jobs["over"]["prepared"], jobs["over"]["stopped"]) == ([1, 2], [1, 2])
    # Ranks that have lost their shim, supervisor and guard are listed: they have to be stopped.
    folder = next(path.parent for path in node.state.glob("jobs/*/1-4/started.json"))
    for name in ("order.json", "started.json"):
        shutil.copy(folder / name, folder.with_name("1-2") / name)
    jobs = list_briefly()
    assert [one["state"] for one in jobs["j"]["generations"]] == ["gone", "running"]
    assert {str(one["rank"]): one["pid"] for one in jobs["j"]["generations"][0]["ranks"]} == pids

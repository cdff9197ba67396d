"""What ranks find and leave: environment, logs and errors, and how late they may be."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest

from relaunch.activities.gang import CASCADE_GATHER_TIMEOUT_S
from relaunch.backends.local import cut, heal
from tests import planted
from tests.chaos.world import ROOT, Job, World, chaos_policy, environments, eventually

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


async def trained(job: Job, generation: int) -> None:
    await job.until_phase("RUNNING", generation=generation)
    await job.until_steps()


async def finish(job: Job) -> None:
    job.let_end()
    await job.until_phase("SUCCEEDED")
    await job.world.tidy(job)


def environment(job: Job, generation: int, rank: int) -> dict[str, str]:
    return dict(json.loads((job.folder / "env" / f"{generation}.{rank}.json").read_text()))


@pytest.mark.long
async def test_s3_11_s4_9_each_rank_finds_its_place_in_its_environment(
    world: World,
) -> None:
    folder = world.folder / "jobs" / "variables" / "env"
    folder.mkdir(parents=True)
    job = await world.submit(
        name="variables", nproc=2, env={"MINE": "1"}, policy=chaos_policy(max_restarts=5)
    )
    await trained(job, 1)
    os.kill(job.rank_pids()[0], signal.SIGKILL)
    await trained(job, 2)
    await job.until_watched()
    cut(world.node("n2"), freeze_ranks=True)
    await trained(job, 3)
    heal(world.node("n2"))
    token = job.starts()[0]["token"].rpartition("/")[0]
    submission = token.rpartition("/")[2]
    # The node of group rank 1, and how often that place was filled and started, by generation.
    second = {1: ("n2", 1, 1), 2: ("n2", 1, 2), 3: ("n3", 2, 1)}
    run = environment(job, 1, 0)["WANDB_RUN_ID"]
    assert run.startswith("variables-")
    for generation in (1, 2, 3):
        ports = set()
        for rank in range(4):
            group, local = divmod(rank, 2)
            node, scheduled, started = second[generation] if group else ("n1", 1, generation)
            found = environment(job, generation, rank)
            state = world.node(node)
            generation_folder = f"{submission}-{generation}"
            ports.add(found["MASTER_PORT"])
            expected = {
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": "4",
                "LOCAL_WORLD_SIZE": "2",
                "GROUP_RANK": str(group),
                "GROUP_WORLD_SIZE": "2",
                "ROLE_RANK": str(rank),
                "ROLE_NAME": "default",
                "ROLE_WORLD_SIZE": "4",
                "MASTER_ADDR": world.address("n1"),
                "TORCHELASTIC_RESTART_COUNT": str(generation - 1),
                "TORCHELASTIC_MAX_RESTARTS": "5",
                "TORCHELASTIC_RUN_ID": f"variables-{submission}",
                "TORCHELASTIC_USE_AGENT_STORE": "False",
                "MA_SCHEDULE_CNT": str(scheduled),
                "MA_PROC_START_CNT": str(started),
                "RELAUNCH_JOB": "variables",
                "RELAUNCH_GENERATION": str(generation),
                "RELAUNCH_TOKEN": f"{token}/{generation}",
                "RELAUNCH_NODE": node,
                "RELAUNCH_NODE_STATE": str(state.resolve()),
                "OMP_NUM_THREADS": "1",
                "WANDB_RUN_ID": f"{run}-{rank}" if rank else run,
                "WANDB_RESUME": "allow",
                "MINE": "1",
            }
            assert {name: found.get(name) for name in expected} == expected, (
                f"rank {rank} of generation {generation}"
            )
            assert found["TORCHELASTIC_ERROR_FILE"].endswith(
                f"{generation_folder}/errors/rank_{rank}.json"
            )
            assert found["RELAUNCH_PROGRESS_FILE"].endswith(
                f"{generation_folder}/progress/rank_{rank}"
            )
            foreign_processes = {
                name for name in found if name.startswith(("RELAUNCH_", "TORCHELASTIC_"))
            } - set(expected)
            assert foreign_processes == {"TORCHELASTIC_ERROR_FILE", "RELAUNCH_PROGRESS_FILE"}
            assert not any(name.startswith("TEMPORAL_") for name in found), (
                "a rank has no business with the server"
            )
        assert len(ports) == 1
    assert job.lines("violations") == []
    await finish(job)


PRINTS = """
import os, sys, time
rank, generation, folder = os.environ["RANK"], os.environ["RELAUNCH_GENERATION"], sys.argv[1]
print(f"generation {generation} warns", file=sys.stderr)
for number in range(100_000):
    print(f"generation {generation} prints {number}")
    with open(f"{folder}/printed.{generation}.{rank}", "w") as file:
        file.write(str(number))
    if os.path.exists(f"{folder}/stop"):
        break
    time.sleep(0.05)
"""


@pytest.mark.long
async def test_s3_10_output_is_followed_and_found_after_a_replacement(
    world: World,
) -> None:
    folder = world.folder / "jobs" / "prints"
    job = await world.submit(
        name="prints",
        policy=chaos_policy(causes={"UNKNOWN": [{"strategy": "REPLACE_NODE", "tries": 2}]}),
        command=[sys.executable, "-S", "-c", PRINTS, str(folder)],
        output="separate",
        checkpoint={"directory": str(folder / "out")},
    )
    following = await start_logs(world, job, "--follow")
    assert following.stdout is not None
    seen = ""
    # While the rank runs: it prints without flushing, into a file.
    while "[rank 1] generation 1 prints 5\n" not in seen:
        seen += (line := (await following.stdout.readline()).decode())
        assert line, "the follower ended"
    os.kill(job.rank_pids("n2")[0], signal.SIGKILL)
    while "[rank 1] generation 2 prints 5\n" not in seen:
        seen += (line := (await following.stdout.readline()).decode())
        assert line, "the follower ended at the restart"
    (folder / "out" / "checkpoint-10").mkdir(parents=True)
    for name in ("model.safetensors", "trainer_state.json"):
        (folder / "out" / "checkpoint-10" / name).write_text("x")
    (folder / "out" / "checkpoint-20").mkdir()
    shown = json.loads("\n".join((await read_page(world, "show", "prints", "--json"))[0]))
    assert shown["checkpoint"]["newest"]["step"] == 10
    lines, _, _ = await read_page(world, "history", "prints")
    assert "checkpoint-10 (step 10, Hugging Face), saved" in lines[-2]
    assert "checkpoint-20 is not complete: it is empty" in lines[-1]
    job.let_end()
    out, err = await following.communicate()
    assert following.returncode == 0
    assert "--- generation 2 (after rank 1 on n2 was killed by SIGKILL" in err.decode()
    assert "job prints SUCCEEDED" in err.decode()
    assert [slot.node for slot in (await job.state()).slots] == ["n1", "n3"]
    # What it printed before SIGKILL is there, and the node that it was on is found.
    for generation in (1, 2):
        lines, _, code = await read_logs(world, job, "--generation", str(generation))
        for rank in (0, 1):
            last = int((folder / f"printed.{generation}.{rank}").read_text())
            expected = [
                f"[rank {rank}] generation {generation} prints {n}" for n in range(last + 1)
            ]
            own = [line for line in lines if line.startswith(f"[rank {rank}] generation")]
            assert own[: last + 1] == expected and len(own) <= last + 2
            assert set(own) <= set((seen + out.decode()).splitlines()), "all of it was followed"
        assert code == 0
    words = ("--generation", "1", "--grep", "prints [02]$", "--rank", "1")
    lines, _, _ = await read_logs(world, job, *words)
    assert lines == [f"[rank 1] generation 1 prints {number}" for number in (0, 2)]
    lines, _, _ = await read_logs(world, job, "--generation", "1", "--stream", "stderr")
    assert lines == [f"[rank {rank}] generation 1 warns" for rank in (0, 1)]
    assert "[rank 1] stderr: generation 2 warns\n" in seen + out.decode()
    (log,) = job.on("n2").glob("*-1/logs/rank_1.log")
    log.unlink()
    lines, err_text, code = await read_logs(world, job, "--generation", "1")
    printed = [line for line in lines if "stderr:" not in line]
    assert code == 1 and {line.split("]")[0] for line in printed} == {"[rank 0"}
    assert "n2: rank 1 " in err_text
    await world.tidy(job)


async def start_logs(world: World, job: Job, *words: str) -> asyncio.subprocess.Process:
    return await start_command(world, "logs", job.name, *words)


async def start_command(world: World, *words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "starter.py"),
        *words,
        env=world.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


async def read_logs(world: World, job: Job, *words: str) -> tuple[list[str], str, int | None]:
    return await read_page(world, "logs", job.name, *words)


async def read_page(world: World, *words: str) -> tuple[list[str], str, int | None]:
    process = await start_command(world, *words)
    out, err = await process.communicate()
    planted.check(f"the output of {words}", out + err)
    return out.decode().splitlines(), err.decode(), process.returncode


@pytest.mark.long
async def test_a_preset_finds_the_step_in_what_one_rank_prints(world: World) -> None:
    """A bar of Lightning, which counts from the beginning in each epoch."""
    prints = r"""
    bar() { printf '\rEpoch %d:  50%%|█████     | %d/4 [00:01<00:01,  4.00it/s, v_num=0]' $1 $2; }
    if [ "$RANK" = 0 ]; then bar 0 0; bar 0 2; bar 0 4; bar 1 0; bar 1 3; printf '\n'; fi
    until [ -e "$STOP" ]; do sleep 0.1; done"""
    stop = world.folder / "stop-bars"
    job = await world.submit(
        command=["/bin/sh", "-c", prints], progress="lightning", env={"STOP": str(stop)}
    )

    async def reported() -> bool:
        watch = (await job.look()).watch
        return watch is not None and watch.step == 7

    await job.until(reported, "the step is not found")
    stop.touch()
    await job.until_phase("SUCCEEDED")
    progress = (await job.state()).progress
    assert progress is not None and progress.step == 7
    await world.tidy(job)


async def test_s3_6_the_failed_ranks_traceback_reaches_the_incident(
    world: World,
) -> None:
    # On a busy machine its node may report the rank long after the other has reported those that it
    # broke.
    job = await world.submit(nproc=2, policy=chaos_policy({"lease": "60s", "lost_after": "60s"}))
    await trained(job, 1)
    second = (await job.state()).slots[1].node
    # The rank reads the file as soon as it is there.
    (job.folder / "failing").write_text("the loss is not a number")
    (job.folder / "failing").rename(job.folder / "fail.3")
    await trained(job, 2)
    (incident,) = await job.incidents()
    assert str(incident.cause) == "APPLICATION"
    assert (incident.nodes, incident.ranks) == ((second,), (3,)), incident.reason
    assert "RuntimeError: the loss" in incident.reason
    assert "RuntimeError: the loss is not a number" in incident.traceback
    assert "Traceback (most recent call last)" in incident.traceback
    assert str(incident.certainty) == "certain"
    state = await job.state()
    assert [(str(t.cause), t.spent) for t in state.tries] == [("APPLICATION", True)]
    await finish(job)


@pytest.mark.long
async def test_s3_6_a_slow_node_is_asked_for_the_cause(world: World) -> None:
    policy = chaos_policy({"lease": "60s", "lost_after": "60s"}, hang={})
    job = await world.submit(nproc=2, policy=policy)
    await trained(job, 1)
    await job.until_watched()
    stopped = [job.agent_pid("n2", who) for who in ("shim", "supervisor")]
    for pid in stopped:
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
    try:
        (job.folder / "fail.3").write_text("the loss is not a number")

        async def have_failed() -> bool:
            return not job.rank_pids("n1")

        await job.until(have_failed, "the ranks of n1 do not see that rank 3 is gone")
        await asyncio.sleep(CASCADE_GATHER_TIMEOUT_S + 3.0)
        assert await job.phase() == ("RUNNING", 1)
    finally:
        for pid in stopped:
            if pid is not None:
                os.kill(pid, signal.SIGCONT)
    await trained(job, 2)
    (incident,) = await job.incidents()
    assert (str(incident.cause), incident.ranks) == ("APPLICATION", (3,)), incident.reason
    assert "RuntimeError: the loss is not a number" in incident.reason
    await finish(job)


async def test_s2_9_a_cancel_ends_ranks_with_all_that_they_began(world: World) -> None:
    """All ignore SIGTERM, and some have lost their parent."""
    script = "trap '' TERM; (sleep 1001 &); sleep 1002 & sleep 1003"
    policy = chaos_policy({"stop_grace": "1s"})
    command = ["/bin/sh", "-c", script]
    job = await world.submit(command=command, env={"MINE": "whole-groups"}, policy=policy)

    def living() -> list[int]:
        return [pid for pid, variables in environments() if b"MINE=whole-groups" in variables]

    async def have_begun() -> bool:
        return len(living()) == 8

    await eventually(have_begun, "two shells with three others each do not begin")
    await job.signal("cancel", {"reason": "enough", "by": "ada"})
    await job.until_phase("CANCELLED")
    assert living() == []
    await world.tidy(job)


async def test_s3_5_ranks_that_end_within_the_exit_barrier_succeed(world: World) -> None:
    job = await world.submit(
        policy=chaos_policy({"exit_barrier": "20s"}),
        command=["/bin/sh", "-c", 'if [ "$RANK" = 1 ]; then sleep 3; fi; exit 0'],
    )
    await job.until_phase("SUCCEEDED")
    assert await job.incidents() == []
    await world.tidy(job)


async def test_s3_5_a_rank_that_stalls_past_the_exit_barrier_is_hung(
    world: World,
) -> None:
    policy = chaos_policy({"exit_barrier": "2s"}, causes={"HANG": [{"strategy": "FAIL"}]})
    job = await world.submit(
        policy=policy,
        command=["/bin/sh", "-c", 'if [ "$RANK" = 1 ]; then exec sleep 600; fi; exit 0'],
    )
    await job.until_phase("FAILED")
    (incident,) = await job.incidents()
    assert str(incident.cause) == "HANG"
    assert "2 s ago" in incident.reason

    async def has_no_ranks() -> bool:
        return not job.rank_pids()

    await eventually(has_no_ranks, "the rank that hung is left")
    await world.tidy(job)


ENDINGS = {
    "echo": "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]",
    # All of it, with the advice (https://github.com/RLinf/RLinf/issues/255).
    "root": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 86.00 MiB. GPU 0 has a "
    "total capacity of 23.64 GiB of which 264.00 MiB is free. If reserved but unallocated memory "
    "is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation. "
    "See documentation for Memory Management",
}


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize("first", ["echo", "root"])
async def test_s3_6_an_echo_hides_no_cause_whichever_comes_first(world: World, first: str) -> None:
    second = next(name for name in ENDINGS if name != first)
    script = """
    if [ "$RANK" = 0 ]; then echo "$FIRST"; else sleep 0.5; echo "$SECOND"; fi
    exit 1"""
    job = await world.submit(
        command=["/bin/sh", "-c", script],
        env={"FIRST": ENDINGS[first], "SECOND": ENDINGS[second]},
        policy=chaos_policy(causes={"OUT_OF_MEMORY": [{"strategy": "FAIL"}]}),
    )
    await job.until_phase("FAILED")
    (incident,) = await job.incidents()
    assert (str(incident.cause), incident.generation) == ("OUT_OF_MEMORY", 1)
    assert incident.ranks == ((0,) if first == "root" else (1,))
    await world.tidy(job)


SLOW_TO_END = """
import atexit, os, socket, sys, time
rank, root = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
def leave():
    for peer in peers:
        peer.close()
    time.sleep(20)
if os.environ["RELAUNCH_GENERATION"] != "1":
    while not os.path.exists(f"{sys.argv[1]}/stop"):
        time.sleep(0.1)
elif rank == root:
    with socket.create_server(address) as server:
        peers = [server.accept()[0] for _ in range(root)]
    atexit.register(leave)
    raise RuntimeError("the loss is not a number")
else:
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.1)
    peer.recv(1)
    raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]")
"""


@pytest.mark.long
@pytest.mark.parametrize("nproc", [1, 2], ids=["alive", "stopped by its node"])
async def test_a_rank_that_is_slow_to_end_is_the_cause(world: World, nproc: int) -> None:
    name = f"slow-{nproc}"
    folder = world.folder / "jobs" / name
    command = [sys.executable, "-S", "-c", SLOW_TO_END, str(folder)]
    job = await world.submit(name=name, nproc=nproc, command=command)
    await job.until_phase("RUNNING", generation=2)
    root, node = 2 * nproc - 1, (await job.state()).slots[1].node
    (incident,) = await job.incidents()
    assert (str(incident.cause), incident.ranks) == ("APPLICATION", (root,)), incident.reason
    assert incident.nodes == (node,)
    assert "RuntimeError: the loss is not a number" in incident.reason
    assert "Traceback (most recent call last)" in incident.traceback
    lines, _, _ = await read_page(world, "history", name)
    assert f"rank {root} on {node} failed" in " ".join(lines), lines
    await finish(job)

"""The example that demos and users run.

Real processes, real sockets, real SIGKILL, results compared bit for bit.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from examples import train_lm

SCRIPT = Path(train_lm.__file__)
QUICK = ("--steps", "60", "--batch", "8", "--checkpoint-every", "5")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def eventually(what: str, holds: Callable[[], bool], seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.005)


class Launch:
    """One generation of ranks as real processes, with the environment that a launcher gives."""

    def __init__(
        self, folder: Path, world: int, flags: tuple[str, ...], generation: int = 1
    ) -> None:
        self.folder = folder / f"generation-{generation}"
        self.folder.mkdir(parents=True)
        self.port, self.generation, self.world, self.flags = free_port(), generation, world, flags
        self.ranks: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, *ranks: int) -> Launch:
        for rank in ranks or range(self.world):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.port),
                "TORCHELASTIC_ERROR_FILE": str(self.folder / f"error-{rank}.json"),
                "RELAUNCH_PROGRESS_FILE": str(self.folder / f"progress-{rank}"),
                "RELAUNCH_GENERATION": str(self.generation),
            }
            with open(self.folder / f"log-{rank}", "wb") as log:
                self.ranks[rank] = subprocess.Popen(
                    [sys.executable, str(SCRIPT), *self.flags],
                    env=environment,
                    stdout=log,
                    stderr=log,
                )
        return self

    def log(self, rank: int) -> str:
        return (self.folder / f"log-{rank}").read_text()

    def step(self, rank: int) -> int:
        progress = self.folder / f"progress-{rank}"
        return int(json.loads(progress.read_text())["step"]) if progress.exists() else 0

    def error(self, rank: int) -> str:
        error = json.loads((self.folder / f"error-{rank}.json").read_text())["message"]
        assert {"py_callstack", "timestamp"} == set(error["extraInfo"])
        return str(error["message"])

    def wait(self, seconds: float = 180.0) -> dict[int, int]:
        deadline = time.monotonic() + seconds
        return {
            rank: process.wait(max(0.0, deadline - time.monotonic()))
            for rank, process in self.ranks.items()
        }

    def kill(self) -> None:
        for process in self.ranks.values():
            process.kill()
            process.wait()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    launches: list[Launch] = []

    def make(name: str, world: int, *flags: str, generation: int = 1) -> Launch:
        launches.append(Launch(tmp_path / name, world, flags, generation))
        return launches[-1]

    yield make
    for one in launches:
        one.kill()


@pytest.mark.long  # tests/test_demo.py kills more, through the whole service
def test_a_run_killed_twice_ends_with_the_bits_of_a_whole_one(
    tmp_path: Path, launch: Callable[..., Launch]
) -> None:
    calm, harried = tmp_path / "calm", tmp_path / "harried"
    undisturbed = launch("a", 4, *QUICK, "--checkpoint", str(calm)).start()
    assert undisturbed.wait() == {0: 0, 1: 0, 2: 0, 3: 0}

    for generation, victim, at in ((1, 2, 17), (2, 0, 38)):
        # Slowed down, so that on a busy machine too the blow falls before the end.
        flags = (*QUICK, "--checkpoint", str(harried), "--step-time", "0.05")
        ranks = launch("b", 4, *flags, generation=generation).start()
        eventually(
            f"rank {victim} is past step {at}", lambda r=ranks, v=victim, a=at: r.step(v) >= a
        )  # type: ignore[misc]
        ranks.ranks[victim].send_signal(signal.SIGKILL)
        exits = ranks.wait()
        assert exits.pop(victim) == -signal.SIGKILL
        assert set(exits.values()) == {1}
        assert not (harried / "final.json").exists()
    last = launch("b", 4, *QUICK, "--checkpoint", str(harried), generation=3).start()
    assert last.wait() == {0: 0, 1: 0, 2: 0, 3: 0}

    told = [json.loads((last.folder / f"progress-{rank}").read_text()) for rank in range(4)]
    assert [one.get("checkpoint") for one in told] == [told[0]["step"], None, None, None], (
        "who writes them tells of them"
    )
    resumed = re.search(r"going on after step (\d+)", last.log(3))
    assert resumed is not None
    assert int(resumed[1]) in (35, 40, 45, 50, 55)
    assert (calm / "final.json").read_bytes() == (harried / "final.json").read_bytes()
    assert (
        json.loads((calm / "final.json").read_text())["loss"] < 3.3
    )  # it learns: an even guess is ln 67 = 4.2


def test_torn_and_corrupt_checkpoints_are_skipped_in_words(
    tmp_path: Path, launch: Callable[..., Launch]
) -> None:
    folder = tmp_path / "checkpoints"
    assert launch("first", 1, *QUICK, "--checkpoint", str(folder)).start().wait() == {0: 0}
    expected = (folder / "final.json").read_bytes()
    (folder / "final.json").unlink()
    third, second, newest = sorted(folder.glob("step-*.ckpt"))
    newest.write_bytes(newest.read_bytes()[:100_000])
    data = bytearray(second.read_bytes())
    data[-7] ^= 0x10
    second.write_bytes(data)

    again = launch("again", 1, *QUICK, "--checkpoint", str(folder)).start()
    assert again.wait() == {0: 0}
    for spoilt in (newest, second):
        assert (
            f"checkpoint {spoilt} cannot be read and is skipped: its digest does not match its "
            "content" in again.log(0)
        )
    assert "after step 50" in again.log(0)
    assert expected == (folder / "final.json").read_bytes()
    assert third.exists()


def test_a_dead_peer_fails_the_others_before_their_exchange(
    launch: Callable[..., Launch],
) -> None:
    # A step of a minute: the loss has to be noticed while the ranks only wait, not at the next
    # exchange.
    ranks = launch("a", 4, "--steps", "3", "--batch", "8", "--step-time", "60").start()
    eventually(
        "all ranks are in their first step",
        lambda: all("going on" in ranks.log(r) for r in range(4)),
    )
    ranks.ranks[1].kill()
    killed = time.monotonic()
    assert ranks.wait() == {0: 1, 1: -9, 2: 1, 3: 1}
    assert time.monotonic() - killed < 50.0
    assert "ConnectionError: rank 0: Connection closed by peer: rank 1" in ranks.error(0)
    assert "ConnectionError: rank 3: Connection closed by peer: rank 0" in ranks.error(3)


def test_one_process_runs_without_any_environment(tmp_path: Path) -> None:
    bare = {"PATH": os.environ["PATH"]}
    command = [sys.executable, str(SCRIPT), "--steps", "3", "--batch", "2"]
    first, second = (
        subprocess.run(command, env=bare, capture_output=True, text=True, check=True)
        for _ in range(2)
    )
    assert "final loss " in first.stdout
    assert first.stdout == second.stdout


def test_rank_0_turns_away_a_rank_of_another_generation(launch: Callable[..., Launch]) -> None:
    ranks = launch("a", 2, "--steps", "2", "--batch", "2", generation=5).start(0)
    stale: list[socket.socket] = []

    def connected() -> bool:
        try:
            stale.append(socket.create_connection(("127.0.0.1", ranks.port), timeout=5.0))
        except ConnectionRefusedError:
            return False
        return True

    eventually("rank 0 listens", connected)
    with stale[0] as peer:
        peer.sendall(struct.pack("!8sIII", b"train_lm", 4, 2, 1))
        assert peer.recv(1) == b""
    assert ranks.start(1).wait() == {0: 0, 1: 0}


def test_a_checkpoint_of_other_flags_leaves_an_error_file(
    tmp_path: Path, launch: Callable[..., Launch]
) -> None:
    flags = ("--batch", "2", "--checkpoint", str(tmp_path / "checkpoints"))
    assert launch("first", 1, *flags, "--steps", "2").start().wait() == {0: 0}
    other = launch("other", 1, *flags, "--steps", "4", "--seed", "9").start()
    assert other.wait() == {0: 1}
    assert other.error(0).startswith("WrongRun: checkpoint ")
    assert "(seed 1 there, 9 here)" in other.error(0)


def test_the_gradient_written_by_hand_is_the_slope_of_the_loss() -> None:
    shape = train_lm.Shape(vocabulary=11, context=7, width=8, heads=2, layers=2)
    random = np.random.default_rng(0)
    flat = shape.initial(3).astype(np.float64)
    sequences = random.integers(0, 11, size=(3, 8))
    _, gradient = train_lm.loss_and_gradient(shape, flat, sequences, 21)

    for at in random.choice(shape.size, 200, replace=False):
        up, down = flat.copy(), flat.copy()
        up[at] += 1e-6
        down[at] -= 1e-6
        higher, lower = (
            train_lm.loss_and_gradient(shape, moved, sequences, 21)[0] for moved in (up, down)
        )
        assert (higher - lower) / 2e-6 == pytest.approx(gradient[at], rel=1e-4, abs=1e-7)


def test_the_ranks_shares_add_up_to_the_gradient_of_the_batch() -> None:
    shape = train_lm.Shape(vocabulary=11, context=7, width=8, heads=2)
    flat = shape.initial(3).astype(np.float64)
    text = np.random.default_rng(1).integers(0, 11, size=100)
    batch = train_lm.sequences_of(text, seed=1, step=5, batch=6, context=7)
    loss, whole = train_lm.loss_and_gradient(shape, flat, batch, 42)
    shares = [
        train_lm.loss_and_gradient(shape, flat, batch[part], 42)
        for part in (slice(0, 1), slice(1, 6), slice(6, 6))
    ]
    assert sum(share[0] for share in shares) == pytest.approx(loss)
    np.testing.assert_allclose(
        np.sum([share[1] for share in shares], axis=0), whole, rtol=1e-9, atol=1e-12
    )

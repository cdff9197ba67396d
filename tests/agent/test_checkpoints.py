"""Which checkpoints a node finds in a folder: files as their libraries write them, some torn."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_node import Node, expect_done, is_alive, refusal, wait_for

from relaunch.agent import checkpoints, processes
from relaunch.agent.checkpoints import TRACKER, find_checkpoints
from relaunch.agent.protocol import Fields, Refusal

HF = ("config.json", "model.safetensors", "trainer_state.json")
ACCELERATE = ("model.safetensors", "random_states_0.pkl")
DCP = (".metadata", "__0_0.distcp")


def write(folder: Path, *files: str, at: int, empty: str = "") -> None:
    """Write files into a folder, changed at a time; one of them is empty."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in files:
        path = folder / name
        path.mkdir() if name.endswith("/") else path.write_text("" if name == empty else "x")
        os.utime(path, (at, at))
    os.utime(folder, (at, at))


def save(path: Path, at: int, cut: int = 0) -> None:
    """Write a zip file, as torch.save does, without so many bytes of its end."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"x" * 1000)
    path.write_bytes(path.read_bytes()[: -cut or None])
    os.utime(path, (at, at))


def find(folder: Path) -> list[tuple[str, str, str]]:
    return [(one.name, one.format, one.incomplete) for one in find_checkpoints(str(folder))]


@pytest.mark.parametrize(
    ("name", "files", "empty", "kind", "incomplete"),
    [
        ("checkpoint-20", HF, "", "hf", ""),
        ("checkpoint-20", HF[::2], "", "hf", "no model weights"),
        ("checkpoint-20", HF[:2], "", "hf", "no trainer_state.json"),
        ("checkpoint-20", HF, "model.safetensors", "hf", "model.safetensors is empty"),
        ("checkpoint-20", HF, "trainer_state.json", "hf", "trainer_state.json is empty"),
        ("checkpoint-20", (), "", "hf", "it is empty"),
        ("checkpoint-20", ("pytorch_model_fsdp_0/", *HF[::2]), "", "hf", ""),
        ("checkpoint_2", ACCELERATE, "", "accelerate", ""),
        ("checkpoint_2", ACCELERATE[:1], "", "accelerate", "no random_states_0.pkl"),
        ("step-20", DCP, "", "dcp", ""),
        ("step-20", DCP[1:], "", "dcp", "no .metadata"),
        ("step-20", DCP, ".metadata", "dcp", ".metadata is empty"),
        ("step-20", DCP[:1], "", "dcp", "no .distcp files"),
        ("iter_0000020", ("mp_rank_00/",), "", "megatron", ""),
        ("iter_0000020", DCP, "", "dcp", ""),
        ("iter_0000020", ("common.pt",), "", "megatron", "no model weights"),
    ],
)
def test_a_folder_is_complete_with_what_is_written_last(
    name: str, files: tuple[str, ...], empty: str, kind: str, incomplete: str, tmp_path: Path
) -> None:
    write(tmp_path / name, *files, at=100, empty=empty)
    assert find(tmp_path) == [(name, kind, incomplete)]


def test_files_of_torch_are_complete_with_their_end(tmp_path: Path) -> None:
    save(tmp_path / "epoch=1-step=30.ckpt", 300, cut=10)
    save(tmp_path / "epoch=0-step=20.ckpt", 200)
    (tmp_path / "last.ckpt").symlink_to("epoch=0-step=20.ckpt")
    (tmp_path / "ckpt.pt").touch()
    os.utime(tmp_path / "ckpt.pt", (400, 400))
    (tmp_path / "train.log").write_text("step 20")
    (tmp_path / "gone.ckpt").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "wandb").mkdir()
    empty, torn, (name, *complete) = find(tmp_path)
    assert empty == ("ckpt.pt", "torch", "it is empty")
    assert torn == ("epoch=1-step=30.ckpt", "torch", "its end is missing")
    assert (name in ("epoch=0-step=20.ckpt", "last.ckpt"), complete) == (True, ["torch", ""])


def test_megatron_resumes_from_the_iteration_that_it_names(tmp_path: Path) -> None:
    write(tmp_path / "iter_0000010", "mp_rank_00/", at=100)
    write(tmp_path / "iter_0000020", *DCP, at=200)
    write(tmp_path, TRACKER, at=150)
    (tmp_path / TRACKER).write_text("10")
    torn = f"{TRACKER} still names iteration 10"
    assert find(tmp_path) == [("iter_0000020", "dcp", torn), ("iter_0000010", "megatron", "")]
    (tmp_path / TRACKER).write_text("30")
    missing = f"{TRACKER} names it, but it is missing"
    assert find(tmp_path)[0] == ("iter_0000030", "megatron", missing)
    (tmp_path / TRACKER).write_text("release")
    assert find(tmp_path)[0] == ("iter_0000020", "dcp", "")


NAMED = re.compile(r"step_(?P<step>[0-9]{1,15})[^/]*?")


def test_a_pattern_names_checkpoints_of_any_kind(tmp_path: Path) -> None:
    now = time.time()
    save(tmp_path / "step_10.pt", 100)
    write(tmp_path / "step_20", "rank0.bin", "rank1.bin", at=200)
    save(tmp_path / "step_30.pt", 300, cut=10)
    (tmp_path / "step_40.pkl").write_text("x")
    os.utime(tmp_path / "step_40.pkl", (now - 5, now - 5))
    (tmp_path / "tmp_step_50.pkl").write_text("x")
    save(tmp_path / "other.pt", 400)
    found = find_checkpoints(str(tmp_path), NAMED)
    assert [(one.name, one.format, one.incomplete) for one in found] == [
        ("step_40.pkl", "other", "it was changed less than 20 s ago"),
        ("step_30.pt", "torch", "its end is missing"),
        ("step_20", "other", ""),
    ]


def test_what_has_no_mark_is_complete_once_it_does_not_change(tmp_path: Path) -> None:
    now = time.time()
    write(tmp_path / "step_7", "weights.bin", at=int(now - 60))
    assert [one.incomplete for one in find_checkpoints(str(tmp_path), NAMED)] == [""]
    os.utime(tmp_path / "step_7" / "weights.bin", (now - 3, now - 3))
    (recent,) = find_checkpoints(str(tmp_path), NAMED)
    assert recent.incomplete == "it was changed less than 20 s ago"
    write(tmp_path / "step_8", at=int(now - 50))
    assert find_checkpoints(str(tmp_path), NAMED)[0].incomplete == "it is empty"


def test_few_files_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a network file system, the status of each file is a request.
    looked: list[str] = []
    look_at = checkpoints._look_at
    monkeypatch.setattr(
        checkpoints, "_look_at", lambda entry: (looked.append(entry.path), look_at(entry))[1]
    )
    shards = [f"__{rank}_0.distcp" for rank in range(100)]
    for step in range(10, 30):
        write(tmp_path / f"step-{step}", ".metadata", *shards, at=step)
    write(tmp_path / "step-30", *shards, at=30)
    write(tmp_path / "step-40", *shards, at=9)
    write(tmp_path, *(f"events.{number}" for number in range(100)), at=50)
    torn = [("step-30", "dcp", "no .metadata"), ("step-40", "dcp", "no .metadata")]
    assert sorted(find(tmp_path)) == sorted([*torn, ("step-29", "dcp", "")])
    assert len(looked) < 22 + 3 + 2 * 20


@pytest.fixture
def unkillable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Make readers as unkillable as if they hung in the kernel; return how they end."""
    kill, readers = os.kill, tmp_path / "readers"
    examine = checkpoints._examine_file

    def examine_file(path: str, name: str, entry: checkpoints.Entry) -> object:
        with readers.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return examine(path, name, entry)

    def end() -> None:
        for pid in readers.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                kill(int(pid), signal.SIGKILL)

    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    monkeypatch.setattr(processes, "die_with", lambda parent: None)
    monkeypatch.setattr(checkpoints, "_examine_file", examine_file)
    yield end
    end()


def test_a_folder_that_hangs_has_one_reader(
    unkillable: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, state = tmp_path / "out", tmp_path / "state"
    folder.mkdir()
    state.mkdir()
    os.mkfifo(folder / "ckpt.pt")  # nothing ever writes into it
    monkeypatch.setattr(checkpoints, "LOCK_TIMEOUT", 0.1)
    order = Fields({"directory": str(folder)})
    with pytest.raises(Refusal, match="was not read within"):
        checkpoints.read_checkpoints(state, order)
    wait_for((tmp_path / "readers").exists)
    for _ in range(2):
        with pytest.raises(Refusal, match="still being read"):
            checkpoints.read_checkpoints(state, order)
    assert len((tmp_path / "readers").read_text().split()) == 1
    other = checkpoints.read_checkpoints(state, Fields({"directory": str(state)}))
    assert other["outcome"] == "done"
    unkillable()
    (folder / "ckpt.pt").unlink()
    monkeypatch.setattr(checkpoints, "LOCK_TIMEOUT", 60.0)  # until the kernel has ended it
    assert checkpoints.read_checkpoints(state, order)["outcome"] == "done"
    assert list(state.iterdir()) == []


def test_a_folder_that_hangs_ends_with_an_answer(node: Node, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ckpt.pt")
    assert refusal(node.order("checkpoints", directory=str(tmp_path))) == "still_reading"
    wait_for(lambda: not any(map(is_alive, node.list_commands())))
    node.end_session()


def test_the_newest_complete_one_is_answered_and_newer_torn_ones(
    node: Node, tmp_path: Path
) -> None:
    # The clock of a file server may be off: a higher step is newer, too.
    for step, files, at in ((10, HF[:1], 10), (20, HF, 20), (30, HF[:1], 15)):
        write(tmp_path / "out" / f"checkpoint-{step}", *files, at=at)
    answer = expect_done(node.order("checkpoints", directory="out", workdir=str(tmp_path)))
    newest, (torn,) = answer["newest"], answer["incomplete"]
    assert (newest["name"], newest["step"], newest["incomplete"]) == ("checkpoint-20", 20, "")
    assert (torn["name"], torn["step"]) == ("checkpoint-30", 30)
    own = str(tmp_path / "step-5")
    write(Path(own), *DCP, at=5)
    assert expect_done(node.order("checkpoints", directory=own))["newest"]["name"] == "."
    nothing = expect_done(node.order("checkpoints", directory=str(tmp_path / "nothing")))
    assert nothing["unreadable"] == "No such file or directory"

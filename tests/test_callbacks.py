"""Reports that a training script writes, as the agent reads them.

transformers and lightning are not installed for tests: their hooks are called here in the order in
which transformers 5.23 and lightning 2.6 call them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from relaunch import callbacks
from relaunch.agent.ranks.progress import RankProgress
from relaunch.agent.state import Generation


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RankProgress:
    generation = Generation(tmp_path, tmp_path, (1, 1))
    generation.make_folders()
    monkeypatch.setenv(callbacks.PROGRESS_FILE, str(generation.progress_path(0)))
    monkeypatch.setattr(callbacks, "_kept", {})
    monkeypatch.setattr(callbacks, "_work", callbacks._Work())
    return RankProgress(generation, 0, re.compile("(?P<step>x)"))


def read(rank: RankProgress) -> tuple[int, str | None, int | None]:
    rank.read()
    rank.read()  # a lower step is taken when it is read twice
    report = rank.report() or {}
    return report["step"], report["phase"], report["checkpoint"]


def test_a_report_is_read_with_all_that_it_says(rank: RankProgress) -> None:
    callbacks.report(7, loss=2.5, lr="1e-4")
    rank.read()
    report = rank.report() or {}
    assert (report["step"], report["values"]) == (7, {"loss": 2.5, "lr": 1e-4})
    callbacks.report(8, phase="evaluation")
    assert read(rank) == (8, "evaluation", None)
    callbacks.report(8, checkpoint=8)
    callbacks.report(9)
    assert read(rank) == (9, None, 8), "the node may not have read the report before"
    assert [path.name for path in rank.file.parent.iterdir()] == ["rank_0"]


def busy(rank: RankProgress) -> float | None:
    rank.read()
    return ((rank.report() or {})["values"]).get("busy_s")


def test_the_work_of_a_step_is_reported_with_it(
    rank: RankProgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: now[0])
    callbacks.report(1)
    assert busy(rank) is None
    for seconds in (0.25, 0.5):
        with callbacks.time_work():
            now[0] += seconds
    now[0] += 10.0  # the others are waited for
    callbacks.report(2)
    assert busy(rank) == 0.75
    callbacks.report(2, phase="evaluation")
    assert busy(rank) == 0.75
    callbacks.report(3, busy_s=0.5)
    assert busy(rank) == 0.5


class Event:
    """A CUDA event on a GPU that lags behind."""

    passed: float = 0.0
    clock: float = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = Event.clock

    def query(self) -> bool:
        return self.at <= Event.passed

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)


def test_work_on_a_gpu_is_read_once_it_is_done(
    rank: RankProgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = SimpleNamespace(
        Event=Event, is_initialized=lambda: True, is_current_stream_capturing=lambda: False
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    callbacks.report(1)
    for step in (2, 3, 4):
        with callbacks.time_work():
            Event.clock += step
        callbacks.report(step)
    assert busy(rank) is None
    Event.passed = 5.0
    callbacks.report(5)
    assert busy(rank) == 3.0


def test_a_report_never_stops_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: RankProgress
) -> None:
    monkeypatch.setenv(callbacks.PROGRESS_FILE, str(tmp_path / "gone" / "rank_0"))
    callbacks.report(1)
    monkeypatch.delenv(callbacks.PROGRESS_FILE)
    callbacks.report(2)
    assert (rank.read(), rank.report()) == (False, None)


def test_it_imports_nothing_but_the_standard_library() -> None:
    program = f"import sys; sys.path[:0] = ['{Path(callbacks.__file__).parent}']; import callbacks"
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True, timeout=60)
    for make in (callbacks.make_trainer_callback, callbacks.make_lightning_callback):
        with pytest.raises(ImportError):
            make()


def test_a_trainer_reports_steps_evaluations_and_checkpoints(
    rank: RankProgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    library: Any = ModuleType("transformers")
    library.TrainerCallback = object
    monkeypatch.setitem(sys.modules, "transformers", library)
    callback = callbacks.make_trainer_callback()
    state = SimpleNamespace(global_step=40)
    control = SimpleNamespace(should_evaluate=False, should_save=False)

    def call(hook: str, **more: Any) -> tuple[int, str | None, int | None]:
        getattr(callback, hook)(None, state, control, **more)
        return read(rank)

    assert call("on_train_begin") == (40, None, None), "it resumed there"
    state.global_step = 41
    assert call("on_step_end", model=None) == (41, None, None)
    state.global_step, control.should_evaluate, control.should_save = 50, True, True
    assert call("on_step_end") == (50, "evaluation", None)
    assert call("on_log", logs={"loss": 2.5, "epoch": 0.1}) == (50, "evaluation", None)
    assert call("on_prediction_step") == (50, "evaluation", None)
    assert call("on_evaluate", metrics={}) == (50, "checkpoint", None)
    assert call("on_save") == (50, None, 50)
    assert (rank.report() or {})["values"] == {"loss": 2.5}
    state.global_step, control.should_evaluate, control.should_save = 51, False, True
    assert call("on_epoch_end") == (51, "checkpoint", 50)


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize(("io", "saved"), [("TorchCheckpointIO", 10), ("AsyncCheckpointIO", None)])
def test_lightning_reports_a_checkpoint_once_it_is_saved(
    rank: RankProgress, monkeypatch: pytest.MonkeyPatch, name: str, io: str, saved: int | None
) -> None:
    library: Any = ModuleType(name)
    library.Callback = object
    monkeypatch.setitem(sys.modules, name.partition(".")[0], library)
    monkeypatch.setitem(sys.modules, name, library)
    callback = callbacks.make_lightning_callback()
    strategy = SimpleNamespace(checkpoint_io=type(io, (), {})())
    trainer = SimpleNamespace(global_step=0, strategy=strategy)

    def call(hook: str, *more: Any) -> tuple[int, str | None, int | None]:
        getattr(callback, hook)(trainer, None, *more)
        return read(rank)

    assert call("on_train_start") == (0, None, None)
    assert call("on_train_epoch_start") == (0, None, None)
    assert call("on_train_batch_start", None, 9) == (0, None, None)
    assert call("on_before_backward", None) == (0, None, None)
    assert call("on_before_backward", None) == (0, None, None), "of a second optimizer"
    trainer.global_step = 10
    assert call("on_train_batch_end", None, None, 9) == (10, None, None)
    assert call("on_validation_start") == (10, "evaluation", None)
    assert call("on_validation_end") == (10, None, None)
    assert call("on_save_checkpoint", {}) == (10, "checkpoint", None)
    if saved is not None:
        assert call("on_train_batch_start", None, 10) == (10, None, saved)
    trainer.global_step = 11
    assert call("on_train_batch_end", None, None, 10) == (11, None, saved)
    assert call("on_save_checkpoint", {}) == (11, "checkpoint", saved)
    assert call("teardown", "fit")[2] == (saved and 11)

"""Reports progress from a training script to the node that started it.

This module needs nothing but the standard library of Python 3.8, and imports transformers or
lightning only in the function that needs it: where relaunch is not installed beside the training
program, copy this file. Each rank writes the file that RELAUNCH_PROGRESS_FILE names. Without that
variable nothing is written, so that the script also runs by itself.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from typing import Any

PROGRESS_FILE = "RELAUNCH_PROGRESS_FILE"

_files: list[Any] = []
"""What faulthandler writes to: closed, its number might become that of another file."""
_kept: dict[str, int] = {}
"""What every further report repeats: the newest checkpoint."""
BUSY = "busy_s"
MAX_PENDING = 64
"""Most pieces of work on a GPU whose end is waited for; older ones are dropped."""


class _Work:
    """Times the work of a rank in each step, between two reports of different steps."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.seconds: float | None = None
        """Of the newest step whose time is known."""
        self._current = 0.0
        self._events: list[tuple[Any, Any]] = []
        """CUDA events around the pieces of work of the present step."""
        self._pending: list[list[tuple[Any, Any]]] = []
        """The same of earlier steps, whose work the GPU may not have done yet."""

    def add(self, seconds: float, events: tuple[Any, Any] | None) -> None:
        if events is None:
            self._current += seconds
        else:
            self._events.append(events)

    def end_step(self, step: int) -> float | None:
        """Return the seconds of the newest step whose time is known."""
        if step != self.step:
            if self._events:
                self._pending = [*self._pending, self._events][-MAX_PENDING:]
            elif self._current:
                self.seconds = self._current
            self.step, self._current, self._events = step, 0.0, []
        while self._pending and all(end.query() for _, end in self._pending[0]):
            events = self._pending.pop(0)
            self.seconds = sum(begin.elapsed_time(end) for begin, end in events) / 1000
        return self.seconds


_work = _Work()


class time_work:
    """Time what this rank does by itself in a step, for `with`, so that a slow node is seen.

    Put it around the part of a step before the first wait for other ranks: loading the batch and
    the forward pass, not `backward()` of DistributedDataParallel. Several parts of a step add up.
    `report` says the seconds as `busy_s`. On a GPU two CUDA events are recorded, and nothing waits
    for them; they are read once the GPU has passed them.
    """

    def __enter__(self) -> None:
        torch = sys.modules.get("torch")
        cuda = getattr(torch, "cuda", None)
        self._begin: Any = None
        if cuda is not None and cuda.is_initialized() and not cuda.is_current_stream_capturing():
            self._end = cuda.Event(enable_timing=True)
            self._begin = cuda.Event(enable_timing=True)
            self._begin.record()
        self._begun = time.perf_counter()

    def __exit__(self, *error: Any) -> None:
        if any(error):
            return
        if self._begin is None:
            _work.add(time.perf_counter() - self._begun, None)
            return
        self._end.record()
        _work.add(0.0, (self._begin, self._end))


def report(
    step: int, checkpoint: int | None = None, phase: str | None = None, **values: Any
) -> None:
    """Report how far training is. A report replaces the one before.

    Args:
        step: The step that is finished, counted over the whole training.
        checkpoint: The step of the newest checkpoint, once it is completely written. It is kept for
            later reports, as the node does not read every one.
        phase: "checkpoint" or "evaluation" while training does that and not steps: it then has the
            time that the policy allows for it.
        **values: Numbers to show beside the step, such as the loss. `busy_s` is compared over the
            nodes: the seconds of this step in which the rank did not wait for others (`time_work`).
    """
    if checkpoint is not None:
        _kept["checkpoint"] = int(checkpoint)
    path = os.environ.get(PROGRESS_FILE)
    if not path:
        return
    written: dict[str, Any] = {name: float(value) for name, value in values.items()}
    busy = _work.end_step(int(step))
    if busy is not None:
        written.setdefault(BUSY, busy)
    written.update(_kept, step=int(step))
    if phase is not None:
        written["phase"] = phase
    part = f"{path}.{os.getpid()}"
    try:
        with open(part, "w") as file:
            json.dump(written, file)
        os.replace(part, path)
    except OSError:
        pass  # training is worth more than a report of it: the disk may be full


def allow_stacks(number: int = signal.SIGRTMAX - 4) -> None:
    """Let the node read the Python stacks of this process where py-spy may not.

    That is in a container that forbids it, and for processes that this one forks where the kernel
    lets only ancestors read (Yama's ptrace_scope 1). The node sends the signal only when training
    seems to hang; Python's faulthandler then writes the stacks of all threads to a file beside the
    progress file. Processes that are forked later allow it too.

    Args:
        number: A signal that nothing else in this process uses.

    Raises:
        ValueError: The signal has a handler already.
    """
    path = os.environ.get(PROGRESS_FILE)
    if not path:
        return
    if signal.getsignal(number) is not signal.SIG_DFL:
        raise ValueError(
            f"signal {number} has a handler already: expected one that nothing else uses"
        )
    _register_stacks(path, number)
    os.register_at_fork(after_in_child=lambda: _register_stacks(path, number))


def _register_stacks(path: str, number: int) -> None:
    own = f"{path}.stacks.{os.getpid()}"
    part = f"{own}.part"
    try:
        folder, name = os.path.split(f"{path}.stacks.")
        for other in os.listdir(folder):
            if other.startswith(name) and not os.path.exists(f"/proc/{other.split('.')[2]}"):
                os.unlink(f"{folder}/{other}")  # of a worker that has ended
        with open("/proc/self/stat", "rb") as stat:
            started = int(stat.read().rpartition(b")")[2].split()[19])
        file = open(part, "w")  # noqa: SIM115  (it stays open as long as this process lives)
        file.write(json.dumps({"signal": int(number), "started": started}) + "\n")
        file.flush()
        faulthandler.register(number, file, all_threads=True, chain=False)
        # The node sends the signal only where this file is, so it comes last.
        os.replace(part, own)
    except OSError:
        return  # training is worth more than this: the disk may be full
    _files.append(file)


def make_trainer_callback() -> Any:
    """Return a callback for the Trainer of Hugging Face transformers.

    It reports steps, evaluations, and checkpoints once they are saved. Every rank needs it.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import TrainerCallback

    class ProgressCallback(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.values: dict[str, Any] = {}

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            report(state.global_step)

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
        ) -> None:
            loss = (logs or {}).get("loss")
            if isinstance(loss, (int, float)):
                self.values = {"loss": float(loss)}

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # The flow of the Trainer, which comes first, has decided what follows this step.
            phase = "evaluation" if control.should_evaluate else None
            phase = phase or ("checkpoint" if control.should_save else None)
            report(state.global_step, phase=phase, **self.values)

        def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            report(state.global_step, phase="evaluation", **self.values)

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            phase = "checkpoint" if control.should_save else None
            report(state.global_step, phase=phase, **self.values)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.on_step_end(args, state, control)

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            report(state.global_step, checkpoint=state.global_step, **self.values)

    return ProgressCallback()


def make_lightning_callback() -> Any:
    """Return a callback for the Trainer of Lightning, also under its name pytorch_lightning.

    It reports steps (`trainer.global_step`), evaluations, and checkpoints once they are saved; not
    those of AsyncCheckpointIO, whose end it cannot see. It times the work of a step from its batch
    to `backward()` (`time_work`). Every rank needs it.

    Raises:
        ImportError: Neither is installed.
    """
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback

    class ProgressCallback(Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.saving: int | None = None
            self.work: time_work | None = None

        def _report(self, trainer: Any, phase: str | None = None) -> None:
            # A checkpoint is written between two calls of this callback.
            saved, self.saving = self.saving, None
            report(trainer.global_step, checkpoint=saved, phase=phase)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._report(trainer)

        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            if self.saving is not None:
                self._report(trainer)
            self.work = time_work()
            self.work.__enter__()

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            if self.work is not None:  # with several optimizers the first one counts
                self.work.__exit__()
                self.work = None

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            self._report(trainer)

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            self._report(trainer, "evaluation")

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            self._report(trainer)

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            self._report(trainer)

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if self.saving is not None:
                self._report(trainer)

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            report(trainer.global_step, phase="checkpoint")
            if type(trainer.strategy.checkpoint_io).__name__ != "AsyncCheckpointIO":
                self.saving = trainer.global_step

    return ProgressCallback()

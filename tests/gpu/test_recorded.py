"""What an H200 and programs that failed on it said, as `python -m tests.gpu` recorded it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from relaunch.evidence.catalog import catalog
from relaunch.evidence.kernel_log import read_kernel_log
from relaunch.evidence.last_words import find_last_words
from relaunch.evidence.nvml import read_gpus
from relaunch.evidence.observations import RankExited
from relaunch.job.diagnose import diagnose
from relaunch.job.events import FaultObserved
from tests.recovery.builders import running

RECORDED = Path(__file__).with_name("recorded")
SAID = json.loads((RECORDED / "endings.json").read_text())
ENDED = datetime(2026, 11, 26, tzinfo=UTC)
CUDA = "torch.AcceleratorError: CUDA error: "
EXPECTED = {
    "read_wrong_address": ("GPU_USER_INDUCED", "Xid 31", "an illegal memory access was"),
    "store_misaligned": ("GPU_USER_INDUCED", "Xid 13", "misaligned address"),
    # Its own Xid 43 only says that the channel was stopped.
    "trap": ("GPU_USER_INDUCED", "log illegal_access", "unspecified launch failure"),
    "assert_on_device": ("APPLICATION", "log device_assert", "device-side assert triggered"),
    "use_missing_gpu": ("USER_INPUT", "log device_count", "invalid device ordinal"),
    "find_no_room": ("OUT_OF_MEMORY", "log cuda_oom", "out of memory"),
    "see_no_gpu": ("NODE_FAULT", "log cuda_not_ready", None),
    "share_gpu": ("APPLICATION", "log nccl_invalid", None),
    "die_computing": ("UNKNOWN", "SIGKILL", None),
    "run_out_of_memory": ("OUT_OF_MEMORY", "log cuda_oom", None),
    "jax_out_of_memory": ("OUT_OF_MEMORY", "log cuda_oom", None),
}


def observe(ending: dict[str, Any]) -> RankExited:
    code = ending["exit"]
    return RankExited(
        node="n1",
        rank=0,
        local_rank=0,
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        at=ENDED,
        log_tail=tuple(ending["log"]),
        kernel=tuple(line for line in SAID["kernel"] if f" pid={ending['pid']}," in line),
        pid=ending["pid"],
    )


@pytest.mark.parametrize("name", EXPECTED)
def test_the_cause_of_what_failed_on_a_real_gpu(name: str) -> None:
    cause, code, said = EXPECTED[name]
    exited = observe(SAID["endings"][name])
    found = diagnose(running(generation=1), FaultObserved(1, (exited,), 0, ENDED, ()))
    assert (found.cause, found.code) == (cause, code)
    if said is not None:
        # CuPy goes on to print the same error twice from a destructor.
        words = find_last_words(exited.log_tail, exited.exit_code, exited.signal)
        assert words is not None
        assert words.error.startswith(CUDA + said)


def test_every_line_about_an_xid_is_read() -> None:
    lines = [line for line in SAID["kernel"] if "Xid" in line]
    findings = read_kernel_log(tuple(SAID["kernel"]), catalog())
    assert [one.code.removeprefix("Xid ") for one in findings] == [
        line.split("): ")[1].split(",")[0] for line in lines
    ]
    assert {one.gpu for one in findings} == {"0000:00:06"}


def test_a_healthy_gpu_without_nvlink_has_nothing_unread() -> None:
    read = read_gpus(json.loads((RECORDED / "nvml.json").read_text()), 1, catalog())
    assert (read.findings, read.unread, read.working) == ((), (), 1)
    assert read.seen == read.read_in_full == ("00000000:00:06.0",)

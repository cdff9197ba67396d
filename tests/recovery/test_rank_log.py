"""What a line of a log means depends on where it stands."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from relaunch.evidence import exits, kernel_log, last_words, rank_log
from relaunch.evidence.catalog import catalog
from relaunch.evidence.causes import Cause
from relaunch.evidence.observations import RankError
from relaunch.evidence.rank_log import names_failure, read_rank_log
from relaunch.job.diagnose import diagnose, diagnose_log
from tests.recovery.builders import exited, fault, running

EIO = "OSError: [Errno 5] Input/output error: '/data/shard-7'"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
KEY_ERROR = "KeyError: 'label_ids'"
STEP = "step 120 loss 2.31 lr 3e-4"
DURING = "During handling of the above exception, another exception occurred:"
DIRECT = "The above exception was the direct cause of the following exception:"


def raised(error: str, source: str = "train(batch)") -> list[str]:
    return [
        "Traceback (most recent call last):",
        '  File "train.py", line 7, in <module>',
        f"    {source}",
        error,
    ]


def chained(*errors: str, by: str = DIRECT) -> list[str]:
    lines: list[str] = []
    for error in errors:
        lines += [*(["", by, ""] if lines else []), *raised(error)]
    return lines


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        pytest.param([*raised(EIO), STEP, *raised(KEY_ERROR)], "APPLICATION", id="handled"),
        pytest.param([f"{EIO}, retrying (1/3)", *raised(KEY_ERROR)], "APPLICATION", id="retried"),
        pytest.param([EIO, *raised(KEY_ERROR)], "APPLICATION", id="a line before a plain bug"),
        pytest.param([f"{OOM} Skipping batch"], "OUT_OF_MEMORY", id="all that it said"),
        pytest.param(
            [f"{OOM} Skipping batch", *raised("acme.Stop: no more data")],
            "APPLICATION",
            id="a warning before an exception that no row knows",
        ),
        pytest.param(
            ["step 120 loss 2.3 best loss: inf", *raised(KEY_ERROR)], "APPLICATION", id="best loss"
        ),
        pytest.param([EIO, STEP, "acme: bye"], "APPLICATION", id="training went on after it"),
        pytest.param([f"{EIO}, retrying (3/3)", "acme: bye"], "STORAGE", id="it gave up retrying"),
        pytest.param([EIO, "acme: bye"], "STORAGE", id="training did not go on"),
        pytest.param(
            ["NCCL WARN NET/IB : Got async event : port error", STEP, "acme: bye"],
            "NETWORK",
            id="ranks print on for a while after a port is gone",
        ),
        pytest.param(
            ["RuntimeError: Address already in use", STEP, "acme: bye"],
            "APPLICATION",
            id="a port was taken, and training went on",
        ),
        pytest.param(
            [
                "RuntimeError: CUDA error: invalid device ordinal",
                STEP,
                *raised("acme.Stop: no more data"),
            ],
            "APPLICATION",
            id="a mistake of the user that training went on after",
        ),
        pytest.param(
            ["slurmstepd: error: Job 7 exceeded memory limit (626 > 512), being killed", STEP],
            "OUT_OF_MEMORY",
            id="training goes on until a batch system's signal arrives",
        ),
        pytest.param(
            ["Pod was preempted", STEP, "acme: bye"],
            "PREEMPTED",
            id="a node is left some time to train after the notice",
        ),
        pytest.param(
            ["Pod was preempted", STEP, *raised("acme.Stop: no more data")],
            "APPLICATION",
            id="an exception after a notice",
        ),
        pytest.param(
            [
                "Sequence group 0 is preempted by PreemptionMode.RECOMPUTE mode because there is "
                "not enough KV cache space.",
                *raised("acme.Stop: no more data"),
            ],
            "APPLICATION",
            id="vLLM preempts requests",
        ),
        pytest.param(
            [
                "ERROR: [Errno 98] address already in use, trying 8001",
                *raised("acme.Stop: no more data"),
            ],
            "APPLICATION",
            id="a port that a service tries",
        ),
        pytest.param(
            raised("OSError: [Errno 98] Address already in use"),
            "APPLICATION",
            id="a port that the program names",
        ),
        pytest.param(
            raised(
                "torch.distributed.DistNetworkError: The server socket has failed to listen on "
                "any local network address. port: 29500, name: EADDRINUSE"
            ),
            "PLATFORM",
            id="the port of the store",
        ),
        pytest.param(
            raised("botocore.exceptions.NoCredentialsError: Unable to locate credentials"),
            "STORAGE",
            id="credentials that could not be fetched",
        ),
        pytest.param(
            raised("ClientError: An error occurred (ExpiredToken) when calling the PutObject"),
            "STORAGE",
            id="credentials that have expired",
        ),
        pytest.param(
            raised("google.auth.exceptions.RefreshError: ('Unexpected response', '503')"),
            "STORAGE",
            id="credentials that could not be renewed",
        ),
        pytest.param(
            raised("ClientError: An error occurred (AccessDenied) when calling the PutObject"),
            "APPLICATION",
            id="an object store refuses",
        ),
        pytest.param(
            [
                "NCCL WARN Bootstrap : no socket interface found",
                *raised("DistBackendError: NCCL error, ncclInternalError: Internal check failed."),
            ],
            "NETWORK",
            id="no network interface",
        ),
        pytest.param(
            raised(KEY_ERROR, "open(path)  # No space left on device"),
            "APPLICATION",
            id="a comment in the source",
        ),
        pytest.param(
            raised("acme.Stop: x", 'raise RuntimeError("loss is nan")'),
            "APPLICATION",
            id="a guard in the source",
        ),
        pytest.param(
            [
                '  File "train.py", line 7, in save',
                "    write()  # No space left on device",
                "a: bye",
            ],
            "APPLICATION",
            id="a stack without a title",
        ),
        pytest.param(
            [
                *raised(KEY_ERROR),
                '  File "thread.py", line 9, in <module>',
                "    Input/output error",
                "    ^^^^^^^^",
                "    ^^^^^^^^",
                "    ^^^^^^^^",
            ],
            "APPLICATION",
            id="a long frame of another stack",
        ),
        pytest.param(
            chained("OSError: [Errno 28] No space left on device", "RuntimeError: save failed"),
            "STORAGE",
            id="a wrapper around the reason",
        ),
        pytest.param(chained(EIO, KEY_ERROR, by=DURING), "STORAGE", id="a bug in the handler"),
        pytest.param(
            [*raised(EIO), *chained("ValueError: a", KEY_ERROR, by=DURING)],
            "APPLICATION",
            id="a handled one before a chain",
        ),
        pytest.param(
            [
                *raised("RuntimeError: Caught OSError in DataLoader worker process 0."),
                "Original Traceback (most recent call last):",
                *raised(EIO)[1:],
            ],
            "STORAGE",
            id="from a worker of a DataLoader",
        ),
        pytest.param(
            [
                *raised(OOM),
                *raised("subprocess.CalledProcessError: Command 'x' returned non-zero exit status"),
            ],
            "OUT_OF_MEMORY",
            id="below a launcher",
        ),
        pytest.param(
            [
                "enqueue.cc:1085 NCCL WARN Cuda failure 2 'out of memory'",
                *raised("DistBackendError: NCCL error, unhandled cuda error, NCCL version 2.27"),
                "ncclUnhandledCudaError: Call to CUDA function failed.",
            ],
            "OUT_OF_MEMORY",
            id="another line says more than NCCL's error",
        ),
        pytest.param(
            raised("DistBackendError: NCCL error, unhandled cuda error, NCCL version 2.27"),
            "GPU_TRANSIENT",
            id="nothing says more than NCCL's error",
        ),
        pytest.param(
            [*raised("RuntimeError: NCCL failed:"), "uncorrectable ECC error encountered"],
            "GPU_RESET",
            id="a line of the message",
        ),
        pytest.param(
            [*raised(KEY_ERROR), "", "recvValue failed: Connection reset by peer"],
            "APPLICATION",
            id="what breaks while it ends",
        ),
        pytest.param(
            ["task 3 of 8: peer hangups are frequently caused by bugs", "a", "b", "c", "d"],
            "NETWORK",
            id="an echo of many lines",
        ),
        pytest.param(
            [
                "F0929 17:42:48.5 client.h:77] Terminating process because the JAX distributed "
                "service detected fatal errors. This most likely indicates that another task died",
                "Additional GRPC error information from remote target coordination_service:",
                ":UNKNOWN:Error received from peer",
                "RPC: /tensorflow.CoordinationService/PollForError",
            ],
            "NETWORK",
            id="an abort of JAX",
        ),
    ],
)
def test_last_words_weigh_most(lines: list[str], cause: str) -> None:
    diagnosis, _ = diagnose_log(lines, 1, catalog())
    assert diagnosis.cause == cause


def test_a_chain_in_an_error_file_is_read_as_in_a_log() -> None:
    full = "\n".join(chained("OSError: [Errno 28] No space left on device", "RuntimeError: save"))
    error = RankError("RuntimeError: save", full)
    found = diagnose(running(), fault(running(), exited(0, code=1, error=error)))
    assert found.cause is Cause.STORAGE


@pytest.mark.parametrize(
    ("words", "is_echo"),
    [
        ("RuntimeError: Connection reset by peer", True),
        ("RuntimeError: boom", False),
        ("ValueError: Connection reset by peer", True),
        ("torch.OutOfMemoryError: CUDA out of memory\nConnection reset by peer", False),
    ],
)
def test_an_error_file_that_blames_a_peer_is_an_echo(words: str, is_echo: bool) -> None:
    read = read_rank_log([], 1, None, catalog(), RankError(words))
    assert read.is_echo == is_echo


def test_unknown_quotes_the_line_that_nothing_explains() -> None:
    killed = exited(3, "n2", signal=9, log_tail=("epoch 3", "acme: lost quorum"))
    found = diagnose(running(), fault(running(), killed))
    assert (found.cause, "acme: lost quorum" in found.reason) == (Cause.UNKNOWN, True)


def test_a_kill_for_memory_that_the_kernel_tells_beats_the_log() -> None:
    killed = "[ 9.1] Out of memory: Killed process 4711 (python) total-vm:1kB, anon-rss:1kB"
    one = exited(3, "n2", signal=9, pid=4711, log_tail=(KEY_ERROR,), kernel=(killed,))
    assert diagnose(running(), fault(running(), one)).cause is Cause.OUT_OF_MEMORY


def test_a_kill_for_memory_that_only_the_log_tells() -> None:
    log = ("step 9", "Last State: Terminated, Reason: OOMKilled, Exit Code: 137")
    found = diagnose(running(), fault(running(), exited(3, "n2", code=137, log_tail=log)))
    assert found.cause is Cause.OUT_OF_MEMORY


JAX_EXIT = (
    "E1123 13:15:53.970290    2002 coordination_service_agent.cc:289] Polled an error from "
    "coordination service (this can be an error from this or another task).",
    "F1123 13:15:53.970615    2002 client.h:80] Terminating process because the JAX distributed "
    "service detected fatal errors. This most likely indicates that another task died; see the "
    "other task logs for more details.",
    "Barrier result: 'DEADLINE_EXCEEDED: Barrier timed out. Id: Shutdown::717498061300613742::0. "
    "This usually happens because a task triggered the barrier too early or too slowly.",
    "# of tasks that reached the barrier: 1/2.",
    "The first task at the barrier: 1. Some timed out task names:",
    "0",
    "RPC: /xla.coordination.CoordinationService/PollForError",
    "*** Check failure stack trace: ***",
    "    @     0x7f05f5440634  absl::lts_20260107::log_internal::LogMessage::SendToLog()",
    "    @     0x7f05f54405b6  absl::lts_20260107::log_internal::LogMessage::Flush()",
)
"""What jax 0.10.2 prints in each process where one has raised an exception."""


def test_a_jax_process_that_waited_for_others_is_an_echo() -> None:
    waited = exited(0, "n1", signal=6, log_tail=(STEP, *JAX_EXIT))
    raised_it = exited(1, "n2", signal=6, seconds=0.1, log_tail=(*raised(KEY_ERROR), *JAX_EXIT))
    found = diagnose(running(), fault(running(), waited, raised_it))
    assert (found.cause, found.ranks) == (Cause.APPLICATION, (1,))
    assert found.traceback.endswith(KEY_ERROR)
    assert diagnose(running(), fault(running(), waited)).cause is Cause.HANG


PARTS = (
    *(
        "1",
        " ",
        "\t",
        "step 1 ",
        "[",
        "(",
        "]",
        "'",
        '"',
        "{",
        "a",
        "_a",
        "a ",
        "0 ",
        "1/1 [",
        "1:",
    ),
    *("x.y.", "a/b/c", "1%|", "=", "~", "-", "@", ": error: ", "loss ", "nan ", "train loss "),
    *("Job ", "The node ", "exceeded ", "shape ", "gloo ", "peer_mem ", "TCPStore ", "NCCL WARN "),
    *("server socket ", "address already in use ", "RESOURCE_EXHAUSTED: ", "HeartbeatMonitor "),
    *("No space left ", "shared memory ", "DataLoader worker ", "NET/IB : Got completion "),
    *("NVRM: ", "NVRM: Xid (0:0", "dev ", "EDAC ", "MCE: ", "mce: ", "mlx5_core ", "XFS (a): "),
    *("oom-kill:", " task=python", "Out of memory ", "Lustre: ", "(0x0, ", "killing a:", "eth0"),
)
"""Of which lines are made that patterns may take long for."""


def make_line(part: str, length: int) -> str:
    return (part * (length // len(part) + 1))[:length]


def measure(call: Callable[[], object]) -> float:
    """Return the processor time of a call, the least of three: others use this machine, too."""
    times = []
    for _ in range(3):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return min(times)


@pytest.mark.parametrize("part", ["1", "step 1 ", " ", "x.y.", "[", "a/b/c"])
@pytest.mark.parametrize("before", [OOM, "x"], ids=["after a fault", "alone"])
def test_a_long_line_takes_no_more_time_than_its_read_part(before: str, part: str) -> None:
    def read(length: int) -> float:
        log = [before, f"step {make_line(part, length)}", make_line(part, length)]
        return measure(lambda: diagnose_log(log, 1, catalog()))

    # A line of 64 KiB that is read whole takes a thousand times as long, and minutes in all.
    assert read(1 << 16) < 10 * read(exits.MAX_LINE) + 0.01


def list_patterns() -> dict[str, Any]:
    tables = catalog()
    named = {f"log {row.id}": row.pattern for row in tables.log_lines}
    named |= {f"{n} kernel {row.code}": row.pattern for n, row in enumerate(tables.kernel_lines)}
    named |= {f"advice {n}": one for n, one in enumerate(tables.advice_lines)}
    for module in (rank_log, last_words, kernel_log, exits):
        found = {key: one for key, one in vars(module).items() if isinstance(one, re.Pattern)}
        named |= {f"{module.__name__} {key}": one for key, one in found.items()}
    return named


def test_no_pattern_takes_long_for_the_longest_line() -> None:
    """The unit is what a pattern takes whose time grows by the square of a line."""
    digits = make_line("1", exits.MAX_LINE)
    unit = partial(re.compile("1+2").search, digits)
    limit = 5 * measure(unit)
    slow = set()
    for name, pattern in list_patterns().items():
        length = kernel_log.MAX_LINE if " kernel " in name else exits.MAX_LINE
        # What `match` reads starts at the first character.
        read = pattern.match if name.endswith("_HEADER") else pattern.search
        for part in PARTS:
            call = partial(read, make_line(part, length))
            began = time.process_time()
            call()
            # What else the machine does slows both down: they are compared at the same moment.
            if time.process_time() - began > limit and measure(call) > 5 * measure(unit):
                slow.add((name, part))
    assert slow == set()


@pytest.mark.parametrize(
    ("lines", "said", "ends"),
    [
        pytest.param(raised(KEY_ERROR), None, True, id="its last words"),
        pytest.param([*raised(KEY_ERROR), STEP], None, False, id="training went on"),
        pytest.param([STEP], None, False, id="no exception"),
        pytest.param([], None, False, id="nothing"),
        pytest.param(
            raised("RuntimeError: Connection closed by peer [10.0.0.2]:4711"),
            None,
            False,
            id="it blames a peer",
        ),
        pytest.param([STEP], RankError(KEY_ERROR, "", None), True, id="its error file"),
        pytest.param(
            raised(KEY_ERROR),
            RankError("RuntimeError: Connection closed by peer [10.0.0.2]:4711", "", None),
            False,
            id="an error file that blames a peer",
        ),
    ],
)
def test_a_living_process_may_have_written_why_it_ends(
    lines: list[str], said: RankError | None, ends: bool
) -> None:
    assert names_failure(lines, catalog(), said) is ends

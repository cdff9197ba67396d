"""What a process wrote about its end is found in the tail of its log.

The first line of each sample says where its form was reported, and how the process ended. The
samples follow those reports, with shorter paths and other names; some join the output of two, and
those that were made for this test say so.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.causes import Cause
from relaunch.evidence.last_words import (
    AFTER_OTHER,
    INNERMOST,
    MAX_ERROR,
    MAX_TEXT,
    LastWords,
    find_last_words,
    shorten_traceback,
)
from relaunch.evidence.rank_log import CAUSE_LINES
from relaunch.job.diagnose import diagnose
from tests.pages import sections
from tests.recovery.builders import error, exited, fault, running

SAMPLES = Path(__file__).with_name("samples") / "last_words"
ERRORS = {
    "cuda_assert": "RuntimeError: CUDA error: device-side assert triggered",
    "dataloader_worker": "KeyError: 91",
    "dataloader_worker_chained": "KeyError: 'mask'",
    "exception_group": "KeyError: 'shard-7'",
    "faulthandler": "Fatal Python error: Segmentation fault",
    "handled_then_killed": None,
    "jax": "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying "
    "to allocate 6291456 bytes.",
    "mixed_threads": "ValueError: batch is empty",
    "nccl_watchdog": "[PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread "
    "terminated with exception: [Rank 3] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=4, OpType=BROADCAST, Timeout(ms)=1800000) ran for 1800011 milliseconds "
    "before timing out.",
    "nested_group": "TypeError: 3",
    "pin_memory_thread": "RuntimeError: CUDA error: device-side assert triggered",
    "plain_key_error": "KeyError: 'input_ids'",
    "rank_prefix": "KeyError: 'messages'",
    "repeated_frames": "ValueError: shapes must be equal",
    "rich_box": "TimeoutError",
    "rust_panic": "thread '<unnamed>' panicked at 'called `Result::unwrap()` on an `Err` value: "
    'Os { code: 2, kind: NotFound, message: "No such file or directory" }\', '
    "/__w/tokenizers/tokenizers/tokenizers/src/tokenizer/mod.rs:593:29",
    "rust_panic_in_python": "pyo3_runtime.PanicException: index out of bounds: the len is 10 but "
    "the index is 10",
    "shutdown_noise": "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 "
    "MiB (GPU 0; 79.15 GiB total capacity; 77.1 GiB already allocated)",
    "spawned_process": "RuntimeError: Connection timed out",
    "state_dict": "RuntimeError: Error(s) in loading state_dict for JointEmbeder:",
    "syntax_error": "SyntaxError: '(' was never closed",
    "tail_without_title": "RuntimeError: mat1 and mat2 shapes cannot be multiplied "
    "(8x512 and 768x2)",
    "usage": "train.py: error: the following arguments are required: --data",
}


def read_sample(name: str) -> LastWords | None:
    head, *lines = (SAMPLES / f"{name}.txt").read_text().splitlines()
    *_, how, number = head.split()
    exit_code, signal = (int(number), None) if how == "exit" else (None, int(number))
    return find_last_words(lines, exit_code, signal)


def find(*lines: str, exit_code: int | None = 1, signal: int | None = None) -> LastWords | None:
    return find_last_words(lines, exit_code, signal)


def raised(*after: str) -> tuple[str, ...]:
    return (
        "Traceback (most recent call last):",
        '  File "train.py", line 7, in <module>',
        "    step()",
        "KeyError: 'x'",
        *after,
    )


def test_every_sample_is_in_the_table() -> None:
    assert {path.stem for path in SAMPLES.iterdir()} == set(ERRORS)


@pytest.mark.parametrize("name", ERRORS)
def test_the_error_of_each_sample(name: str) -> None:
    found = read_sample(name)
    assert (found.error if found is not None else None) == ERRORS[name]


def test_the_text_of_each_sample(page: SnapshotAssertion) -> None:
    found = {name: read_sample(name) for name in ERRORS}
    texts = {name: one.text if one is not None else "(nothing)" for name, one in found.items()}
    assert max(map(len, texts.values())) <= MAX_TEXT
    assert sections(texts) == page


@pytest.mark.parametrize(
    ("exit_code", "signal", "after", "is_its_end"),
    [
        pytest.param(1, None, 20, True, id="other threads go on to print"),
        pytest.param(1, None, 100, False, id="it went on for long"),
        pytest.param(3, None, AFTER_OTHER, True, id="it exited soon"),
        pytest.param(3, None, AFTER_OTHER + 1, False, id="it exited later"),
        pytest.param(None, 9, 0, True, id="killed with these last words"),
        pytest.param(None, 9, 1, False, id="killed after other words"),
        pytest.param(137, None, 1, False, id="killed below a shell"),
        pytest.param(-9, None, 1, False, id="killed, as Python counts"),
        pytest.param(None, 6, 3, True, id="it aborted soon"),
        pytest.param(None, None, 3, True, id="it is not known how it ended"),
    ],
)
def test_a_handled_traceback_is_not_the_end(
    exit_code: int | None, signal: int | None, after: int, is_its_end: bool
) -> None:
    lines = raised(*(f"step {number} loss 2.0" for number in range(after)))
    found = find(*lines, exit_code=exit_code, signal=signal)
    assert (found is not None and found.error == "KeyError: 'x'") is is_its_end


def test_a_deep_traceback_keeps_its_ends() -> None:
    frames = [
        line
        for number in range(90)
        for line in (f'  File "f{number}.py", line 1, in f', *["    " + "x" * 400] * 3)
    ]
    title, *_, last = raised()
    found = find(title, *frames, f"{last} {'y' * 9000}", *["z" * 2000] * 30)
    assert found is not None
    assert len(found.text) <= MAX_TEXT and len(found.error) == MAX_ERROR
    kept = [line for line in found.text.splitlines() if line.startswith("  File")]
    assert kept == [f'  File "f{n}.py", line 1, in f' for n in (0, *range(90 - INNERMOST, 90))]
    assert "  ... 83 frames left out ..." in found.text
    assert found.error[:8] == "KeyError"


def test_seven_frames_leave_none_out_and_eight_leave_one() -> None:
    title, _, _, last = raised()
    frames = [f'  File "f{number}.py", line 1, in f' for number in range(8)]
    seven, eight = find(title, *frames[:7], last), find(title, *frames, last)
    assert seven is not None and eight is not None
    assert "left out" not in seven.text
    assert "  ... 1 frame left out ..." in eight.text.splitlines()


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param((), None, id="nothing"),
        pytest.param(("", "  "), None, id="blank lines"),
        pytest.param(("wandb: Find logs at: x",), None, id="noise only"),
        pytest.param(
            ("Traceback (most recent call last):", "  ", "cut off here now"),
            "cut off here now",
            id="a title without a traceback",
        ),
        pytest.param(
            ("Traceback (most recent call last):", "MemoryError"), "MemoryError", id="no frames"
        ),
        pytest.param(
            ("  + Exception Group Traceback (most recent call last):", "  | what is this? no"),
            "  | what is this? no",
            id="a group that was cut off",
        ),
        pytest.param(
            ("  + Exception Group Traceback (most recent call last):", "  | ExceptionGroup: a (1)"),
            "ExceptionGroup: a (1)",
            id="a group whose exceptions were cut off",
        ),
        pytest.param(
            (
                "  + Exception Group Traceback (most recent call last):",
                "  | ExceptionGroup: a (1)",
                "  +-+---------------- 1 ----------------",
                "    | Traceback (most recent call last):",
                '    |   File "a.py", line 1, in f',
                "    | KeyError: 1",
                "    | The above exception was the direct cause of the following exception:",
                "    | Traceback (most recent call last):",
                '    |   File "b.py", line 1, in f',
                "    | OSError: 2",
                "    +------------------------------------",
            ),
            "OSError: 2",
            id="a group with a chain",
        ),
        pytest.param(
            ("╭──── Traceback (most recent call last) ──╮", "│ a.py:1 in f"),
            "│ a.py:1 in f",
            id="a box that was cut off",
        ),
        pytest.param(
            ("Exception ignored in: <f>", *raised()), "KeyError: 'x'", id="only an ignored one"
        ),
        pytest.param(
            ("Exception in thread Thread-1:", *raised()), "KeyError: 'x'", id="only a thread's"
        ),
        pytest.param(
            (*raised(), "Exception in thread Thread-1:", *raised()[:-1], "OSError: 9"),
            "KeyError: 'x'",
            id="a thread's after it",
        ),
        pytest.param(
            ("\x1b[31mTraceback (most recent call last):\x1b[0m", *raised()[1:]),
            "KeyError: 'x'",
            id="in colour",
        ),
        pytest.param(
            tuple(f"(Worker pid=3) {line}" for line in raised()),
            "KeyError: 'x'",
            id="each line with a prefix",
        ),
        pytest.param(
            ("thread 'main' panicked at src/main.rs:2:5:", "index out of bounds"),
            "thread 'main' panicked at src/main.rs:2:5: index out of bounds",
            id="a panic of newer Rust",
        ),
        pytest.param(
            ("python: malloc.c:2401: sysmalloc: Assertion `x' failed.",),
            "python: malloc.c:2401: sysmalloc: Assertion `x' failed.",
            id="an assertion in C",
        ),
    ],
)
def test_odd_ends(lines: tuple[str, ...], expected: str | None) -> None:
    found = find(*lines)
    assert (found.error if found is not None else None) == (expected and expected.strip())


def test_an_error_file_is_shortened_in_the_same_way() -> None:
    assert shorten_traceback("") is None
    found = shorten_traceback("\n".join(raised()))
    assert found == LastWords("KeyError: 'x'", "\n".join(raised()))
    plain = shorten_traceback("it only left\nthese words\n")
    assert plain == LastWords("these words", "it only left\nthese words")


def test_a_rank_without_an_error_file_is_diagnosed_by_its_log() -> None:
    tail = ("step 3", *raised("wandb: Find logs at: x"))
    found = diagnose(running(), fault(running(), exited(3, "n2", code=1, log_tail=tail)))
    assert (found.cause, found.ranks, found.nodes) == (Cause.APPLICATION, (3,), ("n2",))
    assert found.reason.endswith(": KeyError: 'x'")
    assert found.traceback == "\n".join(raised())


def test_an_empty_error_file_does_not_hide_the_log() -> None:
    exit = exited(3, "n2", code=1, error=error("KeyError: 'x'"), log_tail=raised())
    assert exit.error is not None
    found = diagnose(running(), fault(running(), exit))
    assert "KeyError: 'x'" in found.traceback


def test_what_is_far_from_the_end_is_no_cause() -> None:
    old = ("torch.OutOfMemoryError: CUDA out of memory.", *["fine"] * CAUSE_LINES)
    found = diagnose(running(), fault(running(), exited(3, "n2", code=1, log_tail=old)))
    assert found.cause is Cause.APPLICATION

"""Readings of files that ranks write, torn or whole: a value, or unreadable with a reason."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest
from real_node import wait_for

from relaunch.agent.ranks import evidence, journal, progress
from relaunch.agent.ranks.progress import (
    LOG_CHUNK_BYTES,
    MATCH_CPU_S,
    ProgressError,
    RankProgress,
    parse_file,
    read_last_step,
)
from relaunch.agent.ranks.redact import Redactor
from relaunch.agent.state import Generation


@pytest.fixture
def generation(tmp_path: Path) -> Generation:
    made = Generation(tmp_path, tmp_path, (1, 1))
    made.make_folders()
    return made


@pytest.mark.parametrize(
    ("text", "step"),
    [("12", 12), (" 12\n", 12), ("12.0", 12), ('{"step": 3, "on": true, "s": "x"}', 3), ("0", 0)],
)
def test_steps(text: str, step: int) -> None:
    assert parse_file(text) == {"step": step, "values": {}, "phase": None, "checkpoint": None}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "twelve",
        "{",
        "[]",
        "null",
        "true",
        "-1",
        "1.5",
        "NaN",
        "{}",
        '{"step": "1"}',
        "[" * 99999,
    ],
)
def test_what_is_not_a_step(text: str) -> None:
    with pytest.raises(ProgressError):
        parse_file(text)


@pytest.mark.parametrize(
    ("text", "checkpoint"),
    [
        ('{"step": 130, "loss": 3.1, "checkpoint": 120}', 120),
        ('{"step": 3, "checkpoint": 0}', 0),
        ('{"step": 3, "checkpoint": 2.0}', 2),
        ('{"step": 3, "checkpoint": null}', None),
    ],
)
def test_the_newest_checkpoint_is_reported_beside_the_step(
    text: str, checkpoint: int | None
) -> None:
    read = parse_file(text)
    assert (read["checkpoint"], "checkpoint" in read["values"]) == (checkpoint, False)


@pytest.mark.parametrize("written", ['"120"', "-1", "1.5", "true", "[]"])
def test_what_is_no_checkpoint_is_unreadable_as_a_step_would_be(written: str) -> None:
    with pytest.raises(ProgressError, match=r"^checkpoint is .* 0$"):
        parse_file(f'{{"step": 3, "checkpoint": {written}}}')


def test_a_checkpoint_counts_until_the_next_and_is_news(
    generation: Generation,
) -> None:
    progress = RankProgress(generation, 0, None)
    for text, checkpoint, news in (
        ("110", None, True),
        ('{"step": 110, "checkpoint": 100}', 100, True),
        ("111", 100, True),
        ("111 ", 100, False),
    ):
        generation.progress_path(0).write_text(text)
        assert progress.read() is news
        assert (progress.report() or {})["checkpoint"] == checkpoint


SAVING = re.compile(r"step (?P<step>\S+)|saved checkpoint (?P<checkpoint>\S+)")


@pytest.mark.parametrize(
    ("lines", "step", "checkpoint"),
    [
        (("step 119", "step 120", "saved checkpoint 120", "step 121"), 121, 120),
        (("step 120", "saved checkpoint 100", "saved checkpoint 120", "nothing"), 120, 120),
        (("saved checkpoint 120",), None, 120),
        (("step 121",), 121, None),
    ],
)
def test_lines_of_a_log_may_tell_of_a_step_or_of_a_checkpoint(
    generation: Generation, lines: tuple[str, ...], step: int | None, checkpoint: int | None
) -> None:
    progress = RankProgress(generation, 0, SAVING)
    generation.log_path(0).write_text("".join(f"{line}\n" for line in lines))
    assert progress.read() is True
    report = progress.report()
    assert report is not None
    assert (report["step"], report["checkpoint"], report["values"]) == (step, checkpoint, {})
    with open(generation.log_path(0), "a") as log:
        log.write("saved checkpoint 140\n")
    assert progress.read() is True
    assert (progress.report() or {})["checkpoint"] == 140
    with open(generation.log_path(0), "a") as log:
        log.write("saved checkpoint soon\n")
    progress.read()
    report = progress.report() or {}
    assert report.keys() == {"unreadable"}
    assert "checkpoint" in report["unreadable"] and "'soon'" in report["unreadable"]


@pytest.mark.parametrize(
    ("line", "step", "values"),
    [
        ("epoch 3 step 7/100", 307, {}),
        ("epoch 0 step 7/100", 7, {}),
        ("epoch 3 step 7/?", 7, {"epoch": 3.0}),
        ("epoch 1.5 step 7/100", 7, {"epoch": 1.5, "total": 100.0}),
        ("epoch \x1b[31m3\x1b[0m step \x1b[1;32m7\x1b[0m/100", 307, {}),
    ],
)
def test_a_step_within_an_epoch_of_known_length(
    generation: Generation, line: str, step: int, values: dict[str, float]
) -> None:
    pattern = r"epoch (?P<epoch>\S+) step (?P<step>\d+)/(?P<total>\S+)"
    progress = RankProgress(generation, 0, re.compile(pattern))
    generation.log_path(0).write_text(f"{line}\n")
    assert progress.read() is True
    report = progress.report() or {}
    assert (report["step"], report["values"]) == (step, values)


def test_the_newest_drawing_of_a_bar_is_read_before_the_next(generation: Generation) -> None:
    progress = RankProgress(generation, 0, re.compile(r"(?P<step>\d+)/"))
    for written, step in (("\r1/9 [\r2/9 [", 2), ("\r3/9 [", 3), (" 4/9", 3), ("\n5/9", 3)):
        with open(generation.log_path(0), "a") as log:
            log.write(written)
        progress.read()
        assert (progress.report() or {})["step"] == step


def test_an_epoch_beyond_all_numbers_is_unreadable(generation: Generation) -> None:
    pattern = r"(?P<epoch>\d+) (?P<step>\d+)/(?P<total>\d+)"
    progress = RankProgress(generation, 0, re.compile(pattern))
    generation.log_path(0).write_text(f"{'9' * 4000} 1/100\n")
    progress.read()
    assert (progress.report() or {}).keys() == {"unreadable"}


def test_the_last_lines_are_short_and_harmless(generation: Generation) -> None:
    progress = RankProgress(generation, 0, None)
    assert (progress.printed_at(), progress.read_tail(Redactor())) == (0.0, [])
    log = generation.log_path(0)
    log.write_text("one\n\x1b[2J\x1b]0;title\x07two\x07\n\n  \nbar 1%\rbar 2%\x1b[A\rbar 3%")
    assert progress.printed_at() > 0.0
    assert progress.read_tail(Redactor()) == ["one", "two", "bar 1%", "bar 2%", "bar 3%"]
    log.write_bytes(b"x" * 100_000 + b"\n" + b"y" * 5000 + b"\n\xff\n")
    assert progress.read_tail(Redactor()) == ["y" * 300, "\ufffd"]
    log.write_bytes(b"z" * 100_000)
    assert progress.read_tail(Redactor()) == ["z" * 300]


def test_a_pattern_that_takes_long_is_given_up_and_says_so(generation: Generation) -> None:
    progress = RankProgress(generation, 0, re.compile(r"(?P<step>(\d+)+)$"))
    generation.log_path(0).write_text("12\n")
    assert progress.read() is True
    with open(generation.log_path(0), "a") as log:
        log.write(f"{'1' * 60}x\n")
    began = time.process_time()
    progress.read()
    assert time.process_time() - began < 10 * MATCH_CPU_S
    report = progress.report() or {}
    assert report.keys() == {"unreadable"}
    assert "log_pattern" in report["unreadable"] and "0.5 s" in report["unreadable"]
    with open(generation.log_path(0), "a") as log:
        log.write("13\n")
    assert progress.read() is False
    # Nothing of it is left that could end the process later.
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) is signal.SIG_DFL


def test_one_line_may_tell_of_both(generation: Generation) -> None:
    progress = RankProgress(
        generation,
        0,
        re.compile(r"step (?P<step>\d+) loss (?P<loss>\S+)( saved (?P<checkpoint>\d+))?"),
    )
    generation.log_path(0).write_text("step 7 loss 2.5 saved 7\nstep 8 loss 2.4\n")
    progress.read()
    report = progress.report()
    assert report is not None
    assert (report["step"], report["checkpoint"], report["values"]) == (8, 7, {"loss": 2.4})


def test_a_torn_file_keeps_the_last_step_and_no_cut_number(
    generation: Generation,
) -> None:
    progress = RankProgress(generation, 0, None)
    assert progress.read() is False
    assert progress.report() is None
    generation.progress_path(0).write_text("1234")
    assert progress.read() is True
    for torn in ("", "12"):
        generation.progress_path(0).write_text(torn)
        assert progress.read() is False
        report = progress.report()
        assert report is not None
        assert report["step"] == 1234
    progress.read()
    assert (progress.report() or {})["step"] == 12  # said twice: it did go back
    generation.progress_path(0).write_text('{"step"')

    def unreadable() -> bool:
        progress.read()
        return "unreadable" in (progress.report() or {})

    wait_for(unreadable)


@pytest.mark.parametrize(
    "error",
    [
        {
            "message": {
                "message": "E",
                "errorCode": 1,
                "extraInfo": {"py_callstack": "", "timestamp": "1"},
            }
        },
        {"message": "Signal 9 (SIGKILL) received by PID 4242", "timestamp": 1785571200},
    ],
)
def test_error_files_in_both_forms(generation: Generation, error: object) -> None:
    generation.error_path(0).write_text(json.dumps(error))
    assert evidence.read_error(generation.error_path(0), Redactor()) == error


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b'"text"', b"{}", b"\xff\xfe", b"x" * 300000])
def test_error_files_that_say_nothing(generation: Generation, text: bytes) -> None:
    assert evidence.read_error(generation.error_path(0), Redactor()) is None
    generation.error_path(0).write_bytes(text)
    assert list(evidence.read_error(generation.error_path(0), Redactor()) or {}) == ["unreadable"]


def test_the_end_of_a_log_is_bounded(generation: Generation) -> None:
    generation.log_path(0).write_text("".join(f"{number} {'x' * 1000}\n" for number in range(100)))
    found = evidence.read_tail(generation.log_path(0), Redactor())
    assert found[-1].startswith("99 ")
    assert sum(map(len, found)) <= 16_384
    assert all(line[0].isdigit() for line in found)
    generation.log_path(0).write_text("y" * 20000)
    assert evidence.read_tail(generation.log_path(0), Redactor()) == ["y" * 16_384]
    assert evidence.read_tail(generation.log_path(1), Redactor()) == []


def test_a_torn_journal_goes_on_after_its_last_whole_line(generation: Generation) -> None:
    record = journal.Journal(generation.journal)
    record.append(("Stopped", {"reason": "a"}), ("Stopped", {"reason": "b"}))
    record.close()
    with open(generation.journal, "ab") as file:
        file.write(b'{"seq":3,"ki')
    assert [seen["seq"] for seen in journal.read(generation.journal)] == [1, 2]
    record = journal.Journal(generation.journal)
    record.append(("Fenced", {"why": "isolated", "reason": "c"}))
    record.close()
    assert [(seen["seq"], seen["kind"]) for seen in journal.read(generation.journal)][2:] == [
        (3, "Fenced")
    ]


@pytest.mark.parametrize(
    "written",
    [
        "9007199254740993",
        "1" + "0" * 40,
        '{"step": 1e300}',
        '{"step": 3, "checkpoint": 9007199254740993}',
    ],
)
def test_a_step_that_no_controller_accepts_is_unreadable(written: str) -> None:
    with pytest.raises(ProgressError, match=r" \d+ bits; .* 2\^53$"):
        parse_file(written)


def test_what_is_reported_beside_a_step_is_bounded() -> None:
    many = {f"value {number:03}": number for number in range(100)}
    read = parse_file(
        json.dumps({"step": 3, "phase": "p" * 1000, "loss": 10**400, "n" * 1000: 2, **many})
    )
    assert (len(read["values"]), read["phase"], read["values"]["loss"]) == (
        64,
        "p" * 256,
        float("inf"),
    )
    assert read["values"]["n" * 256] == 2.0


# --- the last step --------------------------------------------------------------------------------

STEP = r"step (?P<step>\d+)"


def read_last(generation: Generation, *logs: str, pattern: str = STEP) -> int | None:
    """Read the last step of ranks with these logs. In them `~` is a part of a log, `=` a line."""
    record = {"ranks": list(range(len(logs)))}
    (generation.path / "order.json").write_text(json.dumps(record))
    noise = "NCCL INFO x\n" * (LOG_CHUNK_BYTES // 12)
    for rank, log in enumerate(logs):
        generation.log_path(rank).write_text(
            log.replace("~", noise).replace("=", "x" * LOG_CHUNK_BYTES)
        )
    return read_last_step([generation], pattern)[0]


@pytest.mark.parametrize(
    ("log", "step"),
    [
        ("step 7\nstep 8\nend\n", 8),
        ("step 7\nstep 8", 8),
        ("step 7\rstep 8", 8),
        ("step 122\nstep 12", 122),  # killed while it wrote 123
        ("step \x1b[1m8\x1b[0m\n", 8),
        ("step 8\n~~", 8),
        ("step 7~step 8\n~~~x", 8),
        ("step 8 =\nend", 8),
        ("nothing\n~", None),
        ("", None),
    ],
)
def test_the_last_step_is_found_in_what_a_rank_left(
    log: str, step: int | None, generation: Generation
) -> None:
    assert read_last(generation, log) == step


def test_the_last_step_is_found_across_the_parts_of_a_log(generation: Generation) -> None:
    for size in range(12):
        log = "step 1234\n" + "x" * (LOG_CHUNK_BYTES - size) + "\n"
        assert read_last(generation, log) == 1234, size


def test_the_last_step_is_of_the_slowest_rank_that_reports_steps(generation: Generation) -> None:
    generation.progress_path(0).write_text("9")
    generation.log_path(2, "stderr").write_text("step 10\n")
    # A log whose end has none is not searched further, as other logs have one.
    assert read_last(generation, "step 5\n", "step 8\n", "step 7\n", "step 6\n~", "\n") == 8


def test_the_newest_of_all_logs_is_read_first(
    generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each match takes some time in which others cannot be read, whatever the machine.
    monkeypatch.setattr(progress, "LAST_READ_CPU_S", 0.05)
    monkeypatch.setattr(progress, "LAST_READ_TIMEOUT", 60.0)
    logs = ["a" * 40 + "\n"] * 2 + ["step 8\n"]
    slow = r"step (?P<step>\d+)|(a+)+$x"
    assert read_last(generation, *logs, pattern=slow) is None  # and it ends at all
    assert read_last(generation, *reversed(logs), pattern=slow) == 8

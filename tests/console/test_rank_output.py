"""What people see of ranks that draw progress bars, in a pipe and on a terminal.

The sequences are those that tqdm 4.67, rich 15 and Keras write, with shorter bars.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from relaunch.cli import rank_output
from relaunch.cli.rank_output import MAX_LINE, Printer, RunOutput
from relaunch.cli.terminal import say
from relaunch.config import ConfigError

BAR = "".join(f"\rtrain: {n:3}%|{'█' * (n // 20):5}|" for n in range(0, 101, 10))
NESTED = "".join(
    f"\repoch: {epoch}/2"
    + "".join(f"\n\rbatch: {batch}/3\x1b[A" for batch in range(4))
    + "\n\r          \x1b[A"
    + f"\r          \rsaved {epoch}\n"
    for epoch in range(2)
) + ("\repoch: 2/2\nend\n")
RICH = (
    "\x1b[?25l\r\x1b[2Kepoch \x1b[90m----\x1b[0m  0%\nbatch \x1b[90m----\x1b[0m  0%"
    "\r\x1b[2K\x1b[1A\x1b[2Kepoch \x1b[90m--\x1b[0m-- 50%\nbatch \x1b[90m-\x1b[0m--- 25%"
    "\r\x1b[2K\x1b[1A\x1b[2Kepoch ---- 100%\nbatch ---- 100%\n\x1b[?25h"
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def piped(text: str, size: int) -> None:
    """Print what a pipe gets in the end of one rank, read in pieces of a size."""
    printer = Printer(1, colour=False, is_live=False, interval=float("inf"))
    for at in range(0, len(text), size):
        printer.feed(0, text[at : at + size])
        printer.refresh()
    printer.flush()


@pytest.mark.parametrize("size", [1, 7, 1_000_000])
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (BAR, ["train: 100%|█████|"]),
        (BAR + "\nend\n", ["train: 100%|█████|", "end"]),
        (BAR + "\r" + " " * 30 + "\rend\n", ["end"]),
        (NESTED, ["epoch: 0/2", "saved 0", "epoch: 1/2", "saved 1", "epoch: 2/2", "end"]),
        (RICH, ["epoch ----  0%", "epoch ---- 100%", "batch ---- 100%"]),
        ("1/3 [=>.]" + "\x08" * 9 + "\r3/3 [===]\n", ["3/3 [===]"]),
        ("one\r\n\r\ntwo", ["one", "", "two"]),
        ("\x1b]0;title\x07a\x1b[2J\x1b[5;7Hb\x1b[?1049h\x1b(Bc\n", ["abc"]),
        ("\x1b[31mred\x1b[0m \x9b31m\x00\n", ["red 31m"]),
        ("a\tb  \n   \n", ["a\tb  ", "   "]),
        ("\x1b", []),
        ("x\x1b[12", ["x"]),
        ("x\x1b]0;never ends", ["x"]),
        ("a\x1b]52;c;cm0=\x07b\x1b[6nc\x1b[cd\x1b]8;;http://e/\x1b\\e\n", ["abcde"]),
        ("\u202eevil\u2066\u200b\u2028x\n", ["evilx"]),
    ],
)
def test_only_what_a_terminal_would_keep_is_printed(
    text: str, lines: list[str], size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(text, size)
    assert capsys.readouterr().out.splitlines() == [f"[rank 0] {line}" for line in lines]


def test_a_bar_in_a_pipe_is_a_line_each_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    printer = Printer(1, colour=False, is_live=False, clock=clock)
    for second in range(13):
        for tenth in range(10):
            printer.feed(0, f"\r{second * 10 + tenth} of 130")
            printer.refresh()
        clock.now += 1
    printer.flush()
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"[rank 0] {number} of 130" for number in (50, 100, 129)]


def test_an_unfinished_line_is_shown_after_some_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    printer = Printer(1, colour=False, is_live=False, clock=clock)
    printer.feed(0, "whole\nloading")
    assert printer.next_refresh == 5
    clock.now += 4.9
    printer.refresh()
    assert capsys.readouterr().out == "[rank 0] whole\n"
    clock.now += 0.1
    printer.refresh()
    printer.refresh()
    assert capsys.readouterr().out == "[rank 0] loading\n"
    assert printer.next_refresh == float("inf")
    printer.feed(0, " done\n")
    printer.flush()
    assert capsys.readouterr().out == "[rank 0] loading done\n"


def test_lines_that_end_soon_are_never_printed_in_two(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    printer = Printer(1, colour=False, is_live=False, clock=clock)
    for number in range(20):
        printer.feed(0, f"\n{number}" if number else "0")
        clock.now += 1
        printer.refresh()
    printer.flush()
    assert capsys.readouterr().out.splitlines() == [f"[rank 0] {number}" for number in range(20)]


def test_colours_end_with_their_line_and_only_on_terminals(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printer = Printer(1, colour=True, is_live=False)
    printer.feed(0, "\x1b[31mred\nplain\n")
    prefix = "\x1b[36m[rank 0]\x1b[0m"
    assert capsys.readouterr().out == f"{prefix} \x1b[31mred\x1b[0m\n{prefix} plain\n"


def on_screen(written: str) -> list[str]:
    """Return what a terminal shows of the few sequences that are written for it."""
    rows, at = [""], 0
    for piece in re.split(r"(\n|\r|\x1b\[\d*A|\x1b\[J)", written):
        if piece == "\n":
            at += 1
            rows += [""] * (at + 1 - len(rows))
        elif piece.endswith("A") and piece.startswith("\x1b["):
            at -= int(piece[2:-1])
        elif piece == "\x1b[J":
            rows[at:] = [""]
        elif piece != "\r":
            assert at >= 0
            rows[at] += piece
    return rows


def test_a_terminal_shows_a_bar_of_each_rank_below_the_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("LINES", "40")
    printer = Printer(2, colour=False, is_live=True)
    written = ""
    for step in range(3):
        for rank in (0, 1):
            printer.feed(rank, f"\rstep {step} of 3, and more that does not fit")
        printer.refresh()
    written += capsys.readouterr().out
    shown = [f"[rank {rank}] step 2 of 3, and mor" for rank in (0, 1)]
    assert on_screen(written) == [*shown, ""]
    printer.feed(1, "\r" + " " * 40 + "\rsaved\n\rstep 3 of 3")
    say("the phase is RUNNING")
    told = capsys.readouterr()
    printer.refresh()
    written += told.out + told.err + capsys.readouterr().out
    assert on_screen(written) == [
        "[rank 1] saved",
        "relaunch: the phase is RUNNING",
        shown[0],
        "[rank 1] step 3 of 3",
        "",
    ]
    printer.flush()
    say("the end")
    told = capsys.readouterr()
    assert on_screen(written + told.out + told.err)[2:] == [
        "[rank 0] step 2 of 3, and more that does not fit",
        "[rank 1] step 3 of 3",
        "relaunch: the end",
        "",
    ]


def test_of_many_bars_a_terminal_shows_a_few_and_counts_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printer = Printer(100, colour=False, is_live=True)
    for rank in range(100):
        printer.feed(rank, "loading")
    printer.refresh()
    rows = on_screen(capsys.readouterr().out)
    assert rows[0] == "[rank 0]  loading" and len(rows) == rank_output.LIVE_ROWS + 1
    assert "93" in rows[-2]
    printer.flush()


def test_hostile_output_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    # With a time that grows with the square of the size this would last for minutes.
    for text in ("\x1b]" * 50_000, "\x1b[1" * 50_000, "\r" * 50_000 + "\x1b[A" * 50_000):
        piped(text, 50_000)
    assert "\x1b" not in capsys.readouterr().out
    piped("x" * (2 * MAX_LINE + 10), 250_000)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and sum(line.count("x") for line in lines) == 2 * MAX_LINE + 10


def test_a_run_prints_and_copies_the_streams_that_are_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = RunOutput(frozenset({"stdout"}), frozenset({1}), tmp_path / "logs")
    output.check_folder()
    streams = ("stdout", "stderr")
    for generation in (1, 2):
        for stream in streams:
            printer = output.make_printer(4, 2, generation, streams, stream)
            for rank in range(5):  # 4: a launcher
                printer.feed(rank, f"{stream} {rank}\n")
                printer.feed(rank, f"of {generation}\n")
            printer.flush()
    out, err = capsys.readouterr()
    shown = {line.split("]")[0] for line in err.splitlines()}
    assert (out, shown) == ("", {"[rank 1", "[rank 3", "[launcher 0"})
    copied = {path.relative_to(tmp_path / "logs") for path in tmp_path.rglob("*.log")}
    assert len(copied) == 2 * 2 * 5
    assert (tmp_path / "logs/attempt_1/0/stderr.log").read_text() == "stderr 0\nof 2\n"


def test_a_folder_for_copies_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(ConfigError, match=r"--log-dir: .*/logs"):
        RunOutput(folder=tmp_path / "logs").check_folder()


def test_copies_that_cannot_be_written_are_given_up_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "attempt_0").touch()
    printer = RunOutput(folder=tmp_path).make_printer(1, 1, 1, ("stdout",), "stdout")
    for text in ("a\n", "b\n"):
        printer.feed(0, text)
    out, err = capsys.readouterr()
    assert (out, err.count("cannot be written")) == ("[rank 0] a\n[rank 0] b\n", 1)


@pytest.mark.parametrize(
    ("sequence", "passes"),
    [
        ("\x1b[1;31m", "\x1b[1;31m"),
        ("\x1b[38;5;8m", "\x1b[38;5;8m"),  # a grey, not the attribute
        ("\x1b[48;2;8;8;8m", "\x1b[48;2;8;8;8m"),
        ("\x1b[38:2::8:8:8m", "\x1b[38:2::8:8:8m"),
        ("\x1b[8m", ""),  # text that is not seen
        ("\x1b[1;08;31m", "\x1b[1;31m"),
        ("\x1b[38;5;8;8m", "\x1b[38;5;8m"),
        ("\x1b[>4;2m", ""),  # how the keyboard answers
        ("\x1b[?4m", ""),  # a question, whose answer the shell would read
        ("\x1b[0 m", ""),
    ],
)
def test_colours_pass_and_nothing_that_ends_like_one(
    sequence: str, passes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printer = Printer(1, colour=True, is_live=False)
    printer.feed(0, f"{sequence}text\n")
    printer.flush()
    line = capsys.readouterr().out.partition("[rank 0]\x1b[0m ")[2].removesuffix("\n")
    assert line == (f"{passes}text\x1b[0m" if passes else "text")

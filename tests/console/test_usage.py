"""Command lines that cannot be parsed: one sentence each, and how to get help."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.cli import app
from tests.pages import sections

MISTAKES = (
    "nosuch",
    "shwo llama",
    "submit",
    "submit job.yaml --folow",
    "logs llama --rank two",
    "logs llama --tail -3",
    "nodes lst",
    "policy change llama",
    "explain exit",
    "explain exit 137 --polcy default",
    "explain exit -999",
    "explain xid -79",
    "explain xid 79 --exit-code x",
)


def test_a_line_that_cannot_be_parsed_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], page: SnapshotAssertion
) -> None:
    said = {}
    for line in MISTAKES:
        monkeypatch.setattr("sys.argv", ["relaunch", *line.split()])
        code, shown = app.main(), capsys.readouterr()
        assert (code, shown.out, shown.err.count("\n")) == (2, "", 1)
        said[f"relaunch {line}"] = shown.err
    assert sections(said) == page


@pytest.mark.parametrize(
    ("line", "code", "word"),
    [("nodes", 2, "Usage: "), ("explain exit -9", 0, "SIGKILL"), ("--help", 0, "init")],
)
def test_help_and_negative_numbers_are_printed(
    line: str,
    code: int,
    word: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["relaunch", *line.split()])
    assert app.main() == code
    assert word in "".join(capsys.readouterr())

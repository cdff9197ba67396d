"""Pages of docs/reference that tools/reference.py writes: none is stale, nothing is left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from relaunch.cli.app import app
from relaunch.fields import StrictModel
from tools import reference


def test_no_page_is_stale() -> None:
    assert reference.find_stale(reference.make_pages()) == [], "run `make reference`"


def test_a_changed_page_is_stale() -> None:
    assert reference.find_stale({"files.md": "other\n", "no-such-page.md": "\n"}) == [
        "files.md",
        "no-such-page.md",
    ]


def test_every_key_of_json_is_explained() -> None:
    pages = [(reference.REFERENCE / name).read_text() for name in ("cli.md", "events.md")]
    assert reference.find_unexplained("\n".join(pages)) == [], "explain them in cli.md"
    assert "report: trend" in reference.find_unexplained("`summary`")


def test_each_command_that_prints_json_is_there() -> None:
    def list_commands(command: Any, name: str = "") -> Iterator[str]:
        for word, one in getattr(command, "commands", {}).items():
            yield from list_commands(one, f"{name} {word}".strip())
        if any("--json" in one.opts for one in command.params):
            yield name

    known = [command for command, _, _ in reference.VIEWS]
    commands = list(list_commands(typer.main.get_command(app)))
    assert len(commands) > 10
    # `next` prints the value of a key of `show`.
    assert [one for one in commands if not any(each.startswith(one) for each in known)] == ["next"]


def test_keys_within_keys_are_there() -> None:
    keys = dict(reference.read_keys("report_views", "report_view"))
    assert keys["jobs"] == ""
    assert keys["nodes"] == "[{node, count, price, causes, jobs, recent, link, which}]"
    assert keys["trend"].startswith("{direction, sentence, older{start, end,")
    assert dict(reference.read_keys("explain", "view_of")).keys() == {
        *("verdict", "cause", "findings", "reason", "first")
    }
    page = reference.make_pages()["json.md"]
    assert "| `RankExited` | `node`," in page and "- `withdrawn`" not in page


class Outer(StrictModel):
    wait: bool = False
    """Whether it waits.

    Or not.
    """
    silent: int = 3


def test_a_key_without_a_description_is_refused() -> None:
    assert reference.read_field_texts(Outer) == {}, "only the project's own models"
    with pytest.raises(reference.Undocumented, match=r"Outer\.wait has no description"):
        reference.describe_model(Outer, Outer.model_fields, {})


def test_every_command_and_key_is_there() -> None:
    pages = reference.make_pages()
    for text in ("## relaunch nodes repair", "`--power-cycle`", "## relaunch policy replay"):
        assert text in pages["commands.md"]
    for text in ("`flight_record`", "`no_progress_ask`", "`drain_within`", "**tables**"):
        assert text in pages["files.md"]
    assert "| update | `change_policy` |" in pages["workflows.md"]
    assert "| `Nodes` | KeywordList |" in pages["workflows.md"]

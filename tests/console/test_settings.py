"""Settings: one source of each, blank means unset, and no misspelt one passes in silence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from relaunch.config import ConfigError, describe_settings, read_settings


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in [name for name in os.environ if name.startswith("RELAUNCH_")]:
        monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)


def test_s2_11_settings_rank_options_environment_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "relaunch.toml").write_text('jobs = 7\nlog_level = "debug"\nstate = "/from/file"\n')
    monkeypatch.setenv("RELAUNCH_JOBS", "9")
    monkeypatch.setenv("RELAUNCH_TASK_QUEUE", "")
    monkeypatch.setenv("RELAUNCH_FLEETS", "a.yaml:b.yaml")
    settings = read_settings(state=Path("/typed"))
    assert (settings.jobs, settings.log_level, settings.task_queue) == (9, "DEBUG", "relaunch")
    assert (settings.state, settings.fleets) == (Path("/typed"), (Path("a.yaml"), Path("b.yaml")))
    sources = {name: source for name, _, source in describe_settings(settings, ("state",))}
    expected = {
        "state": "command line",
        "jobs": "RELAUNCH_JOBS",
        "log_level": "relaunch.toml",
        "task_queue": "default",
    }
    assert {name: sources[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("RELAUNCH_JOBS", "many", ("RELAUNCH_JOBS is 'many'", "integer")),
        ("RELAUNCH_JOBS", "0", ("RELAUNCH_JOBS is '0'", "1")),
        ("RELAUNCH_METRICS", "9464", ("RELAUNCH_METRICS is '9464'", "host:port")),
        ("RELAUNCH_WEB_UI", "ui:8080", ("RELAUNCH_WEB_UI is 'ui:8080'", "http://")),
        ("RELAUNCH_LOG_LEVEL", "loud", ("RELAUNCH_LOG_LEVEL is 'loud'", "'INFO'")),
        ("RELAUNCH_STAET", "x", ("unknown setting RELAUNCH_STAET", "RELAUNCH_STATE")),
        ("RELAUNCH_SETTINGS", "/none.toml", ("settings file /none.toml",)),
    ],
)
def test_a_bad_value_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as caught:
        read_settings()
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("jobz = 1\n", "unknown setting jobz"),
        ("jobs = 0\n", "jobs is 0"),
        ("jobs\n", "is not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "relaunch.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_settings()

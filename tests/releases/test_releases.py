"""What every release wrote is continued, decoded and read by the code of today."""

from __future__ import annotations

import json
import re

from relaunch.config import Settings
from relaunch.spec.fleet import FleetNode, FleetSpec
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import Policy, preset
from tests.releases.check import find_breaks, list_all
from tests.releases.payloads import MESSAGES, WITHOUT_CONTENT, find_types
from tests.releases.real import EXAMPLES
from tests.releases.record import ROOT, read_version
from tests.releases.recording import FINAL, list_releases, load, path_of


async def test_what_each_release_wrote_is_continued_and_read() -> None:
    breaks = [each for path in list_releases() for each in await find_breaks(load(path))]
    assert breaks == [], "\n".join(breaks)


def test_a_key_that_a_release_had_not_is_as_its_preset_says() -> None:
    """Or a job that began under it would decide otherwise than its preset promises."""
    seen = set()
    for path in list_releases():
        recording = load(path)
        for payload in list_all(recording, recording.list_histories()):
            if payload.kind != "input of workflow TrainingJob":
                continue
            written = json.loads(payload.data)["policy"]
            read = Policy.model_validate(written)
            newer = set(Policy.model_fields) - set(written)
            expected = preset(read.extends)
            assert {key: getattr(read, key) for key in newer} == {
                key: getattr(expected, key) for key in newer
            }, (payload.where, read.extends)
            seen.add(read.extends)
    assert seen >= {"default", "ecs-reboot-once"}


def test_each_version_that_was_released_has_its_file() -> None:
    log = (ROOT / "CHANGELOG.md").read_text()
    released = set(re.findall(r"^## \[?(\d+\.\d+\.\d+)\b", log, re.MULTILINE))
    released |= {version for version in (read_version(),) if FINAL.fullmatch(version)}
    missing = sorted(version for version in released if not path_of(version).exists())
    assert missing == [], f"run `make record-release` and commit the file of {', '.join(missing)}"


def test_a_file_is_named_by_the_release_in_it() -> None:
    assert {path: path_of(load(path).release) for path in list_releases()} == {
        path: path for path in list_releases()
    }


def test_each_message_that_is_declared_as_any_has_a_type() -> None:
    kinds = find_types()
    for workflow, messages in MESSAGES.items():
        for name in messages:
            assert {f"signal {name} of {workflow}", f"update {name} of {workflow}"} & set(kinds)
        assert not set(messages) & set(WITHOUT_CONTENT[workflow])


def test_examples_have_every_key_that_people_may_write() -> None:
    def read(folder: str) -> str:
        return "\n".join(path.read_text() for path in (EXAMPLES / folder).glob("*.yaml"))

    for folder, model in (
        ("jobs", JobSpec),
        ("fleets", FleetSpec),
        ("fleets", FleetNode),
        ("policies", Policy),
    ):
        written = set(re.findall(r"(\w+):", read(folder)))
        hidden = {"stated", "catalog"} if model is Policy else set()
        assert set(model.model_fields) - hidden - written == set(), model
    settings = set(re.findall(r"^(\w+) =", (EXAMPLES / "relaunch.toml").read_text(), re.MULTILINE))
    assert settings == set(Settings.model_fields)

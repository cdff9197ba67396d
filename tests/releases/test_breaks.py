"""Recordings, and code, that were broken on purpose: each is found, and said in one sentence."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from relaunch.agent.node import reboots
from relaunch.agent.state import JobState, read_boot_id
from relaunch.messages.jobs import JobResult, TrainingJobInput
from relaunch.workflows.training_job.workflow import TrainingJob
from tests.releases.check import compare, find_breaks
from tests.releases.files import CONTROLLER, NODE, collect, lay_out, read_all
from tests.releases.recording import Answer, Recording
from tests.workflows.test_histories import HISTORIES

NAME = "success job/success 1"
JOB_FILE = f"{CONTROLLER}/jobs/j.yaml"


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    """A small release: the history of a job, files of a node, a job file, and an answer."""
    node, controller = tmp_path / "made" / NODE, tmp_path / "made" / CONTROLLER
    job = JobState(node, "default", "j")
    job.path.mkdir(parents=True)
    job.reserve(prepared=(7, 2))
    reboots.record(node, "repair/default/n1/1", "Xid 79")
    (controller / "jobs").mkdir(parents=True)
    (controller / "jobs" / "j.yaml").write_text("name: j\ncommand: [train]\npriority: 3\n")
    files = collect(node, NODE) | collect(controller, CONTROLLER)
    boot_id = read_boot_id(node)
    lay_out(files, boot_id, tmp_path / "laid")
    history = rewrite(json.loads((HISTORIES / "success.json").read_text()))
    answer = Answer("answer of query next of Fleet", "a fleet", "it waits until a job wants nodes")
    readings = read_all(tmp_path / "laid")
    return Recording("9.8.7", {}, {NAME: history}, (answer,), files, boot_id, readings)


def rewrite(history: dict[str, Any]) -> dict[str, Any]:
    """Return an old history with the input and the result of the job as they are written today."""
    begun, ended = history["events"][0], history["events"][-1]
    for payloads, hint in (
        (begun["workflowExecutionStartedEventAttributes"]["input"], TrainingJobInput),
        (ended["workflowExecutionCompletedEventAttributes"]["result"], JobResult),
    ):
        adapter: TypeAdapter[Any] = TypeAdapter(hint)
        (payload,) = payloads["payloads"]
        read = adapter.validate_json(base64.b64decode(payload["data"]), extra="ignore")
        payload["data"] = base64.b64encode(adapter.dump_json(read)).decode()
    return history


def change_payload(recording: Recording, change: Callable[[str], str]) -> Recording:
    """Return it with another input of the workflow."""
    history = json.loads(json.dumps(recording.histories[NAME]))
    started = history["events"][0]["workflowExecutionStartedEventAttributes"]
    (payload,) = started["input"]["payloads"]
    before = base64.b64decode(payload["data"]).decode()
    after = change(before)
    assert after != before
    payload["data"] = base64.b64encode(after.encode()).decode()
    return replace(recording, histories={NAME: history})


def change_file(recording: Recording, ending: str, change: Callable[[str], str]) -> Recording:
    (name,) = (each for each in recording.files if each.endswith(ending))
    changed = change(recording.files[name])
    assert changed != recording.files[name]
    return replace(recording, files={**recording.files, name: changed})


async def find_break(recording: Recording, *words: str) -> None:
    """Assert that there is a sentence with the words, and that each names the release."""
    breaks = await find_breaks(recording)
    assert all(each.startswith("release 9.8.7: ") and "\n" not in each for each in breaks), breaks
    assert any(all(word in each for word in words) for each in breaks), breaks


async def test_a_whole_recording_has_no_break(recording: Recording) -> None:
    assert await find_breaks(recording) == []


async def test_a_changed_order_of_commands_in_the_code_is_found(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingJob, "_publish", lambda self: None)
    await find_break(recording, "history success job/success", "workflow.patched")


async def test_a_changed_order_of_commands_in_a_history_is_found(recording: Recording) -> None:
    text = json.dumps(recording.histories[NAME]).replace('"watch_ranks"', '"stop_ranks"')
    changed = replace(recording, histories={NAME: json.loads(text)})
    await find_break(changed, "history success job/success", "workflow.patched")


async def test_a_renamed_field_of_a_payload_is_found(recording: Recording) -> None:
    changed = change_payload(
        recording, lambda text: text.replace('"submitted_by":', '"submitter":', 1)
    )
    await find_break(
        changed, "input of workflow TrainingJob", "event 1", "submitter", "keeps its name"
    )


async def test_another_type_of_a_payloads_field_is_found(recording: Recording) -> None:
    changed = change_payload(
        recording, lambda text: text.replace('"submitted_by":"ada"', '"submitted_by":["ada"]', 1)
    )
    await find_break(changed, "input of workflow TrainingJob", "submitted_by", "its type")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer("answer of query next of Fleet", "a fleet", {"what": "it waits"}), "not decoded"),
        (Answer("answer of query mood of Fleet", "a fleet", "good"), "is not taken by any"),
    ],
    ids=["of another type", "to a question that is not known"],
)
async def test_an_answer_that_is_not_understood_is_found(
    recording: Recording, answer: Answer, words: str
) -> None:
    await find_break(replace(recording, answers=(answer,)), answer.kind, words)


@pytest.mark.parametrize(
    ("ending", "change"),
    [
        ("highest.json", lambda text: text[: len(text) // 2]),
        ("highest.json", lambda text: text.replace('"prepared"', '"launched"')),
        ("reboots.jsonl", lambda text: text.replace('"reason"', '"why"')),
        ("rebooting.json", lambda text: ""),
        (JOB_FILE, lambda text: text.replace("priority", "importance")),
        (JOB_FILE, lambda text: text.replace("priority: 3", "priority: 4")),
    ],
    ids=["torn", "renamed", "a line of a journal", "empty", "a key of a person", "its value"],
)
async def test_a_state_file_that_is_not_read_as_it_was_is_found(
    recording: Recording, ending: str, change: Callable[[str], str]
) -> None:
    changed = change_file(recording, ending, change)
    await find_break(changed, "file ", ending.rpartition("/")[2], "as it was")


async def test_a_file_that_is_not_read_any_more_is_found(recording: Recording) -> None:
    readings = {**recording.readings, "node/moods.json": {"mood": "good"}}
    await find_break(replace(recording, readings=readings), "node/moods.json", "read by nothing")


@pytest.mark.parametrize(
    ("recorded", "now", "differs"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": 1}, {"b": 1}, True),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2, "c": 3}]}, False),
        ([1], [1, 2], True),
        (1, "1", True),
        ({"codes": ["mce"]}, {"codes": ["mce", "oops"]}, False),
        ({"codes": ["mce"]}, {"codes": ["mce", "stuck"]}, True),
        ({"codes": ["mce", "oops"]}, {"codes": ["mce"]}, True),
        ({"codes": ["oops"]}, {"codes": ["oops", "panic"]}, False),
        ({"names": ["mce"]}, {"names": ["mce", "oops"]}, True),
    ],
)
def test_more_is_fine_and_less_or_other_is_not(recorded: Any, now: Any, differs: bool) -> None:
    assert bool(compare(recorded, now)) is differs

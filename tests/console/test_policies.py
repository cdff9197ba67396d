"""`policy`: presets, explain, change and replay, as people type them.

The last two run against a real job on a real server.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion
from temporalio.client import Client, WorkflowHistory

from relaunch.cli.policies import change, read, read_changes
from relaunch.cli.policy_replay import trial_lines, trial_view, try_on_events, try_on_history
from relaunch.cli.policy_views import PRESETS, WIDTH, policy_lines, policy_view
from relaunch.config import ConfigError
from relaunch.evidence.causes import Cause
from relaunch.job.replay import replay
from relaunch.job.state import Phase
from relaunch.spec.policy import preset, preset_names, resolve
from relaunch.temporal import data_converter
from relaunch.workflows.training_job.recording import NotReplayable, recording
from tests.console.commands import ROOT, one_sentence, starter
from tests.fakes.nodes import Exit, Progress, Script, error_file
from tests.pages import sections
from tests.workflows.conftest import FAST, _dev
from tests.workflows.rig import policy, rig

SOON = (*FAST, "limit.historyCount.suggestContinueAsNew=15")

# A cancel that crosses an activity's end makes the SDK warn from its own poll loop, and there an
# error ends the worker.
LATE_CANCEL = pytest.mark.filterwarnings("ignore:Cannot find activity to cancel")


@pytest.fixture
async def server() -> AsyncIterator[Client]:
    """A real server that suggests to continue as new after 15 events: histories of several runs."""
    async with _dev(
        [word for value in SOON for word in ("--dynamic-config-value", value)]
    ) as client:
        yield client


async def test_presets_lists_each_with_a_line_of_what_it_is(tmp_path: Path) -> None:
    done = await starter(tmp_path, "policy", "presets")
    assert (done.code, set(PRESETS)) == (0, set(preset_names()))
    listed = dict(line.split(maxsplit=1) for line in done.out.splitlines())
    assert tuple(sorted(listed)) == preset_names()
    assert all(len(line) <= WIDTH for line in done.out.splitlines())


MISTAKES = (
    ("max_restart: 3\n", 1, ("max_restart: ", "max_restarts")),
    ("max_restarts: -1\n", 1, ("max_restarts", "-1")),
    (
        "causes:\n  HANG:\n    - {strategy: FAIL}\n    - {strategy: RESTART_IN_PLACE, delay: 5}\n",
        4,
        ("delay", "unit"),
    ),
    ("causes:\n  HANG:\n    - {strategy: FAIL, tries: 2}\n", 3, ("FAIL", "tries")),
    (
        "causes:\n  HANG:\n    - {strategy: FAIL}\n    - {strategy: ASK}\n",
        2,
        ("causes.HANG", "rung 2"),
    ),
    (
        "max_restarts: 3\ntimeouts:\n  heartbeat: 30s\n  lease: 40s\n",
        4,
        ("lease", "1m30s"),
    ),
    ("timeouts: {lease: 20s}\n", 1, ("lease", "30s")),
    ("extends: harsh\n", 1, ("'harsh'",)),
    ("", 1, ("empty",)),
)


def refusal(folder: Path, text: str) -> str:
    """Return what is said of a policy file, without its folder."""
    (folder / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(str(folder / "bad.yaml"))
    return str(caught.value).replace(f"{folder}/", "")


@pytest.mark.parametrize(("text", "line", "named"), MISTAKES)
def test_a_policy_mistake_is_one_sentence_with_file_and_line(
    tmp_path: Path, text: str, line: int, named: tuple[str, ...]
) -> None:
    said = refusal(tmp_path, text)
    assert said.startswith(f"bad.yaml:{line}: ") and "\n" not in said
    assert all(word in said for word in named), said


def test_the_sentences_of_policy_mistakes(tmp_path: Path, page: SnapshotAssertion) -> None:
    said = {text: refusal(tmp_path, text) for text, _, _ in MISTAKES}
    assert sections(said) == page


async def test_a_policy_that_can_be_used_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text("extends: torchelastic\nmax_restarts: 4\n")
    done = await starter(tmp_path, "policy", "check", "good.yaml")
    assert (done.code, done.err) == (0, "") and "good.yaml" in done.out


def test_every_ladder_of_every_preset_is_drawn_within_a_terminal() -> None:
    for name in preset_names():
        lines = policy_lines(name, preset(name), None)
        assert max(map(len, lines)) <= WIDTH
        titles = [line for line in lines if re.match(r"[A-Z_]+(,|$)", line)]
        assert sorted(word for line in titles for word in re.findall(r"[A-Z_]+", line)) == sorted(
            Cause
        ), "each cause once"


def test_a_drawing_says_all_of_each_rung_and_what_follows(page: SnapshotAssertion) -> None:
    made = resolve(
        {
            "causes": {
                "STORAGE": [
                    {
                        "strategy": "RESTART_IN_PLACE",
                        "tries": 4,
                        "delay": "5s",
                        "backoff": 2,
                        "window": "6h",
                        "key": ["node", "gpu", "code"],
                    },
                    {
                        "strategy": "REPLACE_NODE",
                        "when": "UNHEALTHY",
                        "tries": 1,
                        "isolate": True,
                        "spends": False,
                    },
                    {"strategy": "RESCHEDULE_JOB", "tries": 2, "delay": "20m", "backoff": 3},
                ]
            }
        }
    )
    rungs = policy_view("mine.yaml", made, Cause.STORAGE)["ladders"][0]["rungs"]
    assert [rung["delays"] for rung in rungs] == [[5.0, 10.0, 20.0, 40.0], [], [1200.0, 3600.0]]
    assert "\n".join(policy_lines("mine.yaml", made, Cause.STORAGE)) == page


@pytest.mark.parametrize("name", preset_names())
def test_the_page_of_a_preset(name: str, page: SnapshotAssertion) -> None:
    assert "\n".join(policy_lines(name, preset(name), None)) == page


async def test_causes_that_share_a_ladder_are_drawn_once_or_one_alone(
    tmp_path: Path,
) -> None:
    view = json.loads(
        (await starter(tmp_path, "policy", "explain", "ecs-reboot-once", "--json")).out
    )
    assert [ladder["causes"] for ladder in view["ladders"]] == [list(Cause)]
    assert view["budgets"] == {
        "max_restarts": 1,
        "renewal": "never",
        "exhaust_restarts": False,
        "no_progress_stop": None,
        "no_progress_ask": None,
        "startup_stop": None,
        "bad_checkpoint_ask": None,
        "unanswered": "remind",
        "healthy_for": 3600.0,
        "grow_after": 1800.0,
    }
    of_default = json.loads((await starter(tmp_path, "policy", "explain", "default", "--json")).out)
    assert of_default["budgets"]["no_progress_ask"] == 30
    alone = (await starter(tmp_path, "policy", "explain", "default", "--cause", "hang")).out
    titles = [line for line in alone.splitlines() if re.match(r"[A-Z_]+(,|$)", line)]
    assert titles == ["HANG"]
    one_sentence(
        await starter(tmp_path, "policy", "explain", "default", "--cause", "HUNG"),
        "'HUNG'",
        "HANG",
    )
    with pytest.raises(ConfigError, match="'harsh'"):
        read("harsh")


# --- change ---------------------------------------------------------------------------------------


def test_values_of_set_are_yaml_and_keys_are_at_most_two_deep() -> None:
    words = (
        "max_restarts=12",
        "timeouts.lost_after=5m",
        "no_progress_stop=off",
        "causes.HANG=[{strategy: ASK}]",
        "timeouts.reboot=9m",
    )
    assert read_changes(None, words).keys == {
        "max_restarts": 12,
        "timeouts": {"lost_after": "5m", "reboot": "9m"},
        "no_progress_stop": False,
        "causes": {"HANG": [{"strategy": "ASK"}]},
    }


@pytest.mark.parametrize(
    ("source", "words", "expected"),
    [
        (None, (), "--set KEY=VALUE"),
        ("torchelastic", ("max_restarts=3",), "file or --set"),
        (None, ("hang.rules.blocked=false",), "'hang.rules={blocked: false}'"),
        ("none.yaml", (), "'none.yaml'"),
        (None, ("max_restarts",), "'max_restarts'"),
        (None, ("max_restarts=[1",), "not YAML"),
        (None, ("causes.HANG.0.tries=3",), "causes.HANG.0.tries"),
        (None, ("hang=off", "hang.after=off"), "hang is set both"),
    ],
)
def test_an_empty_change_is_refused_before_any_job_is_asked(
    source: str | None, words: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        read_changes(source, words)


@LATE_CANCEL
@pytest.mark.long
async def test_a_changed_policy_of_a_running_job_shows_what_changed(
    server: Client, tmp_path: Path, page: SnapshotAssertion
) -> None:
    async def refused(job: str, *words: str, file: str | None = None) -> str:
        with pytest.raises(ConfigError) as caught:
            await change(server, job, read_changes(file, words), "a long night")
        return str(caught.value)

    words = ("policy", "change", "llama", "--reason", "a long night")
    address = {"TEMPORAL_ADDRESS": server.service_client.config.target_host}
    assert "'missing'" in await refused("missing", "max_restarts=9")
    async with rig(server, tmp_path, Script((Progress(hangs=True),))) as one:
        job = await one.submit(name="llama")
        await job.until_phase(Phase.RUNNING, 1)
        sets = ("max_restarts=12", "timeouts.lost_after=5m", "causes.HANG=[{strategy: ASK}]")
        done = await starter(
            tmp_path, *words, *(word for value in sets for word in ("--set", value)), **address
        )
        assert (done.code, done.err) == (0, ""), done
        changed = done.out
        state = await job.until(lambda s: s.policy.max_restarts == 12, "changed")
        assert state.policy_changes[-1].reason == words[-1] and "@" in state.policy_changes[-1].by
        nothing = await change(server, "llama", read_changes(None, ["max_restarts=12"]), "again")
        assert (await job.state()).policy_changes == state.policy_changes
        (tmp_path / "short.yaml").write_text("max_restarts: 3\ntimeouts:\n  leese: 1s\n")
        one_sentence(
            await starter(tmp_path, *words, "short.yaml", **address),
            "short.yaml:3: timeouts.leese: ",
        )
        assert (await refused("llama", "max_restarts=many")).startswith("--set: max_restarts: ")
        short = await refused("llama", "timeouts.lease=0.3s")
        assert "lease" in short and "0.6s" in short
        assert (await job.state()).policy.max_restarts == 12, "a refusal changes nothing"
        over_a_preset = await change(
            server, "llama", read_changes("torchelastic", []), "as at home"
        )
        await job.handle.signal("cancel")
        await job.result()
        assert "(CANCELLED)" in await refused("llama", "max_restarts=9")
    pages = {"changed": changed, "nothing to change": nothing, "over a preset": over_a_preset}
    assert sections(pages) == page


# --- replay ---------------------------------------------------------------------------------------


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize(
    "words",
    [(), ("--history", "a", "--events", "b"), ("--events", "b", "--run", "c")],
    ids=["nothing", "both", "run of a file"],
)
async def test_replay_is_of_a_history_or_of_a_file(tmp_path: Path, words: tuple[str, ...]) -> None:
    one_sentence(
        await starter(tmp_path, "policy", "replay", "default", *words),
        "--history JOB [--run RUN_ID] or --events",
    )


@LATE_CANCEL
@pytest.mark.long
async def test_a_policy_is_replayed_over_all_runs_of_a_real_job(
    server: Client, tmp_path: Path
) -> None:
    boom = error_file("ValueError: boom", "Traceback")
    faults = tuple(Exit(generation=g, rank=3, exit_code=1, error=boom) for g in (1, 2, 3))
    always = {"APPLICATION": [{"strategy": "RESTART_IN_PLACE"}]}
    rules = {"max_restarts": 100, "startup_stop": "off", "causes": always}
    (tmp_path / "twice.yaml").write_text(
        "causes: {APPLICATION: [{strategy: RESTART_IN_PLACE, tries: 2}, {strategy: FAIL}]}\n"
    )
    async with rig(server, tmp_path, Script(faults, then="succeed")) as one:
        job = await one.submit(policy(**rules), name="llama")
        await job.result()
        runs = await job.runs()
        assert len(runs) >= 2, "it has continued as new"
        same = trial_view(await try_on_history(server, "llama", resolve(rules), None))
        assert same["differ"] == 0
        strategies = [
            each["strategy"] for each in same["decisions"] if each["decision"] == "Relaunch"
        ]
        assert strategies == [None, "RESTART_IN_PLACE", "RESTART_IN_PLACE", "RESTART_IN_PLACE"]
        assert all(each["then"] is not None and not each["differs"] for each in same["decisions"])

        words = ("policy", "replay", "twice.yaml", "--history", "llama", "--run", runs[0].run_id)
        done = await starter(
            tmp_path, *words, TEMPORAL_ADDRESS=server.service_client.config.target_host
        )
        lines = done.out.splitlines()
        assert (done.code, done.err) == (0, ""), done
        assert [line[:2] for line in lines if "Stop FAILED" in line] == ["! "]
        assert any(line.endswith("[then Relaunch RESTART_IN_PLACE]") for line in lines), lines
        assert lines[-2].split() == [str(len(same["decisions"])), "decisions,", "1", "differ"]
        assert "ended" in lines[-1]
        with pytest.raises(ConfigError, match="'0d7e2ae9"):
            await try_on_history(
                server, "llama", preset("default"), "0d7e2ae9-5a4f-4d29-8c8e-3e0f6ff0a9be"
            )


HISTORIES = ROOT / "tests" / "histories"


@pytest.mark.parametrize(
    "path",
    sorted(set(HISTORIES.glob("*.json")) - set(HISTORIES.glob("repair_*"))),
    ids=lambda path: path.stem,
)
async def test_a_job_replayed_under_its_own_policy_decides_the_same(path: Path) -> None:
    history = WorkflowHistory.from_json(f"job/{path.stem}", path.read_text())
    made = await recording([history], "default", data_converter())
    assert made.steps[0].event.kind == "Submitted"
    assert [one for one in replay(made.job.policy, made.job, made.steps) if one.differs] == []


async def test_a_history_of_another_program_is_refused() -> None:
    text = json.loads((HISTORIES / "success.json").read_text())
    for event in text["events"]:
        if scheduled := event.get("activityTaskScheduledEventAttributes"):
            scheduled["activityType"]["name"] = "feed_cats"
    history = WorkflowHistory.from_json("job/success", json.dumps(text))
    with pytest.raises(NotReplayable, match="feed_cats"):
        await recording([history], "default", data_converter())


# --- files of events ------------------------------------------------------------------------------

EXAMPLE = re.compile(r"```jsonl\n(.*?)```", re.DOTALL)


@pytest.mark.long
async def test_the_example_of_the_documentation_runs(
    tmp_path: Path, page: SnapshotAssertion
) -> None:
    found = EXAMPLE.search((ROOT / "docs" / "reference" / "events.md").read_text())
    assert found is not None
    (tmp_path / "week.jsonl").write_text(found[1])
    done = await starter(
        tmp_path, "policy", "replay", "default", "--events", "week.jsonl", "--json"
    )
    assert (done.code, done.err) == (0, ""), done
    view = json.loads(done.out)
    assert view["differ"] == 0 and all(each["then"] is None for each in view["decisions"])
    tried = [(each["at"], each["strategy"]) for each in view["decisions"] if each["strategy"]]
    assert tried == [
        ("+12m", "RESTART_IN_PLACE"),
        ("+1h", "REPLACE_NODE"),
        ("+3h", "RESTART_IN_PLACE"),
    ]
    keys = {
        "at",
        "event",
        "decision",
        "strategy",
        "phase",
        "reason",
        "spent",
        "left",
        "then",
        "differs",
        "difference",
    }
    assert all(each.keys() == keys for each in view["decisions"])

    pages = {
        rules: (await starter(tmp_path, "policy", "replay", rules, "--events", "week.jsonl")).out
        for rules in ("default", "gputasker")
    }
    assert sections(pages) == page


def events(folder: Path, *lines: str, rules: str = "default") -> list[str]:
    (folder / "events.jsonl").write_text("\n".join(lines))
    return trial_lines(try_on_events(preset(rules), folder / "events.jsonl"))


FAULT = '"kind": "RankExited", "node": "n2", "rank": 3, "exit_code": 1'


UNUSABLE = (
    (("",), ":1: "),
    (("{}",), ":1: at: "),
    (('{"at": "5m"}',), ":1: kind: "),
    (
        ('{"at": "5m", "kind": "RankExit"}',),
        ":1: kind: 'RankExit'",
    ),
    (("[1]",), ":1: '[1]'"),
    (('{"at": 5m}',), ":1: not JSON"),
    (('{"at": 5, "kind": "RanksHung"}',), ":1: at: 5 "),
    (('{"at": "soon", "kind": "RanksHung"}',), ":1: at: 'soon'"),
    (('{"at": "2026-13-01", "kind": "RanksHung"}',), ":1: at: '2026-13-01'"),
    (
        ("", '{"at": "5m", "kind": "RanksHung"}', '{"at": "3m", "kind": "RanksHung"}'),
        ":3: at: 3m ",
    ),
    (
        ('{"at": "5m", "kind": "RanksHung", "rank": [1]}',),
        ":1: rank: ",
    ),
    (
        ('{"at": "5m", "kind": "RankExited", "node": "n2", "rank": 1}',),
        ":1: exit_code: ",
    ),
    (
        ('{"at": "5m", "kind": "RankExited", "rank": 1, "exit_code": 1}',),
        ":1: node: ",
    ),
    (
        ('{"at": "5m", "kind": "RankExited", "node": "n1", "rank": "x", "exit_code": 1}',),
        ":1: rank: ",
    ),
    (('{"at": "5m", "kind": "ProgressSeen"}',), ":1: step: "),
    (
        ('{"at": "5m", "kind": "ProgressSeen", "step": "ten"}',),
        ":1: step: ",
    ),
    (
        ('{"at": "5m", "kind": "NodeUnreachable", "node": "n1", "unheard_for": "90"}',),
        ":1: unheard_for: '90'",
    ),
    (
        ('{"at": "5m", "kind": "NodesExamined", "examined": {"n1": "SICK"}}',),
        ":1: examined.0.verdict: ",
    ),
    (
        ('{"at": "5m", "kind": "FaultObserved", "observations": [{"kind": "x"}]}',),
        ":1: observations: ",
    ),
    (('{"at": "5m", "kind": "PolicyChanged"}',), ":1: kind: 'PolicyChanged'"),
    (('{"job": {"nodes": 0}}',), ":1: job.nodes: 0 "),
    (
        ('{"job": {}, "at": "5m"}',),
        ":1: job: ",
    ),
    (
        ('{"at": "5m", "kind": "RanksHung"}', '{"job": {}}'),
        ":2: job: ",
    ),
)


def complaint(folder: Path, lines: tuple[str, ...]) -> str:
    """Return what is said of a file of events, without its folder."""
    with pytest.raises(ConfigError) as refused:
        events(folder, *lines)
    return str(refused.value).replace(f"{folder}/", "")


@pytest.mark.parametrize(("lines", "expected"), UNUSABLE)
def test_an_unusable_line_is_one_sentence_with_file_and_line(
    tmp_path: Path, lines: tuple[str, ...], expected: str
) -> None:
    said = complaint(tmp_path, lines)
    assert said.startswith(f"events.jsonl{expected}") and "\n" not in said, said


def test_the_sentences_of_unusable_events(tmp_path: Path, page: SnapshotAssertion) -> None:
    said = {"\n".join(lines): complaint(tmp_path, lines) for lines, _ in UNUSABLE}
    assert sections(said) == page


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        try_on_events(preset("default"), tmp_path / "none.jsonl")


def test_times_of_day_stay_and_durations_count_from_the_first(tmp_path: Path) -> None:
    lines = events(
        tmp_path, f'{{"at": "2026-03-01T12:00:00+01:00", {FAULT}}}', f'{{"at": "10m", {FAULT}}}'
    )
    assert [line.split()[0] for line in lines[:-1] if "FaultObserved" in line] == [
        "2026-03-01T11:00:00Z",
        "2026-03-01T11:10:00Z",
    ]


def test_answers_may_be_short_and_nodes_may_have_names(
    tmp_path: Path, page: SnapshotAssertion
) -> None:
    lines = events(
        tmp_path,
        '{"job": {"nodes": 2,'
        ' "metadata": {"annotations": {"fault-tolerance/job-retry-num": "5"}}}}',
        '{"at": "0s", "kind": "NodesAcquired", "nodes": ["gpu-07", "gpu-08"]}',
        *(
            f'{{"at": "{n}m", {FAULT.replace("n2", "gpu-08")}, "error": "ValueError: boom"}}'
            for n in (1, 2, 3)
        ),
        '{"at": "9m", "kind": "NodesExamined", "examined": {"gpu-08": "UNHEALTHY"}}',
        '{"at": "20m", "kind": "FaultObserved",'
        ' "observations": [{"kind": "RanksVanished", "node": "gpu-07"}], "silent": {"n1": "30s"}}',
    )
    text = "\n".join(lines)
    assert " of 5 restarts" in text, "annotations count"
    assert text == page

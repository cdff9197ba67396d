"""What a job file and a fleet file may say, and the sentence for each thing that they may not."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter, ValidationError
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.causes import Cause
from relaunch.fields import Duration, duration, parse_reason
from relaunch.spec.fleet import (
    Channel,
    FleetLimits,
    FleetNode,
    FleetSpec,
    NoticeEvent,
    describe_untaken,
    find_severity,
    find_untaken,
    name_channels,
    parse_jumps,
)
from relaunch.spec.job import JobSpec, SecretReference
from relaunch.spec.progress import PRESETS
from tests.recovery.builders import spec

FLEET: dict[str, Any] = {
    "name": "lab",
    "backend": "ssh",
    "nodes": [{"name": "n1", "address": "10.0.0.1"}],
}


def refusal(error: pytest.ExceptionInfo[ValidationError]) -> tuple[str, str]:
    (one,) = error.value.errors()
    return ".".join(map(str, one["loc"])), one["msg"].removeprefix("Value error, ")


# --- a job file -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "where"),
    [
        *(
            pytest.param({"name": name}, "name", id=f"the name {name[:8]!r}")
            for name in ("", "-llama", "llama.", "my job", "llama/7b", "l" * 64, "llama\n")
        ),
        pytest.param({"fleet": "a b"}, "fleet", id="a fleet's name"),
        pytest.param({"command": "python train.py"}, "command", id="a command in one string"),
        pytest.param({"nodes": 0}, "nodes", id="no nodes"),
        pytest.param({"nodes": {"min": 3, "max": 2}}, "nodes", id="an empty range"),
        pytest.param(
            {"nodes": {"min": 0, "max": 2}}, "nodes", id="a range that begins with nothing"
        ),
        *(
            pytest.param({"nodes": written}, "nodes", id=f"nodes {written}")
            for written in (
                {"min": 3},
                {"min": 1, "max": 2, "step": 1},
                {"min": "1", "max": 2},
                "3:",
                "a:4",
                "few",
                2.5,
                True,
                None,
            )
        ),
        pytest.param({"progress": {"log_pattern": "step ("}}, "progress", id="no pattern"),
        pytest.param(
            {"progress": {"log_pattern": "step .*"}}, "progress", id="a pattern that finds no step"
        ),
        pytest.param(
            {"progress": {"log_pattern": r"step (?P<step>\d+)(?= of)"}},
            "progress",
            id="a pattern that may take for ever",
        ),
        pytest.param({"progress": "megatrn"}, "progress", id="no preset of that name"),
        pytest.param(
            {"progress": {"preset": "hf", "log_pattern": r"(?P<step>\d+)"}},
            "progress",
            id="a preset and a pattern",
        ),
        pytest.param({"secrets": {"HF_TOKEN": {}}}, "secrets", id="a secret from nowhere"),
        pytest.param(
            {"secrets": {"HF_TOKEN": {"file": "/etc/hf", "env": "HF"}}},
            "secrets",
            id="a secret from two places",
        ),
        *(
            pytest.param({key: {name: value}}, key, id=f"the variable {name!r} in {key}")
            for key, value in (("env", "1"), ("secrets", {"env": "X"}))
            for name in ("RELAUNCH_JOB", "TORCHELASTIC_RUN_ID", "1ST", "A B", "")
        ),
        pytest.param({"workdir": "train"}, "workdir", id="a workdir"),
        pytest.param({"workdir": "/a\0"}, "workdir", id="a workdir with a NUL"),
        pytest.param({"command": [" ", "a"]}, "command", id="a blank program"),
        pytest.param({"nodes": 100_001}, "nodes", id="too many nodes"),
        pytest.param({"env_file": "train.env"}, "env_file", id="an environment file"),
        pytest.param({"umask": 23}, "umask", id="a number as umask"),
        pytest.param({"limits": {"files": 1}}, "limits", id="an unknown limit"),
        pytest.param({"limits": {"nofile": -1}}, "limits", id="a negative limit"),
        pytest.param({"checkpoint": {"directory": " "}}, "checkpoint", id="no folder"),
        pytest.param(
            {"checkpoint": {"directory": "out", "pattern": "checkpoint-*"}},
            "checkpoint",
            id="a pattern without a step",
        ),
        pytest.param(
            {"checkpoint": {"directory": "out", "pattern": "{step}/{step}"}},
            "checkpoint",
            id="a pattern with two",
        ),
        pytest.param(
            {"checkpoint": {"directory": "out", "pattern": "a/{step}"}},
            "checkpoint",
            id="a pattern with a folder",
        ),
        pytest.param(
            {"launcher": "torchrun", "warm": ["torch"], "nproc_per_node": 1},
            "",
            id="a launcher that is to fork ranks",
        ),
        pytest.param({"warm": "torch"}, "warm", id="modules that are one string"),
        pytest.param({"warm": ["torch", "my-module"]}, "warm", id="a name of no module"),
        pytest.param({"redact": ["*_TOKEN", "s3cret!"]}, "redact", id="a value to redact"),
        pytest.param(
            {"checkpoint": {"directory": "out", "pattern": "{epoch}-{step}"}},
            "checkpoint",
            id="a pattern with another brace",
        ),
    ],
)
def test_what_a_job_file_cannot_mean_is_refused_with_a_sentence(
    written: dict[str, Any], where: str, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(ValidationError) as error:
        spec(**written)
    (one,) = error.value.errors()
    assert ".".join(map(str, one["loc"][:1])) == where
    assert one["msg"].removeprefix("Value error, ") == snapshot


@pytest.mark.parametrize(
    ("written", "where"),
    [
        pytest.param({"nods": 2}, "nods", id="an unknown key"),
        pytest.param({"command": []}, "command", id="nothing to run"),
        pytest.param({"nproc_per_node": 0}, "nproc_per_node", id="no process"),
        pytest.param({"env": "DEBUG=1"}, "env", id="an environment that is no mapping"),
        pytest.param(
            {"env": {"DEBUG": True}}, "env.DEBUG", id="a yes that may mean 1, true or yes"
        ),
        pytest.param({"gang": "loose"}, "gang", id="an unknown gang"),
    ],
)
def test_a_job_file_of_another_shape_is_refused_where_it_stands(
    written: dict[str, Any], where: str
) -> None:
    with pytest.raises(ValidationError) as error:
        spec(**written)
    assert where == refusal(error)[0]


@pytest.mark.parametrize(
    ("written", "node_count", "ranks_per_node", "world_size"),
    [
        pytest.param({"nodes": 1, "nproc_per_node": 1}, 1, 1, 1, id="one process"),
        pytest.param({"nodes": 4, "nproc_per_node": 8}, 4, 8, 32, id="four nodes of eight"),
        pytest.param(
            {"nodes": {"min": 3, "max": 3}, "nproc_per_node": 8}, 3, 8, 24, id="a range of one size"
        ),
        pytest.param(
            {"nodes": {"min": 2, "max": 3}, "nproc_per_node": 8},
            3,
            8,
            24,
            id="at most, where it may change",
        ),
        pytest.param(
            {"nodes": 4, "nproc_per_node": 8, "launcher": "torchrun"},
            4,
            8,
            32,
            id="with any launcher",
        ),
    ],
)
def test_how_many_ranks_a_job_has(
    written: dict[str, Any], node_count: int, ranks_per_node: int, world_size: int
) -> None:
    job = spec(**written)
    assert (node_count, ranks_per_node, world_size) == (
        job.node_count,
        job.ranks_per_node,
        job.world_size,
    )


@pytest.mark.parametrize(
    ("launcher", "processes"), [("none", 8), ("torchrun", 1), ("ft_launcher", 1)]
)
def test_how_many_processes_relaunch_starts_on_a_node(launcher: str, processes: int) -> None:
    assert processes == spec(nproc_per_node=8, launcher=launcher).processes_per_node


@pytest.mark.parametrize("launcher", ["torchrun", "ft_launcher"])
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["torchrun", "--nproc-per-node=8", "train.py"], id="torchrun"),
        pytest.param(["/opt/conda/bin/torchrun", "train.py"], id="torchrun-by-path"),
        pytest.param(["ft_launcher", "train.py"], id="ft_launcher"),
        pytest.param(["accelerate", "launch", "train.py"], id="accelerate"),
        pytest.param(["python", "-m", "torch.distributed.run", "train.py"], id="torch-run"),
        pytest.param(
            ["/usr/bin/python3.11", "-u", "-m", "torch.distributed.launch", "train.py"],
            id="torch-launch",
        ),
    ],
)
def test_two_launchers_one_within_the_other_are_refused(
    launcher: str, command: list[str], snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(ValidationError) as error:
        spec(command=command, launcher=launcher)
    assert refusal(error)[1] == snapshot
    assert spec(command=command).launcher == "none"


@pytest.mark.parametrize(
    "command",
    [
        ["python", "train.py", "-m", "torch.distributed.run"],
        ["python", "-m", "train"],
        ["python"],
        ["./train", "-m", "torch.distributed.run"],
    ],
)
def test_a_command_that_only_mentions_a_launcher_is_a_rank(command: list[str]) -> None:
    assert spec(command=command, launcher="torchrun").command == tuple(command)


@pytest.mark.parametrize(
    ("written", "fewest", "most"),
    [
        pytest.param(4, 4, 4, id="a number"),
        pytest.param("4", 4, 4, id="as a flag has it"),
        pytest.param({"min": 4, "max": 4}, 4, 4, id="a range of one size"),
        pytest.param({"min": 3, "max": 4}, 3, 4, id="a range"),
        pytest.param("3:4", 3, 4, id="a range as a flag has it"),
    ],
)
def test_s3_3_a_job_says_its_most_and_fewest_nodes(
    written: Any, fewest: int, most: int, snapshot: SnapshotAssertion
) -> None:
    job = spec(nodes=written)
    assert (job.fewest_nodes, job.node_count, job.is_elastic) == (fewest, most, fewest < most)
    assert job.size == snapshot
    assert JobSpec.model_validate_json(job.model_dump_json()) == job


def test_arguments_and_variables_are_text(snapshot: SnapshotAssertion) -> None:
    sentences = []
    for value in (None, 1, 0.5, True, [1], {"a": 1}, "a\0b"):
        for written in ({"env": {"DEBUG": value}}, {"command": ["python", value]}):
            with pytest.raises(ValidationError) as error:
                spec(**written)
            where, sentence = refusal(error)
            assert where in ("env.DEBUG", "command.1")
        sentences.append(sentence)
    assert sentences == snapshot


def test_a_secret_is_never_repeated() -> None:
    for value in ("hf_secret", ["hf_secret"]):
        with pytest.raises(ValidationError) as error:
            spec(secrets={"HF_TOKEN": value})
        where, sentence = refusal(error)
        assert where == "secrets.HF_TOKEN" and "hf_secret" not in sentence


def test_what_a_job_file_may_leave_out_and_may_say() -> None:
    least = JobSpec.model_validate({"name": "l", "command": ["true"]})
    assert (least.node_count, least.workdir, least.progress.log_pattern, least.policy) == (
        1,
        None,
        None,
        "default",
    )
    most = spec(
        workdir="/home/train",
        progress={"log_pattern": r"step (?P<step>\d+)"},
        secrets={"A": {"file": "/a"}, "B": {"env": "b"}},
    )
    assert (most.workdir, most.secrets["A"].file, most.secrets["B"].env) == (
        "/home/train",
        "/a",
        "b",
    )
    assert spec(progress={"log_pattern": None}).progress.pattern is None
    assert most.progress.pattern == r"step (?P<step>\d+)"
    named = spec(progress="nanogpt")
    assert named == spec(progress={"preset": "nanoGPT"})
    assert spec(progress={"preset": None}).progress.pattern is None
    assert named.progress.pattern == PRESETS["nanogpt"]
    assert JobSpec.model_validate_json(named.model_dump_json()) == named
    whole = spec(env_file="/a", inherit_env=False, umask="027", output="separate")
    assert (whole.env_file, whole.inherit_env, whole.umask) == ("/a", False, "027")
    assert (spec().output, whole.output) == ("merged", "separate")
    limits = {"nofile": 65536, "memlock": "unlimited"}
    assert spec(limits=limits).soft_limits == {"nofile": 65536, "memlock": -1}
    for kept in (
        spec(checkpoint={"directory": "out"}).checkpoint,
        spec(checkpoint={"directory": "out", "pattern": None}).checkpoint,
    ):
        assert kept is not None
        assert (kept.directory, kept.pattern, kept.expression) == ("out", None, None)
    with pytest.raises(ValidationError):
        spec(umask="28")


# --- a fleet file ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param(
            [{"name": "n1", "address": "10.0.0.1"}, {"name": "n1", "address": "10.0.0.2"}],
            id="one name twice",
        ),
        pytest.param(
            [
                {"name": "n1", "address": "10.0.0.1"},
                {"name": "n2", "address": "10.0.0.1", "spare": True},
            ],
            id="one machine twice",
        ),
    ],
)
def test_no_two_nodes_of_a_fleet_are_the_same(
    nodes: list[dict[str, Any]], snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(ValidationError) as error:
        FleetSpec.model_validate({**FLEET, "nodes": nodes})
    where, said = refusal(error)
    assert where == "nodes" and said == snapshot


def test_unused_ports_are_written_as_findings_name_them(snapshot: SnapshotAssertion) -> None:
    node = {"name": "n1", "address": "10.0.0.1"}
    names = ["mlx5_3", "mlx5_4 port 2", "enp12s0f1np1"]
    assert FleetNode.model_validate({**node, "unused_ports": names}).unused_ports == tuple(names)
    for name in ("", "port 1 of mlx5_3", "mlx5_3, mlx5_4"):
        with pytest.raises(ValidationError) as error:
            FleetNode.model_validate({**node, "unused_ports": [name]})
        assert refusal(error)[1] == snapshot


def test_a_fleet_asks_before_it_repairs_unless_it_says_otherwise() -> None:
    fleet = FleetSpec.model_validate(
        {**FLEET, "nodes": [*FLEET["nodes"], {"name": "n2", "address": "10.0.0.2", "gpus": 8}]}
    )
    assert (fleet.repairs, [node.name for node in fleet.nodes]) == ("ask", ["n1", "n2"])


# --- durations ------------------------------------------------------------------------------------

DURATION: TypeAdapter[timedelta] = TypeAdapter(Duration)


@pytest.mark.parametrize(
    ("written", "seconds", "told"),
    [
        ("0s", 0, "0s"),
        ("30s", 30, "30s"),
        ("1.5s", 1.5, "1.5s"),
        ("90s", 90, "1m30s"),
        ("5m", 300, "5m"),
        ("1.5h", 5400, "1h30m"),
        ("1h30m", 5400, "1h30m"),
        ("2d", 172800, "2d"),
        ("1d2h3m4s", 93784, "1d2h3m4s"),
        ("PT90S", 90, "1m30s"),
        (timedelta(minutes=5), 300, "5m"),
    ],
)
def test_a_duration_is_read_and_written_as_people_write_it(
    written: Any, seconds: float, told: str
) -> None:
    read = DURATION.validate_python(written)
    assert (timedelta(seconds=seconds), told) == (read, duration(read))
    # and what is written can be read
    assert read == DURATION.validate_python(duration(read))


@pytest.mark.parametrize(
    "written",
    [
        *(30, 1.5, 0, True),
        *("soon", "30", "5m1h", "-5s", "5 m", "s"),
        timedelta(seconds=-1),
        *("3651d", "99999999999d", f"{'9' * 400}s"),
    ],
    ids=lambda written: repr(written)[:20],
)
def test_what_is_no_duration_is_refused_with_a_sentence(
    written: Any, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(ValidationError) as error:
        DURATION.validate_python(written)
    where, said = refusal(error)
    assert where == "" and said == snapshot


@pytest.mark.parametrize("written", ["", None, "P1X", [5]])
def test_what_is_no_duration_at_all_is_left_to_pydantic(
    written: Any,
) -> None:
    with pytest.raises(ValidationError):
        DURATION.validate_python(written)


@pytest.mark.parametrize(
    ("limit", "nodes", "number"),
    [(3, 100, 3), ("25%", 100, 25), ("25%", 7, 1), ("25%", 2, 1), ("0%", 10, 1), ("100%", 8, 8)],
)
def test_a_limit_is_a_number_or_share_of_nodes_and_at_least_one(
    limit: int | str, nodes: int, number: int
) -> None:
    limits = FleetLimits.model_validate({"nodes_out": limit, "repairs_at_once": limit})
    assert (limits.resolve("nodes_out", nodes), limits.resolve("repairs_at_once", nodes)) == (
        number,
        number,
    )


@pytest.mark.parametrize(
    "limit",
    [
        0,
        -1,
        "half",
        "110%",
    ],
)
def test_what_is_no_limit_is_refused_with_a_sentence(
    limit: int | str, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(ValidationError) as error:
        FleetLimits.model_validate({"nodes_out": limit})
    where, said = refusal(error)
    assert where == "nodes_out" and said == snapshot


# --- channels -------------------------------------------------------------------------------------

HOOK = "https://hooks.example.com/T0/s3cret"


def channels(*written: dict[str, Any]) -> tuple[Channel, ...]:
    return FleetSpec.model_validate({**FLEET, "notify": written}).notify


@pytest.mark.parametrize(
    ("written", "where", "expected"),
    [
        ({"webhook": "s3cret"}, "notify.0.webhook", "expected a URL, {file: PATH} or {env: NAME}"),
        ({"webhook": {"url": "s3cret"}}, "notify.0.webhook", "{file: PATH} or {env: NAME}"),
        ({"webhook": {"env": ["s3cret"]}}, "notify.0.webhook", "{file: PATH} or {env: NAME}"),
        ({"webhook": None}, "notify.0.webhook", "expected a URL"),
        ({"webhook": "ftp://h/s3cret"}, "notify.0.webhook", "expected http:// or https://"),
        ({"webhook": "https:///s3cret"}, "notify.0.webhook", "and a host"),
        ({"webhook": "https://h:0/s3cret"}, "notify.0.webhook", "and a host"),
        ({"webhook": "https://h:port/s3cret"}, "notify.0.webhook", "and a host"),
        ({"webhook": "https://[s3cret/"}, "notify.0.webhook", "and a host"),
        ({"apprise": "s3cret"}, "notify.0.apprise", "expected a URL"),
        ({"apprise": "slack://a b"}, "notify.0.apprise", "expected a URL"),
        ({"apprise": "slack://s3cret", "webhook": HOOK}, "notify.0", "exactly one address"),
        ({"events": ["failed"]}, "notify.0", "exactly one address"),
        ({"apprise": "slack://s3cret", "secret": {"env": "KEY"}}, "notify.0", "webhook"),
        ({"webhook": HOOK, "events": []}, "notify.0.events", "at least 1 item"),
        ({"webhook": HOOK, "jobs": ["a b"]}, "notify.0.jobs.0", "'a b' matches no name of a job"),
        (
            {"webhook": HOOK, "events": ["failed", "quarantine"], "severities": ["critical"]},
            "notify.0",
            "it takes nothing: its events are failed (warning), quarantine (warning), its "
            "severities critical",
        ),
        (
            {"webhook": HOOK, "events": ["failed"], "from_reminder": 1},
            "notify.0",
            "and people are reminded of question and waiting only",
        ),
        (
            {"webhook": HOOK, "events": ["breaker"], "jobs": ["llama-*"]},
            "notify.0",
            "and jobs matches none without a job",
        ),
    ],
)
def test_an_impossible_channel_is_refused_without_its_address(
    written: dict[str, Any], where: str, expected: str
) -> None:
    with pytest.raises(ValidationError) as error:
        channels(written)
    at, sentence = refusal(error)
    assert at == where and expected in sentence and "s3cret" not in sentence


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ({"webhook": HOOK}, "webhook hooks.example.com"),
        ({"webhook": "http://ops:s3cret@[::1]:8080/hook"}, "webhook ::1"),
        ({"webhook": {"file": "/etc/hook"}, "secret": {"env": "KEY"}}, "webhook /etc/hook"),
        ({"webhook": SecretReference(env="HOOK")}, "webhook HOOK"),
        ({"apprise": "slack://T0/s3cret"}, "apprise slack"),
        ({"apprise": {"env": "MAIL"}}, "apprise MAIL"),
    ],
)
def test_a_channel_is_named_without_what_may_be_secret(written: dict[str, Any], name: str) -> None:
    (channel,) = channels(written)
    assert channel.name == name and "s3cret" not in repr(channel)
    assert channel.events == get_args(NoticeEvent) and channel.causes == ()


@pytest.mark.parametrize(
    ("written", "matters", "others"),
    [
        pytest.param({}, [("failed", "HANG", "a", 0), ("breaker", None, "", 0)], [], id="all"),
        pytest.param(
            {"events": ["failed"]},
            [("failed", None, "a", 0)],
            [("waiting", None, "a", 0)],
            id="one",
        ),
        pytest.param(
            {"causes": ["HANG"]},
            [("failed", "HANG", "a", 0), ("breaker", None, "", 0)],
            [("failed", "STORAGE", "a", 0)],
            id="a cause, and what has none",
        ),
        pytest.param(
            {"jobs": ["llama-*", "[ab]?"]},
            [("failed", "HANG", "llama-3", 0), ("question", None, "b1", 0)],
            [("failed", "HANG", "c1", 0), ("question", None, "", 0), ("breaker", None, "", 0)],
            id="some jobs",
        ),
        pytest.param(
            {"jobs": ["*"]},
            [("question", None, "a", 0)],
            [("question", None, "", 0)],
            id="all jobs, and what has none not",
        ),
        pytest.param(
            {"severities": ["critical"]},
            [("question", None, "a", 0), ("waiting", None, "a", 1)],
            [("waiting", None, "a", 0), ("failed", "HANG", "a", 0)],
            id="what is critical, or becomes it by a reminder",
        ),
        pytest.param(
            {"from_reminder": 2},
            [("question", None, "a", 2), ("waiting", None, "a", 3)],
            [("question", None, "a", 1), ("failed", "HANG", "a", 0)],
            id="the second reminder and later ones",
        ),
    ],
)
def test_a_channel_takes_what_it_says(
    written: dict[str, Any], matters: list[tuple[Any, ...]], others: list[tuple[Any, ...]]
) -> None:
    (channel,) = channels({"webhook": HOOK, **written})

    def takes(event: str, cause: str | None, job: str, reminders: int) -> bool:
        return channel.takes(event, None if cause is None else Cause(cause), job, reminders)

    assert [one for one in matters if not takes(*one)] == []
    assert [one for one in others if takes(*one)] == []


@pytest.mark.parametrize(
    ("severity", "event", "reminders"),
    [
        *[("critical", "question", 0), ("warning", "failed", 0), ("info", "slow_node", 0)],
        *[("critical", "waiting", 1), ("info", "test", 0)],
    ],
)
def test_a_reminder_is_critical(severity: str, event: str, reminders: int) -> None:
    assert find_severity(event, reminders) == severity


@pytest.mark.parametrize(
    "written",
    [
        pytest.param([{}], id="nothing is missed"),
        pytest.param([{"events": ["failed", "question"]}], id="some events"),
        pytest.param([{"causes": ["HANG", "STORAGE"]}], id="some causes"),
        pytest.param([{"causes": [cause.value for cause in Cause]}], id="each cause by its name"),
        pytest.param([{"causes": ["HANG"]}, {"events": ["failed"]}], id="two add up"),
        pytest.param([{"jobs": ["llama-*"]}], id="some jobs"),
        pytest.param([{"jobs": ["*"]}], id="all jobs, and nothing else"),
        pytest.param(
            [{"jobs": ["llama-*"]}, {"causes": ["HANG"]}], id="some jobs, and of others one cause"
        ),
        pytest.param([{"from_reminder": 1}], id="reminders only"),
    ],
)
def test_what_no_channel_takes_is_a_clause(
    written: list[dict[str, Any]], snapshot: SnapshotAssertion
) -> None:
    told = channels(*({"webhook": HOOK, **one} for one in written))
    assert describe_untaken(find_untaken(told)) == snapshot


def test_channels_of_one_name_are_numbered() -> None:
    written = channels(
        {"webhook": f"{HOOK}/1"},
        {"apprise": "slack://T0"},
        {"webhook": f"{HOOK}/2", "events": ["failed"]},
        {"webhook": f"{HOOK}/3", "causes": ["HANG"]},
    )
    assert name_channels(written) == {
        "webhook hooks.example.com": written[0],
        "apprise slack": written[1],
        "webhook hooks.example.com 2": written[2],
        "webhook hooks.example.com 3": written[3],
    }
    assert list(name_channels(written).values()) == list(written)


# --- a dead man's switch --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "where", "expected"),
    [
        (HOOK, "heartbeat", "expected {url: …, every: 5m}"),
        ({"url": "s3cret"}, "heartbeat.url", "expected a URL, {file: PATH} or {env: NAME}"),
        ({"url": {"path": "s3cret"}}, "heartbeat.url", "{file: PATH} or {env: NAME}"),
        ({"url": "ftp://h/s3cret"}, "heartbeat.url", "expected http:// or https://"),
        ({"url": "https://h:0/s3cret"}, "heartbeat.url", "and a host"),
        ({"url": HOOK, "every": "9s"}, "heartbeat.every", "9 s is too often: expected 10s or more"),
    ],
)
def test_an_impossible_switch_is_refused_without_its_address(
    written: Any, where: str, expected: str
) -> None:
    with pytest.raises(ValidationError) as error:
        FleetSpec.model_validate({**FLEET, "heartbeat": written})
    at, sentence = refusal(error)
    assert at == where and expected in sentence and "s3cret" not in sentence


@pytest.mark.parametrize(
    ("url", "name"),
    [
        (HOOK, "hooks.example.com"),
        ({"file": "/etc/ping"}, "/etc/ping"),
        ({"env": "PING"}, "PING"),
    ],
)
def test_a_switch_is_named_without_what_may_be_secret(url: Any, name: str) -> None:
    switch = FleetSpec.model_validate({**FLEET, "heartbeat": {"url": url}}).heartbeat
    assert switch is not None and switch.every == timedelta(minutes=5)
    assert switch.name == name and "s3cret" not in repr(switch)
    often = FleetSpec.model_validate({**FLEET, "heartbeat": {"url": url, "every": "10s"}})
    assert often.heartbeat is not None and often.heartbeat.every == timedelta(seconds=10)
    assert FleetSpec.model_validate({**FLEET, "heartbeat": switch}).heartbeat == switch
    assert FleetSpec.model_validate({**FLEET, "heartbeat": None}).heartbeat is None


# --- ssh ------------------------------------------------------------------------------------------


def ssh_fleet(
    node: dict[str, object] | None = None, ssh: dict[str, object] | None = None
) -> FleetSpec:
    nodes = [{"name": "gpu-01", "address": "10.0.0.11", **(node or {})}]
    return FleetSpec.model_validate(
        {"name": "lab", "backend": "ssh", "nodes": nodes, "ssh": ssh or {}}
    )


@pytest.mark.parametrize(
    ("node", "ssh"),
    [
        pytest.param({"address": "me@10.0.0.11"}, {}, id="user-in-address"),
        pytest.param({"address": "-oProxyCommand=x"}, {}, id="option-as-address"),
        pytest.param({"network": "10.0.0.1/24"}, {}, id="network"),
        pytest.param({"user": "-l root"}, {}, id="node-user"),
        pytest.param({"port": 0}, {}, id="node-port"),
        pytest.param({}, {"port": 65536}, id="port"),
        pytest.param({}, {"python": "python3; reboot"}, id="python-command"),
        pytest.param({}, {"python": "bin/python3"}, id="python-relative"),
        pytest.param({}, {"python": "-c"}, id="python-option"),
        pytest.param({}, {"proxy_jump": "jump:99999"}, id="jump-port"),
        pytest.param({}, {"proxy_jump": "a,,b"}, id="jump-empty"),
        pytest.param({}, {"sudo": "perhaps"}, id="sudo"),
        pytest.param({}, {"password": "secret"}, id="unknown-key"),
    ],
)
def test_an_impossible_ssh_fleet_is_refused_with_a_sentence(
    node: dict[str, object], ssh: dict[str, object], snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(ValidationError) as error:
        ssh_fleet(node, ssh)
    assert error.value.errors()[0]["msg"].removeprefix("Value error, ") == snapshot


@pytest.mark.parametrize(
    "python", ["python3", "python3.11", "/opt/conda/envs/a-b/bin/python3", "/usr/bin/python3.12"]
)
def test_a_python_of_the_nodes_is_a_name_or_a_plain_path(python: str) -> None:
    assert ssh_fleet(ssh={"python": python}).ssh.python == python


def test_what_an_ssh_fleet_says_is_kept_as_it_is_written() -> None:
    fleet = ssh_fleet(
        {"user": "train", "network": "192.168.7.12"},
        {"user": "ops", "proxy_jump": "me@jump:22,other"},
    )
    assert (fleet.nodes[0].user, fleet.nodes[0].network) == ("train", "192.168.7.12")
    assert (fleet.ssh.user, fleet.ssh.proxy_jump) == ("ops", "me@jump:22,other")


def test_the_hosts_of_a_proxy_jump_are_read_in_order() -> None:
    assert parse_jumps("me@jump:22, other,[fe80::1]:2222") == (
        ("me", "jump", 22),
        (None, "other", None),
        (None, "fe80::1", 2222),
    )
    assert parse_jumps("none") == ()


def test_nodes_behind_one_address_differ_by_their_ports() -> None:
    nodes = [{"name": f"gpu-{port}", "address": "10.0.0.11", "port": port} for port in (2201, 2202)]
    FleetSpec.model_validate({"name": "lab", "backend": "ssh", "nodes": nodes})
    with pytest.raises(
        ValidationError, match=r"nodes gpu-2201 and gpu-2202 have the same address '10\.0\.0\.11'"
    ):
        FleetSpec.model_validate(
            {"name": "lab", "backend": "ssh", "nodes": [{**node, "port": 22} for node in nodes]}
        )


def test_a_reason_that_is_given_says_something() -> None:
    assert parse_reason("burnt") == "burnt"
    for blank in ("", " \n"):
        with pytest.raises(ValueError, match="it is empty"):
            parse_reason(blank)


@pytest.mark.parametrize(
    ("pattern", "name", "step"),
    [
        ("checkpoint-{step}", "checkpoint-20", 20),
        ("checkpoint-{step}", "checkpoint-20.tmp", None),
        ("epoch=*-step={step}.ckpt", "epoch=3-step=500.ckpt", 500),
        ("{step}", "0000012", 12),
        ("step_{step}.p*", "step_7.pkl", 7),
        ("step_{step}.pt", "step_7xpt", None),
    ],
)
def test_a_pattern_of_checkpoints_finds_the_step(pattern: str, name: str, step: int | None) -> None:
    kept = spec(checkpoint={"directory": "out", "pattern": pattern}).checkpoint
    assert kept is not None and kept.expression is not None
    found = re.fullmatch(kept.expression, name)
    assert (None if found is None else int(found["step"])) == step

"""Files that people write.

Each mistake is one sentence with the line, the value and what is expected.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from relaunch.cli.files import job_from_flags, read_fleet, read_job, read_policy
from relaunch.config import ConfigError
from relaunch.spec.annotations import GRACE_PERIOD
from relaunch.spec.job import JobSpec
from relaunch.text import printable
from tests.pages import sections
from tests.recovery.generated import searched

JOB = """\
name: llama
command: [python, train.py]
nodes: 2
env:
  DEBUG: 1
"""


MISTAKES = (
    (JOB + "nproc: 8\n", 6, ("nproc: ", "nproc_per_node")),
    (JOB.replace("nodes: 2", "nodes: two"), 3, ("nodes: ", "'two'")),
    (
        JOB.replace("nodes: 2", "nodes: {min: 3, max: 2}"),
        3,
        ("nodes: min is 3 ", "max is 2"),
    ),
    (
        JOB.replace("command: [python, train.py]", "command: python train.py"),
        2,
        ("command: ", "list"),
    ),
    (JOB.replace("name: llama", "name: ll/ama"), 1, ("'ll/ama'",)),
    (JOB + "nodes: 3\n", 6, ("nodes: ", "line 3")),
    (
        JOB + "progress:\n  log_patern: x\n",
        7,
        ("progress.log_patern: ", "log_pattern"),
    ),
    (JOB + "env: {A: [1]}\n", 6, ("given twice",)),
    (JOB + "policy: harsh\n", 6, ("'harsh'", "default")),
    (
        JOB + "policy:\n  max_restart: 3\n",
        7,
        ("policy.max_restart: ", "max_restarts"),
    ),
    (JOB + "policy:\n  extends: harsh\n", 7, ("'harsh'",)),
    (JOB + "policy:\n  timeouts:\n    lease: 90\n", 8, ("lease", "unit")),
    (JOB + "policy:\n  timeouts: {lease: 5s}\n", 7, ("lease", "30s")),
    (JOB + "env: [\n", 7, ("not YAML",)),
    ("- a\n", 1, ("keys",)),
    ("", 1, ("empty",)),
    ("command: [a]\n", 1, ("name: ",)),
    # keys at the wrong level
    (JOB + "hang: {after: 20m}\n", 6, ("policy: {hang: …}",)),
    (JOB + "max_restart: 3\n", 6, ("policy.max_restarts",)),
    (JOB + "log_pattern: x\n", 6, ("progress: {log_pattern: …}",)),
    (JOB + "directory: /x\n", 6, ("checkpoint: {directory: …}",)),
    (JOB + "annotations: {a: b}\n", 6, ("metadata: {annotations: …}",)),
    (JOB + "task_definition: x\n", 6, ("ecs: {task_definition: …}",)),
    (JOB + "NETWORK: []\n", 6, ("policy: {causes: {NETWORK: …}}",)),
    (JOB + "tries: 3\n", 6, ("policy.causes.CAUSE", "[{tries: …}]")),
    (JOB + "policy: {nproc_per_node: 8}\n", 6, ("top of the file",)),
    (JOB + "policy:\n  causes: {HANG: [{strategy: FAIL, windw: 3}]}\n", 7, ("window",)),
    # values of the wrong kind
    (JOB + "launcher: slurm\n", 6, ("'torchrun'", "'slurm'")),
    (JOB + "nproc_per_node: two\n", 6, ("whole number", "'two'")),
    (JOB + "nproc_per_node: 0\n", 6, ("1 or more",)),
    (JOB + "checkpoint: /data\n", 6, ("keys and values",)),
    (JOB + "policy: [default]\n", 6, ("text",)),
    (JOB + "policy: {hang: {after: soon}}\n", 6, ("'soon'", "'learned'")),
    (JOB + "policy: {no_progress_stop: soon}\n", 6, ("whole number", "'off'")),
    (JOB.replace("train.py", "null"), 2, ("command.1", "no value")),
    (JOB.replace("train.py", "[1]"), 2, ("command.1", "in quotes")),
    (JOB.replace("train.py", "{a: 1}"), 2, ("command.1", "in quotes")),
    (JOB.replace("1\n", "\n"), 5, ("env.DEBUG", "no value")),
    (JOB.replace("[python, train.py]", "[]"), 2, ("command", "empty")),
    # what would be run for ever, or never
    (JOB.replace("[python, train.py]", "['']"), 2, ("command", "program")),
    (JOB.replace("train.py", '"a\\0"'), 2, ("command.1", "NUL")),
    (JOB + 'workdir: "/a\\0"\n', 6, ("workdir", "NUL")),
    (JOB + "policy: {hang: {after: 99999999999d}}\n", 6, ("too long",)),
    (JOB + "policy:\n  healthy_for: 0s\n", 7, ("healthy_for",)),
    (
        JOB + "policy:\n  causes:\n    HANG: [{strategy: RESTART_IN_PLACE, window: 0s}]\n",
        8,
        ("window is 0s",),
    ),
    # what PyYAML does not refuse, or not with a sentence
    (JOB + "policy: &policy\n  hang: *policy\n", 7, ("&policy",)),
    (JOB + "policy: " + "[" * 3000 + "\n", 6, ("levels",)),
    (JOB + "priority: " + "9" * 5000 + "\n", 6, ("5,000 digits",)),
    (JOB + "priority: !!int x\n", 6, ("'x'",)),
    (JOB + "priority: .inf\n", 6, ("finite",)),
    (JOB + "workdir: !!python/name:os.system x\n", 6, ("python/name:os.system",)),
    (JOB + "metadata: !!set {a}\n", 6, ("set",)),
    (JOB + '"\\ud800": 1\n', 6, ("U+D800",)),
    (JOB + "workdir: \x01\n", 6, ("U+0001",)),
    (JOB + '"a\\nb": 1\n', 6, ("a\\nb",)),
    (JOB + "workdir: a: b\n", 6, ("quotes",)),
    (JOB + "ecs:\n\tcontainer: a\n", 7, ("tabs",)),
    (JOB + "ecs: {<<: 3}\n", 6, ("merge",)),
    # variables that mean something to relaunch
    (JOB + f"  {GRACE_PERIOD}: 10s\n", 6, ("env: ", GRACE_PERIOD, "'10s'", "-1")),
    # secrets
    (JOB + "secrets: {HF_TOKEN: hf_secret}\n", 6, ("secrets.HF_TOKEN", "file: PATH")),
    (JOB + "secrets: hf_secret\n", 6, ("secrets", "keys and values")),
    (JOB + "secrets: {HF_TOKEN: {file: [hf_secret]}}\n", 6, ("secrets.HF_TOKEN.file",)),
    (JOB + "secrets: {HF_TOKEN: {value: hf_secret}}\n", 6, ("secrets.HF_TOKEN.value",)),
)

FLEET = "name: lab\nbackend: ssh\nnodes:\n- {name: a, address: b}\n"
FLEET_MISTAKES = (
    (FLEET + "user: me\n", 5, ("each of nodes", "ssh")),
    (FLEET + "repairs_at_once: 3\n", 5, ("limits: {repairs_at_once: …}",)),
    (FLEET + "gpus: 8\n", 5, ("nodes: [{gpus: …}]",)),
    (FLEET + "cluster: training\n", 5, ("ecs: {cluster: …}",)),
    (FLEET.replace("b}", "b, known_hosts: x}"), 4, ("ssh: {known_hosts: …}",)),
    (FLEET.replace("b}", "b, spares: yes}"), 4, ("spare",)),
    (FLEET + "limits: {drain_within: 2}\n", 5, ("unit",)),
    (FLEET + "ecs: {agent_key: hf_secret}\n", 5, ("ecs.agent_key", "file: PATH")),
    # channels
    (FLEET + "notify: [{webhook: hf_secret}]\n", 5, ("notify.0.webhook", "{file: PATH}")),
    (FLEET + "notify: [{webhook: 'ftp://hf_secret'}]\n", 5, ("http:// or https://",)),
    (FLEET + "notify: [{webhook: 'https://:hf_secret@:x/'}]\n", 5, ("http:// or https://",)),
    (FLEET + "notify: [{webhook: {url: hf_secret}}]\n", 5, ("notify.0.webhook", "{env: NAME}")),
    (FLEET + "notify: [{webhook: 'https://h/', secret: hf_secret}]\n", 5, ("file: PATH",)),
    (FLEET + "notify: [{apprise: hf_secret}]\n", 5, ("notify.0.apprise", "URL")),
    (FLEET + "notify: [{apprise: [hf_secret]}]\n", 5, ("notify.0.apprise", "URL")),
    (FLEET + "notify: [{apprise: 'a://b', webhook: 'https://h/'}]\n", 5, ("exactly one",)),
    (FLEET + "notify: [{events: [failed]}]\n", 5, ("exactly one",)),
    (FLEET + "notify: [{apprise: 'a://b', secret: {env: K}}]\n", 5, ("secret", "webhook")),
    (FLEET + "notify: [{apprise: 'a://b', events: [fire]}]\n", 5, ("question", "'fire'")),
    (FLEET + "notify: [{apprise: 'a://b', events: []}]\n", 5, ("events", "at least one")),
    (FLEET + "notify: [{apprise: 'a://b', causes: [FIRE]}]\n", 5, ("causes", "HANG")),
    (FLEET + "notify: [{apprise: 'a://b', event: [failed]}]\n", 5, ("events",)),
    (FLEET + "notify: [{apprise: 'a://b', severities: [loud]}]\n", 5, ("critical", "'loud'")),
    (FLEET + "notify: [{apprise: 'a://b', severity: [info]}]\n", 5, ("severities",)),
    (FLEET + "notify: [{apprise: 'a://b', jobs: ['a b']}]\n", 5, ("'a b'", "llama-*")),
    (FLEET + "notify: [{apprise: 'a://b', jobs: llama}]\n", 5, ("jobs", "list")),
    (
        FLEET + "notify: [{apprise: 'a://b', events: [failed], severities: [critical]}]\n",
        5,
        ("takes nothing", "failed (warning)"),
    ),
    (
        FLEET + "notify: [{apprise: 'a://b', events: [breaker], jobs: ['a*']}]\n",
        5,
        ("takes nothing", "breaker (critical)"),
    ),
    (
        FLEET + "notify: [{apprise: 'a://b', events: [failed], from_reminder: 1}]\n",
        5,
        ("takes nothing", "reminded of question and waiting only"),
    ),
    (FLEET + "notify: [{apprise: 'a://b', from_reminder: -1}]\n", 5, ("from_reminder", "-1")),
    (FLEET + "webhook: hf_secret\n", 5, ("notify",)),
    # the dead man's switch
    (FLEET + "heartbeat: https://h/hf_secret\n", 5, ("heartbeat",)),
    (FLEET + "heartbeat: {every: 5m}\n", 5, ("heartbeat.url",)),
    (FLEET + "heartbeat: {url: hf_secret}\n", 5, ("heartbeat.url", "{file: PATH}")),
    (FLEET + "heartbeat: {url: 'ftp://hf_secret'}\n", 5, ("http:// or https://",)),
    (FLEET + "heartbeat: {url: {path: hf_secret}}\n", 5, ("{env: NAME}",)),
    (FLEET + "heartbeat: {url: 'https://h/', every: 1s}\n", 5, ("heartbeat.every", "10s")),
    (FLEET + "heartbeat: {url: 'https://h/', every: 5}\n", 5, ("heartbeat.every", "unit")),
)


def refusal(
    folder: Path, text: str, read: Callable[[Path], object] = lambda path: read_job(path, {})
) -> str:
    """Return what is said of a file, without its folder."""
    (folder / "job.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(folder / "job.yaml")
    return str(caught.value).replace(f"{folder}/", "")


def title(text: str) -> str:
    """Return a file's text as the title of its sentence, without what makes it long."""
    short = re.sub(r"(.)\1{99,}", r"\1\1\1…", text)
    return "\n".join(map(printable, short.split("\n")))


@pytest.mark.parametrize(
    ("text", "line", "words"), MISTAKES, ids=[str(number) for number in range(len(MISTAKES))]
)
def test_a_mistake_in_a_job_file_is_one_sentence_with_its_line(
    tmp_path: Path, text: str, line: int, words: tuple[str, ...]
) -> None:
    sentence = refusal(tmp_path, text)
    assert sentence.startswith(f"job.yaml:{line}: ")
    assert sentence.isprintable() and "hf_secret" not in sentence
    assert all(word in sentence for word in words), sentence


def test_the_sentences_of_mistakes_in_job_files(tmp_path: Path, page: SnapshotAssertion) -> None:
    said = {title(text): refusal(tmp_path, text) for text, _, _ in MISTAKES}
    assert sections(said) == page


def test_the_sentences_of_mistakes_in_fleet_files(tmp_path: Path, page: SnapshotAssertion) -> None:
    said = {}
    for text, line, words in FLEET_MISTAKES:
        sentence = said[text] = refusal(tmp_path, text, read_fleet)
        assert sentence.startswith(f"job.yaml:{line}: ") and "hf_secret" not in sentence
        assert all(word in sentence for word in words), sentence
    assert sections(said) == page


def test_arguments_and_variables_are_taken_as_written(tmp_path: Path) -> None:
    written = "60 0.10 on true 1_000 0o17 1:30 2024-01-01 1e-4 -1 0x1F .inf = << 9" + "9" * 5000
    items = ", ".join(written.split())
    (tmp_path / "job.yaml").write_text(
        f"name: llama\ncommand: [python, {items}, '', \"a b\"]\n"
        "env: {DEBUG: true, LR: 0.10, NONE: 'null', EMPTY: '', on: off}\n"
        "metadata: {annotations: {fault-tolerance/job-retry-num: 8}}\n"
    )
    spec, policy = read_job(tmp_path / "job.yaml", {})
    assert spec.command == ("python", *written.split(), "", "a b")
    assert spec.env == {"DEBUG": "true", "LR": "0.10", "NONE": "null", "EMPTY": "", "on": "off"}
    assert policy.max_restarts == 8


def test_s4_10_a_job_file_may_bound_the_stop_grace(tmp_path: Path) -> None:
    text = JOB + f"  {GRACE_PERIOD}: 10\npolicy:\n  timeouts: {{stop_grace: 1m}}\n"
    (tmp_path / "job.yaml").write_text(text)
    spec, policy = read_job(tmp_path / "job.yaml", {})
    assert policy.timeouts.stop_grace == timedelta(seconds=10)
    # The ranks get the variable too, as in ModelArts.
    assert spec.env[GRACE_PERIOD] == "10"


def test_what_yaml_means_elsewhere_is_kept(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "name: llama\ncommand: &command [a]\nnodes: 3:4\nenv: &env {A: b}\n"
        "secrets: {<<: {X: {env: Y}}, Z: {env: Q}}\n"
        "policy: {hang: {after: off}, strict_lease: yes, catalog: {xid: {63: {role: root, "
        "cause: GPU_RESET}}}}\n"
    )
    spec, policy = read_job(tmp_path / "job.yaml", {})
    assert (spec.fewest_nodes, spec.node_count, list(spec.secrets)) == (3, 4, ["X", "Z"])
    assert (policy.hang.after, policy.strict_lease, list(policy.catalog.xid)) == (
        "off",
        True,
        [63],
    )


KEYS = [*JobSpec.model_fields, "hang", "after", "file", "<<", "? [a]", '"\\0"', "1", "~", "&a b"]
SCALARS = [
    *("60", "-1", "0.10", "on", "null", "~", "''", "'a b'", "1e400", ".nan", "2024-99-99", "1:2"),
    *("99999999999d", "9" * 4400, "*a", "!!int x", "!!bool x", "!!binary ?", "!!timestamp x"),
    *("!!float x", "!x y", "=", "<<", '"\\ud800"', '"\\0"', "a: b", "[", "}", "&a", "@", "%", "\t"),
]


def values(text: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pair = st.tuples(st.sampled_from(KEYS), text).map(": ".join)
    anchor = st.sampled_from(["", "&a ", "!!set ", "!!omap ", "!!str "])
    many = st.lists(text, max_size=3).map(lambda items: f"[{', '.join(items)}]")
    keys = st.lists(pair, max_size=3).map(lambda items: f"{{{', '.join(items)}}}")
    return st.tuples(anchor, many | keys).map("".join)


@searched(400)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(KEYS),
            st.recursive(st.sampled_from(SCALARS), values, max_leaves=6),
        ),
        max_size=4,
    )
)
def test_no_text_of_a_file_ends_in_a_traceback(pairs: list[tuple[str, str]]) -> None:
    text = "".join(f"{key}: {value}\n" for key, value in pairs)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.yaml")
        for whole in (text, f"name: llama\ncommand: [a]\n{text}"):
            path.write_text(whole)
            for read in (lambda: read_job(path, {}), lambda: read_fleet(path)):
                sentence = "valid"
                try:
                    read()
                except ConfigError as error:
                    sentence = str(error)
                assert sentence.isprintable() and len(sentence) < 700


def test_a_policy_of_a_flag_is_a_file_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs").mkdir()
    for folder, restarts in ((tmp_path, 3), (tmp_path / "jobs", 5)):
        (folder / "mine.yaml").write_text(f"max_restarts: {restarts}\n")
    (tmp_path / "jobs" / "job.yaml").write_text(JOB + "policy: mine.yaml\n")
    monkeypatch.chdir(tmp_path)
    path = Path("jobs/job.yaml")
    assert read_job(path, {})[1].max_restarts == 5
    assert read_job(path, {"policy": "mine.yaml"})[1].max_restarts == 3


def test_flags_win_over_the_file_and_a_bad_flag_is_named(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    spec, _ = read_job(path, {"nodes": 4, "name": "other"})
    assert (spec.node_count, spec.name, spec.env) == (4, "other", {"DEBUG": "1"})
    elastic = read_job(path, {"nodes": "3:4"})[0]
    assert (elastic.fewest_nodes, elastic.node_count) == (3, 4)
    with pytest.raises(ConfigError, match=r"^--nodes: min is 4 and max is 3"):
        read_job(path, {"nodes": "4:3"})
    with pytest.raises(ConfigError, match=r"^--nodes: 0 "):
        read_job(path, {"nodes": 0})
    with pytest.raises(ConfigError, match=r"^--name: '\.\.'"):
        job_from_flags({"name": "..", "command": ["a"]})


def test_a_policy_is_a_preset_a_file_beside_the_job_or_a_mapping(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "extends: default\nmax_restarts: 2\nhang: {after: off}\ntimeouts: {lost_after: 90s}\n"
    )
    (tmp_path / "job.yaml").write_text(
        JOB + "policy: mine.yaml\nmetadata: {annotations: {a/b: '8'}}\n"
    )
    spec, policy = read_job(tmp_path / "job.yaml", {})
    assert (policy.max_restarts, policy.hang.after, policy.timeouts.lost_after) == (
        2,
        "off",
        timedelta(seconds=90),
    )
    assert spec.metadata.annotations == {"a/b": "8"}
    assert read_policy({"max_restarts": 1}).max_restarts == 1
    (tmp_path / "mine.yaml").write_text("max_restarts: -1\n")
    with pytest.raises(ConfigError, match=r"mine.yaml:1: max_restarts: .*-1"):
        read_job(tmp_path / "job.yaml", {})


def test_a_file_that_is_missing_or_no_text_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml .*: No such file"):
        read_job(tmp_path / "none.yaml", {})
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        read_job(tmp_path / "binary.yaml", {})


def test_two_nodes_of_one_address_are_a_fleet_file_mistake(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "name: lab\nbackend: local\nnodes:\n  - {name: a, address: x}\n  - {name: b, address: x}\n"
    )
    with pytest.raises(ConfigError, match=r"fleet.yaml:3: nodes: nodes a and b .*'x'"):
        read_fleet(path)
    path.write_text(
        "name: lab\nbackend: local\nnodes:\n  - {name: a, address: x}\n  - {name: b, adress: y}\n"
    )
    with pytest.raises(
        ConfigError,
        match=r"fleet.yaml:5: nodes.1.(adress|address): ",
    ):
        read_fleet(path)

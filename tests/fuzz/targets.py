"""A target for each parser of what comes in from outside: what is drawn, and what has to hold.

A parser may raise the error that its documentation names, and no other; `properties` bounds its
work. What it returns goes on to where people read it, as far as that is.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import pickle
import re
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from hypothesis import strategies as st
from pydantic import BaseModel

from relaunch.access.orders import PersonOrder, check_order, clean_name, read_signed
from relaunch.access.signatures import SignatureError, strip_armor, verify
from relaunch.activities.observations import read_observations
from relaunch.agent.checkpoints import find_checkpoints
from relaunch.agent.flight_records import UnreadableError, parse_dump, summarize
from relaunch.agent.loop import Channel, Loop
from relaunch.agent.loop import parse as parse_agent_line
from relaunch.agent.protocol import MAX_NOTE, now
from relaunch.agent.protocol import Token as AgentToken
from relaunch.agent.py_spy import parse_dump as parse_stacks_file
from relaunch.agent.ranks import journal
from relaunch.agent.ranks.evidence import read_error, read_tail
from relaunch.agent.ranks.peers import Answer, Peers, compute_mac
from relaunch.agent.ranks.progress import ProgressError, _LogTail, parse_file
from relaunch.agent.ranks.redact import Redactor
from relaunch.agent.state import JobState as AgentJob
from relaunch.backends import answers
from relaunch.backends.base import ProtocolError
from relaunch.backends.ecs.events import read_event
from relaunch.backends.ecs.examine import read_answer
from relaunch.backends.ssh import known_hosts
from relaunch.backends.ssh.route import SshConfigError, read_config
from relaunch.cli import (
    codec_server,
    documents,
    event_file,
    explain,
    files,
    job_views,
    node_pages,
    node_views,
)
from relaunch.cli.init import read_command
from relaunch.cli.rank_output import Printer
from relaunch.cli.terminal import guard_output, make_console
from relaunch.config import ConfigError, read_settings
from relaunch.converter import SharedPayloadConverter
from relaunch.encryption import (
    CIPHER,
    ENCODING,
    KEY_ID,
    EncryptionCodec,
    KeyStore,
    UnreadablePayloadError,
    read_codec,
)
from relaunch.evidence.catalog import catalog
from relaunch.evidence.dcgm import read_diag
from relaunch.evidence.flight import parse_flight
from relaunch.evidence.health import read_condition, read_health
from relaunch.evidence.kernel_log import read_kernel_log
from relaunch.evidence.last_words import find_last_words
from relaunch.evidence.links import read_links
from relaunch.evidence.nvml import read_gpus
from relaunch.evidence.rank_log import read_rank_log
from relaunch.fields import compile_pattern, parse_duration, parse_name
from relaunch.generation import Token
from relaunch.job.events import FaultObserved
from relaunch.job.launchers import parse_failures
from relaunch.job.places import parse_place
from relaunch.job.state import JobState
from relaunch.messages import fleets as fleet_messages
from relaunch.messages import jobs as job_messages
from relaunch.messages.bounds import MAX_TEXT, bound_message
from relaunch.messages.notices import Notice, format_json, format_subject, format_text
from relaunch.pool.events import MalformedMessage
from relaunch.pool.inventory import read_inventory
from relaunch.spec.access import Access
from relaunch.spec.environment import parse_environment, serialize_environment
from relaunch.spec.fleet import SshOptions, parse_jumps
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import Policy, preset
from relaunch.temporal import UP_FILE, find_running_up
from relaunch.text import (
    count_noun,
    escape_controls,
    escape_markdown,
    mute_markup,
    printable,
    quote_code,
    strip_sequences,
)
from relaunch.workflows.fleet.details import fleet_details
from relaunch.workflows.search_attributes import current_details
from tests.console.fake_fleet import fleet, node
from tests.console.fake_job import incident, job_state
from tests.fuzz.draw import (
    SNIPPETS,
    dump,
    encodable_text,
    hostile_text,
    json_values,
    lines,
    mutated_json,
    mutated_text,
)
from tests.fuzz.properties import (
    bounded,
    expect_colours,
    expect_page,
    expect_text,
)
from tests.recovery.builders import at, running, step

NOW = datetime(2026, 11, 21, 3, 0, tzinfo=UTC)
SAMPLES = Path(__file__).parents[1] / "recovery" / "samples"
TOKEN = Token("default", "llama", 1000, 1)
SIGNED = {
    path.stem: (lines[0].strip(), strip_armor("\n".join(lines[1:])))
    for path in sorted((Path(__file__).parent / "samples").glob("*.sshsig"))
    for lines in [path.read_text().splitlines()]
}
"""Public keys, and their signatures of `SIGNED_TEXT` by ssh-keygen -Y sign."""
SIGNED_TEXT = b"an order"
ED25519 = SIGNED["ed25519"][0]


@dataclass(frozen=True)
class Target:
    name: str
    inputs: st.SearchStrategy[Any]
    check: Callable[[Any], None]
    found: tuple[Any, ...] = ()
    """Inputs that were wrong once, or that an attacker tries first."""


catalog(), preset("default")  # read once, not by the first example
TARGETS: dict[str, Target] = {}


def target(
    inputs: st.SearchStrategy[Any], *found: Any
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Make a function that checks one input a target of its name."""

    def add(check: Callable[[Any], None]) -> Callable[[Any], None]:
        name = check.__name__.removeprefix("check_").replace("_", "-")
        TARGETS[name] = Target(name, inputs, check, found)
        return check

    return add


@contextlib.contextmanager
def written(content: str | bytes) -> Iterator[Path]:
    """Write a file that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="relaunch-fuzz-") as folder:
        path = Path(folder) / "input"
        raw = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
        path.write_bytes(raw)
        yield path


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Accept the error of bad input, whose text is one line that does nothing."""
    try:
        yield
    except ConfigError as error:
        text = printable(str(error), 1500)
        expect_text(text, is_line=True)


# --- files

JOB = """
name: llama
command: [python, train.py, --lr, 0.1]
nodes: 2
nproc_per_node: 2
env: {A: b, SWITCH: on}
progress: {log_pattern: 'step (?P<step>\\d+)'}
policy: {extends: default, max_restarts: 3, causes: {HANG: [{strategy: ASK}]}}
metadata: {annotations: {a: b}}
"""
FLEET = """
backend: ssh
repairs: ask
ssh: {user: root, port: 22, jump: a@b:22, options: {}}
nodes:
  - {name: n1, address: 10.0.0.1, gpus: 8}
  - &n2 {name: n2, address: 10.0.0.2, gpus: 8, unused_ports: [mlx5_0]}
notify: {ops: {webhook: http://127.0.0.1:9/x, events: [failed]}}
access:
  people: {ann: {role: oncall, keys: [KEY]}, bob: {role: researcher}}
  roles: {oncall: [cancel, drain]}
  others: researcher
  unproven: [submit]
""".replace("KEY", ED25519)
POLICY = """
extends: default
timeouts: {heartbeat: 5s, lease: 60s}
hang: {after: 10m}
catalog: {log: [{pattern: 'boom (\\d+)', cause: APPLICATION, role: root, meaning: it broke}]}
causes:
  GPU_FATAL: [{strategy: REPLACE_NODE, tries: 2}, {strategy: ASK}]
"""
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(9)
)
LONG_ALIAS = f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 20_000)}]\n"


@target(
    mutated_text(JOB, FLEET, POLICY), BOMB, LONG_ALIAS, "[" * 20_000, "{a: " * 3000, "? " * 3000
)
def check_document(text: str) -> None:
    with refused():
        # Aliases may make that many values of few characters.
        size = len(text) + documents.MAX_PARTS // 20
        document = bounded(size, lambda: documents.Document(text, "f.yaml"))
        assert json.loads(json.dumps(document.content)) == document.content


@target(mutated_text(JOB))
def check_job_file(text: str) -> None:
    with written(text) as path, refused():
        spec, policy = bounded(4000 + len(text), lambda: files.read_job(path, {}))
        assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
        assert Policy.model_validate_json(policy.model_dump_json()) == policy


@target(mutated_text(FLEET))
def check_fleet_file(text: str) -> None:
    with written(text) as path, refused():
        bounded(4000 + len(text), lambda: files.read_fleet(path))


@target(mutated_text(POLICY))
def check_policy_file(text: str) -> None:
    with written(text) as path, refused():
        policy = bounded(4000 + len(text), lambda: files.read_policy(str(path)))
        assert Policy.model_validate_json(policy.model_dump_json()) == policy


EVENTS = """
{"job": {"nodes": 2}}
{"at": "1m", "kind": "ProgressSeen", "step": 10}
{"at": "5m", "kind": "RankExited", "rank": 1, "node": "n1", "exit_code": 1, "error": "x"}
{"at": "6m", "kind": "FaultObserved", "observations": [{"kind": "RanksVanished", "node": "n1"}]}
"""


@target(mutated_text(EVENTS), '{"a": ' + "[" * 20_000, '{"at": ' + "9" * 5000 + "}")
def check_event_file(text: str) -> None:
    with written(text) as path, refused():
        bounded(2000 + len(text), lambda: event_file.read_events(path, preset("default")))


SETTINGS = 'task_queue = "relaunch"\njobs = 100\nfleets = ["a.yaml"]\nlog_level = "INFO"\n'


@target(
    mutated_text(SETTINGS), "a = " + "[" * 20_000, "a = " + "9" * 5000, "a" + ".a" * 5000 + "=1"
)
def check_settings_file(text: str) -> None:
    with written(text) as path, environment({"RELAUNCH_SETTINGS": str(path)}), refused():
        bounded(2000 + len(text), read_settings)


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    try:
        os.environ.update(values)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


NAMES = (
    *("STATE", "TASK_QUEUE", "JOBS", "FLEETS", "METRICS", "WEB_UI", "LOG_LEVEL", "BUILD", "X"),
    *("ENCRYPTION_KEYS", "ENCRYPTION_KEY", "ENCRYPTION_KEYRING"),
)


@target(st.dictionaries(st.sampled_from(NAMES), encodable_text.map(lambda t: t.replace("\0", ""))))
def check_environment(values: dict[str, str]) -> None:
    with environment({f"RELAUNCH_{name}": value for name, value in values.items()}), refused():
        read_codec(read_settings())


@target(
    st.one_of(st.binary(max_size=300), mutated_text("A=b\0C=d\0", "A=b\n# c\n\nC=d\n").map(dump))
)
def check_environment_file(content: bytes) -> None:
    try:
        found = bounded(len(content), lambda: parse_environment(content))
    except ValueError as error:
        expect_text(printable(str(error)), is_line=True)
        return
    if found:
        assert parse_environment(serialize_environment(found)) == found


SSH_CONFIG = (
    "Host n*\n  User root\n  Port 22\n  ProxyJump a@b:22\nMatch host x\n  IdentityFile ~/k\n"
)


@target(mutated_text(SSH_CONFIG))
def check_ssh_config(text: str) -> None:
    with written(text) as path, contextlib.suppress(SshConfigError):
        config = bounded(len(text) + 1000, lambda: read_config(SshOptions(config=str(path))))
        with contextlib.suppress(SshConfigError):
            assert config is not None


# --- words that people type


@target(hostile_text, "9" * 400 + "d", "1e400s", "0." + "9" * 5000 + "s", "1d" * 3000)
def check_fields(text: str) -> None:
    for parse in (parse_name, parse_duration, parse_jumps):
        with contextlib.suppress(ValueError):
            bounded(len(text), lambda parse=parse: parse(text))  # type: ignore[misc]
    with contextlib.suppress(ValueError):
        bounded(len(text), lambda: compile_pattern(text)).search("a" * 100)


@target(
    st.lists(
        st.one_of(
            st.sampled_from(("torchrun", "--nnodes=2", "--nproc-per-node", "A=b", "python", "-m")),
            encodable_text,
        ),
        max_size=8,
    )
)
def check_command_line(words: list[str]) -> None:
    with refused():
        bounded(sum(map(len, words)), lambda: read_command(words))


# --- messages to workflows

MESSAGES: dict[str, Callable[[Any], Any]] = {
    "cancel": job_messages.cancel_event,
    "retry": job_messages.retry_event,
    "repair_asks": job_messages.repair_asks_event,
    "report": lambda raw: job_messages.report_event(raw, running()),
    "drain": job_messages.drain_event,
    "offer": job_messages.OFFER.validate_python,
    "hint": job_messages.HintMessage.model_validate,
    "policy": lambda raw: job_messages.overlay(
        preset("default"), job_messages.PolicyMessage.model_validate(raw).policy
    ),
    "answer": job_messages.AnswerMessage.model_validate,
}
SAID = {
    **{"reason": "r", "by": "b", "node": "n1", "decision": "approve", "within": "1h"},
    **{"avoid_nodes": ["n2"], "renew_budgets": True, "declared": "dead", "force": False},
    **{"policy": {"max_restarts": 3, "causes": {"HANG": [{"strategy": "ASK"}]}}},
}
MESSAGE_SAMPLES = (
    SAID,
    *({key: value} for key, value in SAID.items()),
    {"node": "n1", "reason": "r", "by": "b", "until": "2030-01-01T00:00:00Z"},
    {"submission": 1, "seq": 1, "nodes": ["n1"], "until": "2030-01-01T00:00:00Z"},
)


def expect_bounded(value: Any, longest: int) -> None:
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            assert len(one) <= longest
            expect_text(one, is_line=True)
        elif isinstance(one, dict):
            left += [*one, *one.values()]
        elif isinstance(one, list):
            left += one


HOSTILE_MESSAGES: tuple[Any, ...] = (
    "x" * 1_900_000,
    {"reason": "x" * 1_900_000, "by": "\x1b[2J" * 9},
    {"x" * 1_900_000: 1},
    {"node": "\x1b]0;t\x07"},
    {"policy": {"max_restarts": 10**400}},
    [[[]] * 1000] * 1000,
    json.loads("[" * 900 + "]" * 900),
)


@target(mutated_json(*MESSAGE_SAMPLES), *HOSTILE_MESSAGES)
def check_job_message(raw: Any) -> None:
    for name, parse in MESSAGES.items():
        try:
            message = bound_message(raw)
            expect_bounded(message, 500)
            parse(message)
        except ValueError as error:
            text = job_messages.explain(error)
            assert len(text) <= 500, name
            expect_text(text, is_line=True)


FLEET_MESSAGES: dict[str, Callable[[Any], Any]] = {
    "claim": fleet_messages.claim_fact,
    "report_faults": fleet_messages.fault_report_fact,
    "repair_began": fleet_messages.repair_began_fact,
    "repair_wanted": fleet_messages.repair_wanted_fact,
    "repair_ended": fleet_messages.repair_ended_fact,
    "quarantine": fleet_messages.quarantine_fact,
    "release": fleet_messages.release_fact,
    "declare_dead": fleet_messages.dead_fact,
    "pause": fleet_messages.pause_fact,
    "apply": fleet_messages.apply_message,
}
CLAIM = {
    **{"job": "llama", "submission": 1, "seq": 2, "nodes": 2, "gpus": 8, "keep": ["n1"]},
    **{"holds": [{"node": "n1", "address": "10.0.0.1", "gpus": [0, 1]}], "avoid": ["n3"]},
}
FAULTS = {
    **{"job": "llama", "submission": 1},
    "suspects": [
        {
            "node": "n1",
            "at": "2030-01-01T00:00:00Z",
            "generation": 1,
            "cause": "HANG",
            "reason": "r",
        }
    ],
}
WANTED = {
    **{"workflow": "repair/lab/n1", "run": "x", "seq": 1, "node": "n1", "step": "reset"},
    **{"reason": "r", "asked_at": "2030-01-01T00:00:00Z"},
}


@target(mutated_json(CLAIM, FAULTS, WANTED, *MESSAGE_SAMPLES), *HOSTILE_MESSAGES)
def check_fleet_message(raw: Any) -> None:
    for name, parse in FLEET_MESSAGES.items():
        fact = fleet_messages.read(name, raw, parse)
        if isinstance(fact, MalformedMessage):
            assert len(fact.reason) <= MAX_TEXT, name
            expect_text(fact.reason, is_line=True)


CONVERTER = SharedPayloadConverter()


@target(
    st.tuples(
        st.sampled_from((b"json/plain", b"json/zlib", b"binary/plain", b"binary/null", b"x")),
        st.one_of(st.binary(max_size=200), json_values.map(dump)),
    ),
    (b"json/plain", b"[" * 100_000),
    (b"json/plain", b"[" + b"[]," * 1_000_000 + b"1]"),
    (b"json/plain", b"9" * 100_000),
    (b"json/plain", b'"\\ud800"'),
)
def check_payload(given: tuple[bytes, bytes]) -> None:
    from temporalio.api.common.v1 import Payload

    encoding, data = given
    payload = Payload(metadata={"encoding": encoding}, data=data)
    # The SDK drops a signal for each of them.
    with contextlib.suppress(ValueError, KeyError, RuntimeError):
        bounded(len(data), lambda: CONVERTER.from_payloads([payload], [Any]))  # type: ignore[list-item]


KEYS = KeyStore(given={"a": b"k" * 32})
CODEC = EncryptionCodec(KEYS, "a")
CLOSED = CODEC.encrypt(CONVERTER.to_payloads([{"a": 1}])[0])


@target(
    st.tuples(
        st.sampled_from((b"a", b"b", b"../a", b"")) | st.binary(max_size=40),
        st.binary(max_size=60) | st.integers(0, len(CLOSED.data)).map(lambda n: CLOSED.data[:n]),
    ),
    (b"\x1b[2J\n" * 9, b""),
    (b"x" * 1_900_000, b""),
)
def check_encrypted_payload(given: tuple[bytes, bytes]) -> None:
    from temporalio.api.common.v1 import Payload

    id, data = given
    metadata = {"encoding": ENCODING, KEY_ID: id, CIPHER: b"AES-256-GCM"}
    try:
        bounded(len(id + data), lambda: CODEC.decrypt(Payload(metadata=metadata, data=data)))
    except UnreadablePayloadError as error:
        text = str(error)
    else:
        assert (id, data) == (b"a", CLOSED.data)
        return
    expect_text(text, is_line=True)
    assert len(text) < 1000


REQUEST = {"payloads": [MessageToDict(CLOSED), {"metadata": {"encoding": "anNvbi9wbGFpbg=="}}]}


@target(
    st.tuples(
        st.sampled_from(("decode", "encode", "")),
        st.one_of(mutated_json(REQUEST).map(dump), st.binary(max_size=200)),
    ),
    ("decode", b"null"),
    ("decode", b'{"payloads": [{"\\ud800": 1}]}'),
    ("decode", b"[" * 100_000),
    ("decode", dump({"payloads": [{"data": "A" * 40_000, "metadata": {"a" * 9000: "AA=="}}] * 9})),
)
def check_codec_request(given: tuple[str, bytes]) -> None:
    word, body = given
    said: list[str] = []
    with contextlib.suppress(ValueError):
        converter = codec_server.Converter(CODEC, said.append)
        bounded(len(body) + 100, lambda: json.dumps(converter.convert(word, body)))
    for text in said:
        expect_text(printable(text), is_line=True)


# --- who asks


@st.composite
def torn_signatures(draw: st.DrawFn) -> str:
    data = bytearray(base64.b64decode(draw(st.sampled_from(sorted(SIGNED.values())))[1]))
    data = data[: draw(st.just(len(data)) | st.integers(0, len(data)))]
    for _ in range(draw(st.integers(0, 6))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return base64.b64encode(data).decode()


@target(st.one_of(torn_signatures(), hostile_text), *(one for _, one in SIGNED.values()))
def check_signature(text: str) -> None:
    try:
        key = bounded(len(text) + 100, lambda: verify(text, SIGNED_TEXT))
    except SignatureError as error:
        expect_text(str(error), is_line=True)
        return
    assert (key, text) in SIGNED.values()


ACCESS = Access.model_validate(
    {
        "people": {"ann": {"role": "admin", "keys": [ED25519]}, "bob": {"role": "researcher"}},
        "unproven": ["submit"],
    }
)
ORDER: dict[str, Any] = {
    **{"node": "n1", "reason": "r", "by": "ann@laptop"},
    "proof": {"at": NOW.isoformat(), "nonce": "n", "signature": SIGNED["ed25519"][1]},
}


@target(
    mutated_json(ORDER), {**ORDER, "proof": {**ORDER["proof"], "at": "9999-12-31T23:59:59-23:59"}}
)
def check_signed_order(raw: Any) -> None:
    signed = bounded(
        2000 + len(repr(raw)), lambda: read_signed("default", "fleet/lab/run", "drain", raw)
    )
    message = raw if isinstance(raw, dict) else {}
    by = str(message.get("by"))
    for owner in (None, "ann@laptop", clean_name(by)):
        order = PersonOrder("cancel", "cancel job llama", by, signed, owner)
        verdict = bounded(
            2000 + len(by), lambda order=order: check_order(ACCESS, "lab", order, NOW)
        )  # type: ignore[misc]
        expect_text(verdict.by, is_line=True)
        expect_text(verdict.refusal, is_line=True)
        assert verdict.refusal, "nothing here is signed, and such orders need it"


# --- what ranks write


class Output(io.StringIO):
    """A terminal that is written to."""

    def isatty(self) -> bool:
        return True


@target(
    lines,
    *([snippet + "text\n"] for snippet in SNIPPETS),
    ["\x1b[31m" * 100_000, "x\n"],
    ["\x1b]0;" + "x" * 9000, "\x07y\n"],
    ["x\r" * 20_000],
    ["\x1b[38;5;8mdim\x1b[1;8mhidden\n"],
)
def check_rank_output(pieces: list[str]) -> None:
    for is_live in (False, True):
        out = Output()
        printer = Printer(2, colour=True, is_live=is_live, clock=lambda: 1.0)
        printer._write = lambda text, out=out: out.write(text)  # type: ignore[method-assign,assignment,misc]

        def feed(printer: Printer = printer) -> None:
            for piece in pieces:
                printer.feed(0, piece)
                printer.refresh()
            printer.flush()

        bounded(1000 + sum(map(len, pieces)), feed)
        drawn = out.getvalue()
        # Our own drawing goes up and erases below.
        expect_colours(re.sub(r"\r\x1b\[\d+A\x1b\[J", "", drawn))


@target(lines, *([snippet] for snippet in SNIPPETS))
def check_last_words(log: list[str]) -> None:
    size = sum(map(len, log))
    for code, signal in ((1, None), (None, 9), (None, 6)):
        words = bounded(size, lambda code=code, signal=signal: find_last_words(log, code, signal))  # type: ignore[misc]
        bounded(size, lambda code=code, signal=signal: read_rank_log(log, code, signal, catalog()))  # type: ignore[misc]
        if words is not None:
            expect_text(words.error)
            expect_text(words.text)
    bounded(size, lambda: parse_failures(log))


LOG = "\n".join(
    path.read_text(errors="replace") for path in sorted((SAMPLES / "last_words").glob("*.txt"))
)


@target(mutated_text(*(LOG[n : n + 3000] for n in range(0, len(LOG), 3000))))
def check_explained_log(text: str) -> None:
    for kind in ("log", "kernel", "dcgm"):
        with written(text) as path, refused():
            explanation = bounded(
                len(text) + 2000,
                lambda kind=kind, path=path: explain.explain(kind, str(path), None, None),  # type: ignore[misc]
            )
            shown = io.StringIO()
            with contextlib.redirect_stdout(shown), guard_output():
                print("\n".join(explain.lines_of(explanation, None, None)))
            expect_text(shown.getvalue())
            json.dumps(explain.view_of(explanation, None))


@target(mutated_text("5", '{"step": 5, "values": {"loss": 1.5}, "phase": "p", "checkpoint": 3}'))
def check_progress_file(text: str) -> None:
    with contextlib.suppress(ProgressError):
        bounded(len(text), lambda: parse_file(text))


ERROR_FILE = {
    "message": {
        "message": "RuntimeError: x",
        "extraInfo": {"py_callstack": "Traceback\n", "timestamp": "1"},
    }
}


@target(
    st.one_of(st.binary(max_size=300), mutated_json(ERROR_FILE).map(dump)),
    b"[" * 5000,
    b'{"message": ' + b'{"message": ' * 900,
)
def check_error_file(content: bytes) -> None:
    with written(content) as path:
        raw = bounded(len(content), lambda: read_error(path, Redactor()))
        for line in read_tail(path, Redactor()):
            assert "\n" not in line
    observe({"error": raw})


@target(mutated_json({"error": ERROR_FILE, "log_tail": ["a"], "kernel": ["[1.0] Xid 79"]}))
def check_observation(fields: Any) -> None:
    observe(fields if isinstance(fields, dict) else {"error": fields})


def observe(fields: Mapping[str, Any]) -> None:
    """Have a node send an observation, a job take it, and people look at the job."""
    exit_ = {"seq": 1, "kind": "RankExited", "rank": 2, "local_rank": 0, "pid": 9, "exit_code": 1}
    line = {"observation": {**exit_, "signal": None, "stopped": False, **fields}}
    size = 2000 + len(repr(fields))
    try:
        parsed = bounded(size, lambda: answers.parse_watch_line("n2", TOKEN, line))
    except ProtocolError as error:
        expect_text(printable(str(error)), is_line=True)
        return
    seen = read_observations("n2", parsed["observation"], at(0))
    job = running()
    if seen:
        job, _ = step(job, FaultObserved(job.generation, seen, 0, at(0)))
    expect_page(current_details(job, at(9)))
    expect_view(job)


def expect_view(job: JobState) -> None:
    text = "\n".join(job_views.show_lines(job_views.show(job, None, NOW), NOW))
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), guard_output():
        print(text)
    expect_text(shown.getvalue())


@target(
    mutated_text("epoch 1 step 5 loss 1.5\nsaved ckpt-5\r\x1b[1mstep 6\x1b[0m\n"),
    "step " + "9" * 5000,
)
def check_progress_log(text: str) -> None:
    pattern = re.compile(r"step +(?P<step>\S+)(?: loss (?P<loss>\S+))?")
    with written(text) as path:
        log = _LogTail(path)
        step = bounded(len(text) + 500, lambda: log.read_step(pattern))
        assert step is None or step >= 0
        assert log.is_read


ZIP = b"PK\x03\x04" + b"x" * 9 + b"PK\x05\x06"


@target(
    st.tuples(
        st.sampled_from(("step_5.ckpt", "checkpoint-7", "iter_0000005", "a.pt", "x"))
        | encodable_text,
        st.one_of(st.binary(max_size=200), st.binary(max_size=90).map(lambda end: ZIP + end)),
    ),
    ("step_5.ckpt", b"PK\x03\x04" + b"x" * 70_000 + b"PK\x05\x06"),
    ("latest_checkpointed_iteration.txt", b"9" * 64),
)
def check_checkpoints(given: tuple[str, bytes]) -> None:
    name, content = given
    name = re.sub(r"[/\0]", "_", name).encode()[:200].decode(errors="ignore").strip(".") or "x"
    with written(content) as path:
        path.rename(path.parent / name)
        (path.parent / "iter_0000004").mkdir()
        bounded(4000 + len(content), lambda: find_checkpoints(str(path.parent)))


FAULTHANDLER = (SAMPLES / "last_words" / "faulthandler.txt").read_text()


@target(mutated_text(FAULTHANDLER))
def check_stacks_file(text: str) -> None:
    bounded(len(text), lambda: parse_stacks_file(1, text))


RECORD = (SAMPLES / "flight" / "healthy.rank_0").read_bytes()


@st.composite
def torn_records(draw: st.DrawFn) -> bytes:
    data = bytearray(RECORD[: draw(st.integers(0, len(RECORD)))])
    for _ in range(draw(st.integers(0, 6))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


class Evil:
    """What an unpickler that knows functions would call."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch /tmp/relaunch-fuzz-was-here",)


@target(
    st.one_of(torn_records(), json_values.map(dump), json_values.map(pickle.dumps)),
    pickle.dumps(Evil()),
    pickle.dumps({"entries": [Evil()]}),
    b'{"entries":' + b"[" * 5000,
    b"(" * 5000 + b".",
    b"]" * 200 + b"a" * 300 + b".",
)
def check_flight_record(data: bytes) -> None:
    try:
        record = bounded(len(data) + 2000, lambda: parse_dump(data))
    except UnreadableError as error:
        expect_text(printable(str(error)), is_line=True)
        return
    summary = bounded(len(data) + 2000, lambda: summarize(record, "x", 1.0))
    bounded(len(data) + 2000, lambda: parse_flight(summary))


@target(st.one_of(st.binary(max_size=300), json_values.map(dump)), b"[" * 5000, b"9" * 5000)
def check_agent_files(content: bytes) -> None:
    """Lines of the agent's protocol, its journal, and the note of a running `up`."""
    bounded(len(content) + 200, lambda: parse_agent_line(content))
    with written(content + b"\n") as path:
        journal.read(path)
        (path.parent / UP_FILE).write_bytes(content)
        assert find_running_up(path.parent) is None


# --- what nodes and their tools say

GPU = {
    **{"index": 0, "name": "H100", "uuid": "GPU-1", "bus_id": "0000:05:00.0"},
    **{"memory": {"total": 80, "used": 1}, "processes": [{"pid": 1, "name": "x", "memory": 1}]},
    **{"ecc": {"uncorrectable": 0}, "remapped_rows": {"pending": False}, "temperature": 40},
}
FACTS = {
    **{"boot_id": "b", "uptime": 9.0, "gpus": {"driver": "570", "nvml": "12", "gpus": [GPU]}},
    **{"kernel": {"lines": ["NVRM: Xid (PCI:0000:05:00): 79, pid=1, x"]}, "disks": [{"path": "/"}]},
    **{"memory": {"total": 9, "available": 3}, "clock": {"now": 1.0}, "outcome": "done"},
    **{"links": {"ports": [{"name": "mlx5_0", "state": "ACTIVE", "rate": 400}]}},
}
DIAG = json.loads(next((SAMPLES / "dcgm").glob("*.json")).read_text())


@target(mutated_json(FACTS))
def check_probe(facts: Any) -> None:
    size = 4000 + len(repr(facts))
    bounded(size, lambda: read_gpus(facts, 8, catalog()))
    inventory = bounded(size, lambda: read_inventory(facts))
    expect_text(inventory.unreadable, is_line=True)
    if not isinstance(facts, dict):
        return
    inventory = read_inventory(facts.get("gpus"))
    expect_text(inventory.unreadable, is_line=True)
    bounded(size, lambda: read_links(facts))
    health = bounded(
        size, lambda: read_health(facts, None, expected_gpus=8, level=0, catalog=catalog())
    )
    condition = bounded(size, lambda: read_condition(facts, catalog()))
    for reason in (
        *(health.reason, condition.fault, condition.reset_wanted),
        *(one.reason for one in health.findings),
    ):
        expect_text(reason, is_line=True)


STACKS = {
    "stacks": [
        {
            **{"rank": 0, "pid": 1, "unreadable": None},
            "processes": [{"pid": 1, "name": "python", "threads": [{"name": "x", "frames": []}]}],
        }
    ]
}
LISTED = {"jobs": [{"namespace": "default", "job": "llama", "highest": [1000, 1]}], "gpus": [GPU]}
SCHEMAS = [
    one
    for one in vars(answers).values()
    if isinstance(one, type) and issubclass(one, BaseModel) and one is not BaseModel
]


WORDS = {"ranks": [{"rank": 0, "local_rank": 0, "state": "exiting", "log_age": 1.5}]}


@target(
    mutated_json(
        LISTED, STACKS, WORDS, FACTS, {"exit_code": 0, "stdout": "x"}, {"missing": "dcgmi"}
    )
)
def check_node_answer(answer: Any) -> None:
    parsers: list[Callable[[], Any]] = [
        lambda: answers.parse_list("n2", answer),
        lambda: answers.parse_stacks("n2", 0, answer),
        lambda: answers.parse_last_words("n2", answer),
        *(lambda one=one: answers.parse("n2", "look", one, answer) for one in SCHEMAS),
    ]
    if isinstance(answer, dict):
        parsers.append(lambda: answers.check_output("n2", "diagnose", answer, "stdout"))
    size = 4000 + len(repr(answer))
    for parse in parsers:
        try:
            bounded(size, parse)
        except ProtocolError as error:
            expect_text(printable(str(error)), is_line=True)


@target(
    lines.map(lambda rows: [f"relaunch-answer 1/{len(rows)}: {row}" for row in rows]),
    ["relaunch-answer 1/1: " + "[" * 20_000],
    ["relaunch-answer 9999/9999: {}"],
    ["relaunch-answer ²/1: {}"],
)
def check_container_answer(rows: list[str]) -> None:
    bounded(sum(map(len, rows)) + 20_000, lambda: read_answer(rows))


SECRET = "0f" * 16
QUESTION = {
    "token": {"namespace": "default", "job": "llama", "submission": 1000, "generation": 1},
    **{"from": "n2", "nonce": "x", "clock": True, "mac": "0" * 64},
}
REPLY = {"highest": [1000, 2], "stopped": [1000, 1], "alive": True, "leased": True, "stamp": 1.5}


@target(
    mutated_json(QUESTION, REPLY),
    {**QUESTION, "from": "\ud800"},
    {**QUESTION, "mac": "é"},
    {**REPLY, "mac": "é"},
    *({**REPLY, name: value} for name in ("highest", "stopped") for value in (3, [], ["5\n", 1])),
    {**REPLY, "stopped": [10**400, 1e400]},
    {**REPLY, "stamp": "\ud800"},
)
def check_peer_message(raw: Any) -> None:
    """Questions of who reaches the port, and answers of a node that has the gang's secret."""
    message = parse_agent_line(dump(raw))
    if message is None:
        return
    token = AgentToken("default", "llama", 1000, 1)
    heard: list[Answer] = []
    with tempfile.TemporaryDirectory() as folder, socket.socket() as listener:
        job = AgentJob.from_token(Path(folder), token)
        loop = Loop()
        peers = Peers(loop, job, token, listener, lambda: (True, True))
        peers.begin({"secret": SECRET, "node": "n1", "peers": []})
        ours, theirs = socket.socketpair()
        channel = Channel(loop, ours.detach(), lambda _: None, lambda: None)
        bounded(2000, lambda: peers._hear_question(channel, message))
        channel.drop()
        with theirs:
            assert theirs.recv(9) == b"", "it cannot be proven"
        names = ("highest", "stopped", "alive", "leased", "stamp")
        parts = [
            message.get(name) for name in names if name != "stamp" or message.get(name) is not None
        ]
        for mac in (message.get("mac"), compute_mac(SECRET, "answer", "x", *parts)):
            answer = {**message, "mac": mac}
            bounded(
                2000 + len(repr(message)),
                lambda answer=answer: peers._hear_answer("n2", now(), "x", answer, heard.append),  # type: ignore[misc]
            )
        listener.close()
    for one in heard:
        expect_text(one.superseded or "", is_line=True)
        assert len(one.superseded or "") < MAX_NOTE


KNOWN_HOSTS = """
# comment
n1,10.0.0.1 ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAA
@revoked *.lab,!n9 ssh-rsa AAAAB3Nz
|1|F1E1KeoE/eEWhi10WpGv4OdiO6Y=|3988QV0VE8wmZL7suNrYQLITLCg= ssh-rsa AAAAB3Nz
[n2]:2222 ssh-rsa AAAAB3Nz
"""


@target(mutated_text(KNOWN_HOSTS), "*a" * 3000 + " ssh-rsa AAAAB3Nz")
def check_known_hosts(text: str) -> None:
    with written(text) as path:
        size = len(text) + 1000
        entries = bounded(size, lambda: known_hosts.read([str(path)]))
        for port in (22, 2222):
            bounded(
                size,
                lambda port=port: known_hosts.judge(entries, "n1" + "a" * 60, port, b"x"),  # type: ignore[misc]
            )


@target(
    st.one_of(mutated_json(DIAG).map(json.dumps), mutated_text(json.dumps(DIAG)[:4000])),
    "[" * 20_000,
    '{"a":' * 5000,
    "{" * 20_000 + "}" * 20_000,
    '{"DCGM GPU Diagnostic": ' + "[" * 400 + "1, " * 20_000 + "x",
)
def check_dcgm_output(text: str) -> None:
    examination = bounded(len(text) + 4000, lambda: read_diag(text, 226))
    for finding in examination.findings:
        expect_text(finding.reason, is_line=True)


KERNEL = (SAMPLES / "kernel_log.txt").read_text()


@target(mutated_text(*(KERNEL[n : n + 2000] for n in range(0, len(KERNEL), 2000))))
def check_kernel_log(text: str) -> None:
    rows = text.splitlines()
    for finding in bounded(len(text) + 500, lambda: read_kernel_log(rows, catalog())):
        expect_text(finding.reason, is_line=True)


WATCHED = (
    {"heartbeat": {"stamp": 1.0, "alive": [2], "lease_left": 9.0, "progress": {"2": {"step": 5}}}},
    {"observation": {"seq": 1, "kind": "Fenced", "why": "isolated", "reason": "alone"}},
    {"observation": {"seq": 1, "kind": "RanksVanished", "reason": "r", "kernel": ["Xid 79"]}},
    {"outcome": "refused", "why": "not_above", "reason": "seen higher", "highest": [1000, 4]},
)


@target(mutated_json(*WATCHED))
def check_watch_line(line: Any) -> None:
    try:
        parsed = bounded(
            4000 + len(repr(line)), lambda: answers.parse_watch_line("n2", TOKEN, line)
        )
    except ProtocolError as error:
        expect_text(printable(str(error)), is_line=True)
        return
    for name in ("observation", "heartbeat"):
        reason = parsed.get(name, {}).get("reason") if isinstance(parsed.get(name), dict) else None
        if isinstance(reason, str):
            expect_text(reason, is_line=True)


@target(mutated_json({"machine": "m", "boot_id": "b", "state": "/x", "uid": 0}))
def check_place(value: Any) -> None:
    parse_place(value)


TASK_EVENT = {
    "source": "aws.ecs",
    "detail-type": "ECS Task State Change",
    "detail": {"taskArn": "a", "version": 1, "startedBy": "x", "lastStatus": "STOPPED"},
}


@target(
    st.one_of(mutated_json(TASK_EVENT).map(json.dumps), hostile_text),
    "[" * 20_000,
    '{"source": "aws.ecs", "detail-type": "ECS Task State Change", '
    '"detail": {"taskArn": "a", "version": Infinity}}',
)
def check_task_event(body: str) -> None:
    with contextlib.suppress(ValueError):
        bounded(len(body) + 100, lambda: read_event(body))


# --- where people read it


@target(
    hostile_text, *SNIPPETS, *(f"{one} x {other}" for one in ("`", "**", "_") for other in "`*_")
)
def check_texts(text: str) -> None:
    expect_text(printable(text), is_line=True)
    assert len(printable(text, 50)) <= 50
    expect_text(escape_controls(text))
    expect_text(strip_sequences(text))
    expect_text(mute_markup(text))
    assert not any(mark in mute_markup(text) for mark in ("<", "](", "@everyone ", "@here "))
    for page in (escape_markdown(text), f"- **a** {escape_markdown(text)}", quote_code(text)):
        expect_page(page)
    plain = printable(text.strip().replace("`", ""), 10_000)
    if "\\" not in plain:
        assert read_markdown(escape_markdown(plain)) == plain.strip()


def read_markdown(page: str) -> str:
    """Return what is read of a paragraph."""
    from markdown_it import MarkdownIt

    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(f"x{page}")
    inline = tokens[1].children or [] if len(tokens) > 1 else []
    return "".join(one.content for one in inline)[1:]


@target(
    st.tuples(hostile_text, hostile_text),
    *(("x", snippet) for snippet in SNIPPETS),
    *(("x" * odd + "[" * 9000, "y") for odd in (0, 1)),
)
def check_job_page(texts: tuple[str, str]) -> None:
    one, other = texts
    honest, job = (
        job_state(
            reason=first,
            notices=(second,),
            fewer=first,
            incident=incident(reason=second, traceback=traceback, nodes=("n1",)),
            incidents=(incident(reason=first, outcome=second, closed=NOW),),
        )
        for first, second, traceback in (("x", "x", "x"), (one, other, f"{one}\n{other}"))
    )
    expect_page(current_details(job, NOW), current_details(honest, NOW))
    expect_view(job)


@target(st.tuples(hostile_text, hostile_text), *(("x", snippet) for snippet in SNIPPETS))
def check_fleet_page(texts: tuple[str, str]) -> None:
    one, other = texts

    def make(by: str, reason: str) -> tuple[str, list[str]]:
        from relaunch.pool.state import NodeStatus

        sick = replace(
            node(1), status=NodeStatus.QUARANTINED, by=by, reason=reason, repair=by, since=NOW
        )
        state = fleet(sick, node(2), notices=(reason,))
        return fleet_details(state, [sick], NOW, [by], reason), [
            *node_pages.node_lines(sick, (), "lab", NOW, None),
            *map(str, node_views.table_row(sick, (), NOW)),
        ]

    page, rows = make(one, other)
    expect_page(page, make("x", "x")[0])
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), guard_output():
        print("\n".join(rows))
        make_console(width=60).print(other)
    expect_text(shown.getvalue())


@target(st.tuples(hostile_text, hostile_text), *(("x", snippet) for snippet in SNIPPETS))
def check_notice(texts: tuple[str, str]) -> None:
    one, other = texts
    notice = Notice("failed", one, f"job {one} failed", other, NOW, done=one, details=(other, one))
    for many in ((notice,), (notice, notice)):
        expect_text(format_subject("lab", many), is_line=True)
        expect_text(format_text([(each, "http://ui/x") for each in many]))
        text = json.dumps(format_json("lab", "1", NOW, [(each, "") for each in many]))
        assert text.isascii() and count_noun(1, "x") and timedelta(0) is not None

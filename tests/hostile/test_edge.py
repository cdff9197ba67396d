"""Lies without number against the edge itself.

Each is a fault of its node, or something that every workflow can decode.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from relaunch.activities.fleet import _build_probe
from relaunch.activities.gang import WatchedShard
from relaunch.activities.launch import _check_highest
from relaunch.activities.readings import NodeSnapshot
from relaunch.activities.reports import WatchRanksInput, WatchReport
from relaunch.backends.answers import (
    PrepareAnswer,
    RefusalAnswer,
    check_output,
    has_too_many_values,
    parse,
    parse_list,
    parse_watch_line,
)
from relaunch.backends.base import ProtocolError, Refusal
from relaunch.backends.link import _writable
from relaunch.converter import SharedPayloadConverter
from relaunch.generation import Token
from relaunch.job.diagnose import diagnose
from relaunch.job.events import FaultObserved, LaunchRefused, NodeRefusal
from relaunch.job.hang import Pace
from relaunch.pool.state import NodeProbe
from relaunch.spec.policy import HangLimits, Timeouts
from tests.hostile.liar import Grammar
from tests.recovery.builders import running

TOKEN = Token("default", "llama", 1000, 1)
NAMED = {"namespace": "default", "job": "llama", "submission": 1000, "generation": 1}
MAX_REPORT_BYTES = 256 * 1024 + 64 * 1024
PROGRESS = {"2": {"step": 5, "age": 0.1, "values": {"loss": 2.0}, "phase": None, "checkpoint": 3}}
EXITED = {
    "seq": 1,
    "kind": "RankExited",
    "rank": 2,
    "local_rank": 0,
    "pid": 9,
    "exit_code": 1,
    "signal": None,
    "stopped": False,
}
WATCHED: tuple[dict[str, Any], ...] = (
    {"hello": {"token": NAMED, "boot_id": "b", "state": "running", "ranks": [2, 3], "stamp": 1.0}},
    {"heartbeat": {"stamp": 1.0, "alive": [2, 3], "lease_left": 9.0, "progress": PROGRESS}},
    {
        "observation": {
            **EXITED,
            "error": {"message": "x", "timestamp": "1"},
            "log_tail": ["a"],
            "kernel": [],
            "kernel_unreadable": None,
        }
    },
    {"observation": {"seq": 1, "kind": "Fenced", "why": "isolated", "reason": "alone"}},
    {
        "observation": {
            "seq": 1,
            "kind": "RanksVanished",
            "reason": "the node rebooted",
            "rebooted": True,
            "kernel": ["Xid 79"],
        }
    },
)
LISTED = {
    "outcome": "done",
    "boot_id": "b",
    "protocol": 1,
    "held": None,
    "jobs": [
        {
            "namespace": "default",
            "job": "llama",
            "prepared": [1000, 1],
            "stopped": None,
            "generations": [
                {
                    "submission": 1000,
                    "generation": 1,
                    "state": "running",
                    "ranks": [{"rank": 2, "pid": 9, "alive": True}],
                    "fleet": "default/default",
                }
            ],
        }
    ],
    "gpus": {
        "driver": "570",
        "nvml": "12",
        "gpus": [
            {
                **{"index": 0, "name": "H100", "bus_id": "0000:05:00.0", "recovery_action": 1},
                **{"memory": {"total": 80, "used": 1}, "processes": []},
                **{"remapped": {"pending": True, "failed": True}, "retired_pending": True},
            }
        ],
    },
    "disks": [{"path": "/s", "free": 0, "inodes_free": 9, "writable": False, "reason": "r"}],
    "links": {
        "ports": [
            {
                **{"name": "mlx5_0 port 1", "kind": "rdma", "model": "m", "place": "0/1"},
                **{"state": "DOWN", "rate": 400.0, "enabled": True, "counters": {}},
                "before": {"ago": 9, "rate": 400.0, "counters": {}, "seconds": 9},
            }
        ]
    },
}
PREPARED = {
    "outcome": "done",
    "boot_id": "b",
    "master_port": 1,
    "peer_port": 2,
    "nonce": "ab",
    "stopped": [],
    "stamp": 1.0,
}
REFUSED = {
    "outcome": "refused",
    "why": "not_above",
    "reason": "seen higher",
    "highest": [1000, 4],
    "boot_id": "b",
    "held": None,
}
DIAGNOSED = {
    "outcome": "done",
    "boot_id": "b",
    "exit_code": 0,
    "stdout": "{}",
    "stderr": "",
    "took": 1.0,
}
CONVERTER = SharedPayloadConverter()


def cross(value: object, kind: Any) -> None:
    """Have a value become a payload, and a workflow decode it."""
    [payload] = CONVERTER.to_payloads([value])
    assert len(payload.data) < MAX_REPORT_BYTES
    CONVERTER.from_payloads([payload], [kind])


def gang() -> WatchedShard:
    nodes = ("n1", "n2")
    given = WatchRanksInput(
        TOKEN,
        "default",
        nodes,
        2,
        datetime.now(UTC),
        Timeouts(),
        HangLimits(),
        first_rank=0,
        world_size=4,
    )
    return WatchedShard(given, Pace(datetime.now(UTC), False))


def watch(lines: list[object]) -> None:
    """Take lines in as a watch does, and report as it would."""
    seen = gang()
    try:
        for line in lines:
            seen.process_line("n2", parse_watch_line("n2", TOKEN, line))
    finally:
        cross(seen.heartbeat(), type(seen.heartbeat()))
        fault = seen._make_fault() if seen._faults else None
        cross(seen._make_report(*([fault] if fault else [])), WatchReport)
        if fault is not None:
            cross(fault, FaultObserved)
            diagnose(running(), fault)


def refuse(answer: object) -> None:
    refusal = parse("n2", "prepare", RefusalAnswer, answer)
    highest = refusal.highest
    refused = _check_highest(
        Refusal("n2", refusal.why, refusal.reason, (highest[0], highest[1]) if highest else None),
        TOKEN,
    )
    cross(
        LaunchRefused(1, (NodeRefusal("n2", refused.why, refused.reason, refused.highest),)),
        LaunchRefused,
    )


def look(answer: object) -> None:
    listed = parse_list("n2", answer)
    cross(
        _build_probe(
            "n2", NodeSnapshot(listed, listed, was_read=True), "default/default", ("eno2",)
        ),
        NodeProbe,
    )


def fuzz(seed: int, messages: int) -> dict[str, int]:
    """Tell so many lies; return how many were refused, and how many were taken."""
    grammar = Grammar(seed)
    counts = {"refused": 0, "taken": 0}
    for number in range(messages):
        draw = grammar.random.random()
        honest = grammar.random.choice((*WATCHED, LISTED, PREPARED, REFUSED, DIAGNOSED))
        said = (
            grammar.invent()
            if draw < 0.3
            else grammar.value()
            if draw < 0.4
            else grammar.mutate(honest)
        )
        line = json.dumps(said).encode()
        if has_too_many_values(line):  # the session ends there, with a sentence
            counts["refused"] += 1
            continue
        decoded = _writable(json.loads(line))  # as a session does
        try:
            if honest in WATCHED or draw < 0.3:
                watch([WATCHED[0], WATCHED[1], decoded])
            elif honest is LISTED:
                look(decoded)
            elif honest is PREPARED:
                parse("n2", "prepare", PrepareAnswer, decoded)
            elif honest is REFUSED:
                refuse(decoded)
            elif isinstance(decoded, dict):
                check_output("n2", "diagnose", decoded, "stdout")
        except ProtocolError as error:
            counts["refused"] += error.node == "n2" and 0 < len(error.reason) < 500
        except Exception as error:
            raise AssertionError(f"lie {number} of seed {seed}: {line[:2000]!r}") from error
        else:
            counts["taken"] += 1
    return counts


def test_no_lie_gets_past_the_edge_that_a_workflow_cannot_decode() -> None:
    counts = fuzz(20261122, 300)
    assert min(counts.values()) > 30 and sum(counts.values()) == 300, counts


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_lies_at_the_edge(seed: int) -> None:
    assert sum(fuzz(seed, 10_000).values()) == 10_000

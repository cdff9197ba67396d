"""Endings are played as they were published, and a sample of them through the whole service."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from relaunch.evidence.causes import Cause
from tests.corpus.ending import ENDINGS, Ending, is_held_out, read_ending
from tests.corpus.play import (
    ECHO_GAP,
    MAX_GAP,
    Row,
    find_action,
    find_exception,
    find_mistakes,
    make_play,
    prepare,
    run_play,
)
from tests.corpus.run import WAYS, judge
from tests.programs.service import Service

SAMPLE = (
    ("app_swift_oom_fragmented_rank11", "after-echo"),
    ("node_xid79_overheated_titan", "alone"),
    ("app_deepspeed_recursion_rank1", "torchrun"),
    ("dist_gloo_closed_by_peer_at_load", "alone"),
    ("node_xid94_contained_documented", "before-echo"),
    ("site_quota_sample_image", "error-file"),
)
"""Causes of all kinds, each way, ranks with and without a kernel log."""


def make_ending(*ranks: dict[str, object], **fields: object) -> Ending:
    given = {
        "source": "https://example.com/1",
        "seen": "a test",
        "what": "what happened",
        "ranks": ranks,
        "cause": "APPLICATION",
        "action": "RESTART_IN_PLACE",
        "reason": "why cause and action are right",
    }
    return Ending.model_validate({**given, **fields})


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_sample_is_right_through_the_whole_service(tmp_path: Path) -> None:
    endings = {name: read_ending(ENDINGS / f"{name}.yaml") for name, _ in SAMPLE}
    options = prepare(tmp_path / "service", len(SAMPLE))

    def play(at: int) -> Row:
        name, way = SAMPLE[at]
        return run_play(
            service, f"f{at + 1}", f"{name}.yaml", way, endings[name], tmp_path / "plays"
        )

    folder = tmp_path / "service"
    with Service(folder, *options) as service, ThreadPoolExecutor(len(SAMPLE)) as pool:
        rows = list(pool.map(play, range(len(SAMPLE))))
    judged = judge(rows, {f"{name}.yaml": ending for name, ending in endings.items()})
    assert [(row, wrong) for row, wrong in judged if wrong] == []


def test_the_sample_has_every_way_and_none_held_out() -> None:
    assert {way for _, way in SAMPLE} == set(WAYS)
    assert not any(is_held_out(f"{name}.yaml") for name, _ in SAMPLE)
    endings = [(read_ending(ENDINGS / f"{name}.yaml"), way) for name, way in SAMPLE]
    assert all(make_play(ending, way) is not None for ending, way in endings)


def test_every_ending_can_be_played_alone_and_with_echoes() -> None:
    for path in ENDINGS.glob("*.yaml"):
        ending = read_ending(path)
        for way in ("alone", "after-echo", "before-echo"):
            play = make_play(ending, way)
            assert play is not None, path.name
            assert set(play.parts) <= set(range(play.world)), path.name


def test_ranks_keep_their_numbers_where_they_can() -> None:
    few = make_play(make_ending({"rank": 1, "exit": 1}), "alone")
    many = make_play(make_ending({"rank": 162, "exit": 1}, {"rank": 7, "exit": 1}), "alone")
    assert few is not None and many is not None
    assert (few.world, few.numbers) == (2, {1: 1})
    assert (many.world, many.numbers) == (3, {7: 0, 162: 1})


def test_gaps_between_endings_are_kept_up_to_a_limit() -> None:
    ranks = [{"rank": n, "after": after, "exit": 1} for n, after in enumerate((0, 0.5, 1800))]
    play = make_play(make_ending(*ranks), "after-echo")
    assert play is not None
    assert [play.parts[n].after for n in (3, 0, 1, 2)] == [
        0.0,
        ECHO_GAP,
        ECHO_GAP + 0.5,
        ECHO_GAP + 0.5 + MAX_GAP,
    ]


@pytest.mark.parametrize(
    ("log", "found"),
    [
        pytest.param("step 1\nKilled\n", None, id="no exception"),
        pytest.param("KeyError: 'x'\n", None, id="no traceback"),
        pytest.param(
            'Traceback (most recent call last):\n  File "a.py", line 1\nKeyError: 1\n',
            (
                "KeyError: 1",
                'Traceback (most recent call last):\n  File "a.py", line 1\nKeyError: 1',
            ),
            id="a traceback",
        ),
        pytest.param(
            '[rank3]:   File "a.py", line 1\n[rank3]: torch.cuda.OutOfMemoryError: no\nmore\n'
            "W1026 03:51:31 api.py:908] Sending process 7 closing signal SIGTERM\n",
            (
                "OutOfMemoryError: no\nmore",
                '  File "a.py", line 1\ntorch.cuda.OutOfMemoryError: no\nmore',
            ),
            id="two lines, and what torchrun prints after them",
        ),
    ],
)
def test_error_files_are_what_torch_writes(log: str, found: tuple[str, str] | None) -> None:
    assert find_exception(log) == found


def test_a_first_action_is_no_look_and_no_wait() -> None:
    def make_history(*decisions: tuple[str, str | None]) -> list[dict[str, object]]:
        return [{"decisions": [{"decision": one, "strategy": how} for one, how in decisions]}]

    assert find_action(make_history(("Examine", None), ("Relaunch", "REPLACE_NODE"))) == (
        "REPLACE_NODE"
    )
    assert find_action(make_history(("Stop", None))) == "FAIL"
    assert find_action(make_history(("Wait", None))) is None


def test_mistakes_are_named() -> None:
    row = {
        "cause": "APPLICATION",
        "action": "RESTART_IN_PLACE",
        "guilty": [0],
        "ranks": [0],
        "first_node": "n1",
        "touched": [],
    }
    ending = make_ending({"rank": 0, "exit": 1})
    sick = make_ending({"rank": 0, "exit": 1}, examination="UNHEALTHY")
    either = make_ending({"rank": 0, "exit": 1}, cause=Cause.STORAGE, or_causes=["APPLICATION"])
    isolated = {**row, "touched": [["n1", "isolated"]]}
    assert find_mistakes(row, ending) == find_mistakes(row, either) == []
    assert find_mistakes({**row, "cause": "HANG", "action": None}, ending) == ["cause", "action"]
    assert find_mistakes({**row, "ranks": [1]}, ending) == ["guilty"]
    assert find_mistakes(isolated, ending) == ["healthy node touched"]
    assert find_mistakes(isolated, sick) == []
    assert find_mistakes(row, sick, frozenset({"n2"})) == ["healthy node touched"]

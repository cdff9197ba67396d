"""What the node tells of ranks that have failed and not ended, and of those that it stopped."""

from __future__ import annotations

import os
import signal

import pytest
from real_node import Json, Node, expect_done, python_command, refusal, token, wait_for

FAILS = """
import os, signal, sys, time
def fail(): raise ValueError("boom")
if os.environ["R"] == "1":
    if sys.argv[1:]:
        signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"saving\\n"))
    try:
        fail()
    except ValueError:
        sys.excepthook(*sys.exc_info())
    open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write('{"message": "ValueError: boom"}')
time.sleep(1000)
"""
RANK_ENV = [{"R": "0"}, {"R": "1"}]
ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def ask(node: Node) -> dict[int, Json]:
    answer = expect_done(node.order("last-words", token=token(1)))
    return {row["rank"]: row for row in answer["ranks"]}


def await_words(node: Node) -> Json:
    wait_for(lambda: has_written(ask(node)[1]))
    return ask(node)[1]


def has_written(row: Json) -> bool:
    """Whether the error file of a rank is written: it is empty when it is opened."""
    return row["error"] is not None and "unreadable" not in row["error"]


def test_a_rank_that_has_not_ended_is_reported_with_its_words(node: Node) -> None:
    pids = node.run(1, python_command(FAILS), rank_env=RANK_ENV)
    failed = await_words(node)
    assert (failed["pid"], failed["local_rank"], failed["state"]) == (pids["1"], 1, "running")
    assert failed["error"] == {"message": "ValueError: boom"}
    assert failed["log_tail"][-1] == "ValueError: boom"
    assert 0 <= failed["error_age"] <= failed["log_age"]
    other = ask(node)[0]
    assert (other["error"], other["error_age"], other["log_tail"]) == (None, None, [])
    os.kill(pids["0"], signal.SIGKILL)
    wait_for(lambda: ask(node) == {})
    assert refusal(node.order("last-words", token=token(7))) == "no_such_generation"


def test_a_rank_whose_process_ends_is_exiting(node: Node) -> None:
    """Its main thread has ended, as when the driver of its GPU takes long to give it back."""
    node.run(1, python_command(ENDS), ranks=1)
    wait_for(lambda: ask(node)[0]["state"] == "exiting")


@pytest.mark.parametrize("writes", [False, True], ids=["quiet", "writes at SIGTERM"])
def test_what_a_rank_had_written_before_its_stop(node: Node, writes: bool) -> None:
    arguments = ["and goes on"] if writes else []
    pids = node.run(1, [*python_command(FAILS), *arguments], rank_env=RANK_ENV, stop_grace=0.5)
    wait_for(lambda: is_older_than_a_tick(node))
    watch = node.watch()
    os.kill(pids["0"], signal.SIGKILL)
    assert "before_stop" not in watch.read_observation("RankExited")
    stopped = watch.read_observation("RankExited")
    assert (stopped["rank"], stopped["stopped"], stopped["log_tail"]) == (1, True, [])
    before = stopped["before_stop"]
    assert before["error"] == {"message": "ValueError: boom"}
    # What it wrote at SIGTERM cannot be told from what was there before.
    assert before["log_tail"][-1:] == ([] if writes else ["ValueError: boom"])
    assert (before["log_age"] is None) is writes


def is_older_than_a_tick(node: Node) -> bool:
    row = ask(node)[1]
    return has_written(row) and row["error_age"] > 0.1 and row["log_age"] > 0.1

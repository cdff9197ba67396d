"""Every answer that may prove something of ranks says where it comes from.

That is: machine, boot, user and the job's state.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
from real_node import Node, expect_done, is_alive, refusal, token, wait_for

from relaunch.agent.state import read_boot_id


def place(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = expect_done(answer)["place"]
    return found


def test_every_answer_of_one_state_folder_tells_the_same_place(node: Node) -> None:
    prepared = place(node.prepare())
    assert set(prepared) == {"machine", "boot_id", "uid", "state"}
    assert (prepared["boot_id"], prepared["uid"]) == (read_boot_id(node.state), os.geteuid())
    assert len(bytes.fromhex(prepared["machine"])) == len(bytes.fromhex(prepared["state"])) == 8
    expect_done(node.start())
    assert node.watch().read_until("hello")["place"] == prepared
    refused = node.order("watch", token=token(2), after_seq=0, heartbeat=1.0)
    assert refusal(refused) == "no_such_generation"
    assert refused is not None
    assert refused["place"] == prepared
    node.end_session()
    assert place(node.prepare(2)) == prepared, "another session, and a later generation"
    assert place(node.stop(2)) == prepared
    assert node.watch(2).read_until("hello")["place"] == prepared, "told from the disk"


def test_a_job_that_was_never_here_has_no_state_here(node: Node) -> None:
    refused = node.order("watch", token=token(1), after_seq=0, heartbeat=1.0)
    assert refused is not None
    assert refused["place"]["state"] == ""
    assert place(node.stop())["state"] != place(node.stop(token=token(1, job="k")))["state"], (
        "each job has its own"
    )


def remove(node: Node, what: str) -> None:
    folder = node.folder()
    if what == "highest.json":
        (folder.parent / what).unlink()
    else:
        shutil.rmtree({"state": node.state, "jobs": node.state / "jobs"}[what], ignore_errors=True)


def is_same_machine(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[name] == other[name] for name in ("machine", "boot_id", "uid"))


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize("what", ["state", "jobs", "highest.json"])
def test_state_that_is_deleted_does_not_come_back_as_the_same(node: Node, what: str) -> None:
    before = place(node.prepare())
    expect_done(node.start())
    expect_done(node.stop())
    node.end_session()
    wait_for(lambda: not is_alive(node.pid("shim")))
    remove(node, what)
    after = place(node.stop())
    assert is_same_machine(before, after)
    assert after["state"] != before["state"], "so what it says of earlier ranks is no proof"


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize("what", ["state", "jobs", "highest.json"])
def test_state_deleted_under_ranks_is_restored_by_their_shim(node: Node, what: str) -> None:
    before = place(node.prepare())
    pids = expect_done(node.start())["pids"].values()
    node.end_session()
    remove(node, what)
    assert place(node.stop()) == before
    assert not any(map(is_alive, pids)), "so it is proof"

"""Workflows whose payloads are encrypted.

All tests of this folder run so with RELAUNCH_TEST_ENCRYPTED=1 (docs/testing.md).
"""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
from temporalio.client import Client

from relaunch.job.state import Phase
from relaunch.temporal import data_converter
from tests.fakes.nodes import Exit, Script, error_file
from tests.workflows.rig import policy, rig

pytestmark = pytest.mark.asyncio(loop_scope="session")
PLANTED = "planted-text"


async def test_a_job_with_a_fault_goes_on_with_a_new_key(
    server: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o700)
    for name in ("old", "new"):
        (keys / name).touch(mode=0o600)
        (keys / name).write_text(base64.b64encode(os.urandom(32)).decode())
    monkeypatch.setenv("RELAUNCH_ENCRYPTION_KEYS", str(keys))

    def connect(key: str) -> Client:
        monkeypatch.setenv("RELAUNCH_ENCRYPTION_KEY", key)
        return Client(**{**server.config(), "data_converter": data_converter()})

    before, after = connect("old"), connect("new")
    script = Script((Exit(generation=1, rank=3, exit_code=1, error=error_file(PLANTED)),))
    async with rig(before, tmp_path, script) as made:
        job = await made.submit(policy(), env={"A": PLANTED})
        await job.until_phase(Phase.RUNNING, 2)
        # A person whose command has the new key already.
        handle = after.get_workflow_handle(job.handle.id)
        await handle.signal("cancel", {"reason": PLANTED, "by": PLANTED})
        result = await job.result()
        assert (result.phase, PLANTED in result.reason) == (Phase.CANCELLED, True)
        assert PLANTED in result.incidents[0].reason
        history = b"".join(one.SerializeToString() for one in (await job.history()).events)
    assert PLANTED.encode() not in history
    assert history.count(b"encryption-key-id\x12\x03old") > 5
    assert history.count(b"encryption-key-id\x12\x03new") == 1

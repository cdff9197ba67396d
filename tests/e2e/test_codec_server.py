"""`relaunch codec-server` with Temporal's web UI in a real Chromium."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.browser import PROGRAM, Browser, enter_codec_server
from tests.chaos.world import ROOT, World
from tests.e2e.test_encryption import write_key

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PROGRAM, reason="no Chromium is installed"),
    pytest.mark.timeout(900),
]
SEEN = "planted-to-be-seen"


def browse(folder: Path, page: str, endpoint: str) -> None:
    with Browser(folder) as browser:
        browser.open(page)
        browser.until_text("launch_ranks")
        assert SEEN not in browser.text()
        enter_codec_server(browser, endpoint)
        browser.open(page)
        browser.until_text("launch_ranks • launch generation 1 on n1")
        browser.until_text(SEEN)  # in the input
        browser.click("Memo", "a")
        browser.until_text("generation 1 runs on n1")
        # The summary and details of its start, and the job's page, which is a query.
        browser.click("User Metadata", "a")
        while not (SEEN in (frames := str(browser.frame_texts())) and "To overrule it" in frames):
            pass
        if kept := os.environ.get("RELAUNCH_SCREENSHOTS"):
            browser.picture(Path(kept) / "codec-server.png")


async def test_the_web_ui_shows_payloads_to_those_who_have_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_key(tmp_path / "keys", "first")
    monkeypatch.setenv("RELAUNCH_ENCRYPTION_KEYS", str(tmp_path / "keys"))
    monkeypatch.setenv("RELAUNCH_ENCRYPTION_KEY", "first")
    async with World(tmp_path / "world", 64, nodes=1, spares=0, answer_within=5.0) as world:
        command = ["sh", "-c", "sleep 600", "train", SEEN]
        job = await world.submit(name="seen", nodes=1, command=command)
        await job.until_phase("RUNNING")
        server = await asyncio.create_subprocess_exec(
            *(sys.executable, str(ROOT / "starter.py"), "codec-server"),
            *("--listen", "127.0.0.1:0", "--ui", world.web_ui),
            env={**world.environment, "RELAUNCH_NO_WARM": "1"},
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            assert server.stderr is not None
            lines = [(await server.stderr.readline()).decode() for _ in range(2)]
            endpoint = lines[1].split()[-1]
            assert endpoint.startswith("http://127.0.0.1:")
            page = f"{world.web_ui}/namespaces/default/workflows/job%2Fseen/{job.run_id}"
            await asyncio.to_thread(browse, tmp_path / "profile", page, endpoint)
        finally:
            server.kill()
            await server.wait()
        await job.signal("cancel")
        await job.until_phase("CANCELLED")

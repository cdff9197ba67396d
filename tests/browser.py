"""A real Chromium without a window, driven by its DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome") or ""
POLL_INTERVAL_S = 0.1
FIRST_FREE_FD = 10
"""Above 3 and 4, at which Chromium expects its two pipes."""


class BrowserError(Exception):
    """What a page was asked for failed."""


class Browser:
    """One tab. Its profile is in `folder`: stored columns are kept between pages, not between
    browsers of other folders."""

    def __init__(self, folder: Path, width: int = 1400, height: int = 950) -> None:
        self._folder, self._width, self._height = folder, width, height
        self._count = 0
        self._rest = b""

    def __enter__(self) -> Browser:
        inner = [_lift(fd) for pair in (os.pipe(), os.pipe()) for fd in pair]
        commands, self._commands, self._answers, answers = inner

        def place_pipes() -> None:
            os.dup2(commands, 3)
            os.dup2(answers, 4)

        self._process = subprocess.Popen(
            [
                *(PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
                *("--disable-background-networking", "--disable-component-update"),
                *("--disable-sync", f"--user-data-dir={self._folder}", "--remote-debugging-pipe"),
                # Sandboxed frames in other processes are out of this session's reach.
                *("--disable-features=IsolateSandboxedIframes", "--hide-scrollbars"),
                "about:blank",
            ],
            preexec_fn=place_pipes,  # noqa: PLW1509 (two system calls, before exec)
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        tabs = self._send("Target.getTargets")["targetInfos"]
        tab = next(one["targetId"] for one in tabs if one["type"] == "page")
        attached = self._send("Target.attachToTarget", targetId=tab, flatten=True)
        self._session = attached["sessionId"]
        self.resize(self._width, self._height)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(BrowserError, OSError):
            self._send("Browser.close")
        os.close(self._commands)
        os.close(self._answers)
        self._process.wait()

    def resize(self, width: int, height: int) -> None:
        """Set the size of the page in pixels, at one device pixel each."""
        self._page(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def open(self, url: str) -> None:
        self._page("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page; promises are awaited.

        Raises:
            BrowserError: It threw.
        """
        done = self._page(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in done:
            details = done["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return done["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until an expression in the page is true; only the test's own timeout ends it."""
        look = f"Boolean((() => {{ try {{ return {condition} }} catch {{ return false }} }})())"
        while True:
            # A page that is being replaced forgets what it was asked.
            with contextlib.suppress(BrowserError):
                if self.run(look):
                    return
            time.sleep(POLL_INTERVAL_S)

    def until_text(self, text: str) -> None:
        self.until(f"document.body.innerText.includes({json.dumps(text)})")

    def click(self, text: str, tag: str = "*") -> None:
        """Click the innermost element that has exactly this text, or this label, once it is
        there."""
        found = (
            f"[...document.querySelectorAll({json.dumps(tag)})].filter(one => "
            f"one.innerText?.trim() === {json.dumps(text)}"
            f" || one.getAttribute('aria-label') === {json.dumps(text)}).at(-1)"
        )
        self.until(f"{found} !== undefined")
        self.run(f"{found}.click()")

    def text(self) -> str:
        return str(self.run("document.body.innerText"))

    def frame_texts(self) -> list[str]:
        """Return the text of each frame of the page, also of sandboxed ones."""
        tree = self._page("Page.getFrameTree")["frameTree"]
        texts = []
        for child in tree.get("childFrames", ()):
            with contextlib.suppress(BrowserError):  # it is being replaced
                world = self._page("Page.createIsolatedWorld", frameId=child["frame"]["id"])
                done = self._page(
                    "Runtime.evaluate",
                    expression="document.body.innerText",
                    contextId=world["executionContextId"],
                )
                texts.append(str(done["result"].get("value", "")))
        return texts

    def picture(self, file: Path, quality: int = 80) -> None:
        """Write what the page shows, as PNG or WebP by the file's suffix."""
        kind = file.suffix.removeprefix(".")
        more = {"quality": quality} if kind == "webp" else {}
        shot = self._page("Page.captureScreenshot", format=kind, **more)
        file.write_bytes(base64.b64decode(shot["data"]))

    def _page(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._send(method, self._session, **parameters)

    def _send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        call: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if session is not None:
            call["sessionId"] = session
        # A large call may take several writes.
        left = memoryview(json.dumps(call).encode() + b"\0")
        while left:
            left = left[os.write(self._commands, left) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                break
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._answers, 1 << 16)
            if not more:
                raise BrowserError("the browser has ended")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        read: dict[str, Any] = json.loads(message)
        return read


def _lift(fd: int) -> int:
    """Return a copy of a descriptor above those that Chromium expects its pipes at."""
    lifted = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE_FD)
    os.close(fd)
    return lifted


def enter_codec_server(browser: Browser, address: str) -> None:
    """Do what docs/encryption.md says, on a page of Temporal's web UI."""
    field = "document.getElementById('data-encoder-endpoint-input')"
    browser.click("Configure Codec Server", "button")
    browser.until("document.getElementById('use-local-endpoint-radio')")
    browser.run("document.getElementById('use-local-endpoint-radio').click()")
    browser.until(f"{field} !== null")
    browser.run(
        f"{field}.value = {json.dumps(address)};"
        f"{field}.dispatchEvent(new Event('input', {{bubbles: true}}))"
    )
    browser.click("Apply", "button")

"""Temporal's web UI in a real Chromium, as those on call see it.

The pictures in the docs are made here: `make screenshots` (`RELAUNCH_SCREENSHOTS` is the folder).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from relaunch.cli.web_views import COLUMNS, VIEWS, columns_script
from tests import planted
from tests.browser import PROGRAM, Browser, enter_codec_server
from tests.console.commands import STARTER, bare_environment
from tests.invariants import assert_accounted

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PROGRAM, reason="no Chromium is installed"),
    pytest.mark.timeout(900),
]
MAX_BYTES = 150_000
"""Of a picture in the docs."""
SIZES = {"list": (1500, 560), "job-page": (1280, 1420), "report": (1280, 1060)}
"""Pixels, by picture; the others are 1280 x 1100."""
TRAIN = """
import os, pathlib, sys, time
step = 0
while True:
    step += 1
    print(f"step {step} loss {2 / (step + 1):.4f}", flush=True)
    time.sleep(0.2)
    if sys.argv[1:] == ["--from", "old.pt"] and step == 5:
        raise KeyError("optimizer")
"""


@dataclass
class Service:
    """`relaunch up` with a fleet of six nodes, and what was made with it."""

    folder: Path
    ui: str = ""
    codec: str = ""
    """The address of its codec server, where the tests run with encryption."""

    def run(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, STARTER, *words],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode in (0, 1), done.stderr
        planted.check(f"the output of {words}", done.stdout + done.stderr)
        return done.stdout

    @property
    def environment(self) -> dict[str, str]:
        return bare_environment({"RELAUNCH_STATE": str(self.folder / "state")})

    def submit(self, name: str, *options: str, nodes: int = 2) -> None:
        job = {
            "name": name,
            "command": ["python3", "train.py", *options],
            "workdir": str(self.folder),
            "nodes": nodes,
            "fleet": "lab",
            "progress": {"log_pattern": r"step (?P<step>\d+)"},
            **planted.plant(self.folder),
        }
        (self.folder / f"{name}.json").write_text(json.dumps(job))
        self.run("submit", f"{name}.json")

    def show(self, job: str) -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(self.run("show", job, "--json"))
        return shown

    def until(self, job: str, phase: str, generation: int = 1) -> dict[str, Any]:
        while (now := self.show(job))["phase"] != phase or now["generation"] < generation:
            pass
        return now

    def kill_rank(self, job: str) -> None:
        """Kill rank 0 of a job as the kernel or a person would."""
        for process in Path("/proc").glob("[0-9]*"):
            try:
                is_ours = (process / "cwd").readlink() == self.folder
                variables = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if is_ours and {f"RELAUNCH_JOB={job}".encode(), b"RANK=0"} <= set(variables):
                os.kill(int(process.name), signal.SIGKILL)
                return
        raise AssertionError(f"job {job} has no rank 0")

    def page(self, workflow: str, tab: str = "") -> str:
        return f"{self.ui}/namespaces/default/workflows/{quote(workflow, safe='')}{tab}"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = Service(tmp_path_factory.mktemp("web-ui"))
    planted.folders.add(made.folder)
    state = made.folder / "state"
    (made.folder / "train.py").write_text(TRAIN)
    nodes = [{"name": f"gpu-0{n}", "address": f"127.76.0.{n}"} for n in range(1, 7)]
    fleet = {"name": "lab", "backend": "local", "repairs": "act", "nodes": nodes}
    (made.folder / "lab.json").write_text(json.dumps(fleet))
    with (made.folder / "up.log").open("wb") as log:
        up = subprocess.Popen(
            [
                *(sys.executable, STARTER, "up", "--port", "0", "--ui-port", "0"),
                *("--state", str(state), "--fleet", "lab.json"),
            ],
            cwd=made.folder,
            env=made.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    others: list[subprocess.Popen[str]] = []
    try:
        while not (state / "up.json").exists():
            assert up.poll() is None, (made.folder / "up.log").read_text()
        made.ui = json.loads((state / "up.json").read_text())["ui"]
        if "RELAUNCH_ENCRYPTION_KEY" in os.environ:
            words = (sys.executable, STARTER, "codec-server", "--listen", "127.0.0.1:0")
            codec = subprocess.Popen(words, env=made.environment, stderr=subprocess.PIPE, text=True)
            others.append(codec)
            assert codec.stderr is not None
            made.codec = [codec.stderr.readline() for _ in range(2)][1].split()[-1]
        made.submit("llama-7b")
        made.submit("vit-large", nodes=1)
        made.submit("gpt-ablation", "--from", "old.pt", nodes=1)
        made.until("llama-7b", "RUNNING")
        made.kill_rank("llama-7b")
        made.run("nodes", "repair", "gpu-06", "--fleet", "lab", "--reboot", "--reason", "Xid 119")
        made.run("nodes", "quarantine", "gpu-05", "--fleet", "lab", "--reason", "flaky NVLink")
        made.until("llama-7b", "RUNNING", 2)
        made.until("gpt-ablation", "FAILED")
        yield made
        for job in ("llama-7b", "vit-large"):
            made.run("cancel", job)
        for job in ("llama-7b", "vit-large"):
            shown = made.until(job, "CANCELLED")
            assert_accounted(json.loads(made.run("report", job, "--json")), shown)
    finally:
        for codec in others:
            codec.kill()
            codec.communicate()
        up.terminate()
        up.wait()
        planted.folders.discard(made.folder)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("RELAUNCH_SCREENSHOTS") or tmp_path)
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def browser(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as made:
        if service.codec:
            made.open(service.page("job/llama-7b"))
            enter_codec_server(made, service.codec)
        yield made


def take(browser: Browser, pictures: Path, name: str) -> None:
    browser.run("new Promise(done => setTimeout(done, 1500))")  # fonts and transitions
    file = pictures / f"{name}.webp"
    browser.picture(file)
    assert 5_000 < file.stat().st_size < MAX_BYTES, f"{name}: {file.stat().st_size} bytes"


def show(browser: Browser, name: str, url: str) -> None:
    browser.resize(*SIZES.get(name, (1280, 1100)))
    browser.open(url)


def until_details(browser: Browser, *words: str) -> None:
    """Wait until the details of a workflow's page, which are in frames, have all these words."""
    while not all(word in "\n".join(browser.frame_texts()) for word in words):
        pass


def test_links_save_views_and_columns_show_phase_and_cause(
    service: Service, browser: Browser, pictures: Path
) -> None:
    links = json.loads(service.run("jobs", "--web", "--json"))
    assert list(links) == [name for name, _ in VIEWS]
    for link in links.values():
        browser.open(link)
        browser.until("!location.search.includes('savedQuery')")
    saved = json.loads(browser.run("localStorage['saved-workflow-queries']"))["default"]
    assert [(one["name"], one["query"]) for one in saved] == list(VIEWS)
    browser.run(columns_script("default"))
    browser.until_text("Strategy")  # the page was loaded again
    show(browser, "list", f"{service.ui}/namespaces/default/workflows")
    for text in ("job/llama-7b", "job/gpt-ablation", "fleet/lab"):
        browser.until_text(text)
    heads = browser.run("[...document.querySelectorAll('th')].map(one => one.innerText.trim())")
    assert [one for one in heads if one in COLUMNS] == list(COLUMNS)
    browser.until_text("APPLICATION")
    assert "FAILED" in browser.text()
    take(browser, pictures, "list")


def test_s5_3_the_page_of_a_job_says_why_and_how_to_overrule(
    service: Service, browser: Browser, pictures: Path
) -> None:
    show(browser, "job-page", service.page("job/llama-7b"))
    browser.until_text("User Metadata")
    browser.until_text("watch generation 2")
    take(browser, pictures, "timeline")
    browser.click("User Metadata", "a")
    words = ("generation 2", "the sender is unknown", "To overrule it", "Terminate")
    until_details(browser, *words)
    take(browser, pictures, "job-page")


def test_the_page_of_the_fleet_names_the_node_that_is_out(
    service: Service, browser: Browser, pictures: Path
) -> None:
    show(browser, "fleet-page", service.page("fleet/lab"))
    browser.click("User Metadata", "a")
    until_details(browser, "gpu-05", "flaky NVLink")
    take(browser, pictures, "fleet-page")


def test_the_page_of_a_repair_has_its_steps(
    service: Service, browser: Browser, pictures: Path
) -> None:
    show(browser, "repair-page", service.page("repair/lab/gpu-06"))
    browser.click("User Metadata", "a")
    until_details(browser, "REBOOT_NODE of gpu-06", "Xid 119")
    take(browser, pictures, "repair-page")


def test_the_report_names_its_incident(service: Service, browser: Browser, pictures: Path) -> None:
    page = service.folder / "report.html"
    service.run("report", "llama-7b", "--html", str(page))
    show(browser, "report", page.as_uri())
    browser.until_text("UNKNOWN")
    take(browser, pictures, "report")

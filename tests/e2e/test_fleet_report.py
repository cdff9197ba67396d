"""What a platform engineer reads of a fleet after a bad day: which nodes, which cause, and whether
it gets worse. A real `relaunch up`, three jobs, and faults on four nodes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relaunch.temporal import read_start_time
from tests import planted
from tests.console.commands import STARTER, bare_environment
from tests.console.test_report import BROWSER, browse

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
TRAIN = """
import os, pathlib, sys, time
saved, fails = pathlib.Path(sys.argv[1] + ".step"), pathlib.Path(sys.argv[1] + ".fail")
step = int(saved.read_text()) if saved.exists() else 0
while True:
    step += 1
    if os.environ["RANK"] == "0":
        new = saved.with_suffix(".new")  # a kill must not leave half a checkpoint
        new.write_text(str(step))
        new.replace(saved)
    print(f"step {step}", flush=True)
    time.sleep(0.2)
    if os.environ["RANK"] == "0" and fails.exists():
        fails.unlink()
        raise ValueError("bad batch")
"""


class Service:
    """`relaunch up` with a fleet of eight nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kills: list[tuple[str, str]] = []
        """Jobs and nodes whose shims were killed."""
        self.environment = bare_environment({"RELAUNCH_STATE": str(folder / "state")})

    def run(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, STARTER, *words],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, (words, done.stderr)
        planted.check(f"the output of {words}", done.stdout + done.stderr)
        return done.stdout

    def submit(self, name: str, nodes: int) -> None:
        job = {
            "name": name,
            "command": ["python3", "train.py", name],
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

    def list_jobs(self) -> list[dict[str, Any]]:
        read: list[dict[str, Any]] = json.loads(self.run("jobs", "--json"))
        return read

    def until_trains(self, job: str, generation: int) -> dict[str, Any]:
        """Wait until a job has left its incident behind."""
        while True:
            now = self.show(job)
            is_closed = now["incident"] is None or now["incident"]["closed"] is not None
            if now["generation"] >= generation and now["progress"] is not None and is_closed:
                return now

    def kill_shim(self, job: str, node: str) -> None:
        """End a generation on one node, as a kernel does that runs out of memory."""
        before = self.show(job)["generation"]
        self.kills.append((job, node))
        found = [
            json.loads(file.read_text())
            for file in (self.folder / "state" / "nodes" / node).rglob("shim.json")
        ]  # before the first is killed: the next generation begins within a second
        for known in found:
            if read_start_time(known["pid"]) == known["started"]:
                os.kill(known["pid"], signal.SIGKILL)
        self.until_trains(job, before + 1)

    def fail(self, job: str) -> None:
        before = self.show(job)["generation"]
        (self.folder / f"{job}.fail").touch()
        self.until_trains(job, before + 1)

    def report(self, *options: str) -> dict[str, Any]:
        read: dict[str, Any] = json.loads(self.run("report", "--fleet", "lab", "--json", *options))
        return read


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = Service(tmp_path_factory.mktemp("fleet-report"))
    planted.folders.add(made.folder)
    state = made.folder / "state"
    (made.folder / "train.py").write_text(TRAIN)
    nodes = [{"name": f"gpu-0{n}", "address": f"127.79.0.{n}"} for n in range(1, 9)]
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
    try:
        while not (state / "up.json").exists():
            assert up.poll() is None, (made.folder / "up.log").read_text()
        for name, size in (("llama-7b", 2), ("vit-large", 2), ("gpt-ablation", 1)):
            made.submit(name, size)
        for name in ("llama-7b", "vit-large", "gpt-ablation"):
            made.until_trains(name, 1)
        made.fail("gpt-ablation")
        for name in ("llama-7b", "vit-large"):
            made.kill_shim(name, made.show(name)["nodes"][1])
        worst = made.show("llama-7b")["nodes"][1]
        while worst in made.show("llama-7b")["nodes"]:  # until its ladder leaves the node
            made.kill_shim("llama-7b", worst)
        made.kill_shim("vit-large", made.show("vit-large")["nodes"][0])
        yield made
    finally:
        if up.poll() is None and (state / "up.json").exists():
            for one in made.list_jobs():
                made.run("cancel", one["name"], "--reason", "the test is over")
            while any(made.show(one["name"])["ended"] is None for one in made.list_jobs()):
                pass
        up.terminate()
        up.wait()
        planted.folders.discard(made.folder)


def test_a_fleets_report_names_nodes_causes_and_the_trend(service: Service) -> None:
    read = service.report("--since", "7d")
    assert sorted(read["jobs"]) == ["gpt-ablation", "llama-7b", "vit-large"]
    assert sum(one["seconds"] for one in read["accounts"]) == pytest.approx(read["wall"], abs=1)
    assert {one["cause"]: one["count"] for one in read["causes"]} == {
        "NODE_FAULT": len(service.kills),
        "APPLICATION": 1,
    }
    # The program's own error is no fault of its node.
    faults = Counter(node for _, node in service.kills)
    assert {one["node"]: one["count"] for one in read["nodes"]} == faults
    ((worst, count),) = faults.most_common(1)
    assert len(faults) == 3 and count >= 3
    named = next(one for one in read["nodes"] if one["node"] == worst)
    assert (named["jobs"], named["causes"]) == (["llama-7b"], ["NODE_FAULT"])
    assert {one["job"]: one["interruptions"] for one in read["by_job"]} == {
        **Counter(job for job, _ in service.kills),
        "gpt-ablation": 1,
    }
    assert sum(one["interruptions"] for one in read["trend"]["periods"]) == read["interruptions"]
    assert read["trend"]["direction"] in ("worse", "better", "unchanged")
    assert all(one["link"] for one in (*read["nodes"], *read["causes"], *read["incidents"]))
    text = service.run("report", "--fleet", "lab", "--since", "7d")
    for part in ("the most expensive nodes", worst, "NODE_FAULT", "trend  ", "jobs that lost most"):
        assert part in text


def test_a_short_period_has_only_its_faults(service: Service) -> None:
    whole = service.report()
    last = whole["incidents"][-1]
    part = service.report("--since", "1s")
    assert part["wall"] < whole["wall"]
    assert part["interruptions"] == 0 and part["incidents"] == []
    assert [one["opened"] for one in service.report("--since", "1d")["incidents"]][-1] == (
        last["opened"]
    )
    assert "began before" in part["missing"][0]


MEASURE = """<script>document.title = [document.documentElement.scrollWidth <= innerWidth,
document.querySelectorAll('.period').length,
[...document.querySelectorAll('#nodes tr')].slice(1).map(one => one.cells[0].innerText).join(','),
document.querySelector('#trend').innerText,
[...document.querySelectorAll('a')].map(one => one.getAttribute('href')).every(
  one => one[0] === '#' ? document.querySelector(one) : one.includes('/workflows/job'))
].join(' | ')</script></body>"""


@pytest.mark.skipif(not BROWSER, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [1200, 500])
def test_chromium_reads_the_page_of_a_fleet(service: Service, tmp_path: Path, width: int) -> None:
    file = tmp_path / "report.html"
    service.run("report", "--fleet", "lab", "--since", "7d", "--html", str(file))
    read = service.report("--since", "7d")
    text = file.read_text()
    assert "<script" not in text
    file.write_text(text.replace("</body>", MEASURE))
    dom = browse(file, f"--window-size={width},1600", "--dump-dom")
    title = re.search(r"<title>(.*?)</title>", dom)
    assert title is not None
    fits, columns, nodes, trend, links = title[1].split(" | ")
    assert (fits, links) == ("true", "true")
    assert int(columns) >= len(read["trend"]["periods"]) - 1
    assert nodes.split(",") == [one["node"] for one in read["nodes"]]
    assert trend.startswith(("getting worse", "getting better", "no clear change"))
    paper = tmp_path / "report.pdf"
    browse(file, f"--print-to-pdf={paper}", "--no-pdf-header-footer")
    assert paper.read_bytes().startswith(b"%PDF")
    if shutil.which("pdftotext"):
        read_back = subprocess.run(
            ["pdftotext", "-layout", str(paper), "-"], capture_output=True, text=True, timeout=60
        ).stdout
        assert all(one["node"] in read_back for one in read["nodes"])

"""What `relaunch report` prints and the page that it writes."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import time
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion
from temporalio.client import Client

from relaunch.cli import jobs, reports
from relaunch.cli.report_page import LISTED, list_parts, make_page, write_page
from relaunch.cli.report_views import report_lines, report_view
from relaunch.cli.reports import EventLinks
from relaunch.config import ConfigError
from relaunch.job.report import JobRecord, make_report
from relaunch.job.state import DecisionRecord
from tests.console.test_last_output import JumpingLoop
from tests.recovery.builders import T0, at
from tests.recovery.simulated_training import Training, draw_faults, train
from tests.recovery.test_report import INCIDENTS, make_job

VIEW_KEYS = {
    *("summary", "jobs", "start", "end", "over", "wall", "effective", "lost", "unknown", "ettr"),
    *(
        "interruptions",
        "mtbf",
        "mttr",
        "definitions",
        "accounts",
        "runs",
        "incidents",
        "causes",
        "nodes",
        "waits",
    ),
    *("checkpoints", "advice", "missing", "by_job", "trend"),
}
UI = "http://127.0.0.1:8233/namespaces/default/workflows/job%2Fllama/run-1"


def link(job: str, when: datetime) -> str:
    return f"{UI}/history/events/{int((when - T0).total_seconds())}"


@cache
def view_of(faults: int, linked: bool = True) -> dict[str, Any]:
    """A job of some days with that many faults."""
    training = Training(interval=1800.0, cost=60.0)
    wall = timedelta(hours=6 * faults)
    record = train(training, draw_faults(faults, wall, training.restart, seed=7))
    report = make_report([record], record.state.ended_at or T0)
    return report_view(report, link if linked else lambda *_: None)


def mixed_view() -> dict[str, Any]:
    job = make_job(longest_step=timedelta(seconds=40))
    return report_view(make_report([JobRecord(job, INCIDENTS)], T0), link)


def fleet_view(linked: bool = True) -> dict[str, Any]:
    """Two jobs together."""
    job = make_job(longest_step=timedelta(seconds=40))
    records = [JobRecord(replace(job, name=name), INCIDENTS) for name in ("llama", "bert")]
    return report_view(make_report(records, T0), link if linked else lambda *_: None)


def test_the_lines_of_a_report(page: SnapshotAssertion) -> None:
    assert "\n".join(report_lines(mixed_view())) == page(name="mixed")
    assert "\n".join(report_lines(view_of(12))) == page(name="twelve faults")


def test_a_view_has_the_promised_keys_and_adds_up() -> None:
    view = json.loads(json.dumps(view_of(12)))
    assert view.keys() == VIEW_KEYS
    assert sum(one["seconds"] for one in view["accounts"]) == pytest.approx(view["wall"], abs=1)
    assert len(view["incidents"]) == 12
    assert {one["link"] for one in view["incidents"]} <= {
        link("llama", datetime.fromisoformat(one["opened"]) + timedelta(seconds=5))
        for one in view["incidents"]
    }


def test_a_page_needs_nothing_but_itself() -> None:
    text = make_page(view_of(12))
    assert "<script" not in text and "<link" not in text and "url(" not in text
    assert set(re.findall(r'(?:src|href)="([^"#][^"]*)"', text)) == set(
        re.findall(rf'href="({re.escape(UI)}/history/events/\d+)"', text)
    )
    assert "http" not in make_page(view_of(12, linked=False))
    assert all(one in text for one in view_of(12)["definitions"].values())


def test_each_number_of_a_page_leads_to_its_incidents() -> None:
    for view in (mixed_view(), view_of(40)):
        text = make_page(view)
        targets = set(re.findall(r'id="([^"]+)"', text))
        assert set(re.findall(r'href="#([^"]+)"', text)) <= targets
        rows = dict(re.findall(r'<tr id="(of-[^"]+)">(.*?)</tr>', text))
        for name, key in (("accounts", "account"), ("causes", "cause")):
            for one in view[name]:
                target = f"of-{'cause-' if key == 'cause' else ''}{one[key]}"
                linked = re.findall(r'href="#incident-(\d+)"', rows.get(target, ""))
                assert list(map(int, linked)) == one["which"][:LISTED]
                assert f'href="#{target if one["which"] else "generations"}"' in text
        for index, one in enumerate(view["nodes"]):
            listed = rows[f"of-node-{index}"].count("#incident-")
            assert listed == min(LISTED, one["count"]) == len(one["which"][:LISTED])
            suspects = {view["incidents"][number]["nodes"][0] for number in one["which"]}
            assert suspects == {one["node"]}
        costs = [
            view["incidents"][number]["costs"]["lost_work"]
            for one in view["accounts"]
            if one["account"] == "lost_work"
            for number in one["which"]
        ]
        assert costs and costs == sorted(costs, reverse=True)
    assert 'more <a href="#incidents">below' in text


@pytest.mark.parametrize("linked", [True, False])
def test_no_number_of_a_page_is_without_its_link(linked: bool) -> None:
    """What an incident itself is made of is in the web UI only."""
    for view in (view_of(12, linked), fleet_view(linked)):
        text = make_page(view)
        assert set(re.findall(r'href="#([^"]+)"', text)) <= set(re.findall(r'id="([^"]+)"', text))
        incidents = text.find('<table id="incidents">') if not linked else len(text)
        body = re.sub(r"<style>.*?</style>|<title>.*?</title>", "", text[:incidents], flags=re.S)
        for whole in (
            r"<h1.*?</h1>",
            r'<p id="trend">.*?</p>',
            r'<td class="n">.*?</td>',
            r"<b>.*?</b>",
        ):
            for part in re.findall(whole, body, re.S):
                bare = re.sub(r"<a href=.*?</a>|<[^>]*>| since [-\d: ]+UTC", "", part, flags=re.S)
                assert not re.search(r"\d", bare), part


def test_a_median_leads_to_the_times_it_was_computed_of() -> None:
    """So does each half of the trend, each column, and each advice, to its incidents."""
    for view in (view_of(40), fleet_view()):
        parts = {one["id"]: one for one in list_parts(view)}
        for cause in view["causes"]:
            for stage, middle in cause["median"].items():
                part = parts.get(f"of-{stage}-{cause['cause']}")
                if part is None or part["hidden"]:
                    assert middle is None or part is not None
                    continue
                assert {one["cause"] for one in part["incidents"]} == {cause["cause"]}
                times = [one["part"] for one in part["incidents"]]
                assert times == sorted(times, reverse=True)
                assert middle == pytest.approx(median(times))
        trend = view["trend"]
        for name, period in (
            *((half, trend[half]) for half in ("older", "newer")),
            *((f"period-{index}", one) for index, one in enumerate(trend["periods"])),
        ):
            part = parts.get(f"of-{name}", {"incidents": [], "hidden": 0})
            price = sum(one["part"] for one in part["incidents"])
            assert part["hidden"] or price == pytest.approx(period["price"])
        for index, advice in enumerate(view["advice"]):
            if advice["saves"] is not None:
                listed = parts[f"of-advice-{index}"]["incidents"]
                assert [one["number"] for one in listed] == advice["which"][:LISTED] != []


def test_what_others_wrote_is_text_in_a_page() -> None:
    view = mixed_view()
    view["incidents"][0]["reason"] = "<script>alert(1)</script>"
    view["missing"] = ["<b>"]
    text = make_page(view)
    assert "<script" not in text and "&lt;script&gt;alert(1)" in text and "&lt;b&gt;" in text


@pytest.mark.long
def test_a_page_of_500_incidents_takes_seconds(tmp_path: Path) -> None:
    view = view_of(560)
    assert len(view["incidents"]) >= 500
    began = time.process_time()
    write_page(view, tmp_path / "report.html")
    assert time.process_time() - began < 5
    assert (tmp_path / "report.html").stat().st_size < 1_000_000


def test_a_page_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--html .*/none/x\.html: cannot be written: No such"):
        write_page(view_of(12), tmp_path / "none" / "x.html")


def test_an_event_is_found_by_its_time() -> None:
    links = EventLinks("page", (at(1), at(5)), ("first", "second"))
    assert [links.find(at(second)) for second in (0, 1, 2, 6)] == ["first"] * 2 + [
        "second",
        "page",
    ]


# --- in a browser

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or ""
MEASURE = """<script>document.title = [document.documentElement.scrollWidth <= innerWidth,
getComputedStyle(document.body).backgroundColor,
document.querySelectorAll('svg .mark').length,
[...document.querySelectorAll('svg .mark, .bar rect')].every(
  one => one.getBoundingClientRect().width > 0),
document.querySelector('#summary').innerText].join(' | ')</script></body>"""


def browse(page: Path, *options: str) -> str:
    done = subprocess.run(
        [
            *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *(f"--user-data-dir={page.parent / 'profile'}", *options, page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.skipif(not BROWSER, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [1200, 500])
def test_chromium_reads_the_page_of_twelve_incidents(tmp_path: Path, width: int) -> None:
    view = view_of(12)
    file = tmp_path / "report.html"
    file.write_text(make_page(view).replace("</body>", MEASURE))
    picture = tmp_path / "page.png"
    dom = browse(file, f"--window-size={width},1600", "--dump-dom")
    title = re.search(r"<title>(.*?)</title>", dom)
    assert title is not None
    fits, background, marks, seen, summary = title[1].split(" | ")
    assert (fits, background) == ("true", "rgb(255, 255, 255)")
    assert (marks, seen, summary) == ("12", "true", view["summary"])
    assert dom.count('id="incident-') == 12
    browse(file, f"--window-size={width},1600", f"--screenshot={picture}")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
    dark = browse(
        file, "--force-dark-mode", "--blink-settings=preferredColorScheme=0", "--dump-dom"
    )
    assert "rgb(20, 23, 29)" in dark
    paper = tmp_path / "page.pdf"
    browse(file, f"--print-to-pdf={paper}")
    assert 1 < paper.read_bytes().count(b"/Type /Page\n") < 6, "sheets"


def test_an_open_incident_is_shown_as_open() -> None:
    opened = replace(
        INCIDENTS[3],
        closed=None,
        recovered=None,
        decisions=(DecisionRecord(at(1), "Ask", None, "", False),),
    )
    job = replace(make_job(), incidents=INCIDENTS[:3])
    view = report_view(make_report([JobRecord(job, (*INCIDENTS[:3], opened))], T0), link)
    assert view["incidents"][-1]["closed"] is None
    assert "(open)" in make_page(view)


def test_jobs_of_a_report_are_asked_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a worker the question for a state takes 5 s: a hundred jobs took eight minutes."""

    async def list_jobs(client: Client) -> list[jobs.JobSummary]:
        return [jobs.JobSummary(f"j{n}", "RUNNING", 1, T0, None, "RUNNING") for n in range(100)]

    async def load_job(client: Client, name: str) -> jobs.JobSnapshot:
        await asyncio.sleep(5)
        return jobs.JobSnapshot(name, "r1", True, "RUNNING", 1, None, "memo", {})

    monkeypatch.setattr(jobs, "list_jobs", list_jobs)
    monkeypatch.setattr(jobs, "load_job", load_job)
    nothing: Any = None
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        with pytest.raises(ConfigError, match=r"job j0 is left out: .*; and 99 more"):
            runner.run(reports.read_jobs(nothing, nothing, None, None))
        assert runner.get_loop().time() <= 20

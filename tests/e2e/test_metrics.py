"""A real Prometheus and Alertmanager beside a real worker whose jobs have faults."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import signal
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from relaunch.cli.service import HOST
from tests.chaos.world import FLEET, ROOT, Process, World, chaos_policy, eventually, free_port

PROMETHEUS, ALERTMANAGER = shutil.which("prometheus"), shutil.which("prometheus-alertmanager")
ASK = {"APPLICATION": [{"strategy": "ASK"}], "UNKNOWN": [{"strategy": "ASK"}]}
PATIENCE = 120.0

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed"),
    pytest.mark.skipif(ALERTMANAGER is None, reason="prometheus-alertmanager is not installed"),
]


async def read(url: str) -> Any:
    def get() -> Any:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)

    return await asyncio.to_thread(get)


class Prometheus:
    """Serves deploy/prometheus, in seconds instead of minutes, and with our addresses."""

    def __init__(self, folder: Path, *workers: str) -> None:
        self.folder = folder
        self.port, self.manager_port = free_port(), free_port()
        shutil.copytree(ROOT / "deploy" / "prometheus", folder)
        for name, targets in (
            ("targets.yml", list(workers)),
            ("alertmanagers.yml", [f"{HOST}:{self.manager_port}"]),
        ):
            (folder / name).write_text(json.dumps([{"targets": targets}]))
        config = folder / "prometheus.yml"
        text = config.read_text()
        assert text.count(": 15s") == 2
        config.write_text(text.replace(": 15s", ": 1s").replace("timeout: 5s", "timeout: 1s"))
        rules = folder / "rules.yml"
        text, count = re.subn(r"^( +for:) .*$", r"\1 1s", rules.read_text(), flags=re.MULTILINE)
        assert count > 0
        rules.write_text(text)
        manager = folder / "alertmanager.yml"
        assert "group_wait: 30s" in manager.read_text()
        manager.write_text(manager.read_text().replace("group_wait: 30s", "group_wait: 1s"))
        self.server = Process(
            "prometheus",
            [
                str(PROMETHEUS),
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={HOST}:{self.port}",
            ],
            dict(os.environ),
            folder / "prometheus.log",
        )
        self.manager = Process(
            "alertmanager",
            [
                str(ALERTMANAGER),
                f"--config.file={manager}",
                f"--storage.path={folder / 'alerts'}",
                f"--web.listen-address={HOST}:{self.manager_port}",
                "--cluster.listen-address=",
            ],
            dict(os.environ),
            folder / "alertmanager.log",
        )

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an instant query that have a value."""
        words = urllib.parse.urlencode({"query": expression})
        answer = await read(f"http://{HOST}:{self.port}/api/v1/query?{words}")
        assert answer["status"] == "success", answer
        return [one for one in answer["data"]["result"] if not math.isnan(float(one["value"][1]))]

    async def value(self, expression: str) -> float | None:
        found = await self.query(expression)
        return float(found[0]["value"][1]) if found else None

    async def until(self, expression: str, expected: float) -> None:
        async def is_so() -> bool:
            try:
                return await self.value(expression) == expected
            except OSError:  # it does not listen yet
                return False

        await eventually(is_so, f"{expression} is not {expected}", PATIENCE, 0.5)

    async def list_sent_alerts(self) -> set[str]:
        try:
            alerts = await read(f"http://{HOST}:{self.manager_port}/api/v2/alerts")
        except OSError:
            return set()
        return {one["labels"]["alertname"] for one in alerts}


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with World(tmp_path / "world", 93, answer_within=5.0) as made:
        yield made


async def test_a_fault_is_seen_in_prometheus_and_every_panel_has_data(
    world: World, tmp_path: Path
) -> None:
    await world.worker.end(signal.SIGTERM)
    address = world.environment["RELAUNCH_METRICS"] = f"{HOST}:{free_port()}"
    await world.worker.start()
    prometheus = Prometheus(tmp_path / "prometheus", address)
    await prometheus.server.start()
    await prometheus.manager.start()
    try:
        await prometheus.until('up{job="relaunch"}', 1)
        trains = await world.submit(name="trains")
        await trains.until_phase("RUNNING", generation=1)
        await trains.until_watched()
        os.kill(trains.rank_pids()[0], signal.SIGKILL)
        await trains.until_phase("RUNNING", generation=2)
        asks = await world.submit(name="asks", policy=chaos_policy(causes=ASK))
        await asks.until_phase("RUNNING", generation=1)
        await asks.until_steps()
        os.kill(asks.rank_pids()[0], signal.SIGKILL)
        await asks.until_phase("WAITING_FOR_PERSON")
        fails = await world.submit(name="fails", nodes=1, command=["false"])
        await fails.until_phase("FAILED")

        fleet = f'fleet="{FLEET}"'
        await prometheus.until(f"sum(relaunch:questions{{{fleet}}})", 1)
        await prometheus.until("sum(relaunch_unread_jobs)", 0)
        await prometheus.until(f"sum(relaunch:nodes{{{fleet}}})", len(world.names))
        # Those of the job that trains; on this machine a node that never had ranks has no session.
        await prometheus.until(f"sum(relaunch_warm_nodes{{{fleet}}}) >= bool 2", 1)
        await prometheus.until('relaunch:jobs{phase="WAITING_FOR_PERSON"}', 1)
        # That of the question: the others have closed.
        await prometheus.until(f"sum(relaunch:open_incidents{{{fleet}}})", 1)
        age = await prometheus.value(f"max(relaunch:question_age_seconds{{{fleet}}})")
        assert age is not None and 0 <= age < PATIENCE
        (incident,) = (await trains.state()).incidents
        recovered = f'relaunch_incidents_total{{{fleet},outcome="recovered"}}'
        (found,) = await prometheus.query(recovered)
        assert found["metric"]["cause"] == incident.cause
        assert (found["metric"]["strategy"], found["value"][1]) == ("RESTART_IN_PLACE", "1")
        assert incident.recovered is not None
        whole = (incident.recovered - incident.opened).total_seconds()
        measured = await prometheus.value(f"sum(relaunch_recovery_seconds_sum{{{fleet}}})")
        ended = (await fails.state()).incidents
        stages = sum(
            (one.launched or one.decided or one.opened).timestamp() - one.opened.timestamp()
            for one in ended
        )
        assert measured == pytest.approx(whole + stages, abs=0.01)

        assert await prometheus.query('relaunch_recovery_seconds_bucket{le="86400"}') != []

        panels = json.loads((ROOT / "deploy/grafana/dashboards/relaunch.json").read_text())[
            "panels"
        ]
        queries = {
            one["expr"].replace("$namespace", ".*").replace("$fleet", ".*"): panel["title"]
            for panel in panels
            for one in panel.get("targets", [])
        }
        assert len(queries) > 15
        for query, title in queries.items():

            async def has_data(query: str = query) -> bool:
                return bool(await prometheus.query(query))

            await eventually(has_data, f"no data in panel {title!r}: {query}", PATIENCE, 0.5)

        rules = await read(f"http://{HOST}:{prometheus.port}/api/v1/rules")
        health = {
            rule["name"]: (rule["health"], rule.get("lastError"))
            for group in rules["data"]["groups"]
            for rule in group["rules"]
        }
        assert {one for one in health.values() if one != ("ok", None)} == set(), health

        await asks.signal("cancel")
        await asks.until_phase("CANCELLED")
        await prometheus.until(f"sum(relaunch:questions{{{fleet}}})", 0)
        assert await prometheus.value(f"max(relaunch:question_age_seconds{{{fleet}}})") is None

        async def is_sent(alert: str) -> bool:
            return alert in await prometheus.list_sent_alerts()

        await eventually(lambda: is_sent("RelaunchJobFailed"), "no alert is sent", PATIENCE)
        assert not await is_sent("RelaunchNoWorker")
        await world.worker.end()
        await eventually(lambda: is_sent("RelaunchNoWorker"), "no alert is sent", PATIENCE)
        assert await prometheus.query(f"relaunch:nodes{{{fleet}}}") == [], "nothing stale is shown"
    finally:
        await prometheus.server.end()
        await prometheus.manager.end()

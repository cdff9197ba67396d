"""deploy/prometheus and deploy/grafana: rules by promtool, and that files, code and page agree."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from relaunch.activities import sampler
from relaunch.config import Settings
from relaunch.workflows.training_job import metrics
from tests.console import page_commands
from tests.deploy.compose import ROOT, SERVICES, WORKERS

FOLDER = ROOT / "deploy" / "prometheus"
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "relaunch.json"
PAGE = (ROOT / "docs" / "operations.md").read_text()
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]
ACTIONS = [str(alert["annotations"]["action"]) for alert in ALERTS]
COMMANDS = {
    line.replace("{{ $labels.fleet }}", "lab")
    for line in (*page_commands.code_lines(PAGE), *ACTIONS)
    if line.startswith("relaunch ")
}
NAMES = {
    value
    for module in (sampler, metrics)
    for value in vars(module).values()
    if isinstance(value, str) and value.startswith("relaunch_")
}
"""Of the metrics that the code makes."""


def require(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")


@pytest.mark.parametrize(
    "command",
    [
        ("promtool", "check", "config", "prometheus.yml"),
        ("promtool", "check", "rules", "rules.yml"),
        # Twelve seconds of a core.
        pytest.param(("promtool", "test", "rules", "rules_test.yml"), marks=pytest.mark.long),
        ("amtool", "check-config", "alertmanager.yml"),
    ],
    ids=" ".join,
)
def test_files_are_accepted_as_they_are(command: tuple[str, ...]) -> None:
    require(command[0])
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_a_broken_rule_is_refused(tmp_path: Path) -> None:
    require("promtool")
    folder = tmp_path / "prometheus"
    shutil.copytree(FOLDER, folder)
    rules = folder / "rules.yml"
    rules.write_text(rules.read_text().replace("relaunch:question_age_seconds > 600", "vector(0)"))
    command = ["promtool", "test", "rules", str(folder / "rules_test.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert "RelaunchQuestionWaits" in done.stdout + done.stderr


def test_every_alert_is_seen_to_fire() -> None:
    tests = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
    fired = {
        case["alertname"]
        for one in tests
        for case in one.get("alert_rule_test", [])
        if case["exp_alerts"]
    }
    assert fired == {alert["alert"] for alert in ALERTS}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert["alert"]))
def test_every_alert_has_a_section_and_a_command(alert: dict[str, Any]) -> None:
    notes = alert["annotations"]
    assert set(notes) == {"summary", "action", "runbook"}
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert notes["runbook"] == f"docs/operations.md#{alert['alert'].lower()}"
    section = re.search(rf"^### {alert['alert']}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert section is not None
    assert re.search(r"^```\n", section[1], re.MULTILINE), "a command that answers"


@pytest.mark.parametrize("line", sorted(COMMANDS))
def test_every_command_of_the_runbook_is_one(line: str) -> None:
    page_commands.take(line)


def test_the_page_lists_the_metrics_of_the_code() -> None:
    listed = set(re.findall(r"^\| `(relaunch_\w+)`", PAGE, re.MULTILINE))
    assert listed == NAMES


def test_rules_and_panels_use_metrics_that_exist() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [rule["expr"] for rule in RULES]
    expressions += [one["expr"] for panel in panels for one in panel.get("targets", [])]
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    used = set(re.findall(r"\brelaunch_\w+|\brelaunch:[\w:]+", "\n".join(expressions)))
    histograms = (metrics.STAGE_SECONDS, metrics.INCIDENT_SECONDS)
    made = NAMES - {*histograms} | {f"{name}_bucket" for name in histograms}
    assert used <= made | recorded
    assert recorded <= used, "a recording that nothing uses"


def test_no_metric_names_a_job_or_a_node() -> None:
    source = Path(sampler.__file__).read_text() + Path(metrics.__file__).read_text()
    assert not re.search(r'"(job_name|workflow_id|run_id|node|rank)"', source)


def test_compose_serves_what_prometheus_scrapes() -> None:
    port = SERVICES["worker-a"]["environment"]["RELAUNCH_METRICS"].rpartition(":")[2]
    assert Settings(metrics=f"0.0.0.0:{port}").metrics == f"0.0.0.0:{port}"
    (targets,) = yaml.safe_load((FOLDER / "targets.yml").read_text())
    assert targets["targets"] == [f"{name}:{port}" for name in WORKERS]
    (managers,) = yaml.safe_load((FOLDER / "alertmanagers.yml").read_text())
    assert managers["targets"] == ["alertmanager:9093"]


def test_the_dashboard_names_the_data_source_that_is_provisioned() -> None:
    folder = ROOT / "deploy" / "grafana" / "provisioning"
    sources = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())
    (source,) = sources["datasources"]
    assert source["url"] == "http://prometheus:9090"
    named = set(re.findall(r'"uid": "(\w+)"\n? *}', DASHBOARD.read_text()))
    assert named == {source["uid"]}
    providers = yaml.safe_load((folder / "dashboards" / "relaunch.yml").read_text())
    (provider,) = providers["providers"]
    mounts = {volume["target"] for volume in SERVICES["grafana"]["volumes"] if "target" in volume}
    assert provider["options"]["path"] in mounts


def test_panels_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        mine = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not mine & cells, panel["title"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        cells |= mine

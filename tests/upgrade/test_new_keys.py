"""docs/upgrade.md names every key that a release before refuses, so that people can take it out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.upgrade.services import ROOT

LIST = """\
import json
import typing
from pydantic import BaseModel
from relaunch.config import Settings
from relaunch.spec.fleet import FleetSpec
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import Policy

def walk(model, above):
    for name, field in model.model_fields.items():
        found.append(above + name)
        walk_type(field.annotation, above + name + ".")

def walk_type(kind, above):
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        walk(kind, above)
    for one in typing.get_args(kind):
        walk_type(one, above)

lists = {}
for model in (FleetSpec, Settings, JobSpec, Policy):
    found = lists[model.__name__] = []
    walk(model, "")
print(json.dumps(lists))
"""


def list_keys(folder: Path) -> dict[str, set[str]]:
    """Return the keys of all files of people, as the package in a folder knows them."""
    done = subprocess.run(
        [sys.executable, "-c", LIST],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    return {name: set(keys) for name, keys in json.loads(done.stdout).items()}


def test_the_page_names_each_key_that_the_release_refuses(package: Path) -> None:
    known, now = list_keys(package), list_keys(ROOT)
    text = (ROOT / "docs" / "upgrade.md").read_text()
    section = text[text.index("## Back") : text.index("## Temporal's server")]
    rows = re.findall(r"^\| (fleet|`relaunch.toml`|job|polic)[^|]*\| (.*) \|$", section, re.M)
    assert len(rows) == len(now)
    for (row, keys), name in zip(rows, ("FleetSpec", "Settings", "JobSpec", "Policy"), strict=True):
        new = now[name] - known[name]
        outermost = {key for key in new if key.rpartition(".")[0] not in new}
        assert set(re.findall("`([^`]+)`", keys)) == outermost, row

"""docker-compose.yml as the tests of this folder read it.

And what they need to run its commands without Docker.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import yaml

from tests.console import page_commands

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
FILE: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
WORKERS = ("worker-a", "worker-b")
ONE_SHOT = ("schema", "namespace")
METRICS = ("prometheus", "alertmanager", "grafana")
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PAGE = (ROOT / "docs" / "compose.md").read_text()
FILES_ON_THE_PAGE = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
COMMANDS_ON_THE_PAGE = page_commands.code_lines(PAGE)
UNITS = {"s": 1, "m": 60}

SPECIFICATION = json.loads(Path(__file__).with_name("compose-spec.json").read_text())
"""schema/compose-spec.json of github.com/compose-spec/compose-spec (Apache-2.0, see
compose-spec.LICENSE).

Taken from the package check-jsonschema 0.39.0 of 2026-10-26 on PyPI, which ships it unchanged.
"""


def seconds(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]]


def typed(argument: str) -> str:
    """An argument as the container gets it: compose takes `$$` for a `$`."""
    return argument.replace("$$", "$")


def double(folder: Path, name: str, script: str) -> dict[str, str]:
    """A program of that name, and an environment that finds it first."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}

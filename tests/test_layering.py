"""Who may import whom: each module in a process of its own, against what was loaded with it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = (
    "workflows",
    "activities",
    "recovery",
    "backends",
    "agent",
    "console",
    "settings",
    "connection",
    "interpreter",
    "warm_client",
    "worker",
    "starter",
)
PYDANTIC = ("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection")
HEAVY = ("boto3", "botocore", "paramiko", "numpy", "typer", "rich", "yaml", "pydantic_settings")

PROGRAM = """
import importlib, json, sys
before = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
loaded = [name for name in sys.modules if name not in before]
print(json.dumps([[name, str(getattr(sys.modules[name], "__file__", None))] for name in loaded]))
"""


def loaded(*modules: str) -> dict[str, str]:
    """Names and files of the modules that these imports load, in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *modules], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def modules(package: str) -> list[str]:
    """Every module of a package, a package by itself included."""
    found = [path.relative_to(ROOT).with_suffix("") for path in sorted((ROOT / package).rglob("*.py"))]
    names = [".".join(path.parts).removesuffix(".__init__") for path in found]
    return [name for name in names if not name.endswith("__main__")]


def within(name: str, allowed: Iterable[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in allowed)


ALLOWED = [
    ("recovery", ("recovery",)),
    ("agent", ("agent",)),
    ("backends", ("backends", "recovery")),
    # log_messages, node_messages: what the command line, which must not load activities, and activities say to each other.
    # backends.answers: what a node says in a watch or a list is parsed by the activity that takes it.
    # messages, fleet_messages: `tell_fleet` begins the fleet where there is none, with its argument.
    (
        "activities",
        (
            "activities",
            "recovery",
            "backends",
            "backends.base",
            "backends.answers",
            "workflows",
            "workflows.log_messages",
            "workflows.node_messages",
            "workflows.messages",
            "workflows.fleet_messages",
        ),
    ),
    ("workflows", ("workflows", "activities", "recovery", "backends", "backends.base", "backends.answers")),
    (
        "console",
        (
            "console",
            "workflows",
            "workflows.messages",
            "workflows.log_messages",
            "workflows.node_messages",
            "workflows.fleet_messages",
            "recovery",
            "settings",
            "connection",
            "warm_client",
        ),
    ),
    (
        "starter",
        (
            "starter",
            "console",
            "workflows",
            "workflows.messages",
            "workflows.log_messages",
            "workflows.node_messages",
            "workflows.fleet_messages",
            "recovery",
            "settings",
            "connection",
            "interpreter",
            "warm_client",
        ),
    ),
]
"""What each may load of ours. A bare `backends` or `workflows` stands for the package itself, which is a docstring."""

BARE = {"activities": ("backends", "workflows"), "workflows": ("backends",), "console": ("workflows",), "starter": ("workflows",)}


@pytest.mark.parametrize(("package", "allowed"), ALLOWED, ids=[row[0] for row in ALLOWED])
def test_a_package_loads_only_what_it_may(package: str, allowed: tuple[str, ...]) -> None:
    names = ["starter"] if package == "starter" else modules(package)
    whole = tuple(one for one in allowed if one not in BARE.get(package, ()))
    found = [name for name in loaded(*names) if within(name, OURS)]
    assert [name for name in found if not within(name, whole) and name not in BARE.get(package, ())] == []


@pytest.mark.parametrize(("package", "also"), [("agent", ()), ("recovery", PYDANTIC)])
def test_a_pure_package_loads_the_standard_library_and_no_more(package: str, also: tuple[str, ...]) -> None:
    # By their files: pydantic looks for plugins of whatever is installed, so its own imports are taken as given.
    given = set(loaded("pydantic", "pydantic.functional_validators")) if also else set()
    names = [name for name, file in loaded(*modules(package)).items() if "site-packages" in file and name not in given]
    assert [name for name in names if not within(name, also)] == []


def reaches(path: Path, package: str) -> list[str]:
    """Where a file imports a package when it runs, not only for its types."""
    found = []
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [name for name in names if within(name, [package])]
        waiting += ast.iter_child_nodes(node)
    return found


def test_the_command_line_reaches_nodes_in_two_modules_for_whoever_has_no_worker_yet() -> None:
    """`nodes check --file`, `nodes trust` and `nodes discover` come before the first worker; whatever acts on a node goes through one."""
    files = [ROOT / "starter.py", *sorted((ROOT / "console").rglob("*.py"))]
    assert [path.name for path in files if reaches(path, "backends")] == ["direct.py", "discover.py"]
    # None of it at its import: `starter.py jobs` does not wait for paramiko or boto3, nor does whatever keeps it imported.
    assert [name for name in loaded("starter", *modules("console")) if within(name, ("backends", "paramiko", "boto3"))] == []


def test_recovery_knows_no_clock_and_no_log() -> None:
    for path in sorted((ROOT / "recovery").rglob("*.py")):
        text = path.read_text()
        for word in (
            "datetime.now(",
            "time.time(",
            "time.monotonic(",
            "import logging",
            "import asyncio",
            "import temporalio",
            "from temporalio",
        ):
            assert word not in text, f"{path.name} has {word!r}"


def test_importing_what_a_replay_needs_loads_no_cloud_no_ssh_and_no_command_line() -> None:
    found = loaded("workflows.training_job", "connection", "temporalio.worker", "temporalio.contrib.pydantic")
    assert [name for name in found if name in HEAVY] == []


def test_the_command_line_and_a_worker_of_local_nodes_load_no_ssh() -> None:
    found = loaded("starter", "console.nodes", "console.node_commands", "worker")
    assert [name for name in found if within(name, ("paramiko", "cryptography", "backends.ssh"))] == []


@pytest.mark.long
def test_each_module_of_ours_can_be_imported_by_itself() -> None:
    program = """
import os, sys, importlib
failed = []
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
        except BaseException as error:
            print(f"{name}: {error!r}", flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    failed += [name] if status else []
sys.exit(bool(failed))
"""
    names = [name for package in ("recovery", "workflows", "activities", "backends") for name in modules(package)]
    # Forked from one interpreter that has only third parties loaded: a process for each, at a fraction of the time.
    prelude = "import temporalio.worker, temporalio.client, temporalio.contrib.pydantic, pydantic, paramiko\n"
    done = subprocess.run([sys.executable, "-c", prelude + program, *names], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr

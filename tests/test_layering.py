"""Who may import whom: each module in a new process, against what was loaded with it."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("relaunch", "workflows", "activities", "worker", "starter")
OUR_PACKAGES = ("relaunch", "relaunch.workflows", "relaunch.activities")
"""The last two are folders at the top, mapped into the package."""
PYDANTIC = (
    "re2",
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "typing_extensions",
    "typing_inspection",
)
HEAVY = ("boto3", "botocore", "paramiko", "numpy", "typer", "rich", "yaml", "pydantic_settings")
HEAVY += ("opentelemetry", "requests")

PROGRAM = """
import gc, importlib, json, os, sys
gc.disable()  # with the exit below, a third of the time
before = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
loaded = [name for name in sys.modules if name not in before]
print(json.dumps([[name, str(getattr(sys.modules[name], "__file__", None))] for name in loaded]),
      flush=True)
os._exit(0)
"""


@cache
def loaded(*modules: str) -> dict[str, str]:
    """Names and files of the modules that these imports load, in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def modules(package: str) -> list[str]:
    """Every module of a package or folder of packages, itself included."""
    folder = ROOT.joinpath(*package.split("."))
    if folder.with_suffix(".py").exists():
        return [package]
    found = [path.relative_to(ROOT).with_suffix("") for path in sorted(folder.rglob("*.py"))]
    assert found, f"{package} is no package"
    names = [".".join(path.parts).removesuffix(".__init__") for path in found]
    return [name for name in names if not name.endswith("__main__")]


def within(name: str, allowed: Iterable[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in allowed)


FLOORS = (
    ("relaunch.__main__",),
    ("relaunch.worker_main",),
    ("relaunch.worker",),
    ("relaunch.cli",),
    ("relaunch.handover", "relaunch.renewal"),
    ("relaunch.workflows",),
    ("relaunch.activities",),
    ("relaunch.backends",),
    ("relaunch.temporal", "relaunch.builds"),
    ("relaunch.credentials",),
    ("relaunch.encryption",),
    ("relaunch.config", "relaunch.converter", "relaunch.interpreter", "relaunch.worker_log"),
    ("relaunch.messages",),
    ("relaunch.job",),
    ("relaunch.pool", "relaunch.repair"),
    ("relaunch.access",),
    ("relaunch.spec",),
    ("relaunch.evidence",),
    ("relaunch.generation", "relaunch.fields", "relaunch.text"),
    ("relaunch.agent.container.tls",),
)
"""From the top down: what stands on a floor imports what stands below it, and nothing above or
beside it."""
AGENT = "relaunch.agent"
"""Runs on the nodes, and imports nothing else of ours."""
CORE = (
    "relaunch.job",
    "relaunch.pool",
    "relaunch.repair",
    "relaunch.access",
    "relaunch.spec",
    "relaunch.evidence",
    "relaunch.generation",
    "relaunch.fields",
    "relaunch.text",
)
"""Only computes."""
BOTTOM = ("relaunch.messages", *CORE)
ALLOWED = [
    (AGENT, ()),
    ("relaunch.evidence", ("relaunch.fields", "relaunch.generation", "relaunch.text")),
    (
        "relaunch.spec",
        ("relaunch.evidence", "relaunch.fields", "relaunch.generation", "relaunch.text"),
    ),
    ("relaunch.messages", CORE),
    # What runs on the nodes is built by `artifact` and read as files. Both ends of a TLS connection
    # load the same settings.
    ("relaunch.backends", (*CORE, "relaunch.agent.container.tls")),
    # backends.answers: what a node says in a watch or a list is parsed by the activity that takes
    # it.
    ("relaunch.activities", (*BOTTOM, "relaunch.backends.base", "relaunch.backends.answers")),
    (
        "relaunch.workflows",
        (*BOTTOM, "relaunch.activities", "relaunch.backends.base", "relaunch.backends.answers"),
    ),
    (
        "relaunch.cli",
        (
            *BOTTOM,
            "relaunch.config",
            "relaunch.credentials",
            "relaunch.temporal",
            "relaunch.builds",
            "relaunch.converter",
            "relaunch.encryption",
            "relaunch.interpreter",
        ),
    ),
]
"""What may be loaded of ours with each: less than stands below it."""


def packages_above(names: Iterable[str]) -> set[str]:
    """The packages that are loaded with these modules: each is a docstring."""
    return {name.rsplit(".", count)[0] for name in names for count in range(1, name.count(".") + 1)}


@pytest.mark.parametrize(("package", "allowed"), ALLOWED, ids=[row[0] for row in ALLOWED])
def test_a_package_loads_only_what_it_may(package: str, allowed: tuple[str, ...]) -> None:
    given = (package, *allowed)
    found = [name for name in loaded(*modules(package)) if within(name, OURS)]
    assert [
        name for name in found if not within(name, given) and name not in packages_above(given)
    ] == []


@cache
def imports() -> dict[str, set[str]]:
    """By module: the modules of ours that its file imports, also for types and in functions."""
    names = {name: ROOT.joinpath(*name.split(".")) for one in OUR_PACKAGES for name in modules(one)}
    names["relaunch.__main__"] = ROOT / "relaunch" / "__main__"
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        file = (
            path / "__init__.py"
            if path.is_dir() and not path.with_suffix(".py").exists()
            else path.with_suffix(".py")
        )
        nodes = [
            node
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module
        ]
        named = {f"{node.module}.{one.name}" for node in nodes for one in node.names} | {
            str(node.module) for node in nodes
        }
        found[name] = {
            one for one in named if one in names and one not in packages_above([name]) | {name}
        }
    return found


def floor(module: str) -> int:
    return next(number for number, names in enumerate(FLOORS) if within(module, names))


def test_s5_6_names_at_the_top_and_libraries_are_those_agreed() -> None:
    names = ("workflows", "activities", "worker.py", "starter.py", "docker-compose.yml", "tests")
    assert [name for name in names if not (ROOT / name).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pinned = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    have = {re.split(r"[\[=]", line)[0] for line in pinned}
    assert have >= {"temporalio", "boto3", "paramiko", "nvidia-ml-py", "pydantic", "pytest-asyncio"}


def test_no_import_runs_upwards() -> None:
    found = [
        (name, other)
        for name, others in imports().items()
        for other in others
        if not within(name, [AGENT])
    ]
    room = {
        name: next(one for names in FLOORS for one in names if within(name, [one]))
        for pair in found
        for name in pair
    }
    upwards = [
        (name, other)
        for name, other in found
        if room[name] != room[other] and floor(other) <= floor(name)
    ]
    assert upwards == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    left = {name: set(others) for name, others in imports().items()}
    while leaves := {name for name, others in left.items() if not others & set(left)}:
        left = {name: others for name, others in left.items() if name not in leaves}
    assert left == {}


@pytest.mark.parametrize(
    "package",
    sorted(
        path.parent.relative_to(ROOT).as_posix()
        for path in (ROOT / "relaunch").rglob("__init__.py")
    ),
)
def test_a_package_is_a_docstring(package: str) -> None:
    if package != "relaunch/evidence/catalog":
        body = ast.parse((ROOT / package / "__init__.py").read_text()).body
        assert len(body) == 1 and ast.get_docstring(
            ast.parse((ROOT / package / "__init__.py").read_text())
        )


@pytest.mark.parametrize(
    ("packages", "also"), [((AGENT,), ()), (CORE, PYDANTIC)], ids=["agent", "core"]
)
def test_a_pure_package_loads_the_standard_library_and_no_more(
    packages: tuple[str, ...], also: tuple[str, ...]
) -> None:
    # By their files: pydantic looks for plugins of whatever is installed, so its own imports are
    # taken as given.
    given = set(loaded("pydantic", "pydantic.functional_validators")) if also else set()
    names = [one for package in packages for one in modules(package)]
    found = [
        name
        for name, file in loaded(*names).items()
        if "site-packages" in file and name not in given
    ]
    assert [name for name in found if not within(name, also)] == []


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


def test_the_command_line_reaches_nodes_in_two_modules_only() -> None:
    """`nodes check --file`, `nodes trust` and `nodes discover` come before the first worker.

    Whatever acts on a node goes through one.
    """
    files = sorted((ROOT / "relaunch" / "cli").rglob("*.py"))
    assert [path.name for path in files if reaches(path, "relaunch.backends")] == [
        "direct.py",
        "discover.py",
    ]
    # None of it at its import: `relaunch jobs` does not wait for paramiko or boto3, nor does
    # whatever keeps it imported.
    assert [
        name
        for name in loaded(*modules("relaunch.cli"))
        if within(name, ("relaunch.backends", "paramiko", "boto3"))
    ] == []


def test_the_core_knows_no_clock_and_no_log() -> None:
    for path in (
        path
        for package in CORE
        for path in sorted((ROOT / "relaunch").glob(f"{package.split('.')[1]}*/**/*.py"))
    ):
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


def test_importing_for_a_replay_loads_no_cloud_ssh_or_commands() -> None:
    found = loaded(
        "relaunch.workflows.training_job.workflow",
        "relaunch.temporal",
        "temporalio.worker",
        "temporalio.contrib.pydantic",
    )
    assert [name for name in found if name in HEAVY] == []


def test_an_agent_loads_little_of_the_standard_library() -> None:
    """Each node has some nine processes of it, which hold what their session has loaded."""
    large = ("asyncio", "concurrent", "email", "html", "http", "logging", "multiprocessing")
    large += ("pickle", "sqlite3", "ssl", "tempfile", "unittest", "xml", "zipfile")
    found = loaded("relaunch.agent.session", "relaunch.agent.children")
    assert [name for name in found if within(name, large)] == []


def test_the_command_line_and_local_workers_load_no_ssh() -> None:
    found = loaded(
        "relaunch.cli.app", "relaunch.cli.repairs", "relaunch.cli.nodes", "relaunch.worker"
    )
    assert [
        name
        for name in found
        if within(name, ("paramiko", "cryptography", "relaunch.backends.ssh"))
    ] == []


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("explain", "xid", "79"),
        ("policy", "presets"),
        ("policy", "explain", "default"),
    ],
    ids=" ".join,
)
def test_a_command_that_asks_no_server_loads_no_sdk(words: tuple[str, ...]) -> None:
    program = (
        "import sys; from relaunch.cli.app import main; assert main() == 0;"
        "print(*sys.modules, sep='\\n', file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True, text=True
    )
    found = done.stderr.split()
    assert done.returncode == 0 and "relaunch.cli.app" in found, done.stderr
    heavy = ("temporalio", "asyncio", "rich", "relaunch.job", "relaunch.messages")
    assert [name for name in found if within(name, heavy)] == []


def test_commands_about_a_job_load_only_the_core_that_they_print() -> None:
    found = loaded("relaunch.cli.jobs", "relaunch.cli.tables", "relaunch.temporal")
    assert [name for name in found if within(name, ("relaunch.job", "relaunch.spec"))] == []


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
    names = [name for package in OUR_PACKAGES for name in modules(package)]
    # Forked from one interpreter that has only third parties loaded: a process for each, at a
    # fraction of the time.
    prelude = (
        "import temporalio.worker, temporalio.client, temporalio.contrib.pydantic, pydantic, "
        "paramiko\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", prelude + program, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr

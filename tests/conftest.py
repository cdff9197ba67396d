"""What holds for every test."""

from __future__ import annotations

import atexit
import base64
import gc
import itertools
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.backends.artifact import build_agent
from tests.pages import PageExtension
from tests.torch_python import PYTHON, has_module


def pytest_configure() -> None:
    """Make the surroundings those of a terminal of root or of a user, wherever the tests run.

    Ignored signals are inherited: below nohup or in a script's background, a command that a test
    starts would rightly go on after a hangup. `mkfs.ext4` and `fsfreeze` are where a user's PATH
    in Debian does not look.
    """
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    folders += [folder for folder in ("/usr/sbin", "/sbin") if folder not in folders]
    os.environ["PATH"] = os.pathsep.join(folders)
    # The servers that tests start use one core and collect garbage rarely: a tenth of the time of
    # the tests of workflows.
    os.environ.setdefault("GOMAXPROCS", "1")
    os.environ.setdefault("GOGC", "400")
    if os.environ.pop("RELAUNCH_TEST_ENCRYPTED", ""):
        _encrypt_payloads()
    for number, handler in (
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGINT, signal.default_int_handler),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def _encrypt_payloads() -> None:
    """Have clients, workers and commands of the tests encrypt, with keys of this run."""
    folder = Path(tempfile.mkdtemp(prefix="relaunch-keys-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "test").touch(mode=0o600)
    (folder / "test").write_text(base64.b64encode(os.urandom(32)).decode())
    os.environ["RELAUNCH_ENCRYPTION_KEYS"] = str(folder)
    os.environ["RELAUNCH_ENCRYPTION_KEY"] = "test"


def pytest_report_header() -> str:
    """Name the releases whose histories, messages and files are read (tests/releases)."""
    files = (Path(__file__).parent / "releases").glob("*.json.xz")
    names = sorted(path.name.removesuffix(".json.xz") for path in files)
    return f"releases that are read: {', '.join(names) or 'none, because there is none yet'}"


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The agent's archive, built once for all tests of a process."""
    return build_agent(tmp_path_factory.mktemp("agent"))


@pytest.fixture
def page(snapshot: SnapshotAssertion) -> SnapshotAssertion:
    """The text file that holds what this test prints for people."""
    return snapshot.use_extension(PageExtension)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Iterator[Any]:
    """Describe a failed test without a garbage collection in between.

    Before 3.11.8 a collection during `ast.parse` that lets another thread parse, too, ends in
    `SystemError: AST constructor recursion depth mismatch` (cpython issue 106905). pytest parses
    the source of a failed test, and such an error ends the whole run unexplained.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        if was_enabled:
            gc.enable()


LONGEST = ("test_upgrade.py", "test_ecs.py", "test_demo.py", "e2e", "workflows", "console")
"""Files and folders whose tests take longest: begun last, they would leave all but one process
idle at the end."""
SHARED = LONGEST.index("e2e")
"""The tests of this folder share a server, a worker and nodes, one of each in a process."""


def _deal(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Order tests so that each process begins with some of the longest files.

    `--dist worksteal` gives each an equal part of the list, in its order. Files stay whole, and
    those that share a service go to two processes.
    """

    def rank(item: pytest.Item) -> int:
        return next((n for n, name in enumerate(LONGEST) if name in item.path.parts), len(LONGEST))

    files: dict[tuple[int, Path], list[pytest.Item]] = {}
    for item in items:
        files.setdefault((rank(item), item.path), []).append(item)
    hands: list[list[pytest.Item]] = [[] for _ in range(processes)]
    for n, (kind, path) in enumerate(sorted(key for key in files if key[0] < len(LONGEST))):
        hands[-1 - n % 2 if kind == SHARED and processes > 1 else n % processes] += files[
            kind, path
        ]
    rest = iter([item for item in items if rank(item) == len(LONGEST)])
    left = len(items)
    for n, hand in enumerate(hands):
        share = left // (processes - n)
        hand.extend(itertools.islice(rest, max(0, share - len(hand))))
        left -= share
    return [*itertools.chain(*hands), *rest]


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark all variants of a test as long but the first ones, if it says so."""
    if (marker := item.get_closest_marker("long_after")) is not None:
        test = item.nodeid.partition("[")[0]
        _variants[test] += 1
        if _variants[test] > marker.kwargs["variants"]:
            item.add_marker(pytest.mark.long)


_variants = Counter[str]()


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a library for training where there is none.

    Only now is it looked for: each process collects all tests, and an import of torch takes
    seconds.
    """
    for marker in item.iter_markers("needs_module"):
        (module,) = marker.args
        if not has_module(module):
            pytest.skip(f"{PYTHON} has no {module}: RELAUNCH_TORCH_PYTHON names one that has")


@pytest.hookimpl(trylast=True)  # once those of other suites are out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Count no branch that a property test takes, and begin with the longest tests.

    Which examples it draws depends on its name and on hypothesis: a branch that only such a test
    takes may be one that no test takes after a renaming. And counting makes them twice as slow.
    """
    items[:] = _deal(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.no_cover)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Look for no garbage while all that tests import is made: a sixth of the time of that."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Look for garbage only in what tests make, and rarely.

    Looking through all that is imported was a tenth of the workflow tests, and the default, after
    each 700 objects, another twentieth.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)

"""What is installed, shipped and published: by hash, with its licences, in the same bytes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest

from relaunch.backends.artifact import build_agent
from tools import dist, notices

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("requirements.lock", "deploy/compose/requirements.lock", "tools/release.lock")
AGENT = (
    "import pathlib, sys; sys.path.insert(0, '.');"
    " from relaunch.backends.artifact import build_agent;"
    " print(build_agent(pathlib.Path(sys.argv[1])))"
)
needs_sbom = pytest.mark.skipif(
    not dist.SBOM_PYTHON.exists(), reason="cyclonedx-bom is not installed: `make dist` does that"
)
needs_git = pytest.mark.skipif(
    not (ROOT / ".git").exists() or shutil.which("git") is None, reason="not a clone, or no git"
)


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_is_locked_by_hash(lock: str) -> None:
    text = (ROOT / lock).read_text()
    entries = [match[0] for match in dist.ENTRY.finditer(text)]
    assert len(entries) == len(re.findall(r"^\S+==", text, re.MULTILINE)) > 0
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []


@pytest.mark.parametrize("file", ["Makefile", "Dockerfile", "Dockerfile.node"])
def test_only_what_is_locked_is_installed(file: str) -> None:
    text = (ROOT / file).read_text().replace("\\\n", " ")
    installs = re.findall(r"\bpip install\b[^\n;&|]*", text)
    # The checkout itself is built by the setuptools that is installed by then.
    others = [words for words in installs if not re.search(r"(-e|--editable) \.", words)]
    assert [words for words in others if "--require-hashes" not in words] == []
    assert others
    for words in set(installs) - set(others):
        assert "--no-deps" in words and "--no-build-isolation" in words


def test_actions_of_ci_are_pinned_by_commit() -> None:
    workflows = (ROOT / ".github" / "workflows").glob("*.yml")
    used = [line for path in workflows for line in re.findall(r"uses: (\S+)", path.read_text())]
    assert used
    assert [one for one in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", one)] == []


def test_what_is_locked_is_all_that_is_needed() -> None:
    """Set-up installs without a look at what packages say they need."""
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("these tests run in an environment that `make setup` did not make")
    done = subprocess.run(
        [uv, "pip", "check", "--python", sys.executable], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_notices_are_those_of_what_is_installed() -> None:
    assert notices.PAGE.read_text() == notices.make_page(), "run `make reference`"


def test_a_package_without_a_licence_is_refused() -> None:
    class Bare:
        name, version = "bare", "1"
        metadata = notices.distribution("rich").metadata

    del Bare.metadata["License"], Bare.metadata["Classifier"]
    with pytest.raises(LookupError, match="bare 1 names no licence"):
        notices.find_licence(Bare)  # type: ignore[arg-type]


def test_the_agent_carries_the_licence_of_its_bindings(tmp_path: Path) -> None:
    with zipfile.ZipFile(build_agent(tmp_path)) as archive:
        bindings = archive.read("pynvml.py").decode()
    top, _, _ = bindings.partition("\nfrom ")
    assert "Copyright (c)" in top and "Redistribution and use in source and binary forms" in top


def build(clone: Path, to: Path, umask: int, **environment: str) -> dict[str, bytes]:
    """Build a release and an agent in a clone; return the files by name."""
    for words in (
        (sys.executable, "tools/dist.py", "--to", str(to)),
        (sys.executable, "-c", AGENT, str(to)),
    ):
        subprocess.run(words, cwd=clone, env={**os.environ, **environment}, umask=umask, check=True)
    return {path.name: path.read_bytes() for path in to.iterdir()}


@pytest.mark.long  # two wheels
@needs_git
@needs_sbom
def test_a_commit_is_built_to_the_same_bytes_twice(tmp_path: Path) -> None:
    built = []
    for name, umask, when, environment in (
        ("a", 0o022, 1_600_000_000, {"TZ": "Asia/Tokyo", "PYTHONHASHSEED": "1"}),
        ("another folder", 0o077, 1_700_000_000, {"TZ": "UTC", "SOURCE_DATE_EPOCH": "1"}),
    ):
        clone = tmp_path / name
        subprocess.run(
            ["git", "clone", "--quiet", "--no-hardlinks", ROOT, clone], umask=umask, check=True
        )
        (clone / "build").symlink_to(ROOT / "build")  # has cyclonedx-bom
        (clone / "relaunch" / "not_committed.py").write_text("a = 1\n")
        for path in clone.rglob("*.py"):
            os.utime(path, (when, when))
        built.append(build(clone, tmp_path / f"dist of {name}", umask, **environment))
    first, second = built
    assert sorted(name.rpartition(".")[2] for name in first) == ["SHA256SUMS", "json", "pyz", "whl"]
    assert first == second


@pytest.mark.long
@needs_git
@pytest.mark.parametrize(
    "wheel", sorted((ROOT / "tests/releases/wheels").glob("*.whl")), ids=lambda path: path.name
)
def test_a_kept_wheel_is_what_its_release_contains(wheel: Path, tmp_path: Path) -> None:
    commit = find_release(wheel.name.split("-")[1])
    source = tmp_path / "source"
    source.mkdir()
    when = dist.export(commit, source)
    again = dist.build_wheel(source, tmp_path, when)
    assert read_members(again) == read_members(wheel)
    pin = re.search(r'"setuptools==(\S+?)"', (source / "pyproject.toml").read_text())
    assert pin is not None
    if (pin[1], zlib.ZLIB_RUNTIME_VERSION) == (
        notices.distribution("setuptools").version,
        "1.2.13",
    ):
        assert again.read_bytes() == wheel.read_bytes()


def find_release(version: str) -> str:
    """Return the commit of a release: the one with its recording. A clone need not have tags."""

    def git(*words: str) -> str:
        return dist.git(*words).decode().strip()

    if git("rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("this clone does not have all commits")
    recording = f"tests/releases/{version}.json.xz"
    return git("log", "--diff-filter=A", "--format=%H", "--", recording)


def read_members(wheel: Path) -> dict[str, bytes]:
    """Return the files of a wheel but for those that name the version of setuptools."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: archive.read(name)
            for name in archive.namelist()
            if not name.endswith((".dist-info/WHEEL", ".dist-info/RECORD"))
        }

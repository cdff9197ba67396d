"""`make dist`: builds what a release consists of from a commit, so that anyone gets the same bytes.

    python tools/dist.py [--ref v0.1.0] [--to dist]

Only what the commit contains is built: no file that was never committed, and none of its times,
owners or modes on this machine. Times are those of the commit (SOURCE_DATE_EPOCH).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


def git(*words: str) -> bytes:
    return subprocess.run(
        ("git", "-C", str(ROOT), *words), check=True, stdout=subprocess.PIPE
    ).stdout


def export(ref: str, folder: Path) -> int:
    """Write the files of a commit into a folder; return its time in seconds since 1970."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", "--format=tar", ref))) as archive:
        for member in archive:
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            archive.extract(member, folder, filter="tar")
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():  # whatever the umask is
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    return int(git("log", "-1", "--format=%ct", f"{ref}^{{commit}}"))


def build_wheel(source: Path, built: Path, when: int) -> Path:
    """Build the wheel of a folder with the setuptools of this environment; return its path."""
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "SOURCE_DATE_EPOCH": str(when),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
    }
    built.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        (sys.executable, "-c", BUILD, str(built.resolve())),
        cwd=source,
        env=environment,
        umask=0o022,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"the wheel cannot be built:\n{done.stdout}")
    return built / done.stdout.split()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ref", default="HEAD", help="a tag or commit; default: HEAD")
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="default: dist")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relaunch-dist-") as folder:
        when = export(arguments.ref, Path(folder))
        wheel = build_wheel(Path(folder), arguments.to, when)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (arguments.to / "SHA256SUMS").write_text(f"{digest}  {wheel.name}\n")
    print(f"{digest}  {wheel}")


if __name__ == "__main__":
    main()

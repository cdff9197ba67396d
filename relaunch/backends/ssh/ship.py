"""Brings the agent to a node over the channel that it will be spoken to on, and starts it there. It is sent once for each version.

Nothing of what a fleet file says becomes part of the remote command line but the name of its Python, which is checked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from relaunch.backends.ssh.channel import ChannelPipe
from relaunch.backends.ssh.connection import Failed

MARK = b"relaunch-agent "
NOISE = 64 * 1024
"""Bytes that a login shell may print first. A message of the day is a page."""
NOTICED = 300
"""Bytes of it that are told where nothing else came."""
UNSET = ("RELAUNCH_SUDO",)
"""Only the fleet file says that."""

STUB = 'import os;f=os.fdopen(0,"rb",0);exec(f.readline())'
"""Without quotes, backslashes, `!`, `$` and ends of lines: sh, bash, zsh, fish and csh take it alike. Unbuffered: what follows the line on
stdin is for others. Any Python can run it, so that one which is too old can say so."""
OLDEST = (3, 8)
TOO_OLD = """sys.stdout.write('\\nrelaunch-agent {"cannot": "its Python is %d.%d.%d; expected 3.8 or newer"}\\n' % tuple(V[:3]))"""


def remote_command(python: str) -> str:
    return f"exec {python} -E -S -c '{STUB}'"


class NotStarted(Failed):
    """We are logged in, and the agent does not run there."""


@dataclass(frozen=True, slots=True)
class Artifact:
    name: str
    data: bytes
    sha256: str

    @classmethod
    def read(cls, path: Path) -> Artifact:
        data = path.read_bytes()
        return cls(path.name, data, hashlib.sha256(data).hexdigest())


def first_line(artifact: Artifact, environment: Mapping[str, str]) -> bytes:
    """What the stub reads and runs."""
    request = {
        "name": artifact.name,
        "size": len(artifact.data),
        "sha256": artifact.sha256,
        "environment": dict(environment),
        "unset": UNSET,
    }
    source = Path(__file__).with_name("bootstrap.py").read_text()
    # The first folder of the path is the home that we log in to: a json.py there is not the one that is meant.
    begin = "import sys; V = sys.version_info; sys.path[:] = filter(None, sys.path)"
    return f"{begin}; REQUEST = {request!a}; exec({source!a} if V >= {OLDEST} else {TOO_OLD!a})\n".encode()


async def start_agent(pipe: ChannelPipe, artifact: Artifact, environment: Mapping[str, str], python: str) -> int:
    """Have the agent run at the other end; what it says comes next. Return how many bytes of it were sent: none where it was there.

    Raises:
        NotStarted: it cannot be started there.
        ConnectionError: the connection broke.
    """
    await pipe.write(first_line(artifact, environment))
    noise = bytearray()
    sent = False
    while True:
        try:
            line = await pipe.readline()
        except ValueError:
            line, noise = b"", noise + b"a line without end"
            pipe.kill()
        if line.startswith(MARK):
            try:
                said = json.loads(line[len(MARK) :])
                if "have" in said:
                    return len(artifact.data) if sent else 0
                if "cannot" in said:
                    raise NotStarted(f"the agent could not be started: {str(said['cannot'])[:400]}")
                if "want" in said and not sent:
                    sent = True
                    await pipe.write(artifact.data)
                    continue
            except (ValueError, TypeError, RecursionError):
                pass  # whatever it is, it is not ours
        noise += line
        if not line or len(noise) > NOISE:
            raise NotStarted(_not_started(pipe, bytes(noise), python))


def _not_started(pipe: ChannelPipe, noise: bytes, python: str) -> str:
    words = pipe.last_words or noise[:NOTICED].decode(errors="replace").strip()
    status = pipe.exit_status
    if len(noise) > NOISE:
        return f"the agent could not be started: the login shell printed more than {NOISE} bytes first: {words[:NOTICED]!r}"
    if status is None:
        return f"the agent could not be started: {pipe.ended or 'the session has ended'}" + (f": {words[-NOTICED:]!r}" if words else "")
    missing = f", which is how a shell says that there is no {python}" if status == 127 else ""
    return f"the agent could not be started: `{python}` ended with {status}{missing}" + (f": {words[-NOTICED:]}" if words else "")

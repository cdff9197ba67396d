"""Ships the agent to a node over the channel of its session, and starts it there.

It is sent once for each version.

The only part of a fleet file that enters the remote command line is the name of the Python, which
is checked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from relaunch.backends.ssh.channel import ChannelPipe
from relaunch.backends.ssh.connection import ConnectError

MARK = b"relaunch-agent "
NOISE = 64 * 1024
"""Bytes that a login shell may print first. A message of the day is a page."""
NOTICED = 300
"""Bytes of that output that an error message quotes if nothing else came."""
UNSET = ("RELAUNCH_SUDO",)
"""Variables removed from the node's environment: only the fleet file may set them."""

STUB = 'import os;f=os.fdopen(0,"rb",0);exec(f.readline())'
"""The stub has no single quotes, backslashes, `!`, `$` or line ends, so that sh, bash, zsh, fish
and csh read it alike. It reads unbuffered: what follows the line on stdin is for the agent. Any
Python can run it, so that a Python that is too old can report that."""
OLDEST = (3, 8)
TOO_OLD = (
    "sys.stdout.write('\\nrelaunch-agent "
    '{"cannot": "its Python is %d.%d.%d; expected 3.8 or newer"}\\n\' % tuple(V[:3]))'
)


def remote_command(python: str) -> str:
    return f"exec {python} -E -S -c '{STUB}'"


class NotStarted(ConnectError):
    """The login worked, but the agent does not run on the node."""


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
    """Return the line that the stub reads and executes."""
    request = {
        "name": artifact.name,
        "size": len(artifact.data),
        "sha256": artifact.sha256,
        "environment": dict(environment),
        "unset": UNSET,
    }
    source = Path(__file__).with_name("bootstrap.py").read_text()
    folders = (Path(__file__).parents[2] / "agent" / "folders.py").read_text()
    # The first entry of sys.path is the login's home folder: a json.py there must not be imported.
    begin = "import sys; V = sys.version_info; sys.path[:] = filter(None, sys.path)"
    module = f"folders = type(sys)('folders'); FOLDERS = {folders!a} if V >= {OLDEST} else ''"
    load = "exec(FOLDERS, folders.__dict__)"
    run = f"exec({source!a} if V >= {OLDEST} else {TOO_OLD!a})"
    return f"{begin}; REQUEST = {request!a}; {module}; {load}; {run}\n".encode()


async def start_agent(
    pipe: ChannelPipe, artifact: Artifact, environment: Mapping[str, str], python: str
) -> int:
    """Start the agent at the other end; its own lines come next.

    Return how many bytes of the agent were sent: 0 if it was already there.

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
                pass  # not a line of the bootstrap
        noise += line
        if not line or len(noise) > NOISE:
            raise NotStarted(_not_started(pipe, bytes(noise), python))


def _not_started(pipe: ChannelPipe, noise: bytes, python: str) -> str:
    words = pipe.last_words or noise[:NOTICED].decode(errors="replace").strip()
    status = pipe.exit_status
    if len(noise) > NOISE:
        return (
            "the agent could not be started: "
            f"the login shell printed more than {NOISE} bytes first: {words[:NOTICED]!r}"
        )
    if status is None:
        return f"the agent could not be started: {pipe.ended or 'the session has ended'}" + (
            f": {words[-NOTICED:]!r}" if words else ""
        )
    missing = f", which is how a shell says that there is no {python}" if status == 127 else ""
    return f"the agent could not be started: `{python}` ended with {status}{missing}" + (
        f": {words[-NOTICED:]}" if words else ""
    )

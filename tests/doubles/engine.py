"""A double of a container engine, and of its client `docker`, as far as processes are concerned.

`engine.py FOLDER` is the engine: it starts each container as its child, in a new session, with the
variables that `-e NAME` hands over. `FOLDER/docker run [--init] [-e NAME] PROGRAM …` is its client:
it passes signals on, and waits. As with the real ones, a container goes on when its client is
killed, and its first process ignores a SIGTERM that it does not handle, unless `--init` is given.
`docker exec` passes no signal on. No namespaces, no images, no restarts.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


def read_line(link: socket.socket) -> dict[str, Any] | None:
    text = bytearray()
    while not text.endswith(b"\n"):
        data = link.recv(1)
        if not data:
            return None
        text += data
    found: dict[str, Any] = json.loads(text)
    return found


def serve(folder: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "engine.sock"))
    listener.listen()
    while True:
        link, _ = listener.accept()
        threading.Thread(target=contain, args=[folder, link], daemon=True).start()


def contain(folder: Path, link: socket.socket) -> None:
    order = read_line(link)
    assert order is not None
    (folder / "asked").touch()
    time.sleep(order["delay"])  # an engine goes on with a start whose client is gone
    first: dict[str, Any] = {} if order["init"] else {"preexec_fn": ignore_terminating}
    container = subprocess.Popen(
        order["program"],
        env={"PATH": os.environ["PATH"], **order["env"]},
        cwd="/",
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        **first,
    )
    with (folder / "containers").open("a") as file:
        file.write(f"{container.pid}\n")
    threading.Thread(target=hand_on, args=[link, container], daemon=True).start()
    code = container.wait()
    with suppress(OSError):  # the client was killed
        link.sendall(json.dumps({"code": code}).encode() + b"\n")


def ignore_terminating() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def hand_on(link: socket.socket, container: subprocess.Popen[bytes]) -> None:
    while (line := read_line(link)) is not None:
        container.send_signal(line["signal"])


def ask(words: list[str]) -> int:
    names: list[str] = []
    is_exec = words.pop(0) == "exec"
    has_init = is_exec  # only the first process of a container ignores it
    delay = 0.0
    while words[0].startswith("-"):
        option = words.pop(0)
        if option == "-e":
            names.append(words.pop(0))
        elif option == "--delay":
            delay = float(words.pop(0))
        has_init = has_init or option == "--init"
    link = socket.socket(socket.AF_UNIX)
    link.connect(str(Path(sys.argv[0]).parent / "engine.sock"))

    def pass_on(number: int, frame: object) -> None:
        link.sendall(json.dumps({"signal": number}).encode() + b"\n")

    signal.signal(signal.SIGTERM, signal.SIG_DFL if is_exec else pass_on)
    env = {name: os.environ[name] for name in names if name in os.environ}
    order = {"program": words, "env": env, "init": has_init, "delay": delay}
    link.sendall(json.dumps(order).encode() + b"\n")
    answer = read_line(link)
    return 1 if answer is None else abs(int(answer["code"]))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(Path(sys.argv[1]))
    else:
        sys.exit(ask(sys.argv[1:]))

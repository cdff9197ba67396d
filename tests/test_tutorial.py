"""The tutorial, as a newcomer types it: every command of the page, and what the page shows of it.

Commands run in one shell with an almost empty environment. Outputs are compared line by line, with
numbers, times and bars left out; `…` on the page stands for anything.

Real OpenSSH servers where they are installed. Elsewhere tests/backends/asyncssh_server.py, a double
of them, stands on PATH as `sshd`. As root, all of it runs in namespaces, where it meets no other
process or port of this machine.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.backends.sshd import ASYNCSSH, OPENSSH, PRIVILEGES

PAGE = Path(__file__).parents[1] / "docs" / "tutorial.md"
PATIENCE_S = 900
"""Seconds until a command hangs; all of them take two minutes on an idle machine."""
PORTS = (7233, 8233, 2222)
MARK = "\x01"
PIECE = re.compile(
    r"^<!-- wait: (?P<wait>.*?) -->$|^```sh ?(?P<kind>\w*)\n(?P<commands>.*?)^```$"
    r"|^```text\n(?P<output>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
SSHD = f"""#!/bin/sh
# sshd -f CONFIG, as a daemon
log=$(dirname "$2")/log
{{ setsid {" ".join(ASYNCSSH)} "$2" 2> "$log" & }} > /dev/null
echo $! > "$(dirname "$2")/sshd.pid"
until grep -q "Server listening" "$log"; do sleep 0.1; done
"""


@dataclass(frozen=True)
class Block:
    """Commands of the page, what has to hold before they are typed, and the output it shows."""

    kind: str
    commands: str
    wait: str
    output: str


def read_page() -> list[Block]:
    blocks: list[Block] = []
    wait = ""
    for piece in PIECE.finditer(PAGE.read_text()):
        if piece["wait"]:
            wait = piece["wait"]
        elif piece["output"]:
            last = blocks.pop()
            assert not last.output, "two outputs of one block"
            blocks.append(Block(last.kind, last.commands, last.wait, piece["output"]))
        else:
            blocks.append(Block(piece["kind"], piece["commands"], wait, ""))
            wait = ""
    return blocks


def make_script(blocks: list[Block]) -> str:
    lines = ["set -e", "ip link set lo up 2> /dev/null || true"]
    for number, block in enumerate(blocks):
        if block.wait:
            lines.append(f"until {block.wait}; do sleep 0.5; done 2> /dev/null")
        lines.append(f"echo; echo {MARK}{number}")
        if block.kind == "up":
            lines += [f"{{\n{block.commands}}} > up.log 2>&1 &", "up=$!"]
            lines.append("until grep -q 'worker started' up.log; do kill -0 $up; sleep 0.2; done")
            lines.append("cat up.log")
        elif block.kind == "down":
            lines += ["kill -INT $(pgrep -P $up) || kill -INT $up; wait $up || true"]
            lines.append(block.commands)
        else:
            lines.append(block.commands)
    return "\n".join(lines)


def simplify(line: str) -> str:
    """Leave out what differs from run to run: numbers, times, keys, bars, widths of columns."""
    line = re.sub(r"SHA256:\S+", "SHA256:#", line)
    line = re.sub(r"[█▏▎▍▌▋▊▉]+", "", line)
    line = re.sub(r"\d+(\.\d+)?", "#", line)
    line = re.sub(r"(# ?(ms|s|m|h|d)\b ?)+", "#s ", line)
    return " ".join(line.split())


def find_missing(shown: str, printed: str) -> str | None:
    """Return the first line of the page that was not printed after those before it."""
    rest = [simplify(line) for line in printed.splitlines()]
    for line in shown.splitlines():
        pattern = ".*".join(re.escape(part.strip()) for part in simplify(line).split("…"))
        if not pattern.strip(".*"):
            continue
        found = next((n for n, text in enumerate(rest) if re.fullmatch(pattern, text)), None)
        if found is None:
            return line
        del rest[: found + 1]
    return None


def test_lines_are_compared_without_what_differs() -> None:
    printed = "a 12 s  ██ 5%\nrank 3 died: SIGKILL\nend 1 m 2 s\n"
    assert find_missing("a 3 m 4 s  █ 77.5%\n…\nrank 0 …\nend 5 s\n", printed) is None
    assert find_missing("end 1 s\nrank 0 …\n", printed) == "rank 0 …"
    assert find_missing("rank 0 lives\n", printed) == "rank 0 lives"


def test_the_page_shows_what_most_commands_print() -> None:
    blocks = read_page()
    assert sum(bool(block.output) for block in blocks) > len(blocks) / 2
    assert [block.kind for block in blocks if block.kind] == ["up", "down"]


@pytest.mark.long
@pytest.mark.timeout(PATIENCE_S + 60)
def test_every_command_prints_what_the_page_shows() -> None:
    blocks = read_page()
    # Not below pytest's folder: names of sockets are limited to a hundred bytes.
    with tempfile.TemporaryDirectory(prefix="tutorial-") as folder:
        printed = run_in_shell(make_script(blocks), Path(folder))
        parts = re.split(rf"\n{MARK}(\d+)\n", printed)
        outputs = {int(number): text for number, text in zip(parts[1::2], parts[2::2], strict=True)}
        assert list(outputs) == list(range(len(blocks))), printed
        for number, block in enumerate(blocks):
            missing = find_missing(block.output, outputs[number])
            assert missing is None, f"{block.commands}\nprinted no {missing!r}:\n{outputs[number]}"
        assert list(Path(folder, "work").iterdir()) == [], "the page removes all that it made"


def run_in_shell(script: str, folder: Path) -> str:
    """Return what a shell prints that runs `script`, stderr included."""
    programs, home, work, printed = (folder / name for name in ("bin", "home", "work", "printed"))
    for made in (programs, home, work):
        made.mkdir()
    # Not `-c`: the page kills processes by a part of their command lines.
    (folder / "script").write_text(script)
    words = ["bash", str(folder / "script")]
    if os.geteuid() == 0:
        words = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", *words]
        if OPENSSH is not None:
            PRIVILEGES.mkdir(mode=0o755, exist_ok=True)
    else:
        for port in PORTS:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    pytest.skip(f"port {port} is in use, which the tutorial needs")
    if OPENSSH is None:
        (programs / "sshd").write_text(SSHD)
        (programs / "sshd").chmod(0o755)
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{programs}:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(home),
        "TERM": "dumb",
    }
    with printed.open("w") as out:
        shell = subprocess.Popen(
            words,
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        shell.wait(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"it hangs after\n{printed.read_text()}") from None
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    return printed.read_text()

"""Draws lies from a seed, and tells them between a controller and a node's real agent.

It is a process there, and changes what the agent says.

    python liar.py FOLDER SEED COMMAND…       COMMAND: the real agent's session

While FOLDER/lying exists it lies; it holds {"rate": of the lines that become lies,
"burst": lies for each}. FOLDER/told has one byte for each lie. Standard library only.
"""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    1,
    7,
    255,
    256,
    2**31,
    2**53,
    2**53 + 1,
    2**63,
    -(2**63),
    10**12,
    10**30,
    0.5,
    9.5,
    -1e6,
    1e18,
    1e300,
)
WORDS = (
    "",
    "boom",
    "abc",
    "NaN",
    "StoppedByUser",
    "RankExited",
    "done",
    "refused",
    "\x00",
    "\ud800",
    "é" * 40,
    "x" * 3000,
    "n1",
    "../..",
)
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [1, 2],
    [2**60, 1],
    {"x": 1},
    float("nan"),
    float("inf"),
    "\x1b[2J",
)
KINDS = (
    "RankExited",
    "Fenced",
    "Stopped",
    "ShimDied",
    "RanksVanished",
    "StoppedByUser",
    "OfTomorrow",
)
FLOOD = 3000
LONGEST = 9 * 1024 * 1024
"""Above the limit of a line."""


class Grammar:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def value(self, depth: int = 0) -> Any:
        """Draw any JSON value, also those that JSON has no word for."""
        draw = self.random.random()
        if draw < 0.35:
            return self.random.choice(NUMBERS)
        if draw < 0.6:
            return self.random.choice(WORDS)
        if draw < 0.85 or depth > 3:
            return copy.deepcopy(self.random.choice(OTHERS))
        if draw < 0.9:
            return json.loads("[" * 60 + "]" * 60)
        if draw < 0.95:
            return [self.value(depth + 1) for _ in range(self.random.randrange(4))]
        return {
            str(self.random.choice(WORDS)): self.value(depth + 1)
            for _ in range(self.random.randrange(4))
        }

    def mutate(self, honest: Any) -> Any:
        """Change one to three places of an honest line."""
        line = json.loads(json.dumps(honest))
        for _ in range(self.random.randint(1, 3)):
            places = list(_places(line))
            if not places:
                return self.value()
            holder, key = self.random.choice(places)
            draw = self.random.random()
            if draw < 0.15 and isinstance(holder, dict):
                del holder[key]
            elif draw < 0.25 and isinstance(holder, dict):
                holder[str(self.random.choice(WORDS))] = self.value()
            elif draw < 0.35 and isinstance(holder, list):
                holder.extend([holder[key]] * self.random.choice((1, 300)))
            else:
                holder[key] = self.value()
        return line

    def invent(self) -> Any:
        """Draw a line of a watch that the protocol has, with values that may make no sense."""
        draw = self.random.random()
        number = self.random.choice((0, 1, 2, 3, 77))
        if draw < 0.5:
            return {
                "observation": {
                    "seq": self.random.choice((1, 2, 3, 9, 99, 10**6, "1")),
                    "kind": self.random.choice(KINDS),
                    "rank": number,
                    "local_rank": self.random.choice((0, 0, 0, self.value())),
                    "exit_code": self.random.choice((0, 1, 7, 139, None, self.value())),
                    "signal": self.random.choice((None, 9, 15, self.value())),
                    "stopped": self.random.choice((True, False, self.value())),
                    "reason": self.random.choice(("evil", self.value())),
                    "why": self.random.choice(("isolated", "superseded", self.value())),
                    "error": self.random.choice((None, {"message": self.value()}, self.value())),
                    "log_tail": self.random.choice(
                        ([], ["Xid 79"], ["x" * 9000] * 9, self.value())
                    ),
                    "kernel": self.random.choice(
                        (
                            [],
                            ["NVRM: Xid (PCI:0000:05:00): 79, pid=1, GPU has fallen off the bus."],
                            self.value(),
                        )
                    ),
                    "launched": self.random.choice(
                        (None, [{"rank": number, "pid": 4}], self.value())
                    ),
                    "ecs": self.random.choice(
                        (None, {"stop_code": "UserInitiated", "reason": "a person"})
                    ),
                }
            }
        if draw < 0.8:
            progress = {
                "step": self.random.choice((3, 10**15, self.value())),
                "age": self.random.choice((0.1, 1e9, self.value())),
            }
            progress["values"] = self.random.choice(
                ({}, {f"v{n}": 1.0 for n in range(200)}, {"loss": self.value()})
            )
            beat = {
                "stamp": self.random.choice((1.0, 1e9, self.value())),
                "alive": [],
                "lease_left": None,
                "progress": {str(number): progress},
            }
            return {"heartbeat": beat}
        if draw < 0.9:
            token = {"namespace": "default", "job": "another", "submission": 1, "generation": 1}
            return {
                "hello": {
                    "token": token,
                    "boot_id": "b",
                    "state": "running",
                    "ranks": [number],
                    "stamp": 1.0,
                }
            }
        highest = self.random.choice(
            ([1, 1], [2**62, 1], [10**12, 10**12], [2**63, 2**63], self.value())
        )
        return {
            "outcome": "refused",
            "why": "not_above",
            "reason": "seen higher",
            "highest": highest,
        }

    def tell(self, message: dict[str, Any]) -> bytes:
        """Return what is said instead of a message of a session."""
        draw = self.random.random()
        if draw < 0.62:
            said: Any = {**message, "line": self.mutate(message.get("line"))}
        elif draw < 0.70:
            said = {**message, "line": self.value()}
        elif draw < 0.88:
            said = {**message, "line": self.invent()}
        elif draw < 0.92:
            said = {**message, "id": self.value()}
        elif draw < 0.95:
            whole = _written(message)
            return whole[: self.random.randrange(len(whole))] + b"\n"
        elif draw < 0.97:
            return self.random.randbytes(200).replace(b"\n", b"") + b"\n"
        elif draw < 0.98:
            exits = (
                f'{{"id":{message["id"]},"line":'
                f'{{"observation":{{"seq":{n},"kind":"Fenced","why":"x"}}}}}}'
                for n in range(1, FLOOD)
            )
            return "\n".join(exits).encode() + b"\n"
        elif draw < 0.99:
            return f'{{"id":{message["id"]},"line":[{"{}," * 600_000}1]}}\n'.encode()
        elif draw < 0.995:
            return b"x" * LONGEST + b"\n"
        else:
            said = {"id": message["id"], "exit": 0}
        return _written(said)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys: Any = (
        list(value)
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else ()
    )
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _written(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def _pass_orders_on(pipe: Any) -> None:
    while data := os.read(0, 65536):
        try:
            pipe.write(data)
            pipe.flush()
        except OSError:
            return
    pipe.close()


def main(folder: Path, seed: int, command: list[str]) -> None:
    with (folder / "sessions").open("ab") as sessions:
        sessions.write(b".")
        sessions.flush()
        grammar = Grammar(seed * 1_000_003 + sessions.tell())
    real = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert real.stdout is not None
    threading.Thread(target=_pass_orders_on, args=(real.stdin,), daemon=True).start()
    told = os.open(folder / "told", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for line in real.stdout:
        message = json.loads(line)
        try:
            lying = json.loads((folder / "lying").read_text())
        except (FileNotFoundError, ValueError):
            lying = None
        if lying is not None and "line" in message and grammar.random.random() < lying["rate"]:
            for _ in range(lying["burst"]):
                _write(grammar.tell(message))
                os.write(told, b".")
        _write(line)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])

"""Train a small character-level transformer, data-parallel, in numpy.

It is a job to run, to kill and to compare bit for bit. Ranks exchange gradients in a star around
rank 0 (MASTER_ADDR, MASTER_PORT). Sums are taken in rank order and batches follow from seed and
step, so a run that was killed and resumed (on the same kind of CPU) ends with the bits of one that
was not. A rank that loses a peer fails. The program is one file, to be copied to a node alone.
text.txt is Lewis Carroll, Alice's Adventures in Wonderland I-IV, public domain. Under torchrun
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 frees the port for it.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import select
import socket
import struct
import sys
import time
import traceback
from pathlib import Path
from typing import Any

# More than one BLAS thread changes the order of additions, and with it the last bits. BLAS reads
# these once, on import.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import numpy as np  # noqa: E402  (after the thread counts, for the reason above)
import numpy.typing as npt  # noqa: E402

Floats = npt.NDArray[np.floating[Any]]
Tokens = npt.NDArray[np.intp]

CONNECT_DEADLINE = 30.0
"""Seconds that ranks of one launch may start apart, and the old launch may hold the master port."""
KEPT_CHECKPOINTS = 3
"""The crash that we resume from may have torn one, and a bad disk one more."""
POLLRDHUP = select.POLLRDHUP | select.POLLHUP | select.POLLERR


# The model


@dataclasses.dataclass(frozen=True)
class Shape:
    vocabulary: int
    context: int = 48
    width: int = 48
    heads: int = 4
    layers: int = 2

    def layout(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        w = self.width
        attention = (("norm1", (w,)), ("qkv", (w, 3 * w)), ("out", (w, w)))
        block = (*attention, ("norm2", (w,)), ("up", (w, 4 * w)), ("down", (4 * w, w)))
        blocks = tuple(
            (f"{name}.{layer}", shape) for layer in range(self.layers) for name, shape in block
        )
        return (
            ("characters", (self.vocabulary, w)),
            ("positions", (self.context, w)),
            *blocks,
            ("norm", (w,)),
            ("head", (w, self.vocabulary)),
        )

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for _, shape in self.layout())

    def views(self, flat: Floats) -> dict[str, Floats]:
        """Name the parts of one flat vector, which is reduced, stored and hashed as one array."""
        views, at = {}, 0
        for name, shape in self.layout():
            views[name] = flat[at : at + math.prod(shape)].reshape(shape)
            at += math.prod(shape)
        return views

    def initial(self, seed: int) -> Floats:
        flat = np.zeros(self.size, np.float32)
        random = np.random.Generator(np.random.PCG64([seed, 0]))
        for name, part in self.views(flat).items():
            scale = 0.1 if name in ("characters", "positions") else 1 / math.sqrt(part.shape[0])
            part[...] = 1.0 if "norm" in name else random.standard_normal(part.shape) * scale
        return flat


def _norm(x: Floats, gain: Floats) -> tuple[Floats, Floats, Floats]:
    inverse = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(1e-5))
    unit = x * inverse
    return unit * gain, unit, inverse


def _norm_back(dy: Floats, gain: Floats, unit: Floats, inverse: Floats) -> tuple[Floats, Floats]:
    du = dy * gain
    dx = inverse * (du - unit * np.mean(du * unit, axis=-1, keepdims=True))
    return dx, np.sum(dy * unit, axis=(0, 1))


def _outer(x: Floats, dy: Floats) -> Floats:
    """The gradient of the matrix in y = x @ matrix."""
    return x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])


def loss_and_gradient(  # noqa: PLR0915 - forward and backward, line by line, are read side by side
    shape: Shape, flat: Floats, sequences: Tokens, tokens: int
) -> tuple[float, Floats]:
    """Sum the cross-entropy of these sequences, divided by the `tokens` of all ranks.

    The sum of the ranks' results is that of the whole batch.
    """
    p, gradient = shape.views(flat), np.zeros_like(flat)
    if not len(sequences):
        return 0.0, gradient
    g = shape.views(gradient)
    inputs, targets = sequences[:, :-1], sequences[:, 1:]
    batch, length = inputs.shape
    heads, part = shape.heads, shape.width // shape.heads
    scale = flat.dtype.type(1 / math.sqrt(part))
    future = np.triu(np.full((length, length), -1e9, flat.dtype), 1)

    x = p["characters"][inputs] + p["positions"][:length]
    kept: list[tuple[Floats, ...]] = []
    for n in range(shape.layers):
        y1, unit1, inverse1 = _norm(x, p[f"norm1.{n}"])
        q, k, v = (
            (y1 @ p[f"qkv.{n}"]).reshape(batch, length, 3, heads, part).transpose(2, 0, 3, 1, 4)
        )
        scores = q @ k.swapaxes(-1, -2) * scale + future
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = (weights @ v).transpose(0, 2, 1, 3).reshape(batch, length, -1)
        x = x + mixed @ p[f"out.{n}"]
        y2, unit2, inverse2 = _norm(x, p[f"norm2.{n}"])
        hidden = np.maximum(y2 @ p[f"up.{n}"], 0)
        x = x + hidden @ p[f"down.{n}"]
        kept.append((y1, unit1, inverse1, q, k, v, weights, mixed, y2, unit2, inverse2, hidden))
    y, unit, inverse = _norm(x, p["norm"])
    logits = y @ p["head"]
    logits -= logits.max(axis=-1, keepdims=True)
    chances = np.exp(logits)
    total = chances.sum(axis=-1, keepdims=True)
    right = np.take_along_axis(logits - np.log(total), targets[..., None], axis=-1)
    loss = -float(np.sum(right, dtype=np.float64)) / tokens

    d = chances / total
    np.put_along_axis(
        d, targets[..., None], np.take_along_axis(d, targets[..., None], axis=-1) - 1, axis=-1
    )
    d /= flat.dtype.type(tokens)
    g["head"][...] = _outer(y, d)
    d, g["norm"][...] = _norm_back(d @ p["head"].T, p["norm"], unit, inverse)
    for n in reversed(range(shape.layers)):
        y1, unit1, inverse1, q, k, v, weights, mixed, y2, unit2, inverse2, hidden = kept[n]
        g[f"down.{n}"][...] = _outer(hidden, d)
        dh = (d @ p[f"down.{n}"].T) * (hidden > 0)
        g[f"up.{n}"][...] = _outer(y2, dh)
        dx, g[f"norm2.{n}"][...] = _norm_back(dh @ p[f"up.{n}"].T, p[f"norm2.{n}"], unit2, inverse2)
        d = d + dx
        g[f"out.{n}"][...] = _outer(mixed, d)
        dmixed = (d @ p[f"out.{n}"].T).reshape(batch, length, heads, part).transpose(0, 2, 1, 3)
        dweights = dmixed @ v.swapaxes(-1, -2)
        dscores = weights * (dweights - np.sum(dweights * weights, axis=-1, keepdims=True)) * scale
        dqkv = np.stack(
            (dscores @ k, dscores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ dmixed)
        )
        dqkv = dqkv.transpose(1, 3, 0, 2, 4).reshape(batch, length, -1)
        g[f"qkv.{n}"][...] = _outer(y1, dqkv)
        dx, g[f"norm1.{n}"][...] = _norm_back(
            dqkv @ p[f"qkv.{n}"].T, p[f"norm1.{n}"], unit1, inverse1
        )
        d = d + dx
    np.add.at(g["characters"], inputs, d)
    g["positions"][:length] = d.sum(axis=0)
    return loss, gradient


def adam(flat: Floats, mean: Floats, square: Floats, gradient: Floats, step: int) -> None:
    """Update in place. Element by element and correctly rounded: every rank gets the same bits."""
    # A warm-up: Adam's first estimates are of one batch.
    rate = np.float32(3e-3 * min(1.0, step / 20))
    mean += np.float32(0.1) * (gradient - mean)
    square += np.float32(0.01) * (gradient * gradient - square)
    unbiased = square / np.float32(1 - 0.99**step)
    flat -= rate * (mean / np.float32(1 - 0.9**step)) / (np.sqrt(unbiased) + np.float32(1e-8))


def sequences_of(text: Tokens, seed: int, step: int, batch: int, context: int) -> Tokens:
    """Return the whole batch of a step, of all ranks. It depends on the arguments alone."""
    random = np.random.Generator(np.random.PCG64([seed, 1, step]))
    starts = random.integers(0, len(text) - context, size=batch)
    sequences: Tokens = text[starts[:, None] + np.arange(context + 1)]
    return sequences


# The ranks


class Star:
    """The ranks of one generation.

    Any lost connection raises ConnectionError at once, also during `pause`.
    """

    _hello = struct.Struct("!8sIII")

    def __init__(self, rank: int, world: int, generation: int, address: str, port: int) -> None:
        self.rank, self.world = rank, world
        self._peers: dict[int, socket.socket] = {}
        deadline = time.monotonic() + CONNECT_DEADLINE
        greeting = (b"train_lm", generation, world)
        if world > 1 and rank == 0:
            self._gather(greeting, address, port, deadline)
        elif world > 1:
            self._peers[0] = self._join(self._hello.pack(*greeting, rank), address, port, deadline)

    def _gather(
        self, greeting: tuple[bytes, int, int], address: str, port: int, deadline: float
    ) -> None:
        with self._listen(address, port, deadline) as listener:
            while len(self._peers) < self.world - 1:
                self._check_peers(listener, max(0.0, deadline - time.monotonic()))
                if time.monotonic() >= deadline:
                    absent = ", ".join(str(r) for r in range(1, self.world) if r not in self._peers)
                    raise TimeoutError(
                        f"rank 0 waited {CONNECT_DEADLINE:.0f} s at {address}:{port} "
                        f"for ranks {absent}"
                    )
                try:
                    peer, _ = listener.accept()
                except OSError:
                    continue  # it went away again before it was accepted
                rank = self._greet(peer, greeting)
                if rank is None:
                    peer.close()  # it may try again; we wait for ours
                else:
                    self._peers[rank] = peer
        self._peers = dict(sorted(self._peers.items()))

    def _greet(self, peer: socket.socket, greeting: tuple[bytes, int, int]) -> int | None:
        """Return which rank this is; None unless it is a rank of this generation and job."""
        try:
            peer.settimeout(1.0)  # a rank speaks at once, and others wait behind it
            *said, rank = self._hello.unpack(_receive(peer, self._hello.size))
            if tuple(said) != greeting or rank in self._peers or not 0 < rank < self.world:
                return None
            peer.settimeout(None)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.sendall(b"+")
            return int(rank)
        except OSError:
            return None

    @staticmethod
    def _listen(address: str, port: int, deadline: float) -> socket.socket:
        while True:
            try:
                family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
                # SO_REUSEADDR is set: connections of the last generation may be in TIME_WAIT.
                listener = socket.create_server((address, port), family=family)
                listener.setblocking(False)
                return listener
            except OSError as error:
                if time.monotonic() >= deadline:
                    waited = f"within {CONNECT_DEADLINE:.0f} s"
                    raise TimeoutError(
                        f"rank 0 could not listen at {address}:{port} {waited}: {error}"
                    ) from error
            time.sleep(0.05)

    @staticmethod
    def _join(greeting: bytes, address: str, port: int, deadline: float) -> socket.socket:
        while True:
            try:
                peer = socket.create_connection((address, port), timeout=5.0)
                try:
                    # A connection to a free port of the same machine can connect to itself, and
                    # then rank 0 could not listen there.
                    if peer.getsockname() == peer.getpeername():
                        raise ConnectionRefusedError("rank 0 does not listen yet")
                    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    peer.settimeout(max(1.0, deadline - time.monotonic()))
                    peer.sendall(greeting)
                    _receive(peer, 1)
                    peer.settimeout(None)
                    return peer
                except BaseException:
                    peer.close()
                    raise
            except OSError as error:
                if time.monotonic() >= deadline:
                    waited = f"within {CONNECT_DEADLINE:.0f} s"
                    raise TimeoutError(
                        f"rank 0 did not answer at {address}:{port} {waited}: {error}"
                    ) from error
            time.sleep(0.02)

    def _check_peers(self, also: socket.socket | None, seconds: float) -> None:
        """Wait until `also` has something to read or the time is over; raise when a peer goes."""
        poll = select.poll()
        for peer in self._peers.values():
            poll.register(peer, POLLRDHUP)
        if also is not None:
            poll.register(also, select.POLLIN)
        for descriptor, _ in poll.poll(math.ceil(seconds * 1000)):
            for rank, peer in self._peers.items():
                if peer.fileno() == descriptor:
                    raise self._connection_error(rank, "gone while we waited")

    def _connection_error(self, rank: int, how: object) -> ConnectionError:
        return ConnectionError(f"rank {self.rank}: Connection closed by peer: rank {rank} ({how})")

    def pause(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            self._check_peers(None, left)

    def sum(self, mine: Floats) -> Floats:
        """The sum over all ranks, added in the order of the ranks whatever arrives first."""
        if self.rank:
            self._send(0, mine.tobytes())
            return np.frombuffer(self._receive_all(mine.nbytes)[0], mine.dtype)
        total = mine.copy()
        received = self._receive_all(mine.nbytes)
        for rank in sorted(received):
            total += np.frombuffer(received[rank], mine.dtype)
        for rank in self._peers:
            self._send(rank, total.tobytes())
        return total

    def from_rank_0(self, message: bytes | None) -> bytes:
        """What rank 0 gives, to every rank."""
        if self.rank:
            (size,) = struct.unpack("!Q", self._receive_all(8)[0])
            return bytes(self._receive_all(size)[0])
        message = message or b""
        for rank in self._peers:
            self._send(rank, struct.pack("!Q", len(message)) + message)
        return message

    def _send(self, rank: int, data: bytes) -> None:
        try:
            self._peers[rank].sendall(data)
        except OSError as error:
            raise self._connection_error(rank, error) from error

    def _receive_all(self, size: int) -> dict[int, bytearray]:
        """Read one message of every peer, in parallel: a slow peer must not hide a dead one."""
        buffers = {rank: bytearray(size) for rank in self._peers}
        filled = dict.fromkeys(self._peers, 0)
        ranks = {peer.fileno(): rank for rank, peer in self._peers.items()}
        poll = select.poll()
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN | POLLRDHUP)
        while any(count < size for count in filled.values()):
            for descriptor, _ in poll.poll():
                rank = ranks[descriptor]
                try:
                    rest = memoryview(buffers[rank])[filled[rank] :]
                    count = self._peers[rank].recv_into(rest) if rest else 0
                except OSError as error:
                    raise self._connection_error(rank, error) from error
                filled[rank] += count
                if count == 0:
                    raise self._connection_error(rank, "end of stream")
                if filled[rank] == size:
                    poll.modify(descriptor, POLLRDHUP)
        return buffers


def _receive(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = peer.recv(size - len(data))
        if not more:
            raise ConnectionResetError("closed before its greeting was read")
        data += more
    return data


# What survives


@dataclasses.dataclass
class State:
    """All that a run is made of: with the flags and the text, `step` fixes every batch to come."""

    step: int
    loss: float
    parameters: Floats
    mean: Floats
    square: Floats

    def pack(self, run: dict[str, Any]) -> bytes:
        """Return a line of JSON, with a digest that reveals a torn file, then the raw arrays."""
        body = b"".join(
            part.astype("<f4").tobytes() for part in (self.parameters, self.mean, self.square)
        )
        head = {"step": self.step, "loss": self.loss.hex(), "run": run}
        sealed = hashlib.sha256(json.dumps(head).encode() + body).hexdigest()
        return json.dumps({**head, "sha256": sealed}).encode() + b"\n" + body

    @classmethod
    def unpack(cls, data: bytes, run: dict[str, Any]) -> State:
        line, _, body = data.partition(b"\n")
        head = json.loads(line)
        if head.pop("sha256") != hashlib.sha256(json.dumps(head).encode() + body).hexdigest():
            raise ValueError("its digest does not match its content")
        if head["run"] != run:
            there = {key: head["run"].get(key) for key in run}
            different = (
                f"{key} {there[key]} there, {run[key]} here"
                for key in run
                if there[key] != run[key]
            )
            raise WrongRun(f"is of another run ({'; '.join(different)})")
        parts = np.frombuffer(body, "<f4").astype(np.float32).reshape(3, -1)
        return cls(
            head["step"],
            float.fromhex(head["loss"]),
            parts[0].copy(),
            parts[1].copy(),
            parts[2].copy(),
        )


class WrongRun(Exception):
    """A valid checkpoint of other flags or text: it can be neither resumed nor overwritten."""


def write_atomically(path: Path, data: bytes, durable: bool) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)
    if durable:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def save(folder: Path, state: State, run: dict[str, Any]) -> None:
    write_atomically(folder / f"step-{state.step:08d}.ckpt", state.pack(run), durable=True)
    for old in sorted(folder.glob("step-*.ckpt"))[:-KEPT_CHECKPOINTS]:
        old.unlink()


def newest(folder: Path, run: dict[str, Any]) -> State | None:
    for unfinished in folder.glob(".step-*"):  # of a rank 0 that was killed while it wrote
        unfinished.unlink()
    for path in sorted(folder.glob("step-*.ckpt"), reverse=True):
        try:
            return State.unpack(path.read_bytes(), run)
        except WrongRun as error:
            raise WrongRun(
                f"checkpoint {path} {error}; give the same flags, or another --checkpoint folder"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            print(f"checkpoint {path} cannot be read and is skipped: {error}", flush=True)
    return None


# The run


def train(options: argparse.Namespace, rank: int, world: int, generation: int) -> None:
    text = options.text.read_text(encoding="utf-8")
    characters = sorted(set(text))
    shape = Shape(vocabulary=len(characters))
    if len(text) <= shape.context:
        raise ValueError(
            f"--text {options.text}: {len(text)} characters; "
            f"expected more than {shape.context}, one sequence"
        )
    tokens = np.searchsorted(np.array(characters), np.array(list(text)))
    digest = hashlib.sha256(text.encode()).hexdigest()
    run = {
        "seed": options.seed,
        "batch": options.batch,
        "text": digest[:16],
        **dataclasses.asdict(shape),
    }
    progress = os.environ.get("RELAUNCH_PROGRESS_FILE")
    saved: dict[str, int] = {}

    star = Star(
        rank,
        world,
        generation,
        os.environ.get("MASTER_ADDR", "127.0.0.1"),
        _number("MASTER_PORT", 0),
    )
    # Only rank 0 reads the folder: nodes may share no disk, and ranks must not see different files.
    if rank == 0:
        state = newest(options.checkpoint, run) if options.checkpoint else None
        if state is None:
            flat = shape.initial(options.seed)
            state = State(0, math.nan, flat, np.zeros_like(flat), np.zeros_like(flat))
        if state.step > options.steps:
            raise WrongRun(
                f"the newest checkpoint is of step {state.step}, past --steps {options.steps}"
            )
        star.from_rank_0(state.pack(run))
    else:
        state = State.unpack(star.from_rank_0(None), run)
    print(
        f"rank {rank} of {world}, generation {generation}: going on after step {state.step}",
        flush=True,
    )

    mine = slice(rank * options.batch // world, (rank + 1) * options.batch // world)
    for step in range(state.step + 1, options.steps + 1):
        began = time.monotonic()
        sequences = sequences_of(tokens, options.seed, step, options.batch, shape.context)[mine]
        loss, gradient = loss_and_gradient(
            shape, state.parameters, sequences, options.batch * shape.context
        )
        star.pause(began + options.step_time)
        total = star.sum(np.concatenate((gradient.astype(np.float64), [loss])))
        state.step, state.loss = step, float(total[-1])
        if not math.isfinite(state.loss):
            raise FloatingPointError(f"the loss of step {step} is {state.loss}")
        adam(state.parameters, state.mean, state.square, total[:-1].astype(np.float32), step)
        if (
            rank == 0
            and options.checkpoint
            and (step % options.checkpoint_every == 0 or step == options.steps)
        ):
            save(options.checkpoint, state, run)
            # Reported once it is written: relaunch drains a node after its next checkpoint.
            saved = {"checkpoint": step}
        if progress:
            write_atomically(
                Path(progress),
                json.dumps({"step": step, "loss": state.loss, **saved}).encode(),
                durable=False,
            )
        if rank == 0 and (step % 10 == 0 or step == options.steps):
            print(f"generation {generation} step {step} loss {state.loss:.4f}", flush=True)

    if rank == 0:
        sealed = hashlib.sha256(state.parameters.astype("<f4").tobytes()).hexdigest()
        print(
            f"final loss {state.loss!r} (hex {state.loss.hex()}) parameters sha256 {sealed}",
            flush=True,
        )
        if options.checkpoint:
            final = {
                "steps": state.step,
                "loss": state.loss,
                "loss_hex": state.loss.hex(),
                "parameters_sha256": sealed,
            }
            write_atomically(
                options.checkpoint / "final.json", json.dumps(final).encode() + b"\n", durable=True
            )
    # No rank exits with 0 before the result is on disk.
    star.from_rank_0(b"done" if rank == 0 else None)


def record_error(error: BaseException) -> None:
    """Leave the uncaught error where torchelastic looks for it, in its format."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {
            "py_callstack": "".join(traceback.format_exception(error)),
            "timestamp": str(int(time.time())),
        }
        content = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
        write_atomically(Path(path), json.dumps(content).encode(), durable=False)


def _number(name: str, default: int) -> int:
    value = os.environ.get(name) or str(default)
    if not value.isdecimal():
        raise ValueError(f"environment variable {name}={value!r}: expected a whole number")
    return int(value)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--batch", type=int, default=48, help="sequences a step, of all ranks together"
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="write checkpoints and final.json here; resume from here",
    )
    parser.add_argument(
        "--checkpoint-every", type=int, default=20, metavar="N", help="steps between checkpoints"
    )
    parser.add_argument(
        "--text", type=Path, default=Path(__file__).with_name("text.txt"), metavar="FILE"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--step-time", type=float, default=0.0, metavar="SECONDS", help="least wall time of a step"
    )
    options = parser.parse_args(arguments)
    for name, least in (
        ("steps", 1),
        ("batch", 1),
        ("checkpoint_every", 1),
        ("seed", 0),
        ("step_time", 0),
    ):
        if getattr(options, name) < least:
            parser.error(
                f"--{name.replace('_', '-')} {getattr(options, name)}: expected at least {least}"
            )
    return options


def main() -> int:
    options = parse()
    try:
        rank, world = _number("RANK", 0), _number("WORLD_SIZE", 1)
        if rank >= world:
            raise ValueError(
                f"RANK={rank}, WORLD_SIZE={world}: expected a rank below the world size"
            )
        if options.checkpoint and rank == 0:
            options.checkpoint.mkdir(parents=True, exist_ok=True)
        train(options, rank, world, _number("RELAUNCH_GENERATION", 0))
    except Exception as error:
        traceback.print_exc()
        record_error(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

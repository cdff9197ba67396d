"""Data-parallel JAX in several processes: `jax.distributed`, one global mesh, gloo between CPUs."""

import os
import time
from pathlib import Path

import fault
import jax
import jax.numpy as jnp
import numpy as np
import outcome
from jax.sharding import Mesh, NamedSharding, PartitionSpec

STEPS, EVERY, CHECKPOINT = 20, 5, Path("out/checkpoint.npz")


def loss_fn(params, features, targets):
    hidden = jnp.tanh(features @ params["w1"])
    return jnp.mean((hidden @ params["w2"] - targets) ** 2)


@jax.jit
def train_step(params, features, targets):
    loss, grads = jax.value_and_grad(loss_fn)(params, features, targets)
    return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), loss


def main():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # The port after that of torchrun's store.
    port = int(os.environ["MASTER_PORT"]) + 1
    jax.distributed.initialize(
        f"{os.environ['MASTER_ADDR']}:{port}",
        world,
        rank,
        # A process that raises waits at its exit for the others, for five minutes by default.
        heartbeat_timeout_seconds=10,
        shutdown_timeout_seconds=10,
    )
    mesh = Mesh(np.array(jax.devices()), ("data",))
    split, everywhere = (
        NamedSharding(mesh, PartitionSpec("data")),
        NamedSharding(mesh, PartitionSpec()),
    )
    rng = np.random.default_rng(0)
    start = {
        "w1": rng.normal(size=(8, 16)).astype("float32"),
        "w2": rng.normal(size=(16, 1)).astype("float32"),
    }
    step, loss = 0, 0.0
    if CHECKPOINT.exists():
        saved = np.load(CHECKPOINT)
        start, step = {name: saved[name] for name in start}, int(saved["step"])
        print(f"process {rank}: restored step {step}")
    params = {
        name: jax.make_array_from_process_local_data(everywhere, value)
        for name, value in start.items()
    }
    print(f"process {rank} of {world}, {jax.device_count()} devices")
    while step < STEPS:
        batch = np.random.default_rng((step, rank)).normal(size=(8, 8)).astype("float32")
        features = jax.make_array_from_process_local_data(split, batch)
        targets = jax.make_array_from_process_local_data(split, batch.sum(1, keepdims=True))
        params, loss = train_step(params, features, targets)
        loss = float(loss)
        step += 1
        time.sleep(0.1)
        if rank == 0:
            print(f"step {step}: loss {loss:.6f}")
            if step % EVERY == 0:
                fault.saving(step)
                CHECKPOINT.parent.mkdir(exist_ok=True)
                with CHECKPOINT.open("wb") as file:
                    np.savez(file, step=step, **{n: np.asarray(p) for n, p in params.items()})
        fault.at(step)
    outcome.write([np.asarray(params[name]).tobytes() for name in sorted(params)], loss)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()

"""A step of JAX that asks for more memory than any GPU has, once in a folder."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp


def main() -> None:
    print(f"training on {jax.devices()[0]}", flush=True)
    mark = Path("fault-0")
    if not mark.exists():
        mark.touch()
        print(float(jnp.ones((1 << 20, 1 << 20)).sum()))
    for step in range(1, 21):
        print(f"step {step}: loss {float(jnp.ones(8).sum()) / step:.4f}", flush=True)
    Path("outcome.txt").write_text("0\n")


if __name__ == "__main__":
    main()

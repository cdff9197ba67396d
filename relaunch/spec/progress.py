"""Patterns that find the step in what well-known training programs print, by name.

Each is written against lines of real runs, which `tests/recovery/samples/progress.yaml` keeps with
their addresses. Agents know no names: an order has the pattern itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# tqdm, without the bar that has the total: `1999/24128 [1:52:09<20:27:23,  3.33s/it]`. A bar below
# another one ends by moving the cursor up (ESC [ A): Hugging Face's Trainer draws evaluations so,
# and their batches are no steps.
_TIMES = r" \[[^\]\x1b]*(?:(?:it|batch|batches|steps?)/s|s/(?:it|batch|step))[^\x1b]*$"
_EPOCH_BAR = (
    r"[Ee]poch (?P<epoch>\d+)(?:, iteration |:[ :]*(?:\d+%)?(?:\|[^|]*\|)? *)"
    r"(?P<step>\d+)/(?P<total>\d+|\?)(?: \[| \|)"
)

PRESETS = {
    "nanogpt": r"(?:iter|step) (?P<step>\d+): (?:train )?loss (?P<loss>\d[\d.]*)?",
    "megatron": (
        r"iteration +(?P<step>\d+)/ *\d+ \|(?:.*\blm loss: (?P<loss>[\d.]+E[-+]\d+))?"
        r"|successfully saved checkpoint from iteration +(?P<checkpoint>\d+)"
    ),
    "torchtitan": r"step: +(?P<step>\d+) +loss: +(?P<loss>\d[\d.]*)?",
    "lightning": _EPOCH_BAR,
    "nemo": _EPOCH_BAR + r"|checkpoint save for step (?P<checkpoint>\d+) .*finalized successfully",
    "deepspeed": (
        r"(?:\bstep=|\bsteps: )(?P<step>\d+)(?:, skipped=| loss: (?P<loss>\d[\d.]*)?)"
        r"|\[Torch\] Checkpoint global_step(?P<checkpoint>\d+) is ready now"
    ),
    "hf": r"^\s*\d+%\|[^|]*\| *(?P<step>\d+)/\d+" + _TIMES,
    "tqdm": r"(?:^|[ |])(?P<step>\d+)(?:/\d+|it)" + _TIMES,
}
"""Pattern by name. The most particular come first, as `propose_progress` tries them in this order.

None of them calls a checkpoint saved before it is: nanoGPT, Hugging Face and Lightning print only
that they are about to save, and torchtitan prints no step.
"""

_COUNTER = re.compile(
    r"\b(?P<name>global[_ ]step|steps?|iterations?|iters?|batch|update)(?P<between>\W{1,3})\d+",
    re.IGNORECASE,
)


def propose_progress(lines: Iterable[str]) -> str | None:
    """Return what to write after `progress:` in the job file so that a step is found, or None.

    Args:
        lines: The last lines that a rank printed.
    """
    printed = list(lines)
    for name, pattern in PRESETS.items():
        compiled = re.compile(pattern)
        if any((found := compiled.search(line)) and found.group("step") for line in printed):
            return name
    for line in reversed(printed):
        if (counter := _COUNTER.search(line)) is not None:
            between = re.sub(r"\s+", " +", re.escape(counter["between"]).replace(r"\ ", " "))
            pattern = f"{counter['name']}{between}(?P<step>\\d+)".replace("'", "''")
            return f"{{log_pattern: '{pattern}'}}"
    return None

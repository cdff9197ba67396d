"""The step in what known training programs print, found by the preset of that name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from relaunch.agent.ranks.progress import RankProgress
from relaunch.agent.state import Generation
from relaunch.fields import compile_pattern
from relaunch.spec.progress import PRESETS, propose_progress

SAMPLES: dict[str, list[dict[str, Any]]] = yaml.safe_load(
    (Path(__file__).parent / "samples" / "progress.yaml").read_text()
)
LINES = [
    pytest.param(preset, sample, id=f"{preset}-{index}")
    for preset, samples in SAMPLES.items()
    for index, sample in enumerate(samples)
]


@pytest.mark.parametrize(("preset", "sample"), LINES)
def test_a_preset_reads_a_real_line(preset: str, sample: dict[str, Any], tmp_path: Path) -> None:
    generation = Generation(tmp_path, tmp_path, (1, 1))
    generation.make_folders()
    progress = RankProgress(generation, 0, re.compile(PRESETS[preset]))
    generation.log_path(0).write_text(sample["line"] + "\n")
    assert progress.read() is not sample.get("none", False)
    report = progress.report()
    if sample.get("none"):
        assert report is None
        return
    assert report is not None
    assert (report["step"], report["checkpoint"]) == (sample["step"], sample.get("checkpoint"))
    assert report["values"] == sample.get("values", {})


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_has_samples_and_suits_both_engines(preset: str) -> None:
    pattern = PRESETS[preset]
    assert "step" in re.compile(pattern).groupindex
    for sample in SAMPLES[preset]:
        line = re.sub("\x1b\\[[0-9;]*m", "", sample["line"])  # as the agent does
        matches = re.search(pattern, line), compile_pattern(pattern).search(line)
        found = [match and match.groupdict() for match in matches]
        assert found[0] == found[1]


@pytest.mark.parametrize(
    ("preset", "sample"),
    [(preset, each) for preset, every in SAMPLES.items() for each in every if "step" in each],
)
def test_a_preset_is_proposed_for_its_lines(preset: str, sample: dict[str, Any]) -> None:
    printed = re.sub("\x1b\\[[0-9;]*m", "", sample["line"])
    proposal = propose_progress(["loading", printed, "done"])
    if sample["step"] is None:
        assert proposal not in PRESETS, "a checkpoint alone is no step"
    else:
        assert proposal is not None
        assert re.search(PRESETS[proposal], printed), f"{proposal} for {preset}"


@pytest.mark.parametrize(
    ("line", "proposal", "step"),
    [
        ("Step 12 of 100, it's fine", r"{log_pattern: 'Step +(?P<step>\d+)'}", "12"),
        ("train_iter=7", None, None),
        ("[iter: 0031] x", r"{log_pattern: 'iter: +(?P<step>\d+)'}", "0031"),
        ("global_step=5|", r"{log_pattern: 'global_step=(?P<step>\d+)'}", "5"),
        ("batch '9'", r"{log_pattern: 'batch +''(?P<step>\d+)'}", "9"),
        ("Downloading 12 files", None, None),
    ],
)
def test_a_counter_in_an_unknown_line_gives_a_pattern(
    line: str, proposal: str | None, step: str | None
) -> None:
    assert propose_progress([line]) == proposal
    if proposal is not None:
        pattern = yaml.safe_load(proposal)["log_pattern"]
        found = compile_pattern(pattern).search(line)
        assert found is not None and found.group("step") == step

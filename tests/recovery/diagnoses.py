"""Counts the diagnoses that a job's logic makes."""

from __future__ import annotations

import sys

import pytest

from relaunch.job.diagnose import Fault, diagnose
from relaunch.job.rules import ALL_RULES, Rules
from relaunch.job.state import Diagnosis, JobState


def count_diagnoses(monkeypatch: pytest.MonkeyPatch) -> list[Fault]:
    """Return a list that receives every fault that is diagnosed, by whichever module."""
    diagnosed: list[Fault] = []

    def counting(job: JobState, fault: Fault, rules: Rules = ALL_RULES) -> Diagnosis:
        diagnosed.append(fault)
        return diagnose(job, fault, rules)

    for name, module in list(sys.modules.items()):
        if name.startswith("relaunch.") and getattr(module, "diagnose", None) is diagnose:
            monkeypatch.setattr(module, "diagnose", counting)
    return diagnosed

"""Hostile input, drawn by Hypothesis, for every parser of what comes in from outside.

`python -m tests.fuzz --minutes N` draws; `test_targets.py` plays what was found.
"""

"""Hostile input, drawn by Hypothesis, for every parser of what comes in from outside.

`python -m tests.fuzz` draws for as long as it is told; `test_targets.py` plays what was found.
"""

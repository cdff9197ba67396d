"""Measure how fast training resumes: the same ranks under relaunch, torchrun and a bare loop."""

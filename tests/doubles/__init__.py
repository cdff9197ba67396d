"""Doubles of a GPU node's dcgmi, nvidia-smi and libnvidia-ml.so.1, and of AWS.

This machine has none of them. Each says what it is given.
"""

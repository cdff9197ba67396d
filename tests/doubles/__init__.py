"""Doubles of a GPU node's dcgmi, nvidia-smi and libnvidia-ml.so.1, which this machine has not, and
of AWS. Each says what it is told.
"""

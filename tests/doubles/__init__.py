"""Doubles of what a GPU node has and this machine has not: dcgmi, nvidia-smi, libnvidia-ml.so.1; and of AWS, in `aws`. They say what they are told to."""

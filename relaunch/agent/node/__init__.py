"""What is asked of a node, and done to it: examinations, GPUs, reboots."""

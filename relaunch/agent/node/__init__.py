"""Operations on the node itself: examinations, GPUs, reboots."""

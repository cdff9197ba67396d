"""Ranks that are forked from a Python that has imported their modules ahead of need."""

"""Chooses what to do about a fault. Pure: no clock, no I/O, no logging, no Temporal; standard library and pydantic only."""

"""The recovery logic of one job. Pure functions: they read no clock and do no I/O."""

"""The ranks of a generation on one node: launched, kept, leased, watched, stopped."""

"""Manage the ranks of a generation on one node: launch, supervise, lease, watch and stop them."""

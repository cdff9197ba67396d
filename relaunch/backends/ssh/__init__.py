"""Nodes that are reached by SSH: one kept connection to each, over which its agent is shipped once and then spoken to."""

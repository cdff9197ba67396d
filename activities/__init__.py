"""Calls out: what workflows ask of nodes, people and files."""

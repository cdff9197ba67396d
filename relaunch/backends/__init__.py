"""Reaches nodes: one module per kind of machine, behind `base.Backend`."""

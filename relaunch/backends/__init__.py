"""Reaches nodes: one module for each kind of machine, behind `base.Backend`."""

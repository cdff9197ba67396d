"""Remembers: the durable workflows."""

"""Workflow that sends the notices of one fleet to people."""

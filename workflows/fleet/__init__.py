"""The workflow of one fleet of nodes."""

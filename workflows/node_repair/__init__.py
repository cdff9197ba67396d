"""The workflow of one repair of one node."""

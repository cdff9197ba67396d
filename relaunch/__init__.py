"""relaunch keeps GPU training jobs running.

This package file is also part of the zipapp that runs on the nodes, so it may use only the standard
library of Python 3.8.
"""

"""relaunch keeps GPU training jobs running.

This file is also the top of what runs on the nodes: standard library of Python 3.8 only.
"""

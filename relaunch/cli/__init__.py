"""The command line: reads files and flags; prints tables, JSON and live views.

Only `direct` connects to nodes.
"""

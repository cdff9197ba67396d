"""The agent that relaunch runs on a node: it reports facts and obeys orders.

The only decision it makes itself is to fence its own ranks.
"""

"""Decides the next step in the repair of one node. Pure: reads no clock and makes no calls.

`machine` carries one strategy through: reset GPUs, reboot or power-cycle, with its proof.
`escalation` chooses the strategy, where the examination of the node decides which one is needed.
"""

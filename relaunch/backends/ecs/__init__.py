"""Backend for nodes that are container instances of an Amazon ECS cluster.

Ranks run as ECS tasks, and their state is read from ECS.
"""

"""Nodes that are container instances of an Amazon ECS cluster: what runs there are tasks, and what is known of them ECS says."""

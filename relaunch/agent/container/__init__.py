"""The agent within a container of ECS."""

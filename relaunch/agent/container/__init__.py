"""The agent inside an ECS container."""

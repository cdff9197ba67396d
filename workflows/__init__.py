"""The durable workflows, which keep all lasting state."""

"""What users write: jobs, fleets, policies and their presets."""

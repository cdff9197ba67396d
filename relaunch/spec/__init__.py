"""The files that users write (jobs, fleets, policies) and the policy presets."""

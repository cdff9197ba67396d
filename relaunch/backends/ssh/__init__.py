"""Reaches nodes by SSH: one kept connection to each, over which its agent is shipped and used."""

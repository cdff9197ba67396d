"""Scheduling of a fleet's nodes. Pure: reads no clock and makes no calls."""

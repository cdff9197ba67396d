"""Doubles of what cannot be had here."""

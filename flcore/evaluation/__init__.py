"""Scoring, the same for all methods."""

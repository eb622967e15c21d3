"""Runs that another person can check: archives, their reproduction, and recorded hashes of every method."""

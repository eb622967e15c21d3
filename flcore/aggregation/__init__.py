"""Aggregation of clients' messages on the server: the mean, robust rules, noise, a server optimiser."""

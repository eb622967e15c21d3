"""Execution of one experiment and of many runs, for commands and Prefect flows; imports neither."""

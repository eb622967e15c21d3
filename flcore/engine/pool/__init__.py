"""Executors: this process, a pool of processes, or Ray actors."""

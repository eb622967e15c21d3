"""Figures of runs, comparisons, sweeps and analyses."""

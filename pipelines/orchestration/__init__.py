"""Experiments, comparisons and sweeps, written once, and who carries them out: plain calls or Prefect."""

"""Analyses of finished runs (evaluation.md section 5): from a run's files to arrays and tables, without figures."""

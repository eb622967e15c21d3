"""Finished runs as statistics, tables, figures and pages."""

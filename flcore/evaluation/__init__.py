"""How anything is scored: one module for all methods."""

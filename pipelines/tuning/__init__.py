"""Optuna: searches of hyper-parameters on validation data."""

"""What runs, tracks, tunes and compares `flcore`; the only place that knows Prefect, MLflow, DVC and Optuna."""

"""Run, track, tune and compare `flcore` experiments; only this package uses Prefect, MLflow, DVC and Optuna."""

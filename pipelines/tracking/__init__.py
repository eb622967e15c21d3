"""MLflow: run folders, logged live or afterwards."""

"""MLflow: runs as they lie on disk, logged live or afterwards."""

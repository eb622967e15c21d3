"""The stages of `dvc.yaml`: thin functions from folders to folders."""

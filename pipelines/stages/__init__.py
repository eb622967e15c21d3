"""The stages of `dvc.yaml`, and the page of one run: thin functions from folders to folders."""

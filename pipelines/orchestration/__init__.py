"""How `pipelines/execution` is run: by plain calls or by Prefect; the follower's process; servers."""

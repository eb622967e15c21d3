"""Who carries out what `pipelines/execution` says: plain calls or Prefect; the follower's process; servers."""

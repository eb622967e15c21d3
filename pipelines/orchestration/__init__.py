"""Who carries out what `pipelines/execution` says: plain calls or Prefect; the recorder's process; servers."""

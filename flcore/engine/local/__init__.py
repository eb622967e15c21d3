"""Local training: one client at a time (`serial`), or many at once (`stacked`)."""

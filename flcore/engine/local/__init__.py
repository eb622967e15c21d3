"""Local training: one client at a time (`serial`), many at once (`stacked`), or by programs (`compiled`)."""

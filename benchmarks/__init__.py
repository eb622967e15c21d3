"""Benchmarks of a source checkout: ``protofl bench NAME``. Few imports: peers' environments import it."""

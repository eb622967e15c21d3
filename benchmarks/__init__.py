"""Benchmarks of a source checkout: ``protofl bench NAME``. Light: environments without our packages import this too."""

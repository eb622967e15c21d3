"""The version of protofl, which partitions and runs record."""

VERSION = "0.1.0"

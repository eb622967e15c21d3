"""The five papers' tables and claims: settings and printed values as data, run by ``protofl paper``."""

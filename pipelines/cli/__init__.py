"""The command ``protofl``: parsing, errors, listings, and what needs no run."""

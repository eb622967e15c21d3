"""The command ``protofl``: parsing, errors, listings, and commands that need no run."""

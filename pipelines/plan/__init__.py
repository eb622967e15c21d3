"""Parameter files and options, resolved to validated configurations."""

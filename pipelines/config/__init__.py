"""From parameter files and options to checked configurations."""

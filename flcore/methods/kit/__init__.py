"""Code that several methods share."""

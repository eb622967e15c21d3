"""A run as an object, its folder, and the code that it uses."""

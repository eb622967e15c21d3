"""A run as an object, its folder, and the code that it was made with."""

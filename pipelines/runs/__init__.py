"""Files that a run leaves on disk, and how to find and read them."""

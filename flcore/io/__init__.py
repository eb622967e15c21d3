"""What is written to disk and what travels between server and clients."""

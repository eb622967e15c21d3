"""The engine: the one loop of local training, where it runs, the round, and what is kept on disk."""

"""What every room uses and what knows nothing of federated learning: errors, text, parameters, random streams."""

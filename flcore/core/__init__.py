"""General tools, independent of federated learning: errors, text, parameters, random streams."""

"""Prototype mathematics that several methods share: made of features, fused over clients, clustered, released."""

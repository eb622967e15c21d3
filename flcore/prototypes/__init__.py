"""Prototype mathematics that several methods share: class means and their aggregation over clients."""

from flcore.prototypes.class_means import average_prototypes, class_means

__all__ = ["average_prototypes", "class_means"]

"""Prototype mathematics that several methods share: class means and their aggregation over clients."""

from flcore.prototypes.class_means import class_means
from flcore.prototypes.fusion import average_prototypes

__all__ = ["average_prototypes", "class_means"]

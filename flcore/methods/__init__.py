"""One file per method, and what they share: `base`, `vocabulary`, `on_top`, `server_training`, `class_prototypes`."""

from flcore.methods.base import Method
from flcore.methods.registry import METHODS

__all__ = ["METHODS", "Method"]

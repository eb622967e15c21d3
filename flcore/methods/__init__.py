"""One file per method. `api` is what an author overrides, `types` the words of it, `kit` what several methods share."""

from flcore.methods.api import Method
from flcore.methods.registry import METHODS

__all__ = ["METHODS", "Method"]

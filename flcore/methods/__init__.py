"""One file per method, and what several share.

All of them: `base` and `vocabulary`; `updates` (steps), `server_training`, `preset` (the authors' choices). Kinds of
them: `on_top` (of another method), `new_head` (for its finished model), `class_prototypes`, `feature_generator`,
`image_generator`, `virtual_images`, `patch_sums`.
"""

from flcore.methods.base import Method
from flcore.methods.registry import METHODS

__all__ = ["METHODS", "Method"]

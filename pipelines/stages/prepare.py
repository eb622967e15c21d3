"""Stage *prepare*: files of a dataset to tensors of one form."""

from flcore.running import prepare

__all__ = ["prepare"]

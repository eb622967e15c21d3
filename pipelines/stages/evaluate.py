"""Stage *evaluate*: the finished run's models, scored afresh from its files, with costs and summaries over rounds."""

from flcore.running import evaluate

__all__ = ["evaluate"]

"""flcore: federated learning on non-IID images, in plain PyTorch.

Knows models, data, methods and how a round runs; knows nothing of orchestrators, trackers or pipelines.
"""

__version__ = "0.1.0"

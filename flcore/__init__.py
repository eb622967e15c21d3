"""flcore: federated learning on non-IID images, in plain PyTorch.

It has models, data, methods and rounds, and no orchestrators, trackers or pipelines. A run in two lines::

    from flcore import run

    metrics = run({"method": {"name": "fedproto"}, "federation": {"rounds": 20}}, "runs/first")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flcore.core import loaded_code, portable
from flcore.version import VERSION

if TYPE_CHECKING:
    from flcore.running import run

__all__ = ["__version__", "run"]

__version__ = VERSION

loaded_code.install()
portable.choose_kernels()

_ON_REQUEST = {"run": "flcore.running"}
"""Name → module, imported at first use: `import flcore` does not import torch."""


def __getattr__(name: str) -> Any:
    if name not in _ON_REQUEST:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ON_REQUEST[name]), name)

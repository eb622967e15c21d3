"""What MLflow imports to load a logged model; stored with it as ``code/protofl_model.py``.

Library and predictor, `flcore` and `pipelines/tracking/serving.py`, lie beside it in one archive: a store is sent a
file, not two hundred. Where `flcore` is imported already, as in this project, that one answers.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

ARCHIVE = "protofl.zip"
SERVING = "protofl_serving"
"""The predictor's module in the archive."""


def _load_pyfunc(data_path: str) -> Any:
    """Return the model; MLflow fixes the name of this function."""
    archive = str(Path(__file__).with_name(ARCHIVE))
    if archive not in sys.path:
        sys.path.insert(0, archive)
    return importlib.import_module(SERVING).RunModel(Path(data_path))

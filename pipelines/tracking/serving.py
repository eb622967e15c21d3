"""The code file of a logged model: MLflow stores this text beside the run's files instead of a pickled object.

MLflow executes the file when the model is loaded, so it must import nothing but what the model's requirements name
and ``flcore``, which is stored with the model. Answers as the run's evaluation does: with the global model, by the
method's own rule of prediction.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel, PythonModelContext
from safetensors.torch import load_file

from flcore.config import Config
from flcore.data.images import normalise
from flcore.messages import Weights
from flcore.models import build_model, load_weights
from flcore.models.network import Network
from flcore.models.view import ModuleView
from flcore.plugins import located
from flcore.records import load_record


class Predictor:
    """A finished run's global model, on the CPU."""

    def __init__(self, config: Mapping[str, Any], dataset: Mapping[str, Any], weights: Path, server: Path) -> None:
        """Rebuild the model from a run's files.

        Args:
            config: the resolved configuration, as in ``config.json``.
            dataset: shape, classes and normalisation of the images, as in the prepared data's ``meta.json``.
            weights: ``model.safetensors``.
            server: ``server.safetensors``, for methods that predict with more than the model.
        """
        checked = Config.from_mapping(config)
        classes = dataset["num_classes"]
        outputs, extra = checked.method.num_outputs(classes), checked.method.extra_layers
        module = build_model(checked.model_spec, tuple(dataset["shape"]), classes, outputs=outputs, extra=extra).eval()
        arrays, parameters = load_file(weights), dict(module.named_parameters())
        params = {name: array for name, array in arrays.items() if name in parameters}
        buffers = {name: array for name, array in arrays.items() if name not in parameters}
        load_weights(module, Weights(params, buffers))
        self._model = ModuleView(module, Network(module), parameters)
        self._method = checked.method
        self._server = load_record(server)[0]
        self._mean, self._std = dataset["mean"], dataset["std"]

    @torch.no_grad()
    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Class probabilities ``[N, K]`` for images ``[N, C, H, W]``, uint8 (0 to 255) or floating (0 to 1)."""
        pixels = torch.from_numpy(np.ascontiguousarray(images))
        if pixels.is_floating_point():
            pixels = pixels * 255
        scores = self._method.predict(self._model, normalise(pixels, self._mean, self._std), self._server, None)
        return np.asarray(scores.softmax(dim=1).numpy())


class GlobalModel(PythonModel):
    """:class:`Predictor` as MLflow calls it."""

    def load_context(self, context: PythonModelContext) -> None:
        """Build the predictor from the files stored with the model."""
        files = {name: Path(path) for name, path in context.artifacts.items()}
        stored = json.loads(files["config"].read_text(encoding="utf-8"))["config"]
        config = located(stored, files.get("plugins", files["config"]).parent)
        dataset = json.loads(files["dataset"].read_text(encoding="utf-8"))
        self._predict = Predictor(config, dataset, files["weights"], files["server"])

    def predict(
        self, context: PythonModelContext, model_input: np.ndarray, params: dict[str, Any] | None = None
    ) -> np.ndarray:
        """Score a batch of images; ``context`` and ``params`` are part of MLflow's interface and unused."""
        return self._predict(model_input)


set_model(GlobalModel())

"""Models by name, and the one way to build them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from flcore.core.registry import Registry
from flcore.core.rng import seeded_globally
from flcore.models.base import Backbone, DropoutMasks, ModelSpec, extract_weights, load_weights, widen_head

__all__ = ["MODELS", "Backbone", "DropoutMasks", "ModelSpec", "build_model", "extract_weights", "load_weights"]


MODELS: Registry[type[ModelSpec]] = Registry(
    "model",
    {
        "fedgen_cnn": "flcore.models.cnn:FedGenCnn",
        "fedproto_cnn": "flcore.models.cnn:FedProtoCnn",
        "fedmlp_cnn": "flcore.models.cnn:FedMlpCnn",
        "fedcspc_cnn": "flcore.models.cnn:FedCspcCnn",
        "pfl_cnn": "flcore.models.cnn:PflCnn",
        "fedavg_cnn": "flcore.models.cnn:FedAvgCnn",
        "pixels": "flcore.models.cnn:Pixels",
        "patch_dictionary": "flcore.models.patch_dictionary:PatchDictionary",
        "resnet18": "flcore.models.resnet:ResNet18",
        "resnet50": "flcore.models.resnet:ResNet50",
        "convnet5": "flcore.models.cnn:ConvNet5",
        "fedpg_cnn": "flcore.models.cnn:FedPgCnn",
        "celeba_cnn": "flcore.models.cnn:CelebaCnn",
        "femnist_cnn": "flcore.models.cnn:FemnistCnn",
    },
)


def build_model(
    spec: ModelSpec,
    shape: tuple[int, int, int],
    num_classes: int,
    seed: int = 0,
    outputs: int | None = None,
    extra: Callable[[int, int, int], Mapping[str, nn.Module]] | None = None,
) -> Backbone:
    """Build a model with PyTorch's default initialisation, as a function of ``seed`` alone.

    The global generator is forked and restored. More ``outputs`` than classes, and ``extra`` layers
    (:meth:`flcore.methods.api.Method.extra_layers`, made last), leave all other initial weights as they are without.
    """
    with seeded_globally(seed):
        module = spec.build(shape, num_classes)
        if outputs is not None and outputs > num_classes:
            widen_head(module, outputs)
        if extra is not None:
            module.extra.update(extra(module.feature_dim, num_classes, module.encoded_dim))
        return module

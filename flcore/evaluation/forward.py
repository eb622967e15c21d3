"""Forward passes of frozen models over images in batches: features for replies, predictions for scoring.

Each model encodes each image once for all predictors (:class:`flcore.models.network.EncodedOnce`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from flcore.data.images import normalise
from flcore.experiment.experiment import Experiment
from flcore.io.messages import Weights
from flcore.io.records import Record
from flcore.methods.types import Predict, with_statistics
from flcore.models.base import Backbone, laid_out
from flcore.models.network import EncodedOnce, ModuleView, Network, ParamDict


class Images(Protocol):
    """Images of a forward pass, in order."""

    def __len__(self) -> int:
        """Return the number of images."""

    def block(self, start: int, stop: int) -> Tensor:
        """Return normalised images [stop - start, C, H, W] on the device."""


class StoredImages:
    """uint8 images [N, C, H, W] (or floating ones on 0 to 255), normalised a block at a time."""

    def __init__(self, experiment: Experiment, images: Tensor) -> None:
        self._meta, self._device = experiment.dataset.meta, experiment.config.engine.device
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def block(self, start: int, stop: int) -> Tensor:
        """Return normalised images on the device."""
        return normalise(self._images[start:stop].to(self._device), self._meta.mean, self._meta.std)


class Forward:
    """One module in evaluation mode that takes the weights of each call."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        module = laid_out(experiment.new_module(), experiment.config.engine.device)
        self._module: Backbone = module.eval().requires_grad_(False)
        params = dict(self._module.named_parameters())
        self._values = {**params, **dict(self._module.named_buffers())}
        self._view = ModuleView(self._module, experiment.setting.network, params)
        self._size = experiment.config.evaluation.batch_size

    def with_weights(self, weights: Weights) -> Backbone:
        """Return the module with these weights; the same object for every call."""
        for name, value in with_statistics(weights, {}, self._experiment.setting).values.items():
            self._values[name].copy_(value)
        return self._module

    @torch.no_grad()
    def part(self, weights: Weights, images: Images, part: str) -> Tensor:
        """Return the output of ``encode``, ``features`` or ``logits``, [N, ...] on the device."""
        self.with_weights(weights)
        return concatenate(part_function(self._view, part)(block) for block in self._blocks(images))

    @torch.no_grad()
    def answers(
        self, weights: Weights, images: Images, ways: Mapping[str, Predict], known: Record, classes: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the scores [N, K] of every predictor, on the CPU.

        Args:
            weights: of the model. images: N of them. ways: predictors by name.
            known: on the device, and
            classes: bool [K] on the device, see :meth:`flcore.methods.api.Method.predict`.
        """
        self.with_weights(weights)
        found: dict[str, list[Tensor]] = {way: [] for way in ways}
        for block in self._blocks(images):
            model = EncodedOnce(self._view, block)
            for way, predict in ways.items():
                found[way].append(predict(model, block, known, classes).cpu())
        return {way: concatenate(blocks) for way, blocks in found.items()}

    def _blocks(self, images: Images) -> Iterator[Tensor]:
        for start in range(0, max(len(images), 1), self._size):  # one empty block without images, for the shapes
            yield images.block(start, min(start + self._size, len(images)))


@torch.no_grad()
def stacked_part(
    network: Network, weights: Sequence[Weights], images: Sequence[Images], part: str, rows: int
) -> list[Tensor]:
    """Return a part of many models at once, each over its own images: [n_k, ...] per model, on the device.

    Args:
        network: the models' architecture.
        weights: with buffers, all of the same shapes.
        images: of each model.
        part: as in :meth:`Forward.part`.
        rows: images that go through the models at a time, all models together.
    """
    order = sorted(range(len(images)), key=lambda index: -len(images[index]))
    ordered = [weights[index] for index in order]
    values = {name: torch.stack([own.values[name] for own in ordered]) for name in ordered[0].values}
    ask = torch.vmap(network_part(network, part))
    found: list[list[Tensor]] = [[] for _ in order]
    size = max(1, rows // len(order))
    for start in range(0, max(len(images[order[0]]), 1), size):
        active = max(1, sum(len(images[index]) > start for index in order))
        blocks = [images[index].block(start, min(start + size, len(images[index]))) for index in order[:active]]
        padded = torch.zeros(active, len(blocks[0]), *blocks[0].shape[1:], device=blocks[0].device)
        for rank, block in enumerate(blocks):
            padded[rank, : len(block)] = block
        answers = ask({name: value[:active] for name, value in values.items()}, padded)
        for rank, block in enumerate(blocks):
            found[rank].append(answers[rank, : len(block)])
    empty = found[0][0][:0]
    by_model = {index: concatenate(found[rank]) if found[rank] else empty for rank, index in enumerate(order)}
    return [by_model[index] for index in range(len(images))]


def part_function(model: ModuleView, part: str) -> Callable[[Tensor], Tensor]:
    """Return the function of a part's name; ``logits`` are the head's."""
    if part == "logits":
        return lambda images: model.classify(model.features(images))
    return lambda images: model.call_part(part, images, None)


def network_part(network: Network, part: str) -> Callable[[ParamDict, Tensor], Tensor]:
    """Return the same as a function of weights."""
    if part == "logits":
        return lambda values, images: network.classify(network.features(images, values), values)
    asked: Callable[[Tensor, ParamDict], Tensor] = getattr(network, part)
    return lambda values, images: asked(images, values)


def concatenate(blocks: Iterable[Tensor]) -> Tensor:
    """Concatenate blocks; return a single one as it is."""
    found = list(blocks)
    return found[0] if len(found) == 1 else torch.cat(found)

"""Forward passes apart from training: a frozen model's parts, and a method's answers, over images in batches.

Replies ask for features of a client's samples, scoring asks for answers to test images. Each model encodes each image
once, for however many ways to answer (:class:`flcore.models.view.EncodedOnce`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flcore.data.images import normalise
from flcore.experiment.experiment import Experiment
from flcore.io.messages import Weights
from flcore.io.records import Record
from flcore.methods.types import Predict, with_statistics
from flcore.models.base import Backbone, laid_out, load_weights
from flcore.models.network import Network, Values
from flcore.models.view import EncodedOnce, ModuleView


class Images(Protocol):
    """Images that a forward pass goes over, in order."""

    def __len__(self) -> int:
        """How many."""

    def block(self, start: int, stop: int) -> Tensor:
        """Normalised images [stop - start, C, H, W] on the device."""


class StoredImages:
    """uint8 images [N, C, H, W] (or floating ones on 0 to 255), normalised a block at a time."""

    def __init__(self, experiment: Experiment, images: Tensor) -> None:
        self._meta, self._device = experiment.dataset.meta, experiment.config.engine.device
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def block(self, start: int, stop: int) -> Tensor:
        """Normalised images on the device."""
        return normalise(self._images[start:stop].to(self._device), self._meta.mean, self._meta.std)


MOST_KEPT = 256 * 2**20
"""Bytes of encoders, and of what they made of images, that a module keeps for the next model with the same encoder: of
some hundred small models, or of a few large ones; a population's are never in memory at once."""


@dataclass(frozen=True)
class _Kept:
    """What an encoder made of images, by block; and the bytes that are held for it alone."""

    encoder: Values
    encoded: Sequence[Tensor]
    size: int


class Forward:
    """One module in evaluation mode, with the weights that a question is about."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        module = laid_out(experiment.new_module(), experiment.config.engine.device)
        self._module: Backbone = module.eval().requires_grad_(False)
        self._view = ModuleView(self._module, experiment.setting.network, dict(self._module.named_parameters()))
        self._size = experiment.config.evaluation.batch_size
        self._remembers = bool(experiment.method.score_before())
        self._encoded: dict[Hashable, _Kept] = {}

    def with_weights(self, weights: Weights) -> Backbone:
        """The module with these weights; the same object for every call."""
        load_weights(self._module, with_statistics(weights, {}, self._experiment.setting))
        return self._module.eval()

    @torch.no_grad()
    def part(self, weights: Weights, images: Images, part: str) -> Tensor:
        """What a part of a model (``encode``, ``features``, ``logits``) makes of images, [N, ...] on the device."""
        self.with_weights(weights)
        return joined(part_of(self._view, part)(block) for block in self._blocks(images))

    @torch.no_grad()
    def over(self, weights: Weights, images: Images, function: Callable[[Backbone, Tensor], Tensor]) -> Tensor:
        """Any function of the module and a block of normalised images, [N, ...] on the device."""
        module = self.with_weights(weights)
        return joined(function(module, block) for block in self._blocks(images))

    @torch.no_grad()
    def answers(
        self,
        weights: Weights,
        images: Images,
        ways: Mapping[str, Predict],
        server: Record,
        classes: Tensor | None,
        name: Hashable = None,
    ) -> dict[str, Tensor]:
        """Scores [N, K] of every way to answer, on the CPU.

        Args:
            weights: of the model that answers.
            images: what it is asked.
            ways: by name.
            server: what the server holds, on the device.
            classes: bool [K] on the device, see :meth:`flcore.methods.api.Method.predict`.
            name: of the images. Where a method has states scored on the way, what the encoder made of them last time is
                kept by it, if that is little: calibration and retraining leave encoders alone, so that both models
                share it.
        """
        self.with_weights(weights)
        encoder = {key: value for key, value in weights.values.items() if key.startswith("encoder.")}
        known = self._known(name, encoder)
        found: dict[str, list[Tensor]] = {way: [] for way in ways}
        encoded: list[Tensor] = []
        for number, block in enumerate(self._blocks(images)):
            model = EncodedOnce(self._view, block, known[number] if known else None)
            for way, predict in ways.items():
                found[way].append(predict(model, block, server, classes).cpu())
            if self._remembers and name is not None:
                encoded.append(model.encoded)
        if encoded:
            self._keep(name, encoder, encoded)
        return {way: joined(blocks) for way, blocks in found.items()}

    def _known(self, name: Hashable, encoder: Values) -> Sequence[Tensor]:
        """What an equal encoder made of the images of this name; nothing where another one saw them last."""
        kept = self._encoded.get(name)
        if kept is None or kept.encoder.keys() != encoder.keys():
            return []
        same = all(torch.equal(kept.encoder[key], tensor) for key, tensor in encoder.items())
        return kept.encoded if same else []

    def _keep(self, name: Hashable, encoder: Values, encoded: Sequence[Tensor]) -> None:
        """Keep this in place of what was kept by the name, within :data:`MOST_KEPT`."""
        self._encoded.pop(name, None)
        # Blocks of the same images are asked behind one another, and have one encoder between them.
        last = next(reversed(self._encoded.values()), None)
        shared = last is not None and all(last.encoder.get(key) is tensor for key, tensor in encoder.items())
        size = sum(tensor.nbytes for tensor in (*encoded, *(() if shared else encoder.values())))
        if size + sum(kept.size for kept in self._encoded.values()) <= MOST_KEPT:
            self._encoded[name] = _Kept(encoder, encoded, size)

    def _blocks(self, images: Images) -> Iterator[Tensor]:
        for start in range(0, max(len(images), 1), self._size):  # one empty block without images, for the shapes
            yield images.block(start, min(start + self._size, len(images)))


@torch.no_grad()
def stacked_part(
    network: Network, weights: Sequence[Weights], images: Sequence[Images], part: str, rows: int
) -> list[Tensor]:
    """A part of many models at once, each over images of its own: [n_k, ...] per model, on the device.

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
    by_model = {index: joined(found[rank]) if found[rank] else empty for rank, index in enumerate(order)}
    return [by_model[index] for index in range(len(images))]


def part_of(model: ModuleView, part: str) -> Callable[[Tensor], Tensor]:
    """The function of a part's name; ``logits`` are those of the head."""
    if part == "logits":
        return lambda images: model.classify(model.features(images))
    return lambda images: model.ask(part, images, None)


def network_part(network: Network, part: str) -> Callable[[Values, Tensor], Tensor]:
    """Likewise as a function of weights."""
    if part == "logits":
        return lambda values, images: network.classify(network.features(images, values), values)
    asked: Callable[[Tensor, Values], Tensor] = getattr(network, part)
    return lambda values, images: asked(images, values)


def joined(blocks: Iterable[Tensor]) -> Tensor:
    """Blocks behind one another; a single one as it is."""
    found = list(blocks)
    return found[0] if len(found) == 1 else torch.cat(found)

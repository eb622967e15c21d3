"""What the clients of a stack bring: samples, tapes and contexts, laid side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flcore.engine.local.samples import ClientImages, GivenSamples, Samples
from flcore.engine.local.tape import Tape
from flcore.errors import ConfigError
from flcore.experiment import Experiment
from flcore.methods.vocabulary import Context, Phase, Turn

StackedBatch = dict[str, Any]


"""Images, labels, noise, draws, and ``weight`` as a list of one tensor or none: vmap takes tensors only."""


class StackedSamples:
    """Samples of all clients behind one another; ``parts`` are the single clients'."""

    def __init__(
        self, experiment: Experiment, turns: Sequence[Turn], phase: Phase, contexts: Sequence[Context]
    ) -> None:
        if phase.source is None:
            indices = [experiment.training_indices(turn.client, turn.round) for turn in turns]
            self._all: Samples = ClientImages(experiment, torch.cat(indices))
            lengths = [len(own) for own in indices]
        else:
            given = [context[phase.source] for context in contexts]
            self._all = GivenSamples(
                torch.cat([own["inputs"] for own in given]), torch.cat([own["labels"] for own in given])
            )
            lengths = [len(own["labels"]) for own in given]
        self.offsets = [sum(lengths[:position]) for position in range(len(lengths))]
        self.parts: list[Samples] = [
            _Part(self._all, offset, length) for offset, length in zip(self.offsets, lengths, strict=True)
        ]

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels at rows of the whole."""
        return self._all.take(rows)


@dataclass(frozen=True)
class _Part:
    whole: Samples
    offset: int
    length: int

    def __len__(self) -> int:
        return self.length

    def take(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.whole.take(positions + self.offset)


class StackedTapes:
    """Tapes of a stack, read a step at a time."""

    def __init__(self, tapes: Sequence[Tape], samples: StackedSamples, order: Sequence[int], device: str) -> None:
        self._samples = samples
        rows = [tape.positions + samples.offsets[client] for tape, client in zip(tapes, order, strict=True)]
        self._rows = _padded(rows)
        self._noise = {site: _padded([tape.noise[site] for tape in tapes]) for site in tapes[0].noise}
        self._draws = {name: _padded([tape.draws[name] for tape in tapes]) for name in tapes[0].draws}
        names = tapes[0].augmentation
        self._augmentation = {name: _padded([tape.augmentation[name] for tape in tapes]) for name in names}

    def read(self, step: int, active: int, width: int) -> StackedBatch:
        """Images [A·W, ...], labels [A, W], noise per site [A, W, ...] and the method's draws [A, ...]."""
        images, labels = self._samples.take(self._rows[step, :active, :width].reshape(-1))
        return {
            "images": images,
            "labels": labels.reshape(active, width),
            "noise": {site: values[step, :active, :width] for site, values in self._noise.items()},
            "draws": {name: values[step, :active] for name, values in self._draws.items()},
        }

    def augmentation(self, step: int, active: int, width: int) -> dict[str, Tensor]:
        """Draws for the images, each [A·W, ...]."""
        return {name: draw[step, :active, :width].flatten(0, 1) for name, draw in self._augmentation.items()}


def _padded(parts: Sequence[Tensor]) -> Tensor:
    """[S_k, ...] of each client to [S, A, ...] with zeros behind the shorter ones; the longest comes first."""
    stacked = parts[0].new_zeros(len(parts[0]), len(parts), *parts[0].shape[1:])
    for client, part in enumerate(parts):
        stacked[: len(part), client] = part
    return stacked


class StackedContext:
    """Contexts of a stack: tensors are stacked, tensors that all clients share and plain numbers are not.

    Raises:
        ConfigError: contexts of two clients differ in names, types or shapes.
    """

    def __init__(self, contexts: Sequence[Context], turns: Sequence[Turn], method: str) -> None:
        self._refusal = f"engine.stack = true: {method} cannot be trained on stacked clients:"
        self._flat = [_flatten(context) for context in contexts]
        first = self._flat[0]
        for flat, turn in zip(self._flat, turns, strict=True):
            if flat.keys() != first.keys():
                raise ConfigError(
                    f"{self._refusal} client {turn.client}'s loss needs {sorted(flat)}, client {turns[0].client}'s "
                    f"{sorted(first)}; use engine.stack=false"
                )
        self._constants: dict[tuple[str, ...], Any] = {}
        self._names: list[tuple[str, ...]] = []
        self._tensors: list[Tensor] = []
        for name, value in first.items():
            values = [flat[name] for flat in self._flat]
            if not isinstance(value, Tensor):
                self._refuse_unless_equal(name, values)
                self._constants[name] = value
            elif all(other is value or _same(other, value) for other in values):
                self._constants[name] = value
            else:
                if any(other.shape != value.shape for other in values):
                    shapes = sorted({tuple(other.shape) for other in values})
                    raise ConfigError(
                        f"{self._refusal} {'.'.join(name)} of the loss has different shapes {shapes} at different "
                        "clients; use engine.stack=false"
                    )
                self._names.append(name)
                self._tensors.append(torch.stack(values))

    def _refuse_unless_equal(self, name: tuple[str, ...], values: Sequence[Any]) -> None:
        if any(other != values[0] for other in values):
            raise ConfigError(
                f"{self._refusal} {'.'.join(name)} of the loss is a number that differs between clients; "
                "make it a tensor, or use engine.stack=false"
            )

    def stacked(self, active: int) -> list[Tensor]:
        """What differs between clients, [A, ...] each."""
        return [tensor[:active] for tensor in self._tensors]

    def rebuild(self, own: Sequence[Tensor]) -> Context:
        """One client's context, inside vmap."""
        context: dict[str, Any] = {}
        for name, value in (*self._constants.items(), *zip(self._names, own, strict=True)):
            place = context
            for part in name[:-1]:
                place = place.setdefault(part, {})
            place[name[-1]] = value
        return context


def _same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype and torch.equal(first, second)


def _flatten(context: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    flat: dict[tuple[str, ...], Any] = {}
    for name, value in context.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, (*prefix, name))
        else:
            flat[(*prefix, name)] = value
    return flat

"""Samples, batch plans and loss inputs of a stack's clients, as stacked tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flcore.core.errors import ConfigError
from flcore.engine.local.plan import BatchPlan
from flcore.engine.local.samples import Samples, drawn_labels
from flcore.methods.types import ClientContext, LossInputs

StackedBatch = dict[str, Any]
"""Images, labels, dropout masks, draws, per-sample inputs; and ``weight`` as a list of one tensor or none, for vmap."""


Path = tuple[str, ...]
"""The keys of a value in nested mappings."""


class StackedBatches:
    """The mini-batches of a phase by step, for clients in order of their number of steps."""

    def __init__(self, plan: BatchPlan, offsets: Sequence[int], samples: Samples, device: str) -> None:
        """Take the plan of a stack's clients to the device.

        Args:
            plan: of the clients, those with most steps first. offsets: of each client's first sample in ``samples``.
            samples: of all clients. device: that trains.
        """
        self._samples = samples
        self._device = device
        self._sizes = plan.sizes
        self.steps = plan.sizes.shape[1]
        self._steps: list[int] = (plan.sizes > 0).sum(1).tolist()
        self._recorded_from = plan.recorded_from
        self._pass_numbers = plan.pass_numbers.to(device)
        self.passes = plan.passes
        self._rows = (plan.positions + torch.tensor(offsets).unsqueeze(1)).to(device)
        placed = plan.on(device)
        self._dropout_masks, self._draws, self._augmentation = placed.dropout_masks, placed.draws, placed.augmentation

    def __len__(self) -> int:
        """A, the clients of the stack."""
        return len(self._sizes)

    def steps_of(self, client: int) -> int:
        """Return the number of steps of a client."""
        return self._steps[client]

    def active(self, step: int) -> int:
        """Return the number of clients with this step; they come first."""
        return sum(steps > step for steps in self._steps)

    def read(self, step: int) -> tuple[StackedBatch, dict[str, Tensor]]:
        """Return the batch of clients still training, padded to the largest: ``images`` [A·W, ...], others by client.

        Returns:
            The batch ([A, W, ...], draws [A, ...]; a weight only where something is padded), and draws for images
            [A·W, ...].
        """
        active = self.active(step)
        sizes = self._sizes[:active, step]
        width = int(sizes.max())
        weight: list[Tensor] = []
        if int(sizes.min()) < width:
            weight = [(torch.arange(width) < sizes[:, None]).to(torch.float32).to(self._device)]
        rows = self._rows[step, :active, :width].reshape(-1)

        def by_client(values: Tensor) -> Tensor:
            return values.reshape(active, width, *values.shape[1:])

        batch = {
            "images": self._samples.inputs(rows),
            "labels": by_client(self._samples.labels.index_select(0, rows)),
            "dropout_masks": {site: values[step, :active, :width] for site, values in self._dropout_masks.items()},
            "draws": {name: values[step, :active] for name, values in self._draws.items()},
            "frozen": {
                name: by_client(rows_of.index_select(0, rows)) for name, rows_of in self._samples.tables.items()
            },
            "weight": weight,
        }
        augmentation = {name: draw[step, :active, :width].flatten(0, 1) for name, draw in self._augmentation.items()}
        return batch, augmentation

    def read_whole(self, start: int, stop: int) -> tuple[StackedBatch, dict[str, Tensor]]:
        """Return steps of all clients, padded to B: ``images`` [T·A·B, ...], the rest [T, A, B, ...].

        Images without augmentation stay uint8: the program normalises them, which saves three quarters of the bytes.

        Returns:
            The batches (draws [T, A, ...]; always a weight, [T, A, B]), and draws for images [T·A·B, ...].
        """
        chosen = slice(start, stop)
        rows = self._rows[chosen]
        flat = rows.reshape(-1)

        def by_step(values: Tensor) -> Tensor:
            return values.reshape(*rows.shape, *values.shape[1:])

        weight = torch.arange(rows.shape[2]) < self._sizes.t()[chosen].unsqueeze(2)
        batch = {
            "images": self._samples.inputs(flat) if self._augmentation else self._samples.raw_inputs(flat),
            "labels": by_step(self._samples.labels.index_select(0, flat)),
            "dropout_masks": {site: values[chosen] for site, values in self._dropout_masks.items()},
            "draws": {name: values[chosen] for name, values in self._draws.items()},
            "frozen": {name: by_step(table.index_select(0, flat)) for name, table in self._samples.tables.items()},
            "weight": [weight.to(torch.float32).to(self._device)],
        }
        return batch, {name: draw[chosen].flatten(0, 2) for name, draw in self._augmentation.items()}

    @property
    def width(self) -> int:
        """B, the most samples of a mini-batch."""
        return int(self._rows.shape[2])

    def drawn(self, num_classes: int) -> Tensor:
        """Return int64 [A, C] on the CPU: how often each class was in a client's mini-batches."""
        return drawn_labels(self._samples.labels[self._rows], self._sizes.t(), num_classes)

    def has_step(self) -> Tensor:
        """Return bool [S, A]: whether a client has a step."""
        return (self._sizes > 0).t().contiguous().to(self._device)

    def pass_numbers(self, step: int, clients: int) -> Tensor:
        """Return int64 [clients]: the pass of this step, below ``passes``."""
        return self._pass_numbers[:clients, step]

    def recording(self, step: int, clients: int) -> Tensor | None:
        """Return float [clients, 1], 1 for clients with averaged features in this step; None without any."""
        wanted = self._recorded_from[:clients] <= step
        return wanted.to(torch.float32).unsqueeze(1).to(self._device) if bool(wanted.any()) else None


class StackedContext:
    """Loss inputs of a stack, by path.

    Attributes:
        plain: values that are no tensors. shared: tensors that are equal for all clients.
        own: tensors that differ, stacked [A, ...].

    Raises:
        ConfigError: inputs of two clients differ in names, types or shapes.
    """

    def __init__(self, all_inputs: Sequence[LossInputs], contexts: Sequence[ClientContext], method: str) -> None:
        self._refusal = f"engine.stack = true: {method} cannot be trained on stacked clients:"
        self._flat = [_flatten(inputs) for inputs in all_inputs]
        first = self._flat[0]
        for flat, ctx in zip(self._flat, contexts, strict=True):
            if flat.keys() != first.keys():
                raise ConfigError(
                    f"{self._refusal} client {ctx.client}'s loss needs {sorted(flat)}, client {contexts[0].client}'s "
                    f"{sorted(first)}; use engine.stack=false"
                )
        self.plain: dict[Path, Any] = {}
        self.shared: dict[Path, Tensor] = {}
        self.own: dict[Path, Tensor] = {}
        for name, value in first.items():
            values = [flat[name] for flat in self._flat]
            if not isinstance(value, Tensor):
                self._refuse_unless_equal(name, values)
                self.plain[name] = value
            elif all(other is value or _same(other, value) for other in values):
                self.shared[name] = value
            else:
                if any(other.shape != value.shape for other in values):
                    shapes = sorted({tuple(other.shape) for other in values})
                    raise ConfigError(
                        f"{self._refusal} {'.'.join(name)} of the loss has different shapes {shapes} at different "
                        "clients; use engine.stack=false"
                    )
                self.own[name] = torch.stack(values)

    def _refuse_unless_equal(self, name: Path, values: Sequence[Any]) -> None:
        if any(other != values[0] for other in values):
            raise ConfigError(
                f"{self._refusal} {'.'.join(name)} of the loss is a number that differs between clients; "
                "make it a tensor, or use engine.stack=false"
            )

    def stacked(self, active: int) -> list[Tensor]:
        """Return the inputs that differ between clients, [A, ...] each."""
        return [tensor[:active] for tensor in self.own.values()]

    def rebuild(self, own: Sequence[Tensor]) -> LossInputs:
        """Return one client's loss inputs, inside vmap."""
        return nested({**self.plain, **self.shared, **dict(zip(self.own, own, strict=True))})


def nested(values: Mapping[Path, Any]) -> LossInputs:
    """Return nested loss inputs from values by path."""
    inputs: dict[str, Any] = {}
    for path, value in values.items():
        place = inputs
        for part in path[:-1]:
            place = place.setdefault(part, {})
        place[path[-1]] = value
    return inputs


def _same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype and torch.equal(first, second)


def _flatten(inputs: Mapping[str, Any], prefix: Path = ()) -> dict[Path, Any]:
    flat: dict[Path, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, (*prefix, name))
        else:
            flat[(*prefix, name)] = value
    return flat

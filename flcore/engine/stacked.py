"""Many clients trained at once: one step function under `torch.vmap`, parameters and buffers stacked [A, ...].

Clients of a stack are ordered by their number of steps, so that those still training are always the first ones: a
client that has finished costs nothing. A mini-batch smaller than the others is padded, and padding has weight 0 in
every loss and in BatchNorm's statistics. Losses of different clients share nothing, so the gradient of their sum is
each one's own; it is taken outside of vmap, where PyTorch's ordinary batched kernels do it.

Results agree with the serial trainer to float32 rounding, not to the bit; how clients are put into stacks depends on
the cohort alone, never on workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flcore.engine.experiment import Experiment
from flcore.engine.optimizers import clip_gradients, make_optimizer
from flcore.engine.tape import ClientImages, GivenSamples, Samples, Tape, record_tape
from flcore.engine.training import (
    ModelView,
    Outcome,
    added,
    augmented,
    class_sums,
    drawn_labels,
    loss_context,
    precision,
    refuse_single_batches,
    set_mode,
    uses_batch_statistics,
)
from flcore.errors import ConfigError
from flcore.messages import Weights
from flcore.methods.base import Batch, Context, Phase, Turn
from flcore.models import Backbone, Noise
from flcore.models.network import Bound, Network, Values


class MaskedBatchNorm(_BatchNorm):
    """BatchNorm whose batch statistics leave out padded samples; with ``mask`` None it is PyTorch's own.

    Samples behind those of the mask are none of the batch's, and count.
    """

    mask: Tensor | None

    def _check_input_dim(self, values: Tensor) -> None:
        """Inputs of 2 to 5 dimensions; what the replaced layer took."""

    def forward(self, values: Tensor) -> Tensor:
        """Normalise [B, C, ...]; in training mode with the statistics of the samples whose mask [B] is 1."""
        if self.mask is None or not self.training:
            return super().forward(values)
        over = [0, *range(2, values.ndim)]
        shape = (1, -1) + (1,) * (values.ndim - 2)
        mask = torch.cat([self.mask, self.mask.new_ones(values.shape[0] - self.mask.shape[0])])
        count = mask.sum() * (values[0, 0].numel() if values.ndim > 2 else 1)
        mask = mask.reshape((-1,) + (1,) * (values.ndim - 1))
        mean = (values * mask).sum(over) / count
        centred = values - mean.reshape(shape)
        variance = (centred.square() * mask).sum(over) / count
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            with torch.no_grad():
                unbiased = variance * (count / (count - 1).clamp_min(1))
                share = self.momentum or 0.0
                self.running_mean.mul_(1 - share).add_(mean, alpha=share)
                self.running_var.mul_(1 - share).add_(unbiased, alpha=share)
                self.num_batches_tracked.add_(1)
        normalised = centred * torch.rsqrt(variance + self.eps).reshape(shape)
        if self.weight is None:
            return normalised
        return normalised * self.weight.reshape(shape) + self.bias.reshape(shape)


def maskable(module: nn.Module) -> nn.Module:
    """Make every BatchNorm layer of a module, in place, one that knows padding."""
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            if layer.momentum is None:
                raise ConfigError("engine.stack: BatchNorm with a cumulative average cannot be stacked")
            layer.__class__ = MaskedBatchNorm
            cast(MaskedBatchNorm, layer).mask = None
    return module


class _StackedView(ModelView):
    """One client of a stack as its loss sees it."""

    def __init__(
        self,
        module: Backbone,
        network: Network,
        params: Values,
        noise: Noise | None,
        layers: Sequence[MaskedBatchNorm],
        mask: Tensor | None,
    ) -> None:
        super().__init__(module, network, params, noise)
        self._layers, self._mask = layers, mask

    def encode(self, images: Tensor, weights: Values | None = None) -> Tensor:
        self._set_mask()
        return super().encode(images, weights)

    def project(self, encoded: Tensor, weights: Values | None = None) -> Tensor:
        self._set_mask()
        return super().project(encoded, weights)

    def features(self, images: Tensor, weights: Values | None = None) -> Tensor:
        self._set_mask()
        return super().features(images, weights)

    def classify(self, features: Tensor, weights: Values | None = None) -> Tensor:
        self._set_mask()
        return super().classify(features, weights)

    def apply_extra(self, name: str, features: Tensor, weights: Values | None = None) -> Tensor:
        self._set_mask()
        return super().apply_extra(name, features, weights)

    def beside(self) -> ModelView:
        return _StackedView(self._module, self._network, self.params, None, self._layers, None)

    def _set_mask(self) -> None:
        for layer in self._layers:
            layer.mask = self._mask


_StackedBatch = dict[str, Any]
"""Images, labels, noise, draws, and ``weight`` as a list of one tensor or none: vmap takes tensors only."""


class StackedTrainer:
    """Trains the clients of a stack at once in one thread."""

    def __init__(self, experiment: Experiment) -> None:
        """Build the module whose values each step swaps for the stack's."""
        self.experiment = experiment
        self.module = deepcopy(experiment.new_module())
        self._bound = Bound(self.module)
        maskable(self.module)
        self._batchnorm_layers = [layer for layer in self.module.modules() if isinstance(layer, MaskedBatchNorm)]
        refuse_single_batches(experiment, self.module)

    def train(
        self, turns: Sequence[Turn], starts: Sequence[Weights], phases: Sequence[Phase], first_phase: int
    ) -> list[Outcome]:
        """One outcome per turn, in the order given.

        Raises:
            ConfigError: the method cannot be stacked; says why.
        """
        contexts = [self.experiment.method.context(turn) if phases else {} for turn in turns]
        params = self._stacked([start.params for start in starts])
        buffers = self._stacked([start.buffers for start in starts])
        sums: list[dict[str, float]] = [{} for _ in turns]
        counts: list[Counter[str]] = [Counter() for _ in turns]
        steps = [0] * len(turns)
        drawn = [torch.zeros(turn.setting.num_classes, dtype=torch.int64) for turn in turns]
        noted: list[tuple[Tensor, Tensor] | None] = [None for _ in turns]
        for number, phase in enumerate(phases, start=first_phase):
            set_mode(self.module, phase, self.experiment.batchnorm)
            samples = _StackedSamples(self.experiment, turns, phase, contexts)
            skip = uses_batch_statistics(self.module)
            tapes = [
                record_tape(self.experiment, self.module, turn, phase, number, len(own), skip_single=skip)
                for turn, own in zip(turns, samples.parts, strict=True)
            ]
            order = sorted(range(len(turns)), key=lambda position: -len(tapes[position]))
            place = torch.tensor(order, device=self.experiment.config.engine.device)
            arranged = {name: value.index_select(0, place) for name, value in {**params, **buffers}.items()}
            context = _StackedContext(
                [loss_context(contexts[position], phases) for position in order],
                [turns[position] for position in order],
                self.experiment.method.name,
            )
            terms, found = self._run_phase(
                phase, turns[0].round, arranged, [tapes[i] for i in order], samples, order, context
            )
            back = torch.argsort(place)
            params = {name: arranged[name].detach().index_select(0, back) for name in params}
            buffers = {name: arranged[name].index_select(0, back) for name in buffers}
            for rank, position in enumerate(order):
                tape = tapes[position]
                steps[position] += len(tape)
                drawn[position] += drawn_labels(tape, samples.parts[position], len(drawn[position]))
                noted[position] = added(noted[position], found[rank])
                for name, totals in terms.items() if len(tape) else ():
                    sums[position][name] = sums[position].get(name, 0.0) + totals[rank]
                    counts[position][name] += len(tape)
        return [
            Outcome(
                _row(params, buffers, index),
                {name: total / counts[index][name] for name, total in sums[index].items()},
                steps[index],
                drawn[index],
                noted[index],
            )
            for index in range(len(turns))
        ]

    def _stacked(self, values: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        device = self.experiment.config.engine.device
        # First to the device: a client's kept layers lie there, those of one at its first turn on the CPU still.
        return {name: torch.stack([value[name].to(device) for value in values]) for name in values[0]}

    def _run_phase(
        self,
        phase: Phase,
        round_number: int,
        values: dict[str, Tensor],
        tapes: Sequence[Tape],
        samples: _StackedSamples,
        order: Sequence[int],
        context: _StackedContext,
    ) -> tuple[dict[str, list[float]], list[tuple[Tensor, Tensor] | None]]:
        """Train one phase in place.

        Returns:
            Per client of the stack the sum over its steps of every loss term; and what it noted.
        """
        config, device = self.experiment.config, self.experiment.config.engine.device
        moving = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        optimizer = make_optimizer(config.local, round_number, config.federation.rounds)
        sums: dict[str, Tensor] = {}
        noted: list[tuple[Tensor, Tensor] | None] = [None for _ in tapes]
        sizes = torch.tensor([list(tape.sizes) + [0] * (len(tapes[0]) - len(tape)) for tape in tapes]).reshape(
            len(tapes), -1
        )
        reader = _StackedTapes(tapes, samples, order, device)
        active = len(tapes)
        for step in range(len(tapes[0])):
            still = int((sizes[:, step] > 0).sum())
            if still < active:
                optimizer.keep(still)
                active = still
            width = int(sizes[:active, step].max())
            weight: list[Tensor] = []
            if int(sizes[:active, step].min()) < width:
                weight = [(torch.arange(width) < sizes[:active, step, None]).to(torch.float32).to(device)]
            leaves = {name: values[name][:active].detach().requires_grad_(name in moving) for name in values}
            batch = reader.read(step, active, width) | {"weight": weight}
            images = augmented(self.experiment, batch["images"], reader.augmentation(step, active, width))
            batch["images"] = images.reshape(active, width, *images.shape[1:])
            noting = [rank for rank in range(active) if step >= tapes[rank].noted_from]
            with precision(self.experiment):
                terms, features = self._losses(phase, leaves, batch, context, active, noting=bool(noting))
            total = torch.stack(tuple(terms.values())).sum() if len(terms) > 1 else next(iter(terms.values())).sum()
            inputs = [leaves[name] for name in moving]
            grads = list(torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True))
            if config.local.clip is not None:
                clip_gradients(grads, config.local.clip, stacked=True)
            optimizer.step([values[name][:active] for name in moving], grads)
            for name, term in terms.items():
                if name not in sums:
                    sums[name] = torch.zeros(len(tapes), device=device)
                sums[name][:active] += term.detach().float()
            if noting:
                classes, padding = self.experiment.setting.num_classes, weight[0] if weight else None
                totals, counts = class_sums(features[0], batch["labels"], classes, padding)
                for rank in noting:
                    noted[rank] = added(noted[rank], (totals[rank], counts[rank]))
        return {name: total.tolist() for name, total in sums.items()}, noted

    def _losses(
        self,
        phase: Phase,
        values: Mapping[str, Tensor],
        batch: _StackedBatch,
        context: _StackedContext,
        active: int,
        *,
        noting: bool,
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Every loss term of one step, [A], and if asked the features that were noted, [A, B, d].

        Running statistics in ``values`` move in place.
        """
        method = self.experiment.method
        loss = phase.loss or method.loss
        network = self.experiment.setting.network
        parameters = [name for name, _ in self.module.named_parameters()]

        def one_client(
            values: Mapping[str, Tensor], batch: _StackedBatch, own: Sequence[Tensor]
        ) -> tuple[dict[str, Tensor], list[Tensor]]:
            (weight,) = batch["weight"] or (None,)
            params = {name: values[name] for name in parameters}
            seen = Batch(batch["images"], batch["labels"], weight, batch["draws"])

            def run(module: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
                noise = batch["noise"] or None
                view = _StackedView(module, network, params, noise, self._batchnorm_layers, weight)
                terms = loss(view, seen, context.rebuild(own))
                return terms, [view.take_noted(method.name)] if noting else []

            return self._bound.call(values, run)

        try:
            found: tuple[dict[str, Tensor], list[Tensor]] = torch.vmap(one_client)(
                values, batch, context.stacked(active)
            )
        except (RuntimeError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            first = str(error).splitlines()[0]
            raise ConfigError(
                f"engine.stack = true: {self.experiment.method.name} cannot be trained on stacked clients with "
                f"{self.experiment.config.model_spec.name} ({first}); use engine.stack=false"
            ) from error
        finally:
            for layer in self._batchnorm_layers:
                layer.mask = None
        return found


class _StackedSamples:
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


class _StackedTapes:
    """Tapes of a stack, read a step at a time."""

    def __init__(self, tapes: Sequence[Tape], samples: _StackedSamples, order: Sequence[int], device: str) -> None:
        self._samples = samples
        rows = [tape.positions + samples.offsets[client] for tape, client in zip(tapes, order, strict=True)]
        self._rows = _padded(rows)
        self._noise = {site: _padded([tape.noise[site] for tape in tapes]) for site in tapes[0].noise}
        self._draws = {name: _padded([tape.draws[name] for tape in tapes]) for name in tapes[0].draws}
        names = tapes[0].augmentation
        self._augmentation = {name: _padded([tape.augmentation[name] for tape in tapes]) for name in names}

    def read(self, step: int, active: int, width: int) -> _StackedBatch:
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


class _StackedContext:
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


def _row(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], index: int) -> Weights:
    def own(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value[index].to("cpu", copy=True) for name, value in values.items()}

    return Weights(own(params), own(buffers))

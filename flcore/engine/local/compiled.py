"""Local training by compiled steps: of one client on a CPU, of a stack on a GPU.

On a CPU intermediate tensors stay in the cache, clients with fewer steps cost nothing, and a call costs microseconds:
stacking would only add passes over larger tensors.

Results agree with the serial trainer to float32 rounding, and are the same bytes wherever the same program runs. A step
that cannot be compiled runs serially or in its stack.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from flcore.config.schema import Config
from flcore.core.errors import ConfigError
from flcore.core.host import CACHE_VARIABLE
from flcore.data.images import scale_and_shift
from flcore.engine.cohort import program_stack
from flcore.engine.local.compiler import Compiler, compiler_missing
from flcore.engine.local.convolution import use_im2col
from flcore.engine.local.cuda_graph import CudaGraphCompiler, has_triton
from flcore.engine.local.program import NotCompilableError, Program, StepCompiler, default_folder
from flcore.engine.local.serial import SerialTrainer, TrainJob, TrainResult
from flcore.engine.local.stacked import Recorded, StackedTrainer
from flcore.engine.local.stacked_inputs import Path, StackedBatches, StackedContext
from flcore.engine.local.step import Step, add_class_sums, augmented, build_steps, by_pass, qualified_name
from flcore.engine.local.step_function import StepFunction
from flcore.experiment.experiment import Experiment
from flcore.experiment.provenance import step_fingerprint
from flcore.io import disk
from flcore.math.prototypes.class_means import class_sums
from flcore.methods.types import Phase

logger = logging.getLogger(__name__)

_GATHERED_BYTES = {"cpu": 16 * 2**20, "cuda": 512 * 2**20}
"""Mini-batches gathered at once: what a cache holds; on a GPU as few kernels as possible."""


class CompiledTrainer(StackedTrainer):
    """Trains with compiled steps: clients one after the other, or stacks at once."""

    def __init__(self, experiment: Experiment, step_compiler: StepCompiler | None = None) -> None:
        """Build the module; ``step_compiler`` replaces the run's own."""
        super().__init__(experiment)
        device = experiment.config.engine.device
        use_im2col(self.module, device)
        self._step_compiler = step_compiler or _step_compiler(experiment)
        self._programs: dict[str, Program] = {}
        self.refused: set[str] = set()
        self._otherwise = StackedTrainer(experiment) if experiment.stacked else SerialTrainer(experiment)
        self._run_key = _key_parts(experiment)
        meta = experiment.dataset.meta
        self._scaling: dict[Path, Tensor] = dict(
            zip((("scale",), ("shift",)), scale_and_shift(meta.mean, meta.std, device), strict=True)
        )

    def train(self, training: TrainJob) -> list[TrainResult]:
        if self.experiment.stacked:
            return self._train(training)
        return [outcome for place in range(len(training.contexts)) for outcome in self._train(training.of([place]))]

    def _train(self, training: TrainJob) -> list[TrainResult]:
        try:
            return super().train(training)
        except NotCompilableError as error:
            # All phases train again in the other way. The choice depends on the method's code alone, so it is the same
            # in every process.
            reason = str(error)
            if reason not in self.refused:
                self.refused.add(reason)
                logger.warning("engine.compile: %s is not compiled (%s)", self.experiment.method.name, reason)
            return self._otherwise.train(training)

    def _run_phase(
        self,
        phase: Phase,
        round_number: int,
        values: dict[str, Tensor],
        batches: StackedBatches,
        inputs: StackedContext,
    ) -> tuple[dict[str, list[float]], Recorded | None]:
        if batches.steps == 0:
            return {}, None
        stacked, device = self.experiment.stacked, self.experiment.config.engine.device
        updates = build_steps(self.experiment, self.module, phase, round_number)
        recording = phase.record_features != "none"
        plain, constant = _constants(inputs, device)
        missing = program_stack(self.experiment, len(batches)) - len(batches) if stacked else 0
        constant = {
            path: _filled_up(tensor, missing, 0) if path[0] == "own" else tensor for path, tensor in constant.items()
        }
        # Without missing rows views of the stack's rows: the program updates them in place.
        trained = {name: _filled_up(value, missing, 0) for name, value in values.items()}
        held: dict[Path, Tensor] = {("value", name): value if stacked else value[0] for name, value in trained.items()}
        memory = {
            ("memory", str(owner), str(number)): tensor
            for owner, update in enumerate(updates)
            for number, tensor in enumerate(update.optimizer.memory([held["value", name] for name in update.names]))
        }
        held |= memory | constant | self._scaling
        rates = [update.optimizer.rates(batches.steps).to(device) for update in updates]
        carried, number = list(held.values()), 0
        program: Program | None = None
        outputs: list[list[Tensor]] = []
        recorded: Recorded | None = None
        for paths, inputs_by_step in self._step_inputs(batches, rates, missing):
            if program is None:
                step_function = StepFunction(self.loss, updates, plain, stacked, recording)
                num_mutated = len(values) + len(memory)
                program = self._program(
                    phase, step_function, held | dict(zip(paths, inputs_by_step[0], strict=True)), num_mutated
                )
            for step_inputs in inputs_by_step:
                found = program.run(carried, step_inputs)
                terms = found[: len(program.terms)]
                outputs.append([term[: len(batches)] for term in terms] if missing else terms)
                wanted = batches.recording(number, len(batches)) if recording else None
                if wanted is not None:
                    own = self._recorded(found[-1], dict(zip(paths, step_inputs, strict=True)), wanted)
                    if phase.record_features == "passes":
                        own = by_pass(own, batches.pass_numbers(number, len(batches)), batches.passes)
                    recorded = add_class_sums(recorded, own)
                number += 1
        assert program is not None
        program.finish()
        for name, value in values.items() if missing else ():
            value.copy_(trained[name][: len(value)])
        return self._sums(program.terms, outputs, batches), recorded

    def _step_inputs(
        self, batches: StackedBatches, rates: Sequence[Tensor], missing: int
    ) -> Iterator[tuple[list[Path], list[tuple[Tensor, ...]]]]:
        """Yield the inputs of each step, some steps at a time: their order, and the tensors by step.

        ``missing`` rows without steps are added to a stack.
        """
        alive = batches.has_step()
        a_step = 4 * len(batches) * batches.width * math.prod(self.experiment.dataset.meta.shape)
        at_once = max(1, _GATHERED_BYTES[self.experiment.config.engine.device] // a_step)
        for start in range(0, batches.steps, at_once):
            chosen = slice(start, min(start + at_once, batches.steps))
            batch, augmentation = batches.read_whole(chosen.start, chosen.stop)
            images = augmented(self.experiment, batch["images"], augmentation)
            labels = batch["labels"]
            found: dict[Path, Tensor] = {
                ("images",): images.reshape(*labels.shape, *images.shape[1:]),
                ("labels",): labels,
                ("weight",): batch["weight"][0],
            }
            for kind, name in (("drop", "dropout_masks"), ("draw", "draws"), ("frozen", "frozen")):
                found |= {(kind, key): tensor for key, tensor in batch[name].items()}
            if self.experiment.stacked:
                found["alive",] = alive[chosen]
                found = {path: _filled_up(tensor, missing, 1) for path, tensor in found.items()}
                found["alive",][:, len(batches) :] = False
            else:
                found = {path: tensor[:, 0] for path, tensor in found.items()}
            found |= {("rates", str(owner)): own[chosen] for owner, own in enumerate(rates)}
            by_path = [tensor.contiguous().unbind(0) for tensor in found.values()]
            yield list(found), list(zip(*by_path, strict=True))

    def _program(
        self, phase: Phase, function: StepFunction, example: Mapping[Path, Tensor], num_mutated: int
    ) -> Program:
        """Return the program of a phase; its key has everything that a step depends on except tensors.

        Raises:
            NotCompilableError: it cannot be one.
        """
        key = self._key_parts(phase, function, list(example))
        name = repr((key, [(tensor.dtype, tuple(tensor.shape)) for tensor in example.values()]))
        if name not in self._programs:
            paths = list(example)

            def by_position(tensors: Sequence[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
                return function(dict(zip(paths, tensors, strict=True)))

            try:
                self._programs[name] = self._step_compiler.make(by_position, list(example.values()), num_mutated, key)
            finally:
                self.loss.forget_masks()
        return self._programs[name]

    def _key_parts(self, phase: Phase, function: StepFunction, paths: list[Path]) -> dict[str, Any]:
        plain = {".".join(path): repr(value) for path, value in function.plain.items()}
        for (name, text), value in zip(plain.items(), function.plain.values(), strict=True):
            if " at 0x" in text or isinstance(value, nn.Module):  # a module does not say its weights
                raise NotCompilableError(f"{name} of its context is an object without a name of its own")
        return {
            **self._run_key,
            "phase": [list(phase.trainable), phase.source, phase.record_features],
            "moves": [_described(update) for update in function.updates],
            "training": [name for name, module in self.module.named_modules() if module.training],
            "plain": plain,
            "stacked": function.stacked,
            "inputs": [list(path) for path in paths],
        }

    def _recorded(self, features: Tensor, step_inputs: Mapping[Path, Tensor], wanted: Tensor) -> Recorded:
        """Return the recorded features of a step, [A, C, d] and [A, C]."""
        labels, weight = step_inputs["labels",], step_inputs["weight",]
        if not self.experiment.stacked:
            features, labels, weight = (tensor.unsqueeze(0) for tensor in (features, labels, weight))
        features, labels, weight = (tensor[: len(wanted)] for tensor in (features, labels, weight))
        weight = wanted * weight
        # Features of a client without this step may be NaN: BatchNorm has no sample.
        features = torch.where(weight.unsqueeze(-1) > 0, features, 0.0)
        return class_sums(features, labels, self.experiment.setting.num_classes, weight)

    def _sums(
        self, terms: Sequence[str], outputs: Sequence[Sequence[Tensor]], batches: StackedBatches
    ) -> dict[str, list[float]]:
        sums: dict[str, list[float]] = {}
        for name, values in zip(terms, zip(*outputs, strict=True), strict=True):
            by_step = torch.stack(values).float().reshape(batches.steps, len(batches))
            if self.experiment.stacked:
                by_step = torch.where(batches.has_step(), by_step, 0.0)
            sums[name] = by_step.sum(0).tolist()
        return sums


def _filled_up(tensor: Tensor, missing: int, dim: int) -> Tensor:
    """Return a stack with ``missing`` more clients along ``dim``, copies of the first; itself if none is missing."""
    if not missing:
        return tensor
    first = tensor.narrow(dim, 0, 1)
    return torch.cat([tensor, *[first] * missing], dim)


def _described(update: Step) -> list[Any]:
    """Return the constants of an update that a step depends on; learning rates are tensors."""
    optimizer = copy(update.optimizer)
    optimizer.lr = 0.0
    moved_by = repr(optimizer)
    if " at 0x" in moved_by:
        raise NotCompilableError(f"its optimizer {type(optimizer).__qualname__} does not say its values")
    return [list(update.names), _named("loss", update.loss), _named("perturb", update.perturb), moved_by]


def _named(role: str, function: object) -> str:
    """Return the cache key of a loss or a perturbation."""
    name = qualified_name(function)
    if name is None:
        called = getattr(function, "__qualname__", type(function).__qualname__)
        raise NotCompilableError(
            f"its {role} {called} has no name of its own; make it a method, or a function of its module"
        )
    return name


def refuse_missing_compiler(config: Config) -> None:
    """Refuse a run with compiled steps on a machine without their compiler: other steps end with other bytes.

    Raises:
        ConfigError: names the compiler, and the setting that trains without it; or the folder of compiled steps, if it
            cannot be made.
    """
    engine = config.engine
    if engine.compile != "default":
        return
    on_gpu = engine.device == "cuda"
    missing = (None if has_triton() else "no Triton on this machine") if on_gpu else compiler_missing()
    if missing:
        raise ConfigError(
            f"engine.compile: this run compiles its steps, and there is {missing}; install one, or set engine.compile="
            f"{'graph' if on_gpu else 'none'}, which is another run and needs another folder"
        )
    folder = default_folder()
    try:
        disk.make_folder(folder)
    except OSError as error:
        raise ConfigError(
            f"engine.compile: {folder}, where compiled steps are kept, cannot be made ({error.strerror}); name another "
            f"cache folder in {CACHE_VARIABLE}"
        ) from error


def _step_compiler(experiment: Experiment) -> StepCompiler:
    """Return the compiler of a run's programs."""
    if experiment.config.engine.device == "cuda":
        return CudaGraphCompiler(fuse=experiment.config.engine.compile == "default")
    return Compiler(default_folder())


def _key_parts(experiment: Experiment) -> dict[str, Any]:
    """Return the constants that every step of a run depends on."""
    mapping = experiment.config.to_mapping()
    chosen = ("optimizer", "momentum", "weight_decay", "clip", "batch_size")
    return {
        "code": step_fingerprint(experiment.config),
        "method": mapping["method"],
        "model": mapping["model"],
        "batchnorm": experiment.batchnorm,
        "local": {name: mapping["local"][name] for name in chosen},
        "precision": experiment.config.engine.precision,
        "setting": [experiment.setting.num_classes, list(experiment.setting.image_shape)],
    }


def _constants(inputs: StackedContext, device: str) -> tuple[dict[Path, Any], dict[Path, Tensor]]:
    """Split loss inputs into a program's constants and its inputs; numbers change with rounds and are inputs."""
    numbers = {path: value for path, value in inputs.plain.items() if isinstance(value, float)}
    plain = {path: value for path, value in inputs.plain.items() if path not in numbers}
    found = {
        ("number", *path): torch.tensor(value, dtype=torch.float32, device=device) for path, value in numbers.items()
    }
    found |= {("shared", *path): tensor.contiguous() for path, tensor in inputs.shared.items()}
    return plain, found | {("own", *path): tensor.contiguous() for path, tensor in inputs.own.items()}

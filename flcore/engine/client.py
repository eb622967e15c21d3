"""A client's work in an exchange: receive, train, reply; for one client, or for a stack of them at once.

All state comes in and goes out as records: nothing of one client reaches the next.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flcore.engine.client_data import ClientData
from flcore.engine.exchange import ExchangeWork, Failure, Reply, round_context
from flcore.engine.failures import ClientError, client_step, misfit
from flcore.engine.local.compiled import CompiledTrainer
from flcore.engine.local.plan import planned_steps
from flcore.engine.local.serial import SerialTrainer, Trainer, TrainJob, TrainResult
from flcore.engine.local.stacked import StackedTrainer
from flcore.engine.local.step import learning_rate
from flcore.evaluation.forward import Forward, stacked_part
from flcore.evaluation.model_selection import ClientStates
from flcore.experiment.experiment import Experiment
from flcore.experiment.traffic import outgoing
from flcore.io.messages import Payload, Prototypes, Weights, all_finite, flat
from flcore.io.records import Payloads, Record, SharedOnDevice, on_device
from flcore.methods.types import BATCHNORM, MODEL, PRIVATE, ClientContext, Exchange

Outcome = tuple[Reply, Record] | Failure
"""A client's reply and its state, or its failure."""


def make_trainer(experiment: Experiment) -> Trainer:
    """Return the run's trainer: serial, stacked or compiled."""
    if experiment.compiled:
        return CompiledTrainer(experiment)
    return StackedTrainer(experiment) if experiment.stacked else SerialTrainer(experiment)


class ClientRunner:
    """Trains clients in this process, on one intra-op thread."""

    def __init__(self, experiment: Experiment, trainer: Trainer | None = None) -> None:
        """Build the modules; ``trainer`` replaces the run's own."""
        self.experiment = experiment
        self._trainer = trainer or make_trainer(experiment)
        self._forward = Forward(experiment)
        # Clients share the tensor objects of a broadcast: shared ones are not stacked.
        self._received = SharedOnDevice(experiment.config.engine.device)
        setting = experiment.setting
        # On the run's device: methods mix the initial weights with what clients receive.
        initial = self._on_device({MODEL: setting.initial})[MODEL]
        self._setting = setting if initial is setting.initial else replace(setting, initial=initial)

    def train(self, work: ExchangeWork, clients: Sequence[int], client_states: ClientStates) -> dict[int, Outcome]:
        """Train a stack of clients in one exchange.

        Args:
            work: the exchange.
            clients: ids; more than one only where clients are stacked.
            client_states: client id to its state; empty at first.

        Raises:
            ClientError: an error of the whole stack, or of the machine.
        """
        experiment, method = self.experiment, self.experiment.method
        exchanges = method.round_exchanges(work.round, experiment.setting)
        exchange = exchanges[work.index]
        with client_step(work, clients, "receive"):
            received = self._received.of(work.received[client] for client in clients)
            contexts = self.contexts(work.round, exchange, clients, received, [*map(client_states, clients)])
            starts = [ctx.with_statistics(method.initial_weights(ctx)) for ctx in contexts]
            data = ClientData.of(experiment, clients, work.round)
        began = time.perf_counter()
        with client_step(work, clients, "local training"):
            before = sum(len(earlier.phases) for earlier in exchanges[: work.index])
            if exchange.phases:
                tables = self.tables(contexts, data, exchange)
                job = TrainJob(contexts, data, starts, exchange.phases, before, tables)
                outcomes = self._trainer.train(job)
            else:
                nothing = torch.zeros(experiment.setting.num_classes, dtype=torch.int64)
                outcomes = [TrainResult(start, {}, 0, nothing) for start in starts]
        trained_seconds = _shares(time.perf_counter() - began, [outcome.steps for outcome in outcomes])
        passes = _Passes(self._forward, experiment, data, [outcome.weights for outcome in outcomes])
        answers: dict[int, _Answer | Failure] = {}
        for index, (ctx, outcome) in enumerate(zip(contexts, outcomes, strict=True)):
            trained = _Trained(passes, index, outcome)
            began = time.perf_counter()
            try:
                with client_step(work, [ctx.client], "reply"):
                    answer = self._answer(ctx, outcome, trained, trains=bool(exchange.phases))
            except ClientError as error:
                if error.is_the_machines:
                    raise
                answer = error.failure
            if isinstance(answer, _Answer):
                answer.seconds = trained_seconds[index] + time.perf_counter() - began
            answers[ctx.client] = answer
        with client_step(work, clients, "reply"):
            finite = _all_finite([answer for answer in answers.values() if isinstance(answer, _Answer)])
            return {
                client: answer if isinstance(answer, Failure) else answer.checked(finite=finite)
                for client, answer in answers.items()
            }

    def _on_device(self, record: Payloads) -> Record:
        """Return a record on the run's device."""
        device = self.experiment.config.engine.device
        if device == "cpu" and isinstance(record, Record):
            return record
        return on_device(record, device)

    def contexts(
        self,
        round_number: int,
        exchange: Exchange,
        clients: Sequence[int],
        received: Sequence[Record],
        client_states: Sequence[Record],
    ) -> list[ClientContext]:
        """Return the contexts of clients, with their messages, which are on the device, and their states."""
        experiment = self.experiment
        config = experiment.config
        ctx = round_context(experiment.method, self._setting, round_number, exchange)
        shared: dict[str, Any] = {
            **vars(ctx),
            "task": experiment.task(round_number),
            "task_visit": experiment.stream.task_visit(round_number),
            "learning_rate": learning_rate(config.local, round_number, config.federation.rounds),
            "momentum": config.local.momentum,
        }
        return [
            ClientContext(
                **shared,
                client=client,
                class_counts=experiment.label_counts(client, round_number),
                received=message,
                client_state=self._on_device(client_state),
                task_counts=experiment.task_counts(client),
            )
            for client, message, client_state in zip(clients, received, client_states, strict=True)
        ]

    def ctx(
        self, round_number: int, exchange: Exchange, client: int, received: Record, client_state: Record
    ) -> ClientContext:
        """Return the context of one client, as :meth:`contexts`."""
        return self.contexts(round_number, exchange, [client], [received], [client_state])[0]

    def tables(
        self, contexts: Sequence[ClientContext], data: Sequence[ClientData], exchange: Exchange
    ) -> Mapping[str, list[Tensor]]:
        """Return the per-sample inputs, and teachers' outputs where they are constant and cheaper than in every step.

        Args:
            contexts: of the clients. data: their samples. exchange: in which they train.

        Returns:
            By name and client [n_k, ...], on the device.

        Raises:
            ValueError: a client's table has not one row per sample.
        """
        method = self.experiment.method
        by_client = [method.per_sample_inputs(ctx) for ctx in contexts]
        for ctx, samples, tables in zip(contexts, data, by_client, strict=True):
            for name, rows in tables.items():
                if len(rows) != len(samples):
                    raise ValueError(f"client {ctx.client} has {len(rows)} rows of {name} for {len(samples)} samples")
        tables_of = {name: [tables[name] for tables in by_client] for name in by_client[0]}
        teachers = [method.teachers(ctx) for ctx in contexts]
        if teachers[0] and self._runs_teachers_once(data, exchange):
            for name in teachers[0]:
                models = [of_client[name] for of_client in teachers]
                tables_of[name] = [
                    self._forward.part(weights, samples, part)
                    for samples, (part, weights) in zip(data, models, strict=True)
                ]
        return tables_of

    def _runs_teachers_once(self, data: Sequence[ClientData], exchange: Exchange) -> bool:
        """Return whether teachers run once per sample: images are constant and used more than once."""
        config = self.experiment.config
        visits = sum(planned_steps(len(samples), config.local, phase) for samples in data for phase in exchange.phases)
        return config.data.augmentation == "none" and visits * config.local.batch_size >= sum(map(len, data))

    def _answer(
        self, ctx: ClientContext, outcome: TrainResult, trained: _Trained, *, trains: bool
    ) -> _Answer | Failure:
        experiment = self.experiment
        cause = _not_finite(outcome)
        if cause is not None:
            return Failure(cause, "local training")
        message, state = experiment.method.reply(ctx, trained)
        message = experiment.poisoning.message(message, ctx)
        model = state.get(MODEL)
        has_statistics = isinstance(model, Weights) and bool(model.buffers)
        if experiment.batchnorm == "local" and outcome.weights.buffers and not has_statistics:
            state = {**state, BATCHNORM: Weights({}, outcome.weights.buffers)}
        if experiment.keeps_private_models:
            state = {**state, **_private_model(state, ctx.client_state, outcome.weights if trains else None)}
        sent, kept = _answered(outgoing(message, experiment)), _answered(state)
        # Trained weights were already checked for NaN.
        unchecked = [kept[name] for name, payload in state.items() if payload is not outcome.weights]
        unchecked += [sent[name] for name, payload in message.items() if payload is not outcome.weights]
        return _Answer(ctx, outcome, sent, kept, unchecked)


@dataclass
class _Answer:
    """A client's message and state before they are checked.

    Attributes:
        ctx: of the client. outcome: of its training. message, state: on the CPU.
        unchecked: payloads that may hold NaN. seconds: of training and replying.
    """

    ctx: ClientContext
    outcome: TrainResult
    message: Record
    state: Record
    unchecked: Sequence[Payload]
    seconds: float = 0.0

    def checked(self, *, finite: bool) -> Outcome:
        """Return the client's result; ``finite``: all payloads are known to be."""
        for name, payload in (*self.state.items(), *self.message.items()) if not finite else ():
            if not all_finite(payload.tensors()):
                cure = "lower local.lr or the weight of the growing term, or set local.clip=5"
                return Failure(f"{name} in its reply is not finite; {cure}", "reply")
        for name, payload in self.message.items():
            unfit = misfit(payload, self.ctx.received.get(name))
            if unfit is not None:
                return Failure(f"its {name} {unfit}", "reply")
        outcome = self.outcome
        reply = Reply(self.message, outcome.losses, outcome.steps, bool(self.state), self.seconds)
        return reply, self.state


def _answered(record: Payloads) -> Record:
    """Return a record of an answer on the CPU, in row-major order."""
    return Record({name: payload.to("cpu").row_major() for name, payload in record.items()})


def _all_finite(answers: Sequence[_Answer]) -> bool:
    """Return whether all unchecked values of a stack's answers are finite, by one look at them together."""
    tensors = [tensor for answer in answers for payload in answer.unchecked for tensor in payload.tensors()]
    floating = [tensor for tensor in tensors if tensor.dtype == torch.float32]
    others = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.dtype != torch.float32]
    return all_finite([*([flat(floating)] if floating else []), *others])


def _shares(seconds: float, steps: Sequence[int]) -> list[float]:
    """Return a stack's seconds by client, in proportion to steps; equal parts without any step."""
    total = sum(steps)
    return [seconds * count / total if total else seconds / len(steps) for count in steps]


class _Passes:
    """Forward passes for the replies of a stack.

    A GPU runs a stack's models together. On a CPU one after the other is faster: ten clients of 640 images take 1.3
    (fedproto_cnn) to 3 times (fedgen_cnn) as long in a stack.
    """

    def __init__(
        self, forward: Forward, experiment: Experiment, data: Sequence[ClientData], weights: Sequence[Weights]
    ) -> None:
        self.experiment, self.data = experiment, data
        self._forward, self._weights = forward, weights
        self._stacked: dict[str, list[Tensor]] = {}

    def of(self, index: int, part: str, weights: Weights | None) -> tuple[Tensor, Tensor]:
        data = self.data[index]
        if weights is not None or len(self.data) == 1 or data.labels.device.type == "cpu":
            chosen = self._weights[index] if weights is None else weights
            return self._forward.part(chosen, data, part), data.labels
        if part not in self._stacked:
            network = self.experiment.setting.network
            rows = self.experiment.config.evaluation.batch_size
            self._stacked[part] = stacked_part(network, self._weights, self.data, part, rows)
        return self._stacked[part][index], data.labels


class _Trained:
    """A client after local training, for :meth:`flcore.methods.api.Method.reply`."""

    def __init__(self, passes: _Passes, index: int, outcome: TrainResult) -> None:
        self._passes, self._index, self._outcome, self._data = passes, index, outcome, passes.data[index]
        self.weights, self.steps, self.num_samples = outcome.weights, outcome.steps, len(self._data)

    def images(self, rows: int) -> Iterator[Tensor]:
        length = len(self._data)
        return (self._data.block(start, min(start + rows, length)) for start in range(0, length, rows))

    def labels(self) -> Tensor:
        return self._data.labels

    def features(self, weights: Weights | None = None) -> tuple[Tensor, Tensor]:
        return self._passes.of(self._index, "features", weights)

    def encoded(self, weights: Weights | None = None) -> tuple[Tensor, Tensor]:
        return self._passes.of(self._index, "encode", weights)

    def drawn_labels(self) -> Tensor:
        return self._outcome.drawn

    def recorded_means(self) -> Prototypes:
        setting = self._passes.experiment.setting
        if self._outcome.recorded is None:
            return Prototypes.empty(setting.num_classes, setting.feature_dim)
        sums, counts = self._outcome.recorded
        return Prototypes((sums / counts.clamp_min(1).unsqueeze(1)).float(), counts > 0)

    def recorded_passes(self) -> tuple[Tensor, Tensor]:
        if self._outcome.recorded is None:
            setting = self._passes.experiment.setting
            nothing = torch.zeros(0, setting.num_classes, setting.feature_dim, device=setting.device)
            return nothing, nothing[..., 0] > 0
        sums, counts = self._outcome.recorded
        return (sums / counts.clamp_min(1).unsqueeze(-1)).float(), counts > 0


def _private_model(state: Payloads, client_state: Record, trained: Weights | None) -> dict[str, Payload]:
    """Return the client's own model to keep; nothing if the method keeps that model itself."""
    if trained is None:
        return {PRIVATE: client_state[PRIVATE]} if PRIVATE in client_state else {}
    return {} if state.get(MODEL) is trained else {PRIVATE: trained}


def _not_finite(outcome: TrainResult) -> str | None:
    """Return why a client's result must not be averaged or kept; None: it is finite."""
    fine = all_finite(outcome.weights.values.values()) if outcome.finite is None else outcome.finite
    if fine and all(math.isfinite(value) for value in outcome.losses.values()):
        return None
    terms = ", ".join(f"{name} {value:.3g}" for name, value in outcome.losses.items())
    return f"training diverged (mean loss: {terms}); lower local.lr or the weight of the growing term"

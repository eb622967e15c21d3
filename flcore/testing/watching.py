"""A watched method: its messages and its side effects."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree

from flcore.io.records import Record
from flcore.methods.api import Method


class Recording:
    """Messages of a run, and side effects of its method."""

    def __init__(self, *, purity: bool = True) -> None:
        self.purity = purity  # values cannot be read in the loss of a stack
        self.down: dict[tuple[int, str, int], Record] = {}
        self.up: dict[tuple[int, str, int], Record] = {}
        self.impure: list[str] = []

    def watch(self, method: Method) -> Method:
        """Return a watched copy of a method."""
        cls = type(method)
        recording = self

        def broadcast(self: Method, server: Record, client: int, ctx: Any) -> Any:
            with recording.pure("broadcast", server):
                message = cls.broadcast(self, server, client, ctx)
            recording.down[ctx.round, ctx.exchange, client] = Record(message)
            return message

        def scoring_message(self: Method, server: Record, client: int, ctx: Any) -> Any:
            return method.scoring_message(server, client, ctx)  # may be a broadcast, which does not count as one here

        def reply(self: Method, ctx: Any, trained: Any) -> Any:
            with recording.pure("reply", ctx.received, ctx.client_state):
                message, client_state = cls.reply(self, ctx, trained)
            recording.up[ctx.round, ctx.exchange, ctx.client] = Record(message)
            return message, client_state

        def loss(self: Method, model: Any, batch: Any, context: Any) -> Any:
            with recording.pure("loss", vars(batch), context):
                return cls.loss(self, model, batch, context)

        def server_steps(self: Method) -> Any:
            return {name: recording.watched_step(name, step) for name, step in cls.server_steps(self).items()}

        names = {
            "broadcast": broadcast,
            "scoring_message": scoring_message,
            "reply": reply,
            "loss": loss,
            "server_steps": server_steps,
        }
        made = type(cls.__name__, (cls,), {**names, "__module__": cls.__module__, "__doc__": cls.__doc__})
        values = {field.name: getattr(method, field.name) for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]  # a method is a dataclass
        return made(**values)

    def watched_step(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def watched(server: Record, replies: Any, ctx: Any) -> Any:
            with self.pure(f"the server's {name}", server, dict(replies)):
                return step(server, replies, ctx)

        return watched

    def pure(self, what: str, *inputs: Any) -> AbstractContextManager[None]:
        return _Pure(self.impure, what, inputs) if self.purity else nullcontext()


class _Pure(AbstractContextManager[None]):
    """Notes changes of inputs, and draws from global generators."""

    def __init__(self, noted: list[str], what: str, inputs: Any) -> None:
        self.noted, self.what, self.inputs = noted, what, inputs

    def __enter__(self) -> None:
        self.before = [tensor.detach().clone() for tensor in _tensors(self.inputs)]
        self.streams = _global_streams()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        after = _tensors(self.inputs)
        changed = len(after) != len(self.before) or any(
            not torch.equal(one, two.detach()) for one, two in zip(self.before, after, strict=True)
        )
        if changed:
            self.noted.append(f"{self.what} changes a tensor that it is given")
        if self.streams != _global_streams():
            self.noted.append(f"{self.what} draws from a global random generator")


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Record):
        return [tensor for payload in values.values() for tensor in payload.arrays().values()]
    if isinstance(values, Mapping):
        return [tensor for value in values.values() for tensor in _tensors(value)]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in _tensors(value)]
    return [leaf for leaf in _pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _global_streams() -> tuple[bytes, bytes, Any]:
    of_numpy = np.random.get_state(legacy=False)["state"]
    return torch.get_rng_state().numpy().tobytes(), of_numpy["key"].tobytes(), (of_numpy["pos"], random.getstate())

"""The checks of methods: ours pass, and a method with one fault fails the check that is about it, in one line."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from flcore.io.messages import Count, Size, Weights
from flcore.io.records import Payloads, Record
from flcore.methods import METHODS
from flcore.methods.fedavg import FedAvg
from flcore.methods.fedprox import FedProx
from flcore.methods.types import MODEL, Batch, ClientContext, LocalModel, LossInputs, RoundContext, TrainedClient
from flcore.testing import CHECKS, CheckError, check_method
from tests.cases import SMALL, quick

# A state of client and server.
QUICK = {"scaffold"}
PATCHES = {"model": {"name": "patch_dictionary", "atoms": 6, "patch": 5, "grid": 2}}
SETTINGS: Mapping[str, Mapping[str, Any]] = {"protolda": PATCHES, "protolda_blocks": PATCHES}
SKIP: Mapping[str, set[str]] = {name: {"stacks"} for name in ("fedavg_q", "protolda_distilled")}  # codes of few bits


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_every_method_passes(name: str) -> None:
    slow = name == "fedprox"
    outcomes = check_method(
        METHODS[name], SETTINGS.get(name), skip=SKIP.get(name, ()), slow=slow, **SMALL.get(name, {})
    )
    assert [one.check for one in outcomes] == list(CHECKS)
    left_out = {one.check for one in outcomes if one.reason is not None}
    if name == "scaffold":
        assert left_out == {"workers"}
    if slow:
        assert not left_out


@dataclass(frozen=True)
class Faulty(FedAvg):
    """FedAvg with a fault."""

    name = "faulty"


class NotFinite(Faulty):
    def reply(self, ctx: ClientContext, trained: TrainedClient) -> tuple[Payloads, Payloads]:
        message, _ = super().reply(ctx, trained)
        return message, {MODEL: trained.weights * float("inf")}


class Raises(Faulty):
    def loss_inputs(self, ctx: ClientContext) -> LossInputs:
        return {"own": ctx.client_state[MODEL].params}


class Forgetful(Faulty):
    """It counts in its class, which a resumed process does not have."""

    contexts: ClassVar[Any] = itertools.count()

    def reply(self, ctx: ClientContext, trained: TrainedClient) -> tuple[Payloads, Payloads]:
        return super().reply(ctx, trained)[0], {"turns": Count(next(self.contexts))}


class Drawing(Faulty):
    def loss(self, model: LocalModel, batch: Batch, context: LossInputs) -> dict[str, Tensor]:
        return {**super().loss(model, batch, context), "noise": 0 * torch.rand(())}


class Changing(Faulty):
    def reply(self, ctx: ClientContext, trained: TrainedClient) -> tuple[Payloads, Payloads]:
        next(iter(ctx.received[MODEL].params.values())).mul_(1.5)
        return super().reply(ctx, trained)


class ChangingServer(Faulty):
    def server_steps(self) -> Mapping[str, Any]:
        def shrink(server: Record, replies: Any, ctx: RoundContext) -> Any:
            next(iter(server[MODEL].params.values())).mul_(0.5)
            return server, {}

        return {**super().server_steps(), "shrink": shrink}


class Cheap(Weights):
    def sizes(self) -> dict[str, Size]:
        return {"": Size(1, 4)}


class Uncounted(Faulty):
    def broadcast(self, server: Record, client: int, ctx: RoundContext) -> Payloads:
        return {MODEL: Cheap(server[MODEL].params, server[MODEL].buffers)}


class Branching(Faulty):
    def loss(self, model: LocalModel, batch: Batch, context: LossInputs) -> dict[str, Tensor]:
        terms = super().loss(model, batch, context)
        return terms if terms["cross_entropy"] > 1 else {**terms, "more": terms["cross_entropy"]}


class NeverOff(FedProx):
    name = "never_off"
    reduces_to_fedavg: ClassVar[Mapping[str, Any] | None] = {"mu": 0.1}


@pytest.mark.parametrize(
    ("cls", "check", "words"),
    quick(
        [
            (NotFinite, "runs", "not finite"),
            (Raises, "runs", "KeyError"),
            (Forgetful, "repeats", "turns"),
            (Drawing, "pure", "loss"),
            (Changing, "pure", "reply"),
            (ChangingServer, "pure", "the server's shrink"),
            (Uncounted, "traffic", "bytes went down"),
            (Branching, "stacks", "faulty"),
            (NeverOff, "switched-off", "model"),
        ],
        [(Forgetful, "repeats", "turns"), (Changing, "pure", "reply"), (Uncounted, "traffic", "bytes went down")],
    ),
)
def test_a_fault_is_found_and_named(cls: Any, check: str, words: str) -> None:
    others = CHECKS.keys() - {"runs", check}
    failed = {one.check: one.problem for one in check_method(cls, skip=others, stop=False) if one.problem is not None}
    assert words in str(failed[check])
    assert "\n" not in str(failed[check])


def test_the_first_failure_is_raised() -> None:
    with pytest.raises(CheckError, match=r"^faulty: runs: "):
        check_method(Raises)

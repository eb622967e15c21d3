"""A discriminant head for any finished model: ProtoLDA's statistics on the features of another method.

When the base's last round is over, one more leg of that round follows: *all* clients receive the final model w_g and
send class counts, class sums and one second moment of their features (evaluation mode, no augmentation); the server
(stage ``solve-head``) adds them and solves w_c = (S_w + λI)⁻¹ μ_c (`flcore/prototypes/discriminant.py`). Where CCVR
sends a covariance per class and trains a head on draws, this sends one matrix for all classes and solves once.

The state in front of it is scored as ``before_discriminant``. Bodies are not touched. Second moments cost
D(D + 1)/2 values per client in the precision of ``wire``.

Privacy: the class sum of a class with one sample is that sample's feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from flcore.messages import Arrays, Weights
from flcore.methods.on_top import OnTop, patched
from flcore.methods.vocabulary import MODEL, Before, Exchange, Facts, Leg, Replies, Setting, Stage, TrainedClient, Turn
from flcore.params import Search, param
from flcore.prototypes.discriminant import (
    GRID,
    ClassSums,
    added,
    class_sums,
    cross_validated,
    discriminant,
    packed,
    unpacked,
)
from flcore.records import Payloads, Record, Slot

LEG = "class-sums"

SUMS = Slot("class_sums", Arrays)
"""A client's class sums, see :func:`flcore.prototypes.discriminant.packed`."""

HEAD = Slot("discriminant_head", Weights)
"""The head that answers instead of the base's, from its solution on."""


@dataclass(frozen=True)
class LdaHead(OnTop):
    """Another method, then Fisher's discriminant on its features."""

    name: ClassVar[str] = "lda_head"
    summary: ClassVar[str] = "another method, after whose last round the head is solved from class sums and one moment"
    citation: ClassVar[str] = "protofl, 2026"
    needs_linear_head: ClassVar[bool] = True

    shrinkage: float | None = param(
        0.01,
        "λ, added to the standardised covariance's diagonal; null: by generalised cross-validation",
        above=0,
        search=Search(1e-5, 1.0, log=True),
    )
    wire: Literal["float64", "float32", "float16", "int8"] = param(
        "float32", "precision in which second moments travel"
    )

    @property
    def can_be_calibrated(self) -> bool:
        """No: nothing is trained behind it."""
        return False

    def legs(self, round_number: int, setting: Setting) -> tuple[Leg, ...]:
        """The base's; after the last one of the run, all clients' sums and the solution."""
        legs = self.legs_with(round_number, setting)
        if round_number < setting.rounds:
            return legs
        return (*legs, Leg(LEG, who="all", phases=(), stages=("solve-head",)))

    def broadcast(self, server: Record, client: int, exchange: Exchange) -> Payloads:
        """The base's message; for the sums the final model alone."""
        if exchange.leg == LEG:
            return {MODEL: self.base_model(server, exchange.setting)}
        return super().broadcast(server, client, exchange)

    def begin(self, turn: Turn) -> Weights:
        """The base's start; for the sums the final model."""
        return turn.inbox[MODEL] if turn.leg == LEG else super().begin(turn)

    def reply(self, turn: Turn, trained: TrainedClient) -> tuple[Payloads, Payloads]:
        """The base's; when training is over class sums, and what is remembered stays."""
        if turn.leg != LEG:
            return super().reply(turn, trained)
        features, labels = trained.features()
        sums = class_sums(features.cpu(), labels.cpu(), turn.setting.num_classes)
        return {SUMS: Arrays(packed(sums, self.wire))}, turn.memory

    def stages(self) -> Mapping[str, Stage]:
        """The base's, and the solution."""
        return self.beside(super().stages(), {"solve-head": self.solve_head})

    def score_before(self) -> Mapping[str, Before]:
        """The base's, and ``before_discriminant``."""
        return {**super().score_before(), "before_discriminant": Before("solve-head")}

    def global_model(self, server: Record, setting: Setting) -> Weights:
        """The base's, with the solved head once there is one."""
        return patched(self.base_model(server, setting), server.get(HEAD))

    def solve_head(self, server: Record, replies: Replies, exchange: Exchange) -> tuple[Record, Facts]:
        """Server stage: the head for the summed statistics. Facts: λ, and how many clients are in the sums."""
        # A base may have outputs beside the classes: nobody has samples of those, and they never answer.
        classes, dim = len(exchange.setting.initial.params["head.bias"]), exchange.setting.feature_dim
        sent = replies.of(SUMS)
        totals = added((unpacked(own.named, classes) for own in sent.values()), ClassSums.nothing(classes, dim))
        shrinkage = cross_validated(totals, GRID) if self.shrinkage is None else self.shrinkage
        weight, bias = discriminant(totals, shrinkage)
        head = Weights({"head.weight": weight.float(), "head.bias": bias.float()})
        return server | {HEAD: head}, {"shrinkage": shrinkage, "answers": float(len(sent))}

"""A discriminant head for any finished model: ProtoLDA's statistics on the features of another method.

After the base's last round one more exchange of that round follows: *all* clients receive the final model w_g and send
class counts, class sums and one second moment of their features (evaluation mode, no augmentation); the server (step
``solve-head``) adds them and solves w_c = (S_w + λI)⁻¹ μ_c (`flcore/math/prototypes/discriminant.py`). Where CCVR sends
a covariance per class and trains a head on draws, this sends one matrix for all classes and solves once.

Answers with the old head are scored as ``before_discriminant``. Bodies are not touched. Second moments cost D(D + 1)/2
values per client in the precision of ``wire``.

Privacy: the class sum of a class with one sample is that sample's feature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flcore.core.params import Search, param
from flcore.io.messages import TensorDict, Weights
from flcore.io.records import Key, Payloads
from flcore.math.prototypes import discriminant as lda
from flcore.methods import types as fl
from flcore.methods.kit.new_head import NewHead

SUMS = Key("class_sums", TensorDict)
"""A client's class sums, see :func:`flcore.math.prototypes.discriminant.pack_sums`."""


@dataclass(frozen=True)
class LdaHead(NewHead, name="lda_head", citation="protofl, 2026", needs_linear_head=True):
    """Another method, then a head solved from class sums and one moment after the last round."""

    collect_leg = "class-sums"
    head_slot: ClassVar[Key[Weights]] = Key("discriminant_head", Weights)
    scored_before = "before_discriminant"

    shrinkage: float | None = param(
        0.01, "λ of the standardised covariance; null: cross-validation", above=0, search=Search(1e-5, 1.0, log=True)
    )
    wire: Literal["float64", "float32", "float16", "int8"] = param(
        "float32", "precision in which second moments travel"
    )

    @property
    def head_step(self) -> str:
        return "solve-head"

    def statistics(self, ctx: fl.ClientContext, trained: fl.TrainedClient) -> Payloads:
        features, labels = trained.features()
        sums = lda.discriminant_sums(features.cpu(), labels.cpu(), ctx.setting.num_classes)
        return {SUMS: TensorDict(lda.pack_sums(sums, self.wire))}

    def new_head(
        self, model: Weights, replies: fl.Replies, setting: fl.FederationContext
    ) -> tuple[Weights, fl.Metrics]:
        """Solve the head of the summed statistics. Metrics: λ, and the number of clients in the sums."""
        # A base may have more outputs than classes: they have no samples and never answer.
        classes, dim = len(model.params["head.bias"]), setting.feature_dim
        sent = replies.of(SUMS)
        totals = lda.add_sums(
            (lda.unpack_sums(own.named, classes) for own in sent.values()), lda.ClassSums.nothing(classes, dim)
        )
        shrinkage = lda.cross_validated(totals, lda.GRID) if self.shrinkage is None else self.shrinkage
        weight, bias = lda.discriminant(totals, shrinkage)
        head = Weights({"head.weight": weight.float(), "head.bias": bias.float()})
        return head, {"shrinkage": shrinkage, "answers": float(len(sent))}

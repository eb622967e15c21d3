"""FedRep (Collins, Hassani, Mokhtari, Shakkottai, ICML 2021): a shared representation, personal heads, in alternation.

Client (Algorithm 1): from the received f and its own last h, train h with f frozen for E_h = ``head_epochs``, then f
with h frozen for E_f = ``body_epochs``, each on CE with a fresh optimiser; upload f. The rest is FedPer's.

Frozen parts are in evaluation mode: while h is trained, f has no dropout and its BatchNorm statistics do not move. For
as many passes as other methods (E_h = E − 1, E_f = 1), set ``local.epochs`` one lower.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flcore.core.params import Search, param
from flcore.math.losses.basic import cross_entropy
from flcore.methods import types as fl
from flcore.methods.fedper import FedPer, layer_of


@dataclass(frozen=True)
class FedRep(FedPer, name="fedrep", citation="Collins et al., ICML 2021"):
    """Shared lower layers, personal upper layers, trained one after the other."""

    head_epochs: int | None = param(
        None, "E_h, passes over the data that train the personal part; null: as configured in local", low=1
    )
    body_epochs: int = param(1, "E_f, passes that then train the shared part", low=1, search=Search(1, 5))

    def round_exchanges(self, round_number: int, setting: fl.FederationContext) -> tuple[fl.Exchange, ...]:
        personal = tuple(map(layer_of, self.personal(setting.initial)))
        # Layers, not parameters: statistics move where a whole layer does.
        shared = tuple(map(layer_of, self.base(setting.initial).params))
        head = fl.Phase(trainable=personal, epochs=self.head_epochs, loss=loss_on_frozen_base)
        return (
            fl.Exchange(participants=self.trains, phases=(head, fl.Phase(trainable=shared, epochs=self.body_epochs))),
        )


def loss_on_frozen_base(model: fl.LocalModel, batch: fl.Batch, inputs: fl.LossInputs) -> dict[str, Tensor]:
    """Return the cross-entropy over features without dropout; the head keeps its own."""
    logits = model.classify(model.for_extra_inputs().features(batch.images))
    return {"cross_entropy": cross_entropy(logits, batch.labels, batch.weight)}

"""Names of graphs: the same for what does the same, another one for anything else, none where that cannot be told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flcore.engine.local.compiler import graph_hash
from flcore.engine.local.program import traced

ONES = torch.ones(3)


def step(weight: float, unread: float = 0.0) -> Callable[..., tuple[Tensor, ...]]:
    """A loss with a weight, and a value that nothing reads."""

    def loss(params: Tensor, images: Tensor) -> tuple[Tensor, ...]:
        found = weight * (params * images).sort().values.sum()  # an operation with two results
        with torch.no_grad():
            params.sub_(images)
        return (found,)

    return loss


def name(function: Callable[..., tuple[Tensor, ...]], *example: Tensor, **made_with: Any) -> str | None:
    example = example or (ONES, ONES)
    return graph_hash(traced(function, example), example, made_with)


def test_what_is_not_read_is_not_in_the_name() -> None:
    assert name(step(0.5, unread=1.0)) == name(step(0.5, unread=2.0)) is not None


@pytest.mark.parametrize(
    "other",
    [
        lambda: name(step(0.5000000000000001)),  # the next number after a half
        lambda: name(lambda params, images: (0.5 * (params * images).sort().values.sum(),)),  # nothing moves
        lambda: name(step(0.5), torch.ones(4), torch.ones(4)),
        lambda: name(step(0.5), ONES.double(), ONES.double()),
        lambda: name(step(0.5), torch.ones(6)[::2], ONES),
        lambda: name(step(0.5), threads=1),
    ],
    ids=["number", "operations", "shape", "dtype", "strides", "compiler"],
)
def test_whatever_machine_code_depends_on_is_in_the_name(other: Callable[[], str | None]) -> None:
    names = {name(step(0.5)), other()}
    assert len(names) == 2
    assert None not in names


def test_a_constant_counts_by_its_values() -> None:
    """One that was made while it was traced, as a table within a loss is."""

    class Table(torch.nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.register_buffer("table", torch.tensor([value, 2.0, 3.0]))

    def graph(value: float) -> torch.fx.GraphModule:
        found = torch.fx.Graph()
        one = found.placeholder("one")
        found.output((found.call_function(torch.ops.aten.add.Tensor, (one, found.get_attr("table"))),))
        return torch.fx.GraphModule(Table(value), found)

    names = [graph_hash(graph(value), [ONES], {}) for value in (1.0, 1.0, 1.5)]
    assert names[0] == names[1] is not None
    assert names[2] not in (names[0], None)


def test_an_operation_of_somebody_else_may_change_under_its_name() -> None:
    with torch.library._scoped_library("protofl_test", "DEF") as library:
        library.define("twice(Tensor one) -> Tensor")
        library.impl("twice", lambda one: one + one, "CompositeExplicitAutograd")
        assert name(lambda params, images: (torch.ops.protofl_test.twice(params),)) is None

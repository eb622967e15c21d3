"""Payloads: their cost is the length of what is sent, their arrays are the wire format and bring them back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from flcore.io.messages import Count, Mixtures, Prototypes, Size, TensorDict, Weights, all_finite
from flcore.io.records import PAYLOADS, Payloads, payload_sizes, serialise


def weights() -> Weights:
    """2·3 + 3 = 9 parameters; two float statistics of 3 and one int64 counter."""
    return Weights(
        {"head.weight": torch.arange(6.0).reshape(3, 2), "head.bias": torch.tensor([-1.0, 0.5, 2.0])},
        {
            "bn.running_mean": torch.tensor([0.1, 0.2, 0.3]),
            "bn.running_var": torch.tensor([1.0, 2.0, 3.0]),
            "bn.num_batches_tracked": torch.tensor(41),
        },
    )


def prototypes(present: list[bool], dim: int = 2) -> Prototypes:
    mask = torch.tensor(present)
    values = torch.arange(1.0, len(present) * dim + 1).reshape(len(present), dim)
    return Prototypes(values * mask[:, None], mask)


def mixtures() -> Mixtures:
    values = torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    counts = torch.tensor([7, 3])
    return Mixtures(torch.tensor([0, 3]), torch.tensor([2, 1]), values[:, 0], values[:, 1:3], values[:, 3:], counts)


EXAMPLES: dict[str, tuple[Payloads, dict[str, Size]]] = {
    # 9 float32 = 36 bytes; statistics 6·4 + 8 = 32 bytes and no scalars.
    "weights": ({"model": weights()}, {"model": Size(9, 36), "model_buffers": Size(0, 32)}),
    "weights without buffers": ({"model": weights().without_buffers()}, {"model": Size(9, 36)}),
    "buffers alone": ({"model": Weights({}, weights().buffers)}, {"model_buffers": Size(0, 32)}),
    "neither": ({"model": Weights({})}, {"model": Size(0, 0)}),
    # Classes of 2 and 1 components of d = 2: 3 weights, 6 means, 6 deviations; an id, a number of components, a count.
    "mixtures": ({"m": mixtures()}, {"m": Size(15, 60 + 2 * 24)}),
    "mixtures without counts": ({"m": replace(mixtures(), counts=None)}, {"m": Size(15, 60 + 2 * 16)}),
    "no mixtures": (
        {"m": Mixtures(*[torch.zeros(0, dtype=torch.int64)] * 2, torch.ones(0), *[torch.ones(0, 2)] * 2)},
        {"m": Size(0, 0)},
    ),
    # Two rows of two float32 and two int64 ids: 4 scalars, 16 + 16 bytes.
    "prototypes": ({"prototypes": prototypes([True, False, True])}, {"prototypes": Size(4, 32)}),
    "no prototypes": ({"prototypes": Prototypes.empty(3, 2)}, {"prototypes": Size(0, 0)}),
    "count": ({"num_samples": Count(7)}, {"num_samples": Size(0, 8)}),
    # 3 float32, 2 int64, 4 bool: 3 scalars, 12 + 16 + 4 bytes.
    "arrays": (
        {"x": TensorDict({"b": torch.tensor([3, 4]), "a": torch.ones(3), "c": torch.ones(2, 2, dtype=torch.bool)})},
        {"x": Size(3, 32)},
    ),
    "no arrays": ({"x": TensorDict({})}, {"x": Size(0, 0)}),
    "nothing": ({}, {}),
    "all": (
        {"model": weights(), "prototypes": prototypes([False, True]), "num_samples": Count(0)},
        {"model": Size(9, 36), "model_buffers": Size(0, 32), "prototypes": Size(2, 16), "num_samples": Size(0, 8)},
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_cost_by_hand_and_by_length(name: str) -> None:
    record, expected = EXAMPLES[name]
    assert payload_sizes(record) == expected
    assert sum(size.bytes for size in payload_sizes(record).values()) == len(serialise(record))


def test_every_type_has_an_example() -> None:
    assert {type(payload) for record, _ in EXAMPLES.values() for payload in record.values()} == set(PAYLOADS.values())
    assert all(name == cls.type_name for name, cls in PAYLOADS.items())


def test_wire_format_by_hand() -> None:
    """Count 258 = 0x0102 as little-endian int64; then, in order of names, row (3, 4) of class 1 after its id."""
    record = {"n": Count(258), "p": prototypes([False, True])}
    expected = bytes([2, 1, 0, 0, 0, 0, 0, 0]) + bytes([1] + [0] * 7) + bytes.fromhex("0000404000008040")
    assert serialise(record) == expected


@pytest.mark.parametrize("name", EXAMPLES)
def test_arrays_and_header_bring_a_payload_back(name: str) -> None:
    """As it was, also when the arrays come in another order and nothing but them and the header is known."""
    for payload in EXAMPLES[name][0].values():
        arrays = dict(reversed(payload.arrays().items()))
        back = type(payload).from_arrays(arrays, json.loads(json.dumps(payload.header())))
        assert back.header() == payload.header()
        assert list(back.arrays()) == list(payload.arrays()) or isinstance(payload, TensorDict)
        for key, tensor in payload.arrays().items():
            assert back.arrays()[key].dtype == tensor.dtype and torch.equal(back.arrays()[key], tensor)


def test_absent_rows_do_not_travel() -> None:
    """What stands in the row of a missing class reaches nobody: it is not in the wire format."""
    dirty = Prototypes(torch.tensor([[1.0], [9.0]]), torch.tensor([True, False]))
    assert serialise({"p": dirty}) == serialise({"p": prototypes([True, False], 1)})


def test_a_part_of_weights() -> None:
    """Parameters of a part replace those of the model; its statistics stay."""
    a, b, c, other = torch.rand(4).unbind()
    model = Weights({"x.a": a, "y.b": b}, {"x.c": c})
    merged = model.with_params(Weights({"y.b": other}))
    assert merged.params == {"x.a": a, "y.b": other} and merged.buffers == {"x.c": c}
    assert model.with_params(None) is model
    assert model.part("x.") == Weights({"x.a": a}, {"x.c": c})
    assert model.part("x.", "y.") == model


@pytest.mark.parametrize(
    ("means", "present"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.bool)),
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.bool)),
        (torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.bool)),
    ],
)
def test_prototypes_of_the_wrong_shape_are_refused(means: torch.Tensor, present: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"prototypes need means float32 \[K, d\] and present bool \[K\]"):
        Prototypes(means, present)


@pytest.mark.parametrize(
    "change",
    [
        {"classes": torch.tensor([3, 0])},  # not ascending
        {"classes": torch.tensor([0, 0])},
        {"components": torch.tensor([2, 2])},  # four in all, of three
        {"components": torch.tensor([3, 0])},
        {"components": torch.tensor([2.0, 1.0])},
        {"weights": torch.ones(2)},
        {"means": torch.zeros(3, 3)},  # another d than the deviations
        {"deviations": torch.zeros(3, 2, dtype=torch.float64)},
        {"counts": torch.tensor([1])},
    ],
)
def test_mixtures_refuse_what_does_not_belong_together(change: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="mixtures need ascending classes"):
        replace(mixtures(), **change)


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be negative, got -1"):
        Count(-1)


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([], True),
        ([1.0, -2.0], True),
        ([3e38, 3e38], True),  # the sum is not, 3.4e38 being the largest float32
        ([1.0, float("nan")], False),
        ([1.0, float("inf")], False),
        ([float("-inf"), float("inf")], False),
    ],
)
def test_finite_values(values: list[float], finite: bool) -> None:
    assert all_finite([torch.ones(2), torch.tensor([2**40]), torch.tensor(values)]) == finite

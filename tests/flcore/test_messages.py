"""Payloads: their cost is the length of what is sent, and what is stored comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from flcore.errors import DataError
from flcore.files import load_arrays, save_arrays
from flcore.messages import Arrays, Count, Facts, Mixtures, Payload, Prototypes, Size, Weights
from flcore.records import PAYLOADS, Record, load_record, measure, on_device, payload_of, save_record, serialise


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


def assert_equal(found: Payload, expected: Payload) -> None:
    assert type(found) is type(expected)
    ours, theirs = found.arrays(), expected.arrays()
    assert sorted(ours) == sorted(theirs)
    if isinstance(expected, Weights):
        assert list(ours) == list(theirs)  # in the module's order
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert ours[name].shape == tensor.shape
        assert torch.equal(ours[name], tensor), name


EXAMPLES: dict[str, tuple[Record, dict[str, Size]]] = {
    # 9 float32 = 36 bytes; statistics 6·4 + 8 = 32 bytes and no scalars.
    "weights": ({"model": weights()}, {"model": Size(9, 36), "model_buffers": Size(0, 32)}),
    "weights without buffers": ({"model": weights().without_buffers()}, {"model": Size(9, 36)}),
    # One class with two components of d = 2: 2 weights, 4 means, 4 deviations; its id and its number of components.
    "mixtures": (
        {"m": Mixtures(torch.tensor([3]), torch.tensor([2]), torch.ones(2), torch.ones(2, 2), torch.ones(2, 2))},
        {"m": Size(10, 56)},
    ),
    # Two rows of two float32 and two int64 ids: 4 scalars, 16 + 16 bytes.
    "prototypes": ({"prototypes": prototypes([True, False, True])}, {"prototypes": Size(4, 32)}),
    "no prototypes": ({"prototypes": Prototypes.empty(3, 2)}, {"prototypes": Size(0, 0)}),
    "count": ({"num_samples": Count(7)}, {"num_samples": Size(0, 8)}),
    # 3 float32, 2 int64, 4 bool: 3 scalars, 12 + 16 + 4 bytes.
    "arrays": (
        {"x": Arrays({"b": torch.tensor([3, 4]), "a": torch.ones(3), "c": torch.ones(2, 2, dtype=torch.bool)})},
        {"x": Size(3, 32)},
    ),
    "no arrays": ({"x": Arrays({})}, {"x": Size(0, 0)}),
    "facts": ({"facts": Facts({"loss": 0.1, "clusters": 3.0})}, {"facts": Size(2, 16)}),  # never sent
    "nothing": ({}, {}),
    "all": (
        {"model": weights(), "prototypes": prototypes([False, True]), "num_samples": Count(0)},
        {"model": Size(9, 36), "model_buffers": Size(0, 32), "prototypes": Size(2, 16), "num_samples": Size(0, 8)},
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_cost_by_hand_and_by_length(name: str) -> None:
    record, expected = EXAMPLES[name]
    assert measure(record) == expected
    assert sum(size.bytes for size in measure(record).values()) == len(serialise(record))


def test_every_type_has_an_example() -> None:
    assert {type(payload) for record, _ in EXAMPLES.values() for payload in record.values()} == set(PAYLOADS.values())
    assert all(name == cls.type_name for name, cls in PAYLOADS.items())


def test_wire_format_by_hand() -> None:
    """Count 258 = 0x0102 as little-endian int64; then, in order of names, row (3, 4) of class 1 after its id."""
    record = {"n": Count(258), "p": prototypes([False, True])}
    expected = bytes([2, 1, 0, 0, 0, 0, 0, 0]) + bytes([1] + [0] * 7) + bytes.fromhex("0000404000008040")
    assert serialise(record) == expected


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("durable", [False, True])
def test_round_trip(name: str, durable: bool, tmp_path: Path) -> None:
    record, _ = EXAMPLES[name]
    save_record(tmp_path / "r", record, {"round": 3, "who": None}, durable=durable)
    found, extra = load_record(tmp_path / "r")
    assert extra == {"round": 3, "who": None}
    assert set(found) == set(record)
    for key, payload in record.items():
        assert_equal(found[key], payload)
    assert measure(found) == measure(record)
    assert [path.name for path in tmp_path.iterdir()] == ["r"]  # nothing temporary stays


def test_prototypes_come_back_whole(tmp_path: Path) -> None:
    sent = prototypes([True, False, True, False])
    save_record(tmp_path / "r", {"p": sent, "none": Prototypes.empty(4, 5)})
    found, _ = load_record(tmp_path / "r")
    back = payload_of(Prototypes, found, "p")
    assert torch.equal(back.means, sent.means)
    assert torch.equal(back.present, sent.present)
    empty = payload_of(Prototypes, found, "none")
    assert empty.means.shape == (4, 5)
    assert not empty.present.any()


def test_absent_rows_do_not_travel() -> None:
    """What stands in the row of a missing class reaches nobody: it is not in the wire format."""
    dirty = Prototypes(torch.tensor([[1.0], [9.0]]), torch.tensor([True, False]))
    assert serialise({"p": dirty}) == serialise({"p": prototypes([True, False], 1)})


def test_names_that_begin_alike_are_kept_apart(tmp_path: Path) -> None:
    save_record(tmp_path / "r", {"a": Count(1), "ab": Count(2), "a_": Count(3)})
    found, _ = load_record(tmp_path / "r")
    assert {name: payload_of(Count, found, name).value for name in found} == {"a": 1, "ab": 2, "a_": 3}


def test_arrays_and_facts_come_back(tmp_path: Path) -> None:
    """Float64 facts to the bit, arrays by name; also those of no element and of no dimension."""
    named = {"counts": torch.tensor([3, 0]), "scale": torch.tensor(0.5), "none": torch.zeros(0, 4)}
    facts = Facts({"loss": 0.1, "distance": 1e-300, "missing": float("inf")})
    save_record(tmp_path / "r", {"extra": Arrays(named), "facts": facts})
    found, _ = load_record(tmp_path / "r")
    arrays = payload_of(Arrays, found, "extra")
    assert set(arrays.named) == set(named)
    assert all(
        torch.equal(arrays[name], tensor) and arrays[name].dtype == tensor.dtype for name, tensor in named.items()
    )
    assert payload_of(Facts, found, "facts").values == facts.values


def test_values_of_weights_are_both_groups() -> None:
    """As a frozen model takes them: 2 parameters and 3 statistics by the module's names."""
    values = weights().values
    assert set(values) == {"head.weight", "head.bias", "bn.running_mean", "bn.running_var", "bn.num_batches_tracked"}
    assert values["head.bias"] is not None and torch.equal(values["bn.running_var"], torch.tensor([1.0, 2.0, 3.0]))


def test_a_record_on_the_device_where_it_is_is_itself() -> None:
    for record, _ in EXAMPLES.values():
        assert on_device(record, "cpu") is record


def test_order_of_weights_survives(tmp_path: Path) -> None:
    save_record(tmp_path / "r", {"model": weights()})
    found = payload_of(Weights, load_record(tmp_path / "r")[0], "model")
    assert list(found.params) == ["head.weight", "head.bias"]  # the module's order, not the alphabet's


def test_same_content_same_bytes(tmp_path: Path) -> None:
    record = EXAMPLES["all"][0]
    backwards = dict(reversed(record.items()))
    for number, (content, extra) in enumerate([(record, {"a": 1, "b": 2}), (record, {"b": 2, "a": 1})] * 5):
        save_record(tmp_path / str(number), content, extra)
    save_record(tmp_path / "backwards", backwards, {"a": 1, "b": 2})
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_one_metadata_key_only(tmp_path: Path) -> None:
    """Safetensors keeps metadata in a hash map: two keys would come in random order."""
    save_record(tmp_path / "r", EXAMPLES["all"][0], {"a": 1, "b": 2, "c": 3})
    with safe_open(tmp_path / "r", framework="pt") as file:
        assert list(file.metadata()) == ["protofl"]


def test_a_stride_is_not_part_of_the_message(tmp_path: Path) -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    transposed, copied = Weights({"w": matrix.T}), Weights({"w": matrix.T.contiguous()})
    assert serialise({"m": transposed}) == serialise({"m": copied})
    save_record(tmp_path / "r", {"m": transposed})
    assert_equal(load_record(tmp_path / "r")[0]["m"], copied)


@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=4),
    buffers=st.lists(st.sampled_from([torch.float32, torch.int64, torch.uint8, torch.float16]), max_size=3),
    present=st.lists(st.booleans(), max_size=6),
    dim=st.integers(0, 5),
    count=st.integers(0, 2**62),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_record(shapes: Any, buffers: Any, present: Any, dim: int, count: int, tmp_path: Path) -> None:
    mask = torch.tensor(present, dtype=torch.bool)
    record = {
        "model": Weights(
            {f"p{i}": torch.full(shape, i + 0.5) for i, shape in enumerate(shapes)},
            {f"b{i}": torch.ones(i + 1, dtype=dtype) for i, dtype in enumerate(buffers)},
        ),
        "prototypes": Prototypes(torch.full((len(present), dim), 2.5) * mask[:, None], mask),
        "count": Count(count),
    }
    scalars = sum(torch.Size(shape).numel() for shape in shapes)
    sizes = measure(record)
    assert sizes["model"] == Size(scalars, 4 * scalars)
    assert sizes["prototypes"] == Size(sum(present) * dim, sum(present) * (4 * dim + 8))
    assert sum(size.bytes for size in sizes.values()) == len(serialise(record))
    save_record(tmp_path / "r", record)
    found, _ = load_record(tmp_path / "r")
    for name, payload in record.items():
        assert_equal(found[name], payload)


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none: no such file; run the stage"):
        load_record(tmp_path / "none")


@pytest.mark.parametrize("length", [0, 1, 7, 8, 40, -1])
def test_a_truncated_file_is_refused(length: int, tmp_path: Path) -> None:
    save_record(tmp_path / "r", EXAMPLES["all"][0])
    (tmp_path / "r").write_bytes((tmp_path / "r").read_bytes()[:length])
    with pytest.raises(DataError, match=r"r: damaged .*; delete it and run again"):
        load_record(tmp_path / "r")


@pytest.mark.parametrize("content", [b"not safetensors at all", b"\x00" * 64, b'{"json": true}'])
def test_a_foreign_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(content)
    with pytest.raises(DataError, match="damaged"):
        load_record(tmp_path / "r")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"protofl": "{half"}])
def test_safetensors_of_somebody_else_are_refused(metadata: Any, tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "r", metadata=metadata)
    with pytest.raises(DataError, match="damaged or not written by protofl"):
        load_record(tmp_path / "r")


def test_arrays_are_not_a_record(tmp_path: Path) -> None:
    save_arrays(tmp_path / "r", {"w": torch.ones(2)}, {"kind": "arrays"})
    assert load_arrays(tmp_path / "r")[1] == {"kind": "arrays"}
    with pytest.raises(DataError, match="not a record"):
        load_record(tmp_path / "r")


@pytest.mark.parametrize(
    "header",
    [
        {"payloads": {"model": {"type": "generator"}}, "extra": {}},  # a type that this version does not have
        {"payloads": {"model": {"type": "count"}}, "extra": {}},  # its arrays are not there
        {"payloads": {"model": {}}, "extra": {}},
        {"payloads": {}},
        {"payloads": []},
    ],
)
def test_a_record_that_cannot_be_read_is_refused(header: Any, tmp_path: Path) -> None:
    save_arrays(tmp_path / "r", {"w": torch.ones(2)}, header)
    with pytest.raises(DataError, match="r: "):
        load_record(tmp_path / "r")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    save_record(tmp_path / "r", {"n": Count(1)})
    with pytest.raises(TypeError):
        save_record(tmp_path / "r", {"n": Count(2)}, {"x": object()})
    assert payload_of(Count, load_record(tmp_path / "r")[0], "n").value == 1


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


def test_a_payload_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="'n' is count, expected weights"):
        payload_of(Weights, {"n": Count(1)}, "n")
    with pytest.raises(KeyError):
        payload_of(Weights, {}, "model")


def test_sizes_add_and_parameters_are_counted() -> None:
    assert Size(1, 2) + Size(10, 20) == Size(11, 22)
    assert weights().num_parameters == 9
    assert weights().without_buffers().buffers == {}


def test_headers_are_json() -> None:
    for record, _ in EXAMPLES.values():
        for payload in record.values():
            assert json.loads(json.dumps(payload.header())) == payload.header()

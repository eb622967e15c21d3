"""Records: read through typed slots, never changed, stored and restored as one file whatever is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from flcore.core.errors import DataError
from flcore.io.files import write_tensors
from flcore.io.messages import Count, Mixtures, Payload, Prototypes, Size, TensorDict, Weights
from flcore.io.records import (
    Key,
    Payloads,
    Record,
    load_record,
    on_device,
    pack_record,
    payload_sizes,
    row_major,
    save_record,
    serialise,
    unpack_record,
)

MODEL, NUMBER = Key("model", Weights), Key("number", Count)


def weights() -> Weights:
    """Two parameters, two statistics and a counter."""
    return Weights(
        {"head.weight": torch.arange(6.0).reshape(3, 2), "head.bias": torch.tensor([-1.0, 0.5, 2.0])},
        {"bn.running_mean": torch.tensor([0.1, 0.2]), "bn.num_batches_tracked": torch.tensor(41)},
    )


def assert_equal(found: Payload, expected: Payload) -> None:
    assert type(found) is type(expected)
    ours, theirs = found.arrays(), expected.arrays()
    assert sorted(ours) == sorted(theirs)
    if isinstance(expected, Weights):
        assert list(ours) == list(theirs)  # in the module's order
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(ours[name], tensor), name


def test_a_slot_is_its_name_with_a_type() -> None:
    """A record holds the same payload under both; a slot refuses a payload of another type, coming and going."""
    record = Record({MODEL: weights(), "other": Count(3)})
    assert record[MODEL] is record["model"] and MODEL in record and "model" in record
    assert list(record) == ["model", "other"] and all(type(name) is str for name in record)
    with pytest.raises(TypeError, match="'number' takes count, got Weights"):
        Record({NUMBER: weights()})
    with pytest.raises(TypeError, match="'other' is count, expected weights"):
        record[Key("other", Weights)]
    with pytest.raises(TypeError, match="'other' is count, expected weights"):
        record.get(Key("other", Weights))
    with pytest.raises(KeyError):
        record[NUMBER]


def test_a_record_is_never_changed() -> None:
    """``|`` adds and replaces in a new one; ``only`` keeps the order asked for; what a method wrote is not held on."""
    written: dict[str, Payload] = {"model": weights(), "number": Count(1)}
    record = Record(written)
    written["number"] = Count(2)
    assert record[NUMBER] == Count(1)
    more = record | {NUMBER: Count(3), "x": Count(4)}
    assert (record[NUMBER], more[NUMBER], list(more)) == (Count(1), Count(3), ["model", "number", "x"])
    assert more[MODEL] is record[MODEL]
    assert list(more.only("x", MODEL, "nowhere")) == ["x", "model"]
    assert list(more.without(MODEL, "nowhere")) == ["number", "x"]
    assert list(more) == ["model", "number", "x"]
    assert repr(more) == "Record(model: weights, number: count, x: count)"
    with pytest.raises(TypeError):
        record["number"] = Count(5)  # type: ignore[index]


def test_payloads_on_the_device_where_they_are_are_themselves() -> None:
    written: Payloads = {MODEL: weights()}
    assert on_device(written, "cpu")[MODEL] is written[MODEL]


def test_a_record_goes_to_another_device_whole() -> None:
    """The meta device stands for any other; integers in a count are no tensors and stay."""
    moved = on_device(Record({MODEL: weights(), "x": TensorDict({"a": torch.ones(2)})}), "meta")
    assert {tensor.device.type for payload in moved.values() for tensor in payload.arrays().values()} == {"meta"}
    assert list(moved[MODEL].params) == ["head.weight", "head.bias"]


EVERYTHING: Payloads = {
    "model": weights(),
    "bare": weights().without_buffers(),
    "prototypes": Prototypes(torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([True, False])),
    "none": Prototypes.empty(3, 2),
    "number": Count(7),
    "arrays": TensorDict({"scale": torch.tensor(0.5), "b": torch.tensor([3, 4]), "nothing": torch.zeros(0, 4)}),
    "empty": TensorDict({}),
    "mixtures": Mixtures(torch.tensor([3]), torch.tensor([2]), torch.ones(2), torch.ones(2, 2), torch.ones(2, 2)),
    "numberless": Count(2),  # begins like another
}


def test_round_trip(tmp_path: Path) -> None:
    save_record(tmp_path / "r", EVERYTHING, {"round": 3, "who": None})
    found, extra = load_record(tmp_path / "r")
    assert extra == {"round": 3, "who": None}
    assert set(found) == set(EVERYTHING)
    for key, payload in EVERYTHING.items():
        assert_equal(found[key], payload)
    assert payload_sizes(found) == payload_sizes(EVERYTHING)
    assert [path.name for path in tmp_path.iterdir()] == ["r"]  # nothing temporary stays
    save_record(tmp_path / "r", {})
    assert load_record(tmp_path / "r") == ({}, {})


def test_what_goes_to_another_process_comes_back() -> None:
    """Values go behind one another, the widest first, so that each begins where its type may: an int64 [2], a float32
    [3] and a bfloat16 [3] between them are 16 + 12 + 6 bytes, whatever their names; what has no values says that."""
    mixed = Record({
        "a": TensorDict({"x": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16), "y": torch.tensor([7, 1 << 40])}),
        "b": Weights({"w": torch.tensor([[1.0], [2.0], [3.0]])}),
    })  # fmt: skip
    described, pieces = pack_record(mixed)
    assert [name for name, *_ in described["arrays"]] == ["a/y", "b/params/w", "a/x"]
    assert [len(piece) for piece in pieces] == [16, 12, 6]
    for record in (mixed, EVERYTHING, Record()):
        described, pieces = pack_record(record)
        values = b"".join(pieces)
        found = unpack_record(described, torch.frombuffer(bytearray(values or b"-"), dtype=torch.uint8)[: len(values)])
        assert list(found) == list(record)
        for name, payload in record.items():
            assert_equal(found[name], payload)


def test_payloads_may_share_tensors(tmp_path: Path) -> None:
    """One tensor under three names, a part of it and its transpose: each comes back as it is, in memory of its own."""
    whole = torch.arange(6.0).reshape(3, 2)
    shared: Payloads = {
        "first": Weights({"w": whole}),
        "second": Weights({"w": whole, "row": whole[1]}),
        "turned": TensorDict({"t": whole.mT, "rows": whole[1:]}),
    }
    save_record(tmp_path / "r", shared)
    found, _ = load_record(tmp_path / "r")
    for name, payload in shared.items():
        assert_equal(found[name], payload)
    places = [tensor.data_ptr() for payload in found.values() for tensor in payload.arrays().values()]
    assert len(set(places)) == len(places) == 5


def test_same_content_same_bytes(tmp_path: Path) -> None:
    """Whatever the order; safetensors keeps metadata in a hash map, where two keys would come in random order."""
    save_record(tmp_path / "r", EVERYTHING, {"a": 1, "b": 2})
    save_record(tmp_path / "backwards", dict(reversed(EVERYTHING.items())), {"b": 2, "a": 1})
    assert (tmp_path / "r").read_bytes() == (tmp_path / "backwards").read_bytes()
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
    sizes = payload_sizes(record)
    assert sizes.get("model", Size()) == Size(scalars, 4 * scalars)
    assert sizes["prototypes"] == Size(sum(present) * dim, sum(present) * (4 * dim + 8))
    assert sum(size.bytes for size in sizes.values()) == len(serialise(record))
    save_record(tmp_path / "r", record)
    found, _ = load_record(tmp_path / "r")
    for name, payload in record.items():
        assert_equal(found[name], payload)


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none: "):
        load_record(tmp_path / "none")


@pytest.mark.parametrize("length", [0, 1, 7, 8, 40, -1])
def test_a_truncated_file_is_refused(length: int, tmp_path: Path) -> None:
    save_record(tmp_path / "r", EVERYTHING)
    (tmp_path / "r").write_bytes((tmp_path / "r").read_bytes()[:length])
    with pytest.raises(DataError, match=r"r: damaged .*; make it again"):
        load_record(tmp_path / "r")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"protofl": "{half"}])
def test_safetensors_of_somebody_else_are_refused(metadata: Any, tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "r", metadata=metadata)
    with pytest.raises(DataError, match=r"damaged or not written by protofl|not a record of protofl"):
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
    write_tensors(tmp_path / "r", {"w": torch.ones(2)}, header)
    with pytest.raises(DataError, match="r: "):
        load_record(tmp_path / "r")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    save_record(tmp_path / "r", {NUMBER: Count(1)})
    with pytest.raises(TypeError):
        save_record(tmp_path / "r", {NUMBER: Count(2)}, {"x": object()})
    assert load_record(tmp_path / "r")[0][NUMBER] == Count(1)


def test_row_major_copies_only_payloads_that_lie_otherwise() -> None:
    """A transposed matrix keeps its values and gets the layout of a file; other payloads stay the same objects."""
    matrix = torch.arange(6.0).reshape(2, 3)
    record = Record({"turned": TensorDict({"matrix": matrix.mT}), "same": TensorDict({"matrix": matrix})})
    found = row_major(record)
    assert found["same"] is record["same"]
    assert found["turned"].arrays()["matrix"].is_contiguous()
    assert torch.equal(found["turned"].arrays()["matrix"], matrix.mT)

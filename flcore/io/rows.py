"""Files of many clients' records, a row each: equal arrays are stacked, and a row is read without the others.

::

    "0/model/params/conv.weight"    [A, ...]    of A clients with records of equal names and shapes
    "1/model/params/conv.weight"    [B, ...]    of B clients with other ones

Every row has a check sum of its own: damage to one row is no damage to the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from flcore.core.errors import Cure, DataError
from flcore.io.files import Blocks, check_sum, json_text, read_tensors, write_tensors
from flcore.io.records import Payloads, flattened, from_flattened, kinds

_INCONSISTENT = (KeyError, TypeError, AttributeError, ValueError, IndexError, OverflowError, RuntimeError)
"""Errors of a header or of payloads that do not go together."""


@dataclass(frozen=True)
class Row:
    """A client's row.

    Attributes:
        record: of the client. values: further JSON values.
    """

    record: Payloads
    values: Mapping[str, Any] = field(default_factory=dict)


def save_rows(path: Path, rows: Mapping[int, Row], place: int, run: str) -> None:
    """Write clients' rows to one file, in one step.

    Args:
        path: the file. rows: by client.
        place: the exchange of the run. run: digest of the run's name.
    """
    layouts: dict[str, list[Mapping[str, Tensor]]] = {}
    clients: dict[str, list[Any]] = {}
    for client, row in sorted(rows.items()):
        arrays, payloads = flattened(row.record), kinds(row.record)
        shapes = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in arrays.items()}
        alike = layouts.setdefault(layout := json_text([payloads, shapes]), [])
        values = json.loads(json_text(row.values))  # as they will be read
        check = check_sum(arrays, [client, payloads, values])
        clients[str(client)] = [list(layouts).index(layout), len(alike), values, check]
        alike.append(arrays)
    stacked = {
        f"{number}/{name}": Blocks(tensor.dtype, (len(alike), *tensor.shape), [arrays[name] for arrays in alike])
        for number, alike in enumerate(layouts.values())
        for name, tensor in alike[0].items()
    }
    payloads_of = [json.loads(layout)[0] for layout in layouts]
    write_tensors(path, stacked, {"place": place, "run": run, "payloads": payloads_of, "clients": clients})


class Rows(Mapping[int, Row]):
    """The rows in a file by client; tensors are views of the mapped file."""

    def __init__(self, path: Path, place: int, run: str) -> None:
        """Read the file's header.

        Raises:
            DataError: it is missing, damaged, or of another place or run.
        """
        self._path = path
        arrays, header = read_tensors(path, Cure.START_OVER)
        try:
            if header["place"] != place or header["run"] != run:
                raise DataError(f"{path}: belongs to another run or another place in it; {Cure.START_OVER}")
            self._payloads: list[Mapping[str, Any]] = header["payloads"]
            self._clients = {int(client): row for client, row in header["clients"].items()}
            self._arrays: list[dict[str, Tensor]] = [{} for _ in self._payloads]
            for key, stacked in arrays.items():
                number, _, name = key.partition("/")
                self._arrays[int(number)][name] = stacked
        except _INCONSISTENT as error:
            raise DataError(f"{path}: damaged or not written by protofl; {Cure.START_OVER}") from error

    def __getitem__(self, client: int) -> Row:
        """Return a client's row.

        Raises:
            KeyError: the file has none. DataError: it is damaged.
        """
        row = self._clients[client]
        try:
            number, place, values, check = row
            arrays = {name: stacked[place] for name, stacked in self._arrays[number].items()}
            payloads = self._payloads[number]
            if check_sum(arrays, [client, payloads, values]) == check:
                return Row(from_flattened(arrays, payloads), values)
        except _INCONSISTENT:
            pass
        raise DataError(f"{self._path}: damaged, client {client}'s row is not what was written; {Cure.START_OVER}")

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)

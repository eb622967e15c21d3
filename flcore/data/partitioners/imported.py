"""A division that was made elsewhere, read from a JSON file of indices and checked."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flcore.core.errors import DataError
from flcore.core.params import LARGEST, param
from flcore.core.text import shorten
from flcore.data.partitioners.base import Assignment, HeldOut, Indices, Partitioner, merge_indices
from flcore.io.files import given_path, read_json

_FORM = (
    'expected {"clients": [{"train": [0, 5, ...], "val": [...], "test": [...], "tasks": [[...], ...]}, ...]}; only '
    'train is needed; optional next to clients: "test_source": "test" or "train", "overlap": true'
)
_KEYS = {"clients", "overlap", "test_source"}
_CLIENT_KEYS = {"train", "val", "test", "tasks"}


@dataclass(frozen=True)
class Imported(Partitioner, name="imported"):
    """Made elsewhere: a JSON file with the indices of every client, checked.

    Indices are of the prepared training split, in any order. Validation and test sets are taken from the file if it has
    them, else cut as for any other partition. ``test`` indexes the official test split or, with ``test_source: train``,
    the training split. Tasks divide ``train``. Clients must be disjoint unless the file says ``"overlap": true``.
    """

    path: str | None = param(None, "the JSON file with every client's training indices")

    def options(self) -> dict[str, Any]:
        """Return the hash of the content: the file's path does not matter."""
        return {"sha256": None if self.path is None else hashlib.sha256(given_path(self.path).read_bytes()).hexdigest()}

    def split(
        self, labels: np.ndarray, num_clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> Assignment:
        if self.path is None:
            raise DataError(f"partition.path is not set; it names a JSON file: {_FORM}")
        content = read_json(given_path(self.path), _FORM)
        entries = content.get("clients")
        if not isinstance(entries, list) or not entries or not set(content) <= _KEYS:
            raise DataError(f"{self.path}: {_FORM}")
        if len(entries) != num_clients:
            raise DataError(
                f"{self.path}: divides among {len(entries)} clients; set partition.num_clients={len(entries)}"
            )
        clients = [self._client(number, entry) for number, entry in enumerate(entries)]
        self._check_alike(clients)
        return Assignment(
            clients=[client["train"] for client in clients],
            complete=False,
            overlap=content.get("overlap") is True,
            tasks=[client["tasks"] for client in clients] if "tasks" in clients[0] else None,
            held_out=self._held_out(clients, content.get("test_source", "test")),
        )

    def _client(self, number: int, entry: Any) -> dict[str, Any]:
        where = f"{self.path}: client {number}"
        if not isinstance(entry, Mapping) or "train" not in entry or not set(entry) <= _CLIENT_KEYS:
            raise DataError(f"{where}: {_FORM}")
        read: dict[str, Any] = {
            key: _indices(entry[key], f"{where}, {key}") for key in ("train", "val", "test") if key in entry
        }
        if "tasks" in entry:
            if not isinstance(entry["tasks"], list):
                raise DataError(f"{where}: {_FORM}")
            tasks = [_indices(task, f"{where}, task {t}") for t, task in enumerate(entry["tasks"])]
            together = np.sort(np.concatenate(tasks)) if tasks else np.empty(0, dtype=np.int64)
            if not np.array_equal(together, read["train"]):
                raise DataError(f"{where}: its tasks together are not its train")
            read["tasks"] = tasks
        return read

    def _check_alike(self, clients: list[dict[str, Any]]) -> None:
        first = clients[0]
        for number, client in enumerate(clients):
            if set(client) != set(first):
                only = ", ".join(sorted(set(client) ^ set(first)))
                raise DataError(f"{self.path}: client {number} and client 0 differ in having {only}")
            if len(client.get("tasks", ())) != len(first.get("tasks", ())):
                raise DataError(f"{self.path}: client {number} has {len(client['tasks'])} tasks, client 0 others")

    def _held_out(self, clients: list[dict[str, Any]], test_source: Any) -> HeldOut:
        if test_source not in ("test", "train"):
            raise DataError(f'{self.path}: test_source = {shorten(test_source)}: must be "test" or "train"')
        val = [client["val"] for client in clients] if "val" in clients[0] else None
        test = [client["test"] for client in clients] if "test" in clients[0] else None
        return HeldOut(val, test, test_source)


def _indices(values: Any, where: str) -> Indices:
    """Return a list of distinct indices as an ascending int64 array, or raise DataError."""
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value <= LARGEST for value in values):
        raise DataError(f"{where}: not a list of whole numbers >= 0")
    indices = merge_indices([np.array(values, dtype=np.int64)])
    if (np.diff(indices) == 0).any():
        raise DataError(f"{where}: sample {indices[np.flatnonzero(np.diff(indices) == 0)[0]]} is listed twice")
    return indices

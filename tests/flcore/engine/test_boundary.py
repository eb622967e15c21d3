"""Nothing but messages and a client's own state crosses to a client, in training and in scoring."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from flcore.engine import rounds
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.client import ClientRunner
from flcore.engine.exchange import ExchangeWork
from flcore.engine.pool.executors import InlineExecutor, Results
from flcore.engine.pool.task import Group
from flcore.evaluation.scoring import Answerer, EvalRequest, EvalTask
from flcore.experiment.experiment import Experiment
from flcore.experiment.traffic import cost
from flcore.io.records import Record, pack_records, serialise, unpack_records
from flcore.methods import METHODS
from tests.cases import SMALL


def over(record: Record) -> Record:
    """A record that has been bytes."""
    return over_together([record])[0]


def over_together(records: Sequence[Record]) -> list[Record]:
    """Records that have been bytes together."""
    described, pieces = pack_records(records)
    return unpack_records(described, torch.frombuffer(bytearray(b"".join(pieces) or b"\0"), dtype=torch.uint8))


class Walled(InlineExecutor):
    """Clients are trained and scored behind a wall: what passes it are bytes, of messages and of their own states.

    The workers' objects are made of an experiment alone. Behind the wall nothing refers to a record of the server's.
    """

    def __init__(self, experiment: Experiment, checkpoint: Checkpoint) -> None:
        super().__init__(experiment, checkpoint)
        self._answerer = Answerer(experiment)
        self.asked = 0

    def train(self, work: ExchangeWork, group: Group) -> Results:
        clients = [client for stack in group for client in stack]
        messages = over_together([work.received[client] for client in clients])
        bare = replace(work, received=dict(zip(clients, messages, strict=True)))
        keeper, states = (
            self.checkpoint.client_state,
            partial(self.checkpoint.client_state, client_states=work.client_states),
        )
        self.checkpoint.client_state = lambda client, client_states: over(states(client))  # type: ignore[method-assign]
        try:
            return super().train(bare, group)
        finally:
            self.checkpoint.client_state = keeper  # type: ignore[method-assign]

    def score(
        self, request: EvalRequest, parts: Sequence[EvalTask], client_states: Mapping[int, int]
    ) -> Sequence[Record] | None:
        if any(part.client is None for part in parts):
            return None  # the global model is the server's, which scores it itself
        self.asked += len(parts)
        states = {part.client: over(self.checkpoint.client_state(part.client, client_states)) for part in parts}  # type: ignore[arg-type]
        known = over_together([part.known for part in parts])
        bare = [replace(part, known=message) for part, message in zip(parts, known, strict=True)]
        return [over(self._answerer.answer(request, part, lambda client: states[client])) for part in bare]


OWN: Mapping[str, Mapping[str, Any]] = {
    **SMALL,
    "fedproto": {"inference": "prototypes"},
    "gfpl": {**SMALL["gfpl"], "head": "sum"},
    "protolda": {"personal": "shares"},
}
"""Little work, and of some what makes clients answer with more than they keep."""

STACKABLE = ("fedavg", "fedproto", "gfpl", "fedcspc", "fedper", "feddc")


def experiment_of(lab: Any, method: str, *, stack: bool, batchnorm: str = "aggregate") -> Experiment:
    found: Experiment = lab.experiment(
        method={"name": method, **OWN.get(method, {})},
        model={**lab.model_of(method), "batchnorm": batchnorm},
        federation={"rounds": 2, "participation": 0.5},
        engine={"stack": stack},
    )
    return found


@pytest.mark.parametrize(
    ("method", "stack", "batchnorm"),
    [
        *((method, False, "aggregate") for method in METHODS),
        *((method, True, "aggregate") for method in STACKABLE),
        *(
            (method, False, "local")
            for method in ("fedavg", "creff", "ccvr", "fedensemble", "fedper", "fesem", "fedmlp")
        ),
    ],
)
def test_behind_a_wall_a_run_has_the_same_bytes(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, stack: bool, batchnorm: str
) -> None:
    """Two rounds of half of the clients: state, history and memories are those of a run without a wall."""
    monkeypatch.setattr(rounds, "WORTH_SHARING", 0)
    experiment = experiment_of(lab, method, stack=stack, batchnorm=batchnorm)
    expected = lab.run(experiment, tmp_path / "open")
    executor = Walled(experiment, Checkpoint(tmp_path / "walled"))
    found = lab.run(experiment, tmp_path / "walled", executor)
    assert found.bytes == expected.bytes
    asked = (
        not experiment.method.has_global_model or experiment.method.predicts_from_client_state or batchnorm == "local"
    )
    assert (executor.asked > 0) == asked


def test_no_worker_has_a_place_for_the_servers_record(lab: Any) -> None:
    """What is handed out names an exchange, clients, messages and states; a worker holds no record of the server."""
    assert {field.name for field in fields(ExchangeWork)} == {
        *("round", "index", "name", "number", "run", "received", "client_states")
    }
    experiment = lab.experiment(federation__rounds=1)
    runner = ClientRunner(experiment)
    server = Record(experiment.method.start_server(experiment.setting)) | {"secret": experiment.setting.initial}
    work = lab.work(experiment, [0], server=server)
    runner.train(work, [0], lambda client: Record())
    assert not any(other is runner for other in gc.get_referrers(server._payloads))
    assert set(work.received[0]) == {"model"}


@pytest.mark.parametrize("method", METHODS)
def test_scoring_bytes_are_those_of_the_messages(lab: Any, method: str) -> None:
    """Whatever a client is sent to be scored is counted as long as it is when it is written."""
    experiment = experiment_of(lab, method, stack=False)
    server = Record(experiment.method.start_server(experiment.setting))
    sent = [lab.scoring_message(experiment, server, client) for client in range(2)]
    counted = sum(size.bytes for size in cost(sent, experiment).values())
    assert counted == (0 if method == "central" else sum(len(serialise(message)) for message in sent))

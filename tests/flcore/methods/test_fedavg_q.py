"""Quantised FedAvg: everybody has the server's model to the bit, errors come back, and what travels (section 24)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flcore.math.compression import restored_all
from flcore.methods.fedavg_q import CHANGES, ERROR, LAST_SEEN, QUANTIZED_CHANGE
from flcore.methods.types import MODEL, RoundContext
from tests.cases import quick

PLAIN = {"name": "fedproto_cnn"}  # no BatchNorm


def quantised(lab: Any, rounds: int = 3, participation: float = 1.0, **method: Any) -> Any:
    federation = {"rounds": rounds, "participation": participation}
    return lab.experiment(model=PLAIN, method={"name": "fedavg_q", **method}, federation=federation)


def test_eight_bits_are_nearly_fedavg(lab: Any, tmp_path: Path) -> None:
    """One round: each weight is off by at most a step up and a step down of 1/127 of the largest change."""
    found = lab.run(quantised(lab, rounds=1, bits=8), tmp_path / "q").state.server[MODEL].params
    changes = {"model": PLAIN, "method__name": "fedavg", "federation": {"rounds": 1}}
    plain = lab.run(lab.experiment(**changes), tmp_path / "plain").state.server[MODEL].params
    initial = quantised(lab).setting.initial.params
    for name, value in plain.items():
        largest = float((value - initial[name]).abs().max())
        assert float((found[name] - value).abs().max()) <= 4 * 2 * largest / 127 + 1e-7  # a client may move farther


@pytest.mark.parametrize("participation", quick([0.5, 1.0], 1))
def test_clients_have_the_servers_model_to_the_bit(lab: Any, participation: float, tmp_path: Path) -> None:
    """What a client starts the next round from, put together of differences, is v."""
    experiment = quantised(lab, 6, participation, bits=4, down_bits=4)
    run = lab.run(experiment, tmp_path / "run")
    server, method = run.state.server, experiment.method
    for client in range(4):
        # One more turn, of which only its start matters.
        reply, client_state = lab.train(
            experiment, client, number=7, server=server, client_state=run.client_state(client)
        )
        assert reply.steps > 0
        for name, value in server[MODEL].params.items():
            assert torch.equal(client_state[MODEL].params[name], value), name
        sent = method.broadcast(server, client, RoundContext(experiment.setting, 7))
        missed = 6 - int(server[LAST_SEEN]["rounds"][client])
        assert (MODEL in sent) == (missed >= 8)


def test_what_was_left_out_comes_with_the_next_message(lab: Any) -> None:
    """The error that a client keeps is what it wanted to send less what arrived."""
    experiment = quantised(lab, bits=2)
    server = experiment.method.start_server(experiment.setting)
    reply, client_state = lab.train(experiment, 0, server=server)
    like = experiment.setting.initial.params
    arrived = restored_all(reply.message[QUANTIZED_CHANGE].named, like, 2)
    plain, _ = lab.train(
        lab.experiment(model=PLAIN, method__name="fedavg"), 0, server={MODEL: experiment.setting.initial}
    )
    for name, value in like.items():
        wanted = plain.message[MODEL].params[name] - value
        torch.testing.assert_close(client_state[ERROR].params[name], wanted - arrived[name], rtol=1e-5, atol=1e-7)
    assert any(float(value.abs().max()) > 0 for value in client_state[ERROR].params.values())


def test_who_was_away_receives_what_is_less(lab: Any, tmp_path: Path) -> None:
    """8 bits down: three missed differences cost less than v, four as much, and v is sent."""
    experiment = quantised(lab, 5, 1.0, down_bits=8)
    run = lab.run(experiment, tmp_path / "run")
    server = run.state.server
    assert sorted({int(name.split("/")[0]) for name in server[CHANGES].named}) == [2, 3, 4, 5]
    for missed, whole in ((0, False), (3, False), (4, True), (5, True)):
        seen = server[LAST_SEEN].named["rounds"].clone()
        seen[0] = 5 - missed
        held = server | {LAST_SEEN: type(server[LAST_SEEN])({"rounds": seen})}
        sent = experiment.method.broadcast(held, 0, RoundContext(experiment.setting, 6))
        assert (MODEL in sent) == whole
        if not whole:
            assert len({name.split("/")[0] for name in sent[CHANGES].named}) == missed


def test_bytes(lab: Any, tmp_path: Path) -> None:
    """Four clients, two rounds: 4 bits a value, rounded up per tensor, with a scale of 4 bytes; nothing in round 1."""
    experiment = quantised(lab, 2, bits=4, down_bits=8)
    run = lab.run(experiment, tmp_path / "run")
    sizes = [value.numel() for value in experiment.setting.initial.params.values()]
    up = sum(-(-size // 2) + 4 for size in sizes)
    down = sum(size + 4 for size in sizes)
    assert run.history[-1]["bytes_up"] == {"change": 2 * 4 * up, "num_samples": 2 * 4 * 8}
    assert run.history[-1]["bytes_down"] == {"changes": 4 * down}

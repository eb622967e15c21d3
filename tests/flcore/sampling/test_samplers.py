"""Client samplers: exact small cases, frequencies, what a trace means and what it is refused for."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flcore.config.schema import Config
from flcore.core.errors import ConfigError
from flcore.core.rng import numpy_stream
from flcore.sampling import SAMPLERS
from flcore.sampling.samplers import BySize, RoundRobin, Uniform
from flcore.sampling.trace import Trace

EQUAL = dict.fromkeys(range(6), 10)
TRACE = Trace(rounds={"1": [0, 2, 5], "2": [1], "4": [3, 4]})


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_set_of_known_clients_from_seed_and_round_alone(name: str) -> None:
    sampler: Any = TRACE if name == "trace" else SAMPLERS[name]()
    sizes = {client: client + 1 for client in range(6)}
    found = [sampler.sample(3, sizes, number, 1) for number in range(1, 9)]
    assert found == [sampler.sample(3, sizes, number, 1) for number in range(1, 9)]
    for chosen in found:
        assert len(chosen) == len(set(chosen)) <= 3 and set(chosen) <= sizes.keys()
    assert name == "trace" or all(len(chosen) == 3 for chosen in found)
    assert found != [sampler.sample(3, sizes, number, 2) for number in range(1, 9)]


def test_uniform_draws_as_runs_always_did() -> None:
    expected = numpy_stream(7, "cohort", 4).choice(list(range(6)), 3, replace=False).tolist()
    assert Uniform().sample(3, EQUAL, 4, 7) == expected


def test_by_size_draws_in_proportion() -> None:
    """One of sizes 1, 2, 7, of 1,000 rounds: 100, 200, 700, ± 5 √(1,000 p (1 - p)) ≤ 73.

    Of two, the second is drawn from the rest: client 0 with 0.1 + 0.2 · 1/8 + 0.7 · 1/3 = 0.3583, 358 ± 76.
    """
    sizes = {0: 1, 1: 2, 2: 7}
    times = Counter(BySize().sample(1, sizes, number, 0)[0] for number in range(1, 1001))
    assert all(abs(times[client] - expected) < 73 for client, expected in ((0, 100), (1, 200), (2, 700)))
    pairs = Counter(client for number in range(1, 1001) for client in BySize().sample(2, sizes, number, 0))
    assert abs(pairs[0] - 358) < 76


def test_by_size_takes_clients_without_samples_last() -> None:
    for number in range(1, 20):
        assert set(BySize().sample(2, {0: 0, 1: 3, 2: 1}, number, 0)) == {1, 2}
    assert sorted(BySize().sample(3, {0: 0, 1: 3, 2: 1}, 1, 0)) == [0, 1, 2]


def test_round_robin_goes_round() -> None:
    """Two of six: after three rounds everybody once, and round 4 is round 1. Four of six: places 0-3, 4-1, 2-5."""
    rounds = [list(RoundRobin().sample(2, EQUAL, number, 0)) for number in range(1, 5)]
    assert sorted(rounds[0] + rounds[1] + rounds[2]) == [0, 1, 2, 3, 4, 5]
    assert rounds[3] == rounds[0]
    order = rounds[0] + rounds[1] + rounds[2]
    assert [RoundRobin().sample(4, EQUAL, number, 0) for number in (1, 2, 3)] == [
        order[:4], order[4:] + order[:2], order[2:]
    ]  # fmt: skip


def test_a_trace_says_who_there_is_and_starts_again() -> None:
    """It has four rounds, the third without anybody; round 5 is round 1 of the trace."""
    assert [set(TRACE.sample(3, EQUAL, number, 0)) for number in (1, 2, 3, 4, 5)] == [
        {0, 2, 5}, {1}, set(), {3, 4}, {0, 2, 5}
    ]  # fmt: skip
    times = Counter(client for ctx in range(600) for client in TRACE.sample(2, EQUAL, 4 * ctx + 1, 0))
    assert all(abs(times[client] - 400) < 58 for client in (0, 2, 5))  # two of three, ± 5 √(600 · 2/3 · 1/3)


def config(**options: Any) -> Config:
    return Config.from_mapping({"federation": {"sampler": "trace", "sampler_options": options}})


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping(raw)
    return str(caught.value)


def test_a_file_is_read_once_and_names_the_run_by_what_it_says(tmp_path: Path) -> None:
    table, tree = tmp_path / "a.csv", tmp_path / "a.json"
    table.write_text("round,client\n1,2\n1,0\n2,1\n")
    tree.write_text('{"1": [0, 2], "2": [1]}')
    of_table, of_tree = config(file=str(table)), config(file=str(tree))
    assert of_table.identity() == of_tree.identity() == config(rounds={"1": [0, 2], "2": [1]}).identity()
    mapping = json.loads(json.dumps(of_table.to_mapping()))
    table.write_text("round,client\n1,1\n")
    assert Config.from_mapping(mapping) == of_table  # needs the file no more
    assert config(file=str(table)).hash("d", "p") != of_table.hash("d", "p")


def test_what_is_not_said_names_no_run() -> None:
    plain = Config.from_mapping({"federation": {"sampler": "uniform"}})
    assert not {"sampler", "sampler_options"} & plain.identity()["federation"].keys()
    assert Config.from_mapping({"federation": {"sampler": "by_size"}}).identity()["federation"]["sampler"] == "by_size"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("client,number\n1,2\n", "'round'"),
        ("round,client\n1,x\n", "invalid literal"),
        ("round,client\n0,1\n", "rounds: 0"),
        ("round,client\n1,1\n1,1\n", "rounds.1"),
        ("", "names no round"),
        ('{"1": 3}', "rounds.1"),
        ('{"1": [', "expected CSV"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    message = refusal({"federation": {"sampler": "trace", "sampler_options": {"file": str(path)}}})
    assert message.startswith(f"federation.sampler_options.file = {path}: ") and words in message


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"federation": {"sampler": "tracer"}}, "federation.sampler = tracer: "),
        ({"federation": {"sampler": "trace"}}, "federation.sampler = trace: set sampler_options"),
        ({"federation": {"sampler": "by_size", "sampler_options": {"file": "a"}}}, "federation.sampler_options.file: "),
        (
            {"federation": {"sampler": "trace", "sampler_options": {"file": "no"}}},
            "federation.sampler_options.file = no: ",
        ),
        (
            {"federation": {"sampler": "by_size"}, "aggregation": {"clip": 1, "noise": 1}},
            "aggregation.noise = 1: the privacy account needs a cohort drawn by chance",
        ),
    ],
)
def test_refused(raw: dict[str, Any], words: str) -> None:
    assert refusal(raw).startswith(words)

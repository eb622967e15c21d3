"""The papers' parameter studies: every command of docs/how-to/sensitivity.md is planned and checked, none trained."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipelines.cli.commands import make_app
from pipelines.cli.options import SEVERAL_RUNS
from pipelines.plan.grid import SweepPlan, sweep_plan
from pipelines.tuning.metrics import check_metric

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "sensitivity.md").read_text(encoding="utf-8")
COMMANDS = {
    words[words.index("--out") + 1].removeprefix("runs/"): words[1:]
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for words in map(shlex.split, block.splitlines())
}
STUDIES = {
    # Seven values of λ_c, and FedAvg once: it knows none of them.
    "fedpg-fig7": ("fedpg", ("method.lambda_c",), 7 + 1),
    # 5 prototypes × 3 clusters × 2 β, and FedAvg for each β.
    "fedcspc-fig5": ("fedcspc", ("method.n_repeat", "method.clusters", "partition.alpha"), 5 * 3 * 2 + 2),
    "fedcspc-fig6": ("fedcspc", ("method.n_aug", "method.n_repeat", "partition.alpha"), 5 * 2 * 2 + 2),
    "fedcspc-fig5-tinyimagenet": ("fedcspc", ("method.n_repeat", "method.clusters", "partition.alpha"), 32),
    "gfpl-fig3a": ("gfpl", ("method.weight",), 6),
    "gfpl-fig3b": ("gfpl", ("method.components",), 5),
    # FedProto and FedAvg for each of five numbers of shots.
    "gfpl-fig3c": ("gfpl", ("partition.shots",), 5 + 2 * 5),
    "gfpl-fig4a": ("gfpl", ("partition.ways_spread",), 4 + 4),
    "gfpl-fig4b": ("gfpl", ("method.interval",), 6),
    "gfpl-fig4c": ("gfpl", ("method.first_exchange",), 5),
    "gfpl-fig6": ("gfpl", ("method.merge_distance",), 8),
}
"""Where a study goes → whose it is, what is varied, and how many points it has, baselines among them."""


def parsed(words: list[str]) -> dict[str, Any]:
    _, bound, _ = make_app().parse_args(words)
    bound.apply_defaults()
    return bound.arguments


def plan(arguments: Mapping[str, Any]) -> SweepPlan:
    raw = arguments["values"].read({}, without_effect=SEVERAL_RUNS)
    return sweep_plan(raw, *(arguments[name] for name in ("vary", "seeds", "baselines")))


def test_these_are_the_commands_of_the_page() -> None:
    assert list(COMMANDS) == list(STUDIES)


@pytest.mark.parametrize("name", STUDIES)
def test_a_command_can_be_carried_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every configuration of it is made and checked, for three seeds; images are not looked for."""
    monkeypatch.chdir(ROOT)
    arguments = parsed(COMMANDS[name])
    method, keys, points = STUDIES[name]
    planned = plan(arguments)
    check_metric(arguments["metric"], planned.base.method)
    assert (planned.base.method.name, planned.keys) == (method, keys)
    assert len(planned.points) == points
    assert len(planned.runs) == 3 * points
    if method == "fedcspc":  # it calibrates a projection, and says that there is none when the model is built
        wide = 512 if name.endswith("tinyimagenet") else 256
        assert planned.base.to_mapping()["model"]["projection_dim"] == wide


def test_first_exchanges_of_a_study_are_rounds_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A multiple of S_T that is not before t1: with S_T = 10 these are t1 itself, so no two runs are the same."""
    monkeypatch.chdir(ROOT)
    arguments = parsed(COMMANDS["gfpl-fig4c"])
    planned = plan(arguments)
    methods = [run.config.method for run in planned.runs[::3]]
    firsts = [next(n for n in range(1, 81) if method.exchanges(n)) for method in methods]  # type: ignore[attr-defined]
    assert firsts == [1, 11, 21, 31, 51]

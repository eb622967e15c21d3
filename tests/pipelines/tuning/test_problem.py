"""What is optimised and where a study starts: any number of `metrics.json`, which way is better, within which limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState, create_trial

from flcore.core.errors import ConfigError, RunError
from flcore.core.params import Search, param
from flcore.methods import METHODS
from flcore.methods.fedavg import FedAvg
from pipelines.runs.folder import RunFolder
from pipelines.tuning.folder import StudyFiles
from pipelines.tuning.metrics import FIGURES, NESTED, PER_ROUND, value_of
from pipelines.tuning.problem import Problem
from pipelines.tuning.results import describe, markdown

from .conftest import Configure

# ---- the metric --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "direction", "prunes"),
    [
        ("top1_global", "maximize", True),
        ("mean_local_own_classes", "maximize", True),
        ("loss_global", "minimize", True),
        ("client_std", "minimize", True),
        ("last10_top1_global", "maximize", False),
        ("bytes_up", "minimize", False),
        ("bytes_up_by_kind.model", "minimize", False),
        ("privacy.epsilon", "minimize", False),
        ("tasks.forgetting", "minimize", False),
        ("tasks.backward_transfer", "maximize", False),
        ("class_acc.3", "maximize", False),
    ],
)
def test_costs_are_minimised_and_what_every_round_has_can_prune(
    config_with: Configure, metric: str, direction: str, prunes: bool
) -> None:
    problem = Problem.of(config_with(), "accuracy", metric)
    assert (problem.direction, problem.directions, problem.prunes) == (direction, (direction,), prunes)
    both = Problem.of(config_with(), "accuracy,bytes", metric)
    assert (both.directions, both.prunes) == ((direction, "minimize"), False)


def test_any_number_of_a_finished_run_is_its_score(finished: Path) -> None:
    run = RunFolder(StudyFiles(finished).trial(0).directory)
    metrics, history = run.metrics, run.history

    def score(metric: str) -> float:
        return value_of(metric, metrics, history)

    assert score("mean_local") == history[-1]["mean_local"]
    assert score("bytes_up") == sum(history[-1]["bytes_up"].values())
    assert score("bytes_down_by_kind.model") == history[-1]["bytes_down"]["model"]
    assert score("class_acc.9") == metrics["class_acc"][9]
    # A run says everything that may be asked of it, and no list here names what there is not.
    assert set(FIGURES) | set(NESTED) - {"tasks", "poisoned"} <= metrics.keys()
    assert all(record.keys() >= set(PER_ROUND) for record in history)


def test_a_figure_that_is_not_there_is_told_with_those_that_are(finished: Path) -> None:
    run = RunFolder(StudyFiles(finished).trial(0).directory)
    metrics, history = run.metrics, run.history
    with pytest.raises(ConfigError, match=r"did you mean bytes_up_by_kind\.model\b") as error:
        value_of("bytes_up_by_kind.modl", metrics, history)
    assert "bytes_up_by_kind.num_samples, bytes_up_per_round, client_std," in str(error.value)
    assert "class_acc.3" not in str(error.value)  # not every class
    assert "method" not in str(error.value).split("runs have")[1]  # no number
    with pytest.raises(RunError, match="mean_local is null: nobody could be scored"):
        value_of("mean_local", {}, [{"round": 1, **dict.fromkeys(PER_ROUND)}])


# ---- the limit ---------------------------------------------------------------------------------------------------


def test_a_limit_on_bytes_is_part_of_a_study(config_with: Configure) -> None:
    free, limited = (Problem.of(config_with(), "accuracy,bytes", max_bytes=most) for most in (None, 1000))
    assert [free.within(count) for count in (1000, 1001)] == [True, True]
    assert [limited.within(count) for count in (1000, 1001)] == [True, False]
    assert free.name != limited.name
    assert not Problem.of(config_with(), "accuracy", max_bytes=1000).within(1001)


# ---- starts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preset(FedAvg):
    """A method whose authors used other values: one that is searched, one that is not, one beyond what is searched."""

    name: ClassVar[str] = "with_preset"
    AUTHORS: ClassVar[dict[str, Any]] = {"rate": 0.3, "kind": "theirs", "size": 100}

    rate: float = param(0.1, "searched", low=0, search=Search(0.0, 1.0))
    kind: str = param("ours", "not searched")
    size: int = param(3, "searched in another range", search=Search(1, 10))

    def __post_init__(self) -> None:
        if self.rate == 0.3 and self.kind == "refuse":
            raise ValueError("rate = 0.3 does not go with this kind")


@pytest.fixture
def preset() -> Iterator[None]:
    """Registered as long as a test takes."""
    METHODS.added["with_preset"] = Preset  # type: ignore[attr-defined]
    yield
    METHODS.added.pop("with_preset")  # type: ignore[attr-defined]


@pytest.mark.usefixtures("preset")
def test_a_study_starts_with_what_is_given_and_then_with_what_the_authors_used(config_with: Configure) -> None:
    def starts(**values: Any) -> list[tuple[float, int]]:
        own = {"name": "with_preset", **values}
        problem = Problem.of(config_with(method=own), "accuracy")
        found = problem.starts
        assert all(start.keys() == found[0].keys() for start in found)
        return [(start["method.rate"], start["method.size"]) for start in found]

    assert starts() == [(0.1, 3), (0.3, 3)]
    assert starts(rate=0.3) == [(0.3, 3)]  # the same
    assert starts(kind="refuse") == [(0.1, 3)]  # refused
    assert starts(size=200) == [(0.1, 200), (0.3, 100)]  # 1 to 200 now


# ---- results -----------------------------------------------------------------------------------------------------


def test_a_trial_without_a_key_has_a_dash_there_and_null_is_a_value(config_with: Configure) -> None:
    problem = Problem.of(config_with(method={"name": "fedmlp"}), "accuracy,bytes", max_bytes=20_000)
    key = "method.num_clusters"
    cluster = CategoricalDistribution(("finch", "centred", "kmeans", "none"))
    known: dict[str, Any] = {"method.cluster": cluster, key: CategoricalDistribution((None, 2, 3, 4, 5))}
    known["local.lr"] = FloatDistribution(1e-3, 0.3, log=True)
    study = optuna.create_study(directions=problem.directions)
    for accuracy, sent, values in (
        (0.5, 10_000, {"method.cluster": "finch", "local.lr": 0.1}),
        (0.4, 9_000, {"method.cluster": "kmeans", key: None}),
        (0.9, 30_000, {"method.cluster": "kmeans", key: 4}),
    ):
        trial = create_trial(
            values=[accuracy, sent],
            params=values,
            distributions={name: known[name] for name in values},
            user_attrs={"bytes": sent},
        )
        study.add_trial(trial)
    study.add_trial(create_trial(state=TrialState.FAIL))

    lines = markdown(problem, study).splitlines()
    place = next(line for line in lines if line.startswith("| trial ")).split(" | ").index(key)
    rows = {line.split()[1].strip("*"): line.split(" | ")[place] for line in lines if line[:4] in ("| 0 ", "| 1 ")}
    rows |= {line.split()[1].strip("*"): line.split(" | ")[place] for line in lines if line.startswith("| **")}
    assert {number: rows[number] for number in "01"} == {"0": "–", "1": "null"}
    (searched,) = [line for line in lines if line.startswith(f"| {key} ")]
    assert searched.strip("| ").split(" | ")[1:] == ["null, 2, 3, 4, 5", "–", "–"]
    said = [describe(problem, trial) for trial in study.trials]
    assert said[0] == "trial 0: top1_global 50.00 %, 10.00 kB"
    assert said[2] == "trial 2: top1_global 90.00 %, 30.00 kB, more than 20.00 kB"

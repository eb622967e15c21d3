"""What a paper says a run should send, by its formula, beside what was measured of the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flcore.config.schema import Config
from flcore.data.dataset import Dataset
from flcore.experiment.run_folder import read_run_config
from flcore.methods.gfpl import GFPL
from flcore.models import build_model
from pipelines.reporting.figures.partition import load_partition
from pipelines.runs.inputs import inputs_of

PREFIX = "formula."
"""What the metric of such a column begins with, in a table's file."""


def mixtures_up(run: Path) -> float:
    """GFPL's scalars that go up, of all clients, in the mean over rounds (gfpl.md section 3; figure 7).

    n·(2d + 1) for each class that a client holds and each exchange: means, deviations and weights of n Gaussians, where
    the class has samples for so many. What goes beside them, such as the class's number of samples, is not in it.

    Args:
        run: its folder.

    Raises:
        DataError: a file of the run is damaged, or its division is not there any more.
    """
    config, inputs = Config.from_mapping(read_run_config(run)["config"]), inputs_of(run)
    method, rounds, meta = config.method, config.federation.rounds, Dataset.load(inputs.prepared).meta
    assert isinstance(method, GFPL)
    length = build_model(config.model_spec, meta.shape, meta.num_classes).feature_dim
    pairs = int((load_partition(inputs.partition).counts > 0).sum())
    exchanges = sum(method.exchanges(number) for number in range(1, rounds + 1))
    return method.components * (2 * length + 1) * pairs * exchanges / rounds


FORMULAS: dict[str, tuple[str, Callable[[Path], float]]] = {"mixtures_up": ("scalars_up_per_round", mixtures_up)}
"""By name, what a formula speaks of, and the formula."""


def spoken_of(metric: str) -> str | None:
    """The measured figure that a formula speaks of; None where a metric is none."""
    return FORMULAS[metric.removeprefix(PREFIX)][0] if metric.startswith(PREFIX) else None

"""``protofl stage``: one stage of `dvc.yaml`, without any server; what is written does not name this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flcore.errors import ConfigError
from pipelines.config.params import without_tracking
from pipelines.orchestration.commands import operation

if TYPE_CHECKING:
    from flcore.config import Config
    from pipelines.execution.bodies import Operation


def stage(name: str, raw: Mapping[str, Any], out: Path, method: str | None, seed: int | None, *, restart: bool) -> None:
    """``protofl stage``: one stage of `dvc.yaml`, below one folder.

    Args:
        name: ``prepare``, ``partition``, ``train`` or ``compare``.
        raw: parameters, not yet checked.
        out: the folder: ``prepared/``, ``partitions/``, ``runs/``, ``comparison/``.
        method, seed: of the comparison's runs only those; None: all of ``compare.methods`` and ``compare.seeds``.
        restart: train: throw away checkpoints that cannot be used.
    """
    methods, seeds = [method] if method else None, None if seed is None else [seed]
    if name in ("train", "compare"):
        with operation(raw) as (how, _):
            configs = _configs(raw, methods, seeds)
            (_train if name == "train" else _compare)(raw, configs, out, how, restart)
        return
    configs = _configs(raw, methods, seeds)
    if name == "prepare":
        from pipelines.stages.prepare import prepare

        meta = prepare(configs[0], out / "prepared").meta
        print(f"{meta.name}: {meta.train_size} training and {meta.test_size} test images, {meta.num_classes} classes")
    else:
        from pipelines.stages.partition import partition, partition_table

        numbers = sorted({config.seed for config in configs})
        for number, division in partition(configs[0], numbers, out / "prepared", out / "partitions").items():
            print("\n".join([f"seed {number}", *partition_table(division)]))


def _configs(raw: Mapping[str, Any], methods: Sequence[str] | None, seeds: Sequence[int] | None) -> list[Config]:
    from pipelines.execution.bodies import comparison_runs

    planned = comparison_runs(raw, methods, seeds)
    if any(run.row or run.draw is not None for run in planned):
        raise ConfigError(
            "compare.variants, compare.partition_seeds: stages carry out each method once per seed; use protofl compare"
        )
    return [run.config for run in planned]


def _train(raw: Mapping[str, Any], configs: Sequence[Config], out: Path, how: Operation, restart: bool) -> None:
    from pipelines.stages.train import train

    train(configs, out / "prepared", out / "partitions", out / "runs", how, restart=restart)


def _compare(raw: Mapping[str, Any], configs: Sequence[Config], out: Path, how: Operation, restart: bool) -> None:
    runs, folder = [out / "runs" / f"{config.method.name}-s{config.seed}" for config in configs], out / "comparison"
    asked = how.recorder.compare("comparison", without_tracking(raw), runs, folder, name=out.name, **how.console)
    asked.result()
    print(f"table: {folder / 'comparison.md'}\nreport: {folder / 'report.html'}")

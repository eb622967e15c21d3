"""``protofl stage``: one stage of `dvc.yaml`, without a server; its outputs do not name this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flcore.core.errors import ConfigError, DataError
from flcore.experiment.run_folder import RunFiles
from pipelines.orchestration.commands import operation
from pipelines.plan.params import without_tracking
from pipelines.runs.ownership import claim_folder
from pipelines.stages.parameters import unseen_plugin

if TYPE_CHECKING:
    from flcore.config.schema import Config
    from pipelines.execution.operation import Operation


def stage(name: str, raw: Mapping[str, Any], out: Path, *, restart: bool) -> None:
    """Run one stage of `dvc.yaml`, below one folder (``protofl stage``).

    Args:
        name: ``prepare``, ``partition``, ``train`` or ``compare``.
        out: the folder: ``prepared/``, ``partitions/``, ``runs/``, ``comparison/``.
        restart: train: discard unusable checkpoints and damaged results.

    Raises:
        ConfigError: the parameters are wrong, or the stage would replace files that no stage has made.
        DataError: data are missing or damaged. RunError: runs failed.
    """
    configs = _configs(raw)
    plugins = [plugin.path for config in configs for plugin in config.plugins]
    if "DVC_STAGE" in os.environ and (refused := unseen_plugin(Path(), plugins)) is not None:
        raise ConfigError(refused)
    _refuse_missing(name, configs, out)
    _claim(name, out)
    if name in ("train", "compare"):
        with operation(raw, restart=restart) as (how, _):
            if name == "compare":
                _compare(raw, configs, out, how)
            else:
                from pipelines.stages.train import train

                train(configs, out / "prepared", out / "partitions", out / "runs", how)
        return
    if name == "prepare":
        from pipelines.stages.prepare import prepare

        prepared = prepare(configs[0], out / "prepared")
        meta = prepared.meta
        print(f"{meta.name}: {meta.train_size} training and {meta.test_size} test images, {meta.num_classes} classes")
    else:
        from pipelines.stages.partition import partition, partition_table

        numbers = sorted({config.seed for config in configs})
        made = partition(configs[0], numbers, out / "prepared", out / "partitions")
        for number, division in made.items():
            print("\n".join([f"seed {number}", *partition_table(division)]))


def _refuse_missing(name: str, configs: Sequence[Config], out: Path) -> None:
    """Refuse to run before an earlier stage, and name it, before anything is read."""
    from pipelines.stages.partition import partition_folder
    from pipelines.stages.train import run_folder

    needed: list[tuple[str, Path]] = []
    if name in ("partition", "train"):
        needed.append(("prepare", out / "prepared" / "meta.json"))
    if name == "train":
        needed += [("partition", partition_folder(out / "partitions", each) / "manifest.json") for each in configs]
    if name == "compare":
        needed += [("train", RunFiles(run_folder(out / "runs", each)).metrics) for each in configs]
    for stage_before, path in needed:
        if not path.exists():
            raise DataError(f"{path}: not there; carry out protofl stage {stage_before} --out {out} first")


def _claim(name: str, out: Path) -> None:
    """Refuse a folder in which a stage would replace or remove files that no stage has made."""
    claim_folder("stages", out)
    if name == "prepare":
        claim_folder("prepared", out / "prepared")
    elif name == "compare":
        claim_folder("comparison", out / "comparison")
    else:
        home = out / ("partitions" if name == "partition" else "runs")
        claim_folder("partitions" if name == "partition" else "stage runs", home)
        for folder in sorted(home.iterdir()) if home.exists() else ():
            if not folder.name.startswith("."):
                claim_folder("partition" if name == "partition" else "run", folder)


def _configs(raw: Mapping[str, Any]) -> list[Config]:
    from pipelines.plan.comparison import comparison_plan

    planned = comparison_plan(raw).runs
    if any(run.row or run.draw is not None for run in planned):
        raise ConfigError(
            "compare.variants, compare.partition_seeds: stages carry out each method once per seed; use protofl compare"
        )
    return [run.config for run in planned]


def _compare(raw: Mapping[str, Any], configs: Sequence[Config], out: Path, how: Operation) -> None:
    from pipelines.stages.train import describe_pulled, run_folder

    describe_pulled(configs, out / "prepared", out / "partitions", out / "runs")
    runs, folder = [run_folder(out / "runs", config) for config in configs], out / "comparison"
    facts = {"name": out.name, "with_times": False, **how.console}
    how.follower.compare("comparison", without_tracking(raw), runs, folder, **facts)
    how.follower.wait()
    print(f"table: {folder / 'comparison.md'}\nreport: {folder / 'report.html'}")

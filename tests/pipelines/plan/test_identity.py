"""Identities of runs: a change of how configurations are read must not rename any run.

``identities.json`` has one digest for every table of the papers, over the identities of all its runs, and one for each
method in the golden check; of ``engine.stack`` and ``engine.compile`` what ``auto`` stands for in short runs on a CPU.
Where a change of identities is meant, run this file to write them again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from flcore.config.schema import Config
from flcore.methods import METHODS
from pipelines.papers.catalogue import table_named, tables
from pipelines.papers.plan import TableSelection, plan_table
from pipelines.proof import golden

RECORDED = Path(__file__).with_name("identities.json")


def of_table(id: str) -> str:
    """Digest over the sorted names of a table's runs, and how many they are."""
    settings = plan_table(table_named(id), TableSelection(seeds=(0,)), with_data=False).settings
    hashes = sorted(name_of(run.config) for setting in settings for run in setting.plan.runs)
    return f"{len(hashes)} {hashlib.sha256(' '.join(hashes).encode()).hexdigest()}"


def of_method(name: str) -> str:
    return name_of(Config.from_mapping(golden._config(name)))


def name_of(config: Config) -> str:
    engine = replace(config.engine, stack=False, compile="none")
    return replace(config, engine=engine).hash("data", "partition")


def recorded() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("id", tables())
def test_runs_of_a_table_keep_their_names(id: str) -> None:
    assert of_table(id) == recorded()["tables"][id]


def test_runs_of_the_golden_check_keep_their_names() -> None:
    names = recorded()["methods"]
    assert {name: of_method(name) for name in names} == names


if __name__ == "__main__":
    found = {"methods": {name: of_method(name) for name in METHODS}, "tables": {id: of_table(id) for id in tables()}}
    RECORDED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

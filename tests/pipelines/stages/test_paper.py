"""The partitions of the papers' settings: each is an artifact of DVC, and is what the code makes of the images now."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from flcore.core.errors import ConfigError
from flcore.data.partition import Partition
from pipelines.papers.catalogue import table_named
from pipelines.runs.cache import ENVIRONMENT_VARIABLE
from pipelines.stages.paper import paper_partitions

ROOT = Path(__file__).resolve().parents[3]
HOME = ROOT / "partitions"
DECLARED = yaml.safe_load((HOME / "dvc.yaml").read_text())
SETTINGS = DECLARED["stages"]["partition"]["foreach"]
IMAGES = Path(os.environ.get("PROTOFL_DATA") or ROOT.parent / "shared" / "data")


def test_every_setting_is_an_artifact_of_a_column_that_exists() -> None:
    assert set(DECLARED["artifacts"]) == set(SETTINGS)
    for name, setting in SETTINGS.items():
        table_named(setting["table"]).column(setting["column"])
        assert DECLARED["artifacts"][name]["path"] == name
        for folder in (HOME / name).iterdir():
            assert Partition.load(folder).num_clients == 20


def test_an_unknown_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fedpa\.table2: no column mnist_7"):
        paper_partitions("fedpa.table2", "mnist_7", (), tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_partition_made_again_has_the_same_bytes(
    name: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (IMAGES / "MNIST").exists():
        pytest.skip("no images; PROTOFL_DATA names their folder")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path_factory.getbasetemp() / "cache"))  # images once for all
    table, column = SETTINGS[name].values()
    paper_partitions(table, column, [f"data.root={IMAGES}"], tmp_path / "made")
    made, stored = (
        {path.relative_to(home).as_posix(): path.read_bytes() for path in home.rglob("*") if path.is_file()}
        for home in (tmp_path / "made", HOME / name)
    )
    assert made == stored

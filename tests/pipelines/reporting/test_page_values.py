"""What a run's page says of privacy and of a simulated attack, and that it says nothing where there is neither."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipelines.reporting.page_tables import fingerprints, run_tiles, run_values
from pipelines.runs.record import RunRecord
from tests.pipelines.reporting.records import write_run

PRIVACY = {
    "epsilon": 5.3201, "delta": 1e-4, "unit": "client", "releases": 20, "covers": "the global models of all rounds",
    "noise_multiplier": 2.0, "clip": 0.5, "sampling": "100 of 1000 clients a round, without replacement",
}  # fmt: skip
POISONED = {"attack": "sign_flip", "attack_scale": 10.0, "clients": [2, 7], "honest_mean_local": 0.875}


def values(run: RunRecord) -> dict[str, str]:
    """Name in metrics.json → what the table says."""
    _, names, shown = (column.values for column in run_values(run).columns)
    return dict(zip(names, shown, strict=True))


def test_the_account_is_on_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", privacy=PRIVACY)
    found = {name: value for name, value in values(run).items() if name.startswith("privacy.")}
    assert found == {
        "privacy.epsilon": "5.32 at δ = 0.0001",
        "privacy.unit": "one client, over 20 rounds",
        "privacy.noise_multiplier": "2.0",
        "privacy.clip": "0.5",
        "privacy.sampling": "100 of 1000 clients a round, without replacement",
        "privacy.covers": "the global models of all rounds",
    }
    assert ("privacy spent, ε", "5.32 at δ = 0.0001", "of what is told under all values") in run_tiles(run)


def test_of_variants_the_page_says_which_folder_is_whose(tmp_path: Path) -> None:
    """Folders are named for the method: two rows of it differ in the hash alone."""
    runs = [replace(write_run(tmp_path / f"fedavg-s0-{row}"), method=row) for row in ("slow", "fast")]
    listed = {column.heading: column.values for column in fingerprints(runs).columns}
    assert (listed["method"], listed["folder"]) == (("slow", "fast"), ("fedavg-s0-slow", "fedavg-s0-fast"))


def test_of_noisy_prototypes_what_their_account_says(tmp_path: Path) -> None:
    account = {key: PRIVACY[key] for key in ("epsilon", "delta", "unit", "releases", "covers")}
    names = values(write_run(tmp_path / "run", privacy=account))
    assert [name for name in names if name.startswith("privacy.")] == [
        "privacy.epsilon", "privacy.unit", "privacy.covers"
    ]  # fmt: skip


def test_a_simulated_attack_is_on_the_page(tmp_path: Path) -> None:
    found = values(write_run(tmp_path / "run", poisoned=POISONED))
    assert [found[f"poisoned.{key}"] for key in ("attack", "clients", "honest_mean_local")] == [
        "sign_flip × 10", "2, 7", "87.50 %"
    ]  # fmt: skip


def test_otherwise_nothing_is_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", privacy=None)
    assert not [name for name in values(run) if name.startswith(("privacy", "poisoned"))]
    assert not [tile for tile in run_tiles(run) if "privacy" in tile[0]]

"""The board: archives of settings, methods and seeds; its figures by hand, and what is refused."""

from __future__ import annotations

import hashlib
import html
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.cli.app import main

Add = Callable[..., Path]


@pytest.fixture
def add(forged: Callable[[Callable[[dict[str, bytes]], object]], Path], tmp_path: Path) -> Add:
    """Write the archive of a run into the folder ``a``: with other results, and other keys of its identity."""

    def made(name: str, seed: int, accuracy: float, **identity: dict[str, Any]) -> Path:
        def change(contents: dict[str, bytes]) -> None:
            config = next(name for name in contents if name.endswith("/config.json"))
            metrics = next(name for name in contents if name.endswith("/metrics.json"))
            header, results = json.loads(contents[config]), json.loads(contents[metrics])
            changes = {"method": {"name": "fedavg"}, **identity}
            header["identity"] |= {key: {**header["identity"][key], **value} for key, value in changes.items()}
            header["identity"]["seed"] = seed
            run = json.dumps(header["identity"])
            header["config_hash"] = results["config_hash"] = hashlib.sha256(run.encode()).hexdigest()
            results |= {"seed": seed, "mean_local": accuracy, "bytes_up": 1000, "bytes_down": 500}
            results["partition_fingerprint"] = f"{identity.get('partition', {}).get('seed')}, {seed}"
            contents[config], contents[metrics] = json.dumps(header).encode(), json.dumps(results).encode()

        target = tmp_path / "a" / f"{name}.zip"
        target.parent.mkdir(exist_ok=True)
        return forged(change).rename(target)

    return made


def settings(tmp_path: Path) -> dict[str, list[list[str]]]:
    """Write the board, and return the rows of each setting's table by its heading."""
    assert main(["board", str(tmp_path / "a"), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "board.html").read_text()
    found = {}
    for section in re.findall(r'<section id="setting-\d+">.*?</section>', page, re.DOTALL):
        rows = re.findall(r"<tr[^>]*>(<td.*?)</tr>", section.split("<figure>")[0], re.DOTALL)
        texts = [[html.unescape(re.sub(r"<[^>]+>", "", cell)).replace("\xa0", " ") for cell in
                  re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)] for row in rows]  # fmt: skip
        found[html.unescape(re.findall("<h2>(.*?)</h2>", section)[0])] = texts
    return found


def test_a_row_is_the_mean_over_seeds_with_its_interval_bytes_and_commands(add: Add, tmp_path: Path) -> None:
    """70, 80 and 90 %: mean 80, std 10; t(0.975, 2) = 4.3027, half-width 4.3027 * 10 / sqrt(3) = 24.84 points.

    FedProx has one seed, so no interval; 1000 bytes up and 500 down are 1.50 kB.
    """
    paths = [add(f"f{seed}", seed, accuracy) for seed, accuracy in enumerate((0.7, 0.8, 0.9))]
    paths.append(add("one run", 0, 0.6, method={"name": "fedprox"}))
    shutil.copy(paths[0], tmp_path / "a" / "g.zip")  # a run of two archives counts once, from the first
    files = [(f"'{path.name}'" if " " in path.name else path.name, path) for path in paths]
    commands = [
        f"protofl reproduce {name} --check\n# SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
        for name, path in files
    ]
    assert settings(tmp_path) == {
        "digits, dirichlet": [
            ["fedavg", "1.50 kB", "80.00 [55.16, 104.84]", "3", "\n".join(commands[:3])],
            ["fedprox", "1.50 kB", "60.00", "1", commands[3]],
        ]
    }


def test_an_interval_is_over_divisions(add: Add, tmp_path: Path) -> None:
    """Divisions 5 and 6 have 60, 80 and 70, 90 %: means 70 and 80, std 7.07; t(0.975, 1) = 12.706.

    Half-width 12.706 * 7.07 / sqrt(2) = 63.53 points around 75.
    """
    for division, seed, accuracy in ((5, 0, 0.6), (5, 1, 0.8), (6, 0, 0.7), (6, 1, 0.9)):
        add(f"{division}-{seed}", seed, accuracy, partition={"seed": division})
    ((row,),) = settings(tmp_path).values()
    assert row[:4] == ["fedavg", "1.50 kB", "75.00 [11.47, 138.53]", "4"]


def test_settings_are_not_mixed_and_rows_of_one_method_are_told_apart(add: Add, tmp_path: Path) -> None:
    """One more round is another setting; another mu is another row. ProtoLDA has its own model."""
    add("short", 0, 0.5)
    add("long", 0, 0.6, federation={"rounds": 2})
    for mu in (0.1, 1.0):
        add(f"mu{mu}", 0, 0.7, method={"name": "fedprox", "mu": mu})
    add("long mu", 0, 0.7, method={"name": "fedprox", "mu": 1.0}, federation={"rounds": 2})
    add("protolda", 0, 0.8, method={"name": "protolda"}, model={"name": "patch_dictionary"})
    found = {name: [row[0] for row in rows] for name, rows in settings(tmp_path).items()}
    assert found == {
        "1. digits, dirichlet (rounds = 2)": ["fedavg", "fedprox (mu = 1.0)"],
        "2. digits, dirichlet (rounds = 1)": ["fedavg", "fedprox (mu = 0.1)", "fedprox (mu = 1.0)", "protolda"],
    }


def test_what_is_no_whole_archive_is_named_in_a_line(
    add: Add, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "a", tmp_path / "out"

    def refused(*places: Path) -> str:
        assert main(["board", *map(str, places), "--out", str(out)]) == 3
        (line,) = capsys.readouterr().err.splitlines()
        assert not out.exists()
        return line.removeprefix("protofl: ")

    whole = add("whole", 0, 0.5)
    assert refused(tmp_path / "none").startswith(f"{tmp_path / 'none'}: no archive (*.zip) there; protofl archive")
    (folder / "cut.zip").write_bytes(whole.read_bytes()[:-1])
    assert refused(folder).startswith(f"{folder / 'cut.zip'}: damaged or no zip file of protofl archive")
    (folder / "cut.zip").unlink()
    huge = add("huge", 1, 10**400)  # no floating-point number
    assert refused(huge).startswith(f"{huge}: runs/")
    huge.unlink()
    other = add("zz", 0, 0.9)
    line = refused(folder)
    assert line.startswith(f"{other}: runs/")
    assert f"/metrics.json is not that of the same run in {whole}; leave one archive out" in line

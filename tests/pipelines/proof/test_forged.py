"""Archives of somebody hostile: any field may be anything, and all hashes are mended."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flcore.core.errors import DataError, RunError
from flcore.core.text import is_control
from pipelines.cli.app import main
from pipelines.proof import reproduce
from pipelines.proof.contents import ArchivedComparison, read_archive
from pipelines.proof.stored_zip import read_zip, write_zip
from pipelines.reporting.comparison_files import markdown, print_table
from pipelines.reporting.comparison_report import collect
from pipelines.runs.folder import RunFolder
from pipelines.runs.standard_error import console

Forge = Callable[[Callable[[dict[str, bytes]], object]], Path]

TUNED = {"method": "fedproto", "metric": "mean_local", "trials": 2, "failed": 0, "given": 0.5, "best": 0.6,
         "values": {"method.weight": 2.0}, "error": None}  # fmt: skip
COMPARED = {
    "baseline": "fedproto",
    "target_fraction": 0.95,
    "rows": [["RUN", "fedproto", None]],
    "budget": "as many bytes as fedproto",
    "tuning": [],
    "claims": {"ours": {"better": "fedproto", "than": "local", "metric": "mean_local", "by": 1, "says": "ours leads"}},
    "failed": {"local seed 0": "lost"},
    "results": {},
}
"""Of an archive with one run: what `protofl archive` writes of a comparison."""

STEERING = "a\x1b[2Jb\u202ec"
JUNK: list[Any] = [
    None,
    True,
    -1,
    2**70,
    10**400,
    float("nan"),
    float("inf"),
    "",
    "x" * 9000,
    [],
    [None],
    {},
    {"a": {}},
]


@pytest.fixture(autouse=True)
def _untrained(plainly: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*_: Any) -> None:
        raise RunError("would train")

    monkeypatch.setattr(reproduce, "_execute", train)


def with_comparison(contents: dict[str, bytes]) -> dict[str, Any]:
    """The content of ``proof.json`` with a comparison."""
    proof: dict[str, Any] = json.loads(contents["proof.json"])
    (run,) = proof["runs"]
    proof["comparison"] = json.loads(json.dumps(COMPARED).replace("RUN", run))
    return proof


def changed(key: str, value: Any) -> Callable[[dict[str, bytes]], None]:
    """Set what the comparison says of a key."""

    def change(contents: dict[str, bytes]) -> None:
        proof = with_comparison(contents)
        proof["comparison"][key] = value
        contents["proof.json"] = json.dumps(proof).encode()

    return change


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, own in items:
        yield (*path, key)
        yield from places(own, (*path, key))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rows", []),
        ("rows", [["RUN", "fedproto", None]] * 2),
        ("rows", [["RUN", "fedproto", 3]] * 2),
        ("rows", [["RUN", "fedproto", 10**400]]),
        ("target_fraction", 0),
        ("target_fraction", float("nan")),
        ("claims", {"ours": {**COMPARED["claims"]["ours"], "by": float("inf")}}),  # type: ignore[index]
        ("tuning", [{**TUNED, "trials": 2.5}]),
    ],
)
def test_a_comparison_that_cannot_be_made_is_refused_before_anything_is_trained(
    key: str, value: Any, archived: Path, forged: Forge, capsys: pytest.CaptureFixture[str]
) -> None:
    (run,) = (run.name for run in read_archive(archived).runs)
    value = [[run, *row[1:]] for row in value] if key == "rows" else value
    assert main(["reproduce", str(forged(changed(key, value))), "--check"]) == 3
    error = capsys.readouterr().err
    assert key in error and error.count("\n") == 1, error


def test_a_comparison_as_it_is_written_is_taken(forged: Forge, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", str(forged(changed("commit", None))), "--check"]) == 4
    assert capsys.readouterr().err == "protofl: would train\n"


@pytest.mark.parametrize("values", [1, pytest.param(len(JUNK), marks=pytest.mark.slow)])
def test_whatever_a_field_is_it_is_refused_or_shown_without_control_characters(
    values: int, finished: Path, archived: Path
) -> None:
    """Every field of ``proof.json`` but hashes of files; what is taken is also compared and shown."""
    whole = read_zip(archived)
    contents = {name: whole.read(name) for name in whole.namelist() if not name.startswith("code/")}
    proof = with_comparison(contents)
    proof["comparison"]["tuning"] = [TUNED]
    proof["files"] = {name: hash for name, hash in proof["files"].items() if name in contents}
    (run,) = proof["runs"]
    proof["runs"][run]["modules"] = dict(list(proof["runs"][run]["modules"].items())[:1])
    taken = 0
    for number, path in enumerate(places({key: value for key, value in proof.items() if key != "files"})):
        # The one with control characters always; of the others as many as are asked for, from another one each time.
        for value in (STEERING, *(JUNK * 2)[number % len(JUNK) :][:values]):
            write_zip(Path("x.zip"), {**contents, "proof.json": json.dumps(replaced(proof, path, value)).encode()})
            try:
                archive = read_archive(Path("x.zip"))
            except DataError as refusal:
                said = str(refusal)
                assert len(said.splitlines()) == 1 and len(said) < 2000, (path, value)
                continue
            if archive.comparison is not None:
                taken += 1
                shown(archive.comparison, finished)
    assert taken > 10


def replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    if not path:
        return by
    items = dict(value) if isinstance(value, dict) else list(value)
    items[path[0]] = replaced(value[path[0]], path[1:], by)
    return items


def shown(comparison: ArchivedComparison, finished: Path) -> None:
    """What ``protofl reproduce`` compares and prints, with a finished run in place of all runs."""
    compared = collect(
        {"compare": comparison.section},
        [RunFolder(finished) for _ in comparison.rows],
        comparison.failed,
        rows=[row for _, row, _ in comparison.rows],
        draws=[draw for _, _, draw in comparison.rows],
        tuning=[tuned.model_dump() for tuned in comparison.tuning] or None,
        budget=comparison.budget,
    )
    table = io.StringIO()
    print_table(compared, console(file=table, width=150))
    for text in (table.getvalue(), markdown(compared)):
        assert not any(is_control(sign) for sign in text if sign not in "\n\t")


def test_an_environment_is_told_without_its_control_characters(
    forged: Forge, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a check prints it: another processor, and other packages."""

    def change(contents: dict[str, bytes]) -> None:
        (name,) = (name for name in contents if name.endswith("/config.json"))
        header = json.loads(contents[name])
        header["environment"] |= {"processor": "x\x1b[8m", "versions": {"torch": "\x1b]0;title\x07", "numpy": [{}]}}
        contents[name] = json.dumps(header).encode()

    archive = read_archive(forged(change))
    findings = reproduce.Findings()
    (run,) = archive.runs
    home = Path("here")
    with reproduce.operation({"tracking": {"enabled": False}}) as (how, _):
        ready = reproduce._place(archive, run, home, [], how)
    reproduce._note_circumstances(run, ready, findings)
    lines = reproduce.report(Path("x.zip"), findings)
    assert findings.classes is not None and "numpy" in lines[-1]
    assert not any(is_control(sign) for line in lines for sign in line)

"""How command lines are read: options by their whole names, values of a stated form, and refusals of one line."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from pipelines.cli.app import main
from pipelines.cli.commands import command_names, make_app
from pipelines.cli.help import help_text
from pipelines.cli.options import Flow, size


def parsed(*words: str) -> dict[str, Any]:
    """The arguments of a command's function, with defaults."""
    _, bound, _ = make_app().parse_args(words)
    bound.apply_defaults()
    return bound.arguments


def refusal(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("compare --method local", "protofl compare: no option --method; did you mean --methods? see"),
        ("compare --seed 0", "protofl compare: no option --seed; did you mean --seeds? see"),
        ("run --param x.yaml", "protofl run: no option --param; did you mean --params? see"),
        ("run --local.lr=1", "protofl run: no option --local.lr; did you mean --set local.lr=VALUE? see"),
        ("run local.lr=1", "protofl run: unexpected local.lr=1; did you mean --set local.lr=1? see"),
        ("run --resume", "protofl run: no option --resume; leave it out: the same command resumes where it stopped;"),
        ("run --rounds 3", "protofl run: no option --rounds; write --set federation.rounds=N; see"),
        ("sweep --nonsense", "protofl sweep: no option --nonsense; see"),
        ("--seed 1 run", "protofl: no option --seed here; options follow the command; see"),
        ("runn", "protofl: no command 'runn': did you mean 'run'? choose from init, run, compare,"),
        (
            "stage trian",
            "protofl stage: no command 'trian': did you mean 'train'? choose from code, prepare, partition,",
        ),
        ("stage", "protofl stage: name one of code, prepare, partition, train, compare, paper; see"),
        ("list metods", "protofl list: KIND 'metods': did you mean 'methods'? choose from methods, datasets,"),
        ("run --set", "protofl run: --set needs a value; see"),
        ("run --json=x", "protofl run: --json 'x': takes no value; see"),
        ("tune", "protofl tune: --method is missing; see"),
        ("tune --metod x", "protofl tune: no option --metod; did you mean --method? see"),
        ("run --seed -1", "protofl run: --seed '-1': expected a whole number >= 0; see"),
        ("run --seed 1.5", "protofl run: --seed '1.5': expected a whole number >= 0; see"),
        ("tune --method x --trials 0", "protofl tune: --trials '0': expected a whole number >= 1; see"),
        (
            "compare --seeds a",
            "protofl compare: --seeds 'a': expected whole numbers separated by commas, such as 0,1,2;",
        ),
        ("compare --seeds 0,0", "protofl compare: --seeds '0,0': 0 appears twice; name each once; see"),
        ("compare --methods a,,b", "protofl compare: --methods 'a,,b': expected names separated by commas, such as"),
        ("compare --methods a,a", "protofl compare: --methods 'a,a': a appears twice; name each once; see"),
        (
            "compare --methods a --methods=b",
            "protofl compare: --methods is given twice; write one list, --methods A,B,...; see",
        ),
        ("run --prefect --no-prefect", "protofl run: --no-prefect contradicts --prefect; remove one; see"),
        ("run --no-wait --no-wait", "protofl run: --no-wait is given twice; remove one; see"),
        (
            "compare --seeds 0 --seeds 1",
            "protofl compare: --seeds is given twice; write one list, --seeds 0,1,...; see",
        ),
        (
            "tune --method x --max-bytes 5MiB",
            "protofl tune: --max-bytes '5MiB': expected a size such as 800kB, 50MB or",
        ),
        ("tune --method x --max-bytes 0.4", "protofl tune: --max-bytes '0.4': expected a size such as 800kB, 50MB or"),
        ("bench --jsno overhead", "protofl bench: no option --jsno here; options follow the command; see"),
        ("run --orchestrator x", "protofl run: --orchestrator 'x': choose from auto, inline, prefect; see"),
    ],
)
def test_refusals_are_a_line_that_names_what_was_meant(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refusal(*words.split(), capsys=capsys)
    assert error.startswith(said)
    assert error.count("\n") == 1
    assert error.endswith("--help\n")


def test_what_is_typed_is_read_into_values() -> None:
    words = "compare --methods fedavg,local --seeds 2,0 --set a.b=-1 --set c.d=x --plugin m.py --no-wait --out x"
    read = parsed(*words.split())
    assert (read["methods"], read["seeds"], read["out"]) == (("fedavg", "local"), (2, 0), Path("x"))
    assert (read["values"].assignments, read["values"].plugins) == (("a.b=-1", "c.d=x"), (Path("m.py"),))
    assert (read["flow"], read["restart"]) == (Flow(no_wait=True), False)
    bare = parsed("compare")
    assert (bare["methods"], bare["seeds"], bare["out"]) == (None, None, Path("runs/comparison"))
    assert (bare["values"].params, bare["values"].debug) == (None, False)
    assert parsed("analyse", "--", "-x")["directory"] == Path("-x")
    assert [parsed("paper", "claims", *word.split())["kept"] for word in ("", "--kept", "--kept d")] == [
        False,
        True,
        Path("d"),
    ]


@pytest.mark.parametrize(
    ("text", "count"),
    [("1", 1), ("17B", 17), ("800kB", 800_000), ("50mb", 50_000_000), ("1.5 GB", 1_500_000_000), ("0.001kB", 1)],
)
def test_sizes_have_decimal_units_as_tables_print_them(text: str, count: int) -> None:
    assert size(text) == count


def test_prefect_is_requested_by_either_name() -> None:
    words = {"": None, "--prefect": True, "--no-prefect": False, "--orchestrator inline": False}
    words |= {"--orchestrator prefect": True, "--orchestrator auto": None}
    assert {flags: parsed("run", *flags.split())["flow"].is_wanted for flags in words} == words


OPTIONS = {
    "init": "images title",
    "run": "params set method seed out prefect no-prefect orchestrator restart no-wait json",
    "compare": "params set methods variant seeds partition-seeds claims tuned out prefect no-prefect "
    "orchestrator restart no-wait",
    "sweep": "params set vary rows seeds baselines metric out prefect no-prefect orchestrator restart no-wait",
    "tune": "params set method trials objective metric max-bytes at-once storage out prefect "
    "no-prefect orchestrator no-wait",
    "stage code": "out",
    "stage prepare": "params set out",
    "stage partition": "params set out",
    "stage train": "params set out restart",
    "stage compare": "params set out",
    "stage paper": "set out",
    "list": "params json",
    "show": "params json",
    "schema": "",
    "new": "out",
    "check": "set slow json",
    "track": "uri",
    "track best": "metric experiment where promote uri",
    "analyse": "analyses prepared partition",
    "archive": "out licence",
    "board": "out",
    "reproduce": "set out check trust-plugins golden methods record",
    "up": "no-prefect no-mlflow no-dashboard no-worker flows-per-gpu",
    "deploy": "flows-per-gpu",
    "schedule list": "",
    "schedule on": "",
    "schedule off": "",
    "status": "json",
    "down": "",
    "doctor": "",
    "clean": "",
    "completion": "",
    "paper list": "json",
    "paper show": "rows columns seeds partition-seeds rounds-scale part not-kept max-hours set measure json",
    "paper run": "rows columns seeds partition-seeds rounds-scale part not-kept max-hours set "
    "out prefect no-prefect orchestrator restart no-wait",
    "paper keep": "into again",
    "paper claims": "home kept papers write json",
    "bench": "",
}
"""Command → its options; names that scripts rely on."""


def test_every_command_has_its_options_and_says_what_they_mean() -> None:
    app = make_app(with_benchmarks=False)
    options = {}
    for name in command_names(app):
        text = help_text(app, name.split(), 1000)
        rows = re.findall(r"^  (--[\w|-]+)[^\n]*?(?:  |\n +)(\S.*)", text, re.MULTILINE)
        flags = [flag.replace("--", "") for flags, _ in rows for flag in flags.split("|")]
        assert name == "bench" or flags[-3:] == ["debug", "plugin", "help"]
        options[name] = set(flags) - {"debug", "plugin", "help"}
    assert options == {name: set(names.split()) for name, names in OPTIONS.items()}


def test_a_help_text_fits_the_terminal_and_has_no_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = help_text(make_app(), ["tune"])
    assert text.startswith("usage: protofl tune [--params FILE] [--set KEY=VALUE]... --method NAME\n")
    assert "  --trials N" in text and "(default: 20)" in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 70


def test_functions_of_commands_say_what_each_argument_means() -> None:
    """Names of parameters in docstrings are those of the signature, so that no text is lost."""
    app = make_app(with_benchmarks=False)
    for name in command_names(app):
        _, apps, _ = app.parse_commands(name.split())
        function = apps[-1].default_command
        assert function is not None and function.__doc__ is not None
        documented = {line.strip().partition(":")[0] for line in function.__doc__.partition("Args:\n")[2].splitlines()}
        parameters = set(inspect.signature(function).parameters)
        assert {word for word in documented if word.isidentifier()} <= parameters, name


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("run --seed 1 --seed 2", "--seed"),
        ("run --out a --out=b", "--out"),
        ("run --method fedavg --method fedprox", "--method"),
        ("run --params a.yaml --params b.yaml", "--params"),
        ("run --orchestrator inline --orchestrator prefect", "--orchestrator"),
        ("run --prefect --no-prefect", "--no-prefect"),
        ("run --no-prefect --orchestrator prefect", "--orchestrator"),
        ("sweep --vary local.lr=1,2 --rows points.yaml", "--rows"),
        ("paper claims --write page --json", "--json"),
        ("tune --method fedavg --objective accuracy --objective accuracy,bytes", "--objective"),
        ("sweep --metric mean_local --metric top1_global", "--metric"),
        ("paper claims --kept a --kept b", "--kept"),
    ],
)
def test_an_option_with_two_values_is_refused(words: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{flag} " in refusal(*words.split(), capsys=capsys)


@pytest.mark.parametrize(
    "words",
    [
        "run --seed 010",
        "run --seed 1_000",
        "compare --seeds 1,02",
        "tune --method x --trials ٣",
        "paper show fedpa.table2 --rounds-scale 1_0",
    ],
)
def test_numbers_that_readers_disagree_about_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Python reads 010 as 10, YAML 1.1 as 8; ٣ is 3 to Python alone."""
    number = words.split()[-1]
    assert number in refusal(*words.split(), capsys=capsys)

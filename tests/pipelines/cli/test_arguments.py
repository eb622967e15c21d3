"""How command lines are read: options by their whole names, values of a stated form, and refusals of one line."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from pipelines.cli.parser import make_parser


def refusal(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        make_parser().parse_args(words)
    assert caught.value.code == 2
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
        ("run --resume", "protofl run: no option --resume; leave it out: the same command goes on where it stopped;"),
        ("run --rounds 3", "protofl run: no option --rounds; write --set federation.rounds=N; see"),
        ("sweep --nonsense", "protofl sweep: no option --nonsense; see"),
        ("--seed 1 run", "protofl: no option --seed here; options stand behind the command; see"),
        ("runn", "protofl: COMMAND 'runn': did you mean 'run'? choose from run, compare, sweep,"),
        ("stage trian", "protofl stage: STAGE 'trian': did you mean 'train'? choose from code, prepare, partition,"),
        ("stage", "protofl stage: STAGE is missing; see"),
        ("list metods", "protofl list: KIND 'metods': did you mean 'methods'? choose from methods, datasets,"),
        ("run --set", "protofl run: --set needs a value; see"),
        ("run --json=yes", "protofl run: --json takes no value; see"),
        ("tune", "protofl tune: --method is missing; see"),
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
            "protofl compare: --methods appears twice; write one list, --methods A,B; see",
        ),
        ("compare --seeds 0 --seeds 1", "protofl compare: --seeds appears twice; write one list, --seeds A,B; see"),
        (
            "tune --method x --max-bytes 5MiB",
            "protofl tune: --max-bytes '5MiB': expected a size such as 800kB, 50MB or",
        ),
        ("tune --method x --max-bytes 0.4", "protofl tune: --max-bytes '0.4': expected a size such as 800kB, 50MB or"),
        ("bench --jsno overhead", "protofl bench: no option --jsno here; options stand behind the command; see"),
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


def test_what_a_command_is_given_is_read_into_values() -> None:
    words = "compare --methods fedavg, --seeds 2,0 --set a.b=-1 --set c.d=x --plugin m.py --no-wait --out x"
    with pytest.raises(SystemExit):
        make_parser().parse_args(words.split())
    read = make_parser().parse_args(words.replace("fedavg,", "fedavg,local").split())
    assert (read.methods, read.seeds, read.assignments) == (("fedavg", "local"), (2, 0), ["a.b=-1", "c.d=x"])
    assert (read.plugins, read.out, read.wait, read.restart) == ([Path("m.py")], Path("x"), False, False)
    assert (read.prefect, read.params, read.debug) == (None, None, False)
    bare = make_parser().parse_args(["compare"])
    assert (bare.methods, bare.seeds, bare.out, bare.wait) == (None, None, Path("runs/comparison"), True)


@pytest.mark.parametrize(
    ("text", "count"),
    [("1", 1), ("17B", 17), ("800kB", 800_000), ("50mb", 50_000_000), ("1.5 GB", 1_500_000_000), ("0.001kB", 1)],
)
def test_sizes_have_decimal_units_as_tables_print_them(text: str, count: int) -> None:
    assert make_parser().parse_args(["tune", "--method", "x", "--max-bytes", text]).max_bytes == count


def test_prefect_is_asked_for_by_either_name() -> None:
    words = {"": None, "--prefect": True, "--no-prefect": False, "--orchestrator inline": False}
    words |= {"--orchestrator prefect": True, "--orchestrator auto": None}
    assert {flags: make_parser().parse_args(["run", *flags.split()]).prefect for flags in words} == words


OPTIONS = {
    "run": "params set method seed out prefect no-prefect orchestrator restart no-wait no-cache json",
    "compare": "params set methods variant seeds partition-seeds claims tuned budget out prefect no-prefect "
    "orchestrator restart no-wait no-cache",
    "sweep": "params set vary rows seeds baselines metric out prefect no-prefect orchestrator restart no-wait",
    "tune": "params set method trials objective metric max-bytes max-steps at-once storage out prefect "
    "no-prefect orchestrator no-wait",
    "stage code": "out",
    "stage prepare": "params set out",
    "stage partition": "params set out seed",
    "stage train": "params set out method seed restart",
    "stage compare": "params set out",
    "list": "params json",
    "show": "params json",
    "schema": "",
    "new": "out",
    "check": "set slow json",
    "track": "uri metric experiment where promote",
    "analyse": "analyses prepared partition",
    "archive": "out licence",
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
    "bench": "",
    "completion": "",
    "paper list": "json",
    "paper show": "rows columns seeds partition-seeds rounds-scale part not-kept max-hours set measure json",
    "paper run": "rows columns seeds partition-seeds rounds-scale part not-kept max-hours set "
    "out prefect no-prefect orchestrator restart no-wait",
    "paper keep": "into again",
    "paper claims": "home kept papers write json",
}
"""Command → its options, in the order of its help; names that scripts rely on."""


def test_every_command_has_its_options_and_says_what_they_mean() -> None:
    found = {}
    for name, command in _commands(make_parser(), ""):
        flags = [action for action in command._actions if action.option_strings]
        found[name] = " ".join(action.option_strings[-1][2:] for action in flags[3:])
        assert [action.option_strings[-1] for action in flags[:3]] == ["--help", "--debug", "--plugin"]
        assert all(action.help for action in command._actions)
        assert command.format_help()
    assert found == OPTIONS


def _commands(parser: argparse.ArgumentParser, prefix: str) -> list[tuple[str, argparse.ArgumentParser]]:
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        return [(prefix.strip(), parser)]
    return [found for name, sub in groups[0].choices.items() for found in _commands(sub, f"{prefix} {name}")]


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
        ("tune --method fedavg --objective accuracy --objective accuracy,bytes", "--objective"),
        ("sweep --metric mean_local --metric top1_global", "--metric"),
        ("compare --budget bytes --budget steps", "--budget"),
        ("paper claims --kept a --kept b", "--kept"),
    ],
)
def test_an_option_with_two_values_is_refused(words: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{flag} " in refusal(*words.split(), capsys=capsys)


def test_an_option_may_be_repeated_with_the_same_value_and_lists_of_options_are_kept_whole() -> None:
    words = "run --out a --seed 1 --out=a --seed 1 --set a.b=1 --set a.c=2"
    read = make_parser().parse_args(words.split())
    assert (read.out, read.seed, read.assignments) == (Path("a"), 1, ["a.b=1", "a.c=2"])


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

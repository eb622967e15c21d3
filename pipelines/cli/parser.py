"""The commands and their options. Light: imports nothing that only a running command needs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flcore.config.analyses import SUMMARIES
from flcore.version import VERSION
from pipelines.cli import check_method, clean, commands, options, paper, proof, schedule
from pipelines.cli.arguments import Parser, names, size, whole_number, whole_numbers
from pipelines.cli.headlines import KINDS, SHOWN
from pipelines.cli.stage_code import stage_code

_EPILOG = """\
begin with:
  protofl run            one run of params.yaml, or of the defaults
  protofl list methods   what can be compared; 'show method NAME' has parameters

exit codes:
  0 done   1 a fault of protofl   2 bad configuration or usage, before data are read
  3 data missing or damaged   4 a run failed   130 interrupted, can be gone on with
"""
_SWEEP_EPILOG = """\
The method is method.name, with compare.settings for it. Finished runs are found again, those of protofl compare in the
same folder too; a run that fails does not stop the others. Writes sweep.csv (a row per point and seed), sweep.json,
sweep.md and sweep.png.

  influence of a value    --set method.name=gfpl --vary method.merge_distance=0.1,1,10 --baselines fedavg,local
  ablation table          --set method.name=gfpl --vary method.use_dcs=false,true --vary method.use_pfg=false,true
  a line per value        --set method.name=gfpl --vary method.components=1,4,8 --vary partition.alpha=0.1,1

A baseline takes over what is varied outside the section method: here it would be run for each partition.alpha.
"""
_TRACK_EPILOG = """\
log what is not there yet   protofl track runs/mine runs/comparison runs/tune-fedprox
the best finished run       protofl track best --metric mean_local --experiment digits/dirichlet
and its model for serving   protofl track best --metric mean_local --promote

Trials of a study are not among the runs: they are scored on validation data.
"""
_STATUS_EPILOG = "Ends with 0 where all answer; with 4 where none was started, or one has ended or does not answer."
_DOCTOR_EPILOG = "Ends with 0; with 3 where a line begins with `miss`: what is asked for there cannot be had."
_BENCH_EPILOG = """\
overhead     a whole run, a bare PyTorch loop with the same steps and, with --peers, other simulators
comparison   runs per hour of `protofl compare`
models       rounds of every model at its paper's batch size, and a bare PyTorch loop
population   seconds per round and memory with 100, 1,000 and 10,000 clients
gpu          steps per second on a CUDA device

The benchmarks are not part of the installed package: run them in a source checkout (docs/benchmarks.md).
"""
_STAGES = {
    "prepare": ("Files of the dataset to tensors of one form.", ()),
    "partition": ("Which client holds what, for each seed.", ("seed",)),
    "train": ("All runs of compare.methods and compare.seeds, trained and evaluated.", ("method", "seed", "restart")),
    "compare": ("These runs in one table, with figures and a page.", ()),
}
"""Stage → summary, and its own options."""


def make_parser() -> Parser:
    """Return the parser of the whole command line; it stores the function to call as ``command``."""
    parser = Parser(prog="protofl", description="Prototype-based federated learning on non-IID images.", epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"protofl {VERSION}")
    add = _Commands(parser)
    _add_runs(add)
    _add_stages(add)
    _add_descriptions(add)
    _add_results(add)
    _add_machine(add)
    paper.add_to(add.group)
    parser.set_defaults(parser=parser)  # for `protofl completion`
    return parser


class _Commands:
    """Adds commands to a parser; all of them have ``--debug`` and ``--plugin``."""

    def __init__(self, parser: Parser, title: str = "commands") -> None:
        self._add = parser.add_subparsers(
            title=title, required=True, metavar=title.removesuffix("s").upper()
        ).add_parser

    def __call__(self, name: str, function: Callable[..., int], summary: str, epilog: str = "", **found: Any) -> Parser:
        sub = self._made(name, summary, epilog)
        sub.set_defaults(command=function, **found)
        common = sub.add_argument_group("of every command")
        common.add_argument("--debug", action="store_true", help="show where an error comes from")
        common.add_argument(
            "--plugin",
            action="append",
            default=[],
            type=Path,
            metavar="FILE.py",
            dest="plugins",
            help="load a file of one's own methods, sources, partitioners, models, samplers; may be repeated",
        )
        return sub

    def group(self, name: str, title: str, summary: str) -> _Commands:
        """Add a command with subcommands."""
        return _Commands(self._made(name, summary), title)

    def _made(self, name: str, summary: str, epilog: str = "") -> Parser:
        return self._add(
            name,
            help=summary[:1].lower() + summary[1:-1],
            description=summary,
            epilog=epilog,
        )


# ----------------------------------------------------------------------------------------------------------- commands


def _add_runs(add: _Commands) -> None:
    run = add("run", commands.run, "One configuration, from data to report; goes on where it was stopped.")
    options.values(run)
    run.add_argument("--method", metavar="NAME", help="short for --set method.name=NAME")
    run.add_argument("--seed", type=whole_number(0), metavar="N", help="short for --set seed=N")
    options.out(run, "runs/<method>-s<seed>-<hash>", "run directory")
    options.orchestration(run)
    options.no_cache(run)
    options.as_json(run, "metrics.json")

    compare = add("compare", commands.compare, "Methods × seeds, then one table; finished runs are found again.")
    options.values(compare)
    compare.add_argument("--methods", type=names, metavar="A,B,...", help="default: compare.methods")
    compare.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME=METHOD,KEY=VALUE,...",
        help="a further row: a method with other values; several times",
    )
    compare.add_argument("--seeds", type=whole_numbers, metavar="0,1,...", help="default: compare.seeds")
    about = "divisions of the data, each with every seed (default: compare.partition_seeds)"
    compare.add_argument("--partition-seeds", type=whole_numbers, metavar="0,1,...", help=about)
    about = "claims, which row is better than which, for verdicts by these runs: a YAML file (default: compare.claims)"
    compare.add_argument("--claims", type=Path, metavar="FILE", help=about)
    about = "tune every method with N trials on validation data, then compare tuned and as given (default: no tuning)"
    compare.add_argument("--tuned", type=whole_number(1), default=0, metavar="N", help=about)
    about = (
        "what is equal for all runs: bytes or steps give each the rounds for those of the baseline (default: rounds)"
    )
    compare.add_argument("--budget", choices=("rounds", "bytes", "steps"), default="rounds", help=about)
    options.out(compare, "runs/comparison")
    options.orchestration(compare)
    options.no_cache(compare)

    about = "One method over a grid of values × seeds: how accuracy and traffic depend on them."
    sweep = add("sweep", commands.sweep, about, _SWEEP_EPILOG)
    options.values(sweep)
    sweep.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=A,B,...",
        help="a key and its values, as in YAML; several times for all combinations, the last key fastest",
    )
    about = "points instead: a YAML list of dotted keys with values, such as [{method.mu: 0.1}, {method.mu: 1}]"
    sweep.add_argument("--rows", type=Path, metavar="FILE", help=about)
    sweep.add_argument("--seeds", type=whole_numbers, metavar="0,1,...", help="default: compare.seeds")
    sweep.add_argument(
        "--baselines", type=names, default=(), metavar="A,B,...", help="methods to draw beside it (default: none)"
    )
    sweep.add_argument(
        "--metric",
        default="mean_local",
        metavar="NAME",
        help="of table and figure: any number of metrics.json, dotted where it is nested (default: mean_local)",
    )
    options.out(sweep, "runs/sweep")
    options.orchestration(sweep)

    tune = add("tune", commands.tune, "Search a method's hyper-parameters on validation data; resumable.")
    options.values(tune)
    tune.add_argument("--method", required=True, metavar="NAME", help="whose search space, see 'protofl list methods'")
    tune.add_argument(
        "--trials",
        type=whole_number(1),
        default=20,
        metavar="N",
        help="total number of trials: finished, pruned or failed (default: 20)",
    )
    tune.add_argument(
        "--objective",
        choices=("accuracy", "accuracy,bytes"),
        metavar="NAME",
        default="accuracy",
        help="accuracy, which stands for the metric; or accuracy,bytes: the front of it against bytes sent (default: "
        "accuracy)",
    )
    tune.add_argument(
        "--metric",
        metavar="NAME",
        help="any number of metrics.json, dotted where it is nested; costs are minimised (default: top1_global, or "
        "mean_local where there is no global model)",
    )
    tune.add_argument(
        "--max-bytes",
        type=size,
        metavar="SIZE",
        help="a trial that sends more, such as 50MB, is no result (default: any may be one)",
    )
    tune.add_argument(
        "--max-steps",
        type=whole_number(1),
        metavar="N",
        help="as many rounds per trial as so many mini-batches of its clients are enough for (default: as given)",
    )
    tune.add_argument(
        "--at-once",
        type=whole_number(1),
        metavar="N",
        help="run N trials in parallel, by all commands in the same folder; each is sampled without the results of the "
        "N - 1 still running (default: tune.parallel)",
    )
    tune.add_argument(
        "--storage", metavar="URL", help="Optuna storage, or a journal file (default: .protofl/studies.journal)"
    )
    options.out(tune, "runs/tune-<method>", "the study's folder")
    options.orchestration(tune, may_restart=False)


def _add_stages(add: _Commands) -> None:
    stages = add.group("stage", "stages", "One stage inline, without any server; this is what dvc.yaml calls.")
    code = stages("code", stage_code, "Digests of the code that each other stage depends on, without comments.")
    options.out(code, "artifacts")
    for name, (summary, own) in _STAGES.items():
        stage = stages(name, commands.stage, summary, stage=name)
        options.values(stage)
        options.out(stage, "artifacts")
        stage.set_defaults(method=None, seed=None, restart=False)
        if "method" in own:
            stage.add_argument("--method", metavar="NAME", help="only runs of this one of compare.methods")
        if "seed" in own:
            stage.add_argument("--seed", type=whole_number(0), metavar="N", help="only this one of compare.seeds")
        if "restart" in own:
            options.restart(stage)


def _add_descriptions(add: _Commands) -> None:
    listing = add("list", commands.list_, "What there is, a line each.")
    listing.add_argument("kind", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    options.params(listing, "the parameter file, whose plug-ins are listed too")
    options.as_json(listing, "a list of objects with all parameters")

    show = add("show", commands.show, "One entry in full: parameters; of a method switches, stages, search space too.")
    show.add_argument("kind", choices=tuple(SHOWN), metavar="KIND", help=", ".join(SHOWN))
    show.add_argument("name", metavar="NAME", help="see 'protofl list'")
    options.params(show, "the parameter file, whose plug-ins can be shown too")
    options.as_json(show, "an object")

    epilog = "A parameter file's first line names it:  # yaml-language-server: $schema=params.schema.json"
    add("schema", commands.schema, "The JSON Schema of parameter files, for editors; with methods of --plugin.", epilog)

    new = add("new", commands.new, "A method of one's own, outside the package, and its test: both work as written.")
    new.add_argument("kind", choices=("method",), metavar="KIND", help="method")
    new.add_argument("name", metavar="NAME", help="of the method: a-z, 0-9 and _, a letter first")
    options.out(new, ".", "where the two files go")
    check_method.add_to(add)


def _add_results(add: _Commands) -> None:
    about = "Finished or stopped runs to MLflow, for example after its server was away; or the best run there."
    track = add("track", commands.track, about, _TRACK_EPILOG)
    track.add_argument(
        "directories", nargs="+", type=Path, metavar="DIR", help="of runs, comparisons, sweeps, studies; or: best"
    )
    about = (
        "tracking store (default: tracking.uri of params.yaml, else MLFLOW_TRACKING_URI, else "
        "sqlite:///mlruns/mlflow.db)"
    )
    track.add_argument("--uri", metavar="URI", help=about)
    ranked = track.add_argument_group("of 'track best'")
    ranked.add_argument("--metric", metavar="NAME", help="by which: a figure of metrics.json, or its name in MLflow")
    ranked.add_argument("--experiment", metavar="NAME", help="DATASET/PARTITION (default: the only one that has it)")
    ranked.add_argument("--where", metavar="FILTER", help="only runs that MLflow finds by this filter")
    ranked.add_argument("--promote", action="store_true", help="register its model, and give that the alias champion")

    epilog = "analyses:\n" + "\n".join(f"  {name}: {summary}" for name, summary in SUMMARIES.items())
    analyse = add("analyse", commands.analyse, "Analyse a finished run, and write its report again.", epilog)
    analyse.add_argument("directory", type=Path, metavar="RUN_DIR", help="the run's folder")
    analyse.add_argument(
        "--analyses", type=names, metavar="A,B,...", help="which (default: evaluation.analyses of the run)"
    )
    analyse.add_argument("--prepared", type=Path, metavar="DIR", help="prepared data (default: the run's)")
    analyse.add_argument("--partition", type=Path, metavar="DIR", help="partition (default: the run's)")

    about = "A finished run or comparison as one file: all but the data, so that anybody can repeat it and check."
    proof.archive_options(add("archive", proof.archive, about, proof.ARCHIVE_EPILOG))
    about = "Carry out what an archive holds, and see whether the same bytes come out."
    proof.reproduce_options(add("reproduce", proof.reproduce, about, proof.REPRODUCE_EPILOG))


def _add_machine(add: _Commands) -> None:
    up = add("up", commands.up, "Servers on this machine: Prefect with a worker, MLflow, Optuna's dashboard.")
    for service, what in commands.SERVICES.items():
        up.add_argument(f"--no-{service}", action="store_false", dest=service, help=f"without {what}")
    deploy = add("deploy", commands.deploy, "Register the deployments with the Prefect server that is configured.")
    for command in (up, deploy):
        about = "flows that share a GPU of this machine (default: 1)"
        command.add_argument("--flows-per-gpu", type=whole_number(1), default=1, metavar="N", help=about)
    schedule.add_to(add.group)
    status = add("status", commands.status, "Which of these servers run, and where.", _STATUS_EPILOG)
    options.as_json(status, "a list of objects")
    add("down", commands.down, "Stop exactly the servers that `up` started.")
    add("doctor", commands.doctor, "What this machine offers, and what to do about what is missing.", _DOCTOR_EPILOG)

    clean.add_to(add)
    bench = add("bench", commands.bench, "Run a benchmark; in a source checkout only.", _BENCH_EPILOG)
    bench.usage = "protofl bench [-h] [--debug] [--plugin FILE.py] NAME [--json] [OPTION]..."
    about = "a benchmark, then its options; `protofl bench NAME --help` lists them"
    words = bench.add_argument("words", nargs=argparse.REMAINDER, metavar="NAME [--json] [OPTION]...", help=about)
    words.required = True  # the versions of argparse differ; the generated page must not

    epilog = "bash:  protofl completion bash > ~/.local/share/bash-completion/completions/protofl"
    completion = add(
        "completion", commands.completion, "A script that completes commands and options in a shell.", epilog
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"), metavar="SHELL", help="bash, zsh or tcsh")

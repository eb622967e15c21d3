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
  protofl run            run params.yaml, or the defaults
  protofl list methods   list the methods; 'show method NAME' prints parameters

exit codes:
  0 done   1 a fault of protofl   2 bad configuration or usage, before data are read
  3 data missing or damaged   4 a run failed   130 interrupted; resumes
"""
_SWEEP_EPILOG = """\
Varies method.name, with its compare.settings. Reuses finished runs, also those of protofl compare in the same folder; a
failed run does not stop the others. Writes sweep.csv (a row per point and seed), sweep.json,
sweep.md and sweep.png.

  influence of a value    --set method.name=gfpl --vary method.merge_distance=0.1,1,10 --baselines fedavg,local
  ablation table          --set method.name=gfpl --vary method.use_dcs=false,true --vary method.use_pfg=false,true
  a line per value        --set method.name=gfpl --vary method.components=1,4,8 --vary partition.alpha=0.1,1

A baseline uses the varied values outside the section method: in the last example it runs for each partition.alpha.
"""
_TRACK_EPILOG = """\
log what is missing         protofl track runs/mine runs/comparison runs/tune-fedprox
the best finished run       protofl track best --metric mean_local --experiment digits/dirichlet
and its model for serving   protofl track best --metric mean_local --promote

Trials of studies are not ranked: they are scored on validation data.
"""
_STATUS_EPILOG = "Exit code 0: all servers answer; 4: none was started, or one has ended or does not answer."
_DOCTOR_EPILOG = "Exit code 0, or 3 if a line begins with `miss`: something that was requested is missing."
_BENCH_EPILOG = """\
overhead     a whole run, a bare PyTorch loop with the same steps and, with --peers, other frameworks
comparison   runs per hour of `protofl compare`
models       rounds of every model at its paper's batch size, and a bare PyTorch loop
population   seconds per round and memory with 100, 1,000 and 10,000 clients
gpu          steps per second on a CUDA device

The benchmarks are not part of the installed package: run them in a source checkout (docs/benchmarks.md).
"""
_STAGES = {
    "prepare": ("Convert the dataset's files to tensors.", ()),
    "partition": ("Divide the data among clients, for each seed.", ("seed",)),
    "train": ("Train and evaluate all runs of compare.methods and compare.seeds.", ("method", "seed", "restart")),
    "compare": ("Write the table, figures and page of these runs.", ()),
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
            help="load a file with your own methods, sources, partitioners, models or samplers; repeatable",
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
    run = add("run", commands.run, "Run one configuration, from data to report; resumes if interrupted.")
    options.values(run)
    run.add_argument("--method", metavar="NAME", help="short for --set method.name=NAME")
    run.add_argument("--seed", type=whole_number(0), metavar="N", help="short for --set seed=N")
    options.out(run, "runs/<method>-s<seed>-<hash>", "run directory")
    options.orchestration(run)
    options.no_cache(run)
    options.as_json(run, "metrics.json")

    compare = add("compare", commands.compare, "Compare methods over seeds in one table; reuses finished runs.")
    options.values(compare)
    compare.add_argument("--methods", type=names, metavar="A,B,...", help="default: compare.methods")
    compare.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME=METHOD,KEY=VALUE,...",
        help="another row: a method with other values; repeatable",
    )
    compare.add_argument("--seeds", type=whole_numbers, metavar="0,1,...", help="default: compare.seeds")
    about = "seeds of partitions, each run with every seed (default: compare.partition_seeds)"
    compare.add_argument("--partition-seeds", type=whole_numbers, metavar="0,1,...", help=about)
    about = "YAML file of claims to judge by these runs, such as which row is better (default: compare.claims)"
    compare.add_argument("--claims", type=Path, metavar="FILE", help=about)
    about = "tune each method with N trials on validation data, then compare it tuned and as given (default: no tuning)"
    compare.add_argument("--tuned", type=whole_number(1), default=0, metavar="N", help=about)
    about = "what all runs have equally: rounds, or the baseline's bytes or steps (default: rounds)"
    compare.add_argument("--budget", choices=("rounds", "bytes", "steps"), default="rounds", help=about)
    options.out(compare, "runs/comparison")
    options.orchestration(compare)
    options.no_cache(compare)

    about = "Run one method over a grid of values and seeds: their effect on accuracy and traffic."
    sweep = add("sweep", commands.sweep, about, _SWEEP_EPILOG)
    options.values(sweep)
    sweep.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=A,B,...",
        help="a key and its values, as in YAML; repeat it for all combinations",
    )
    about = "YAML list of points instead of --vary, such as [{method.mu: 0.1}, {method.mu: 1}]"
    sweep.add_argument("--rows", type=Path, metavar="FILE", help=about)
    sweep.add_argument("--seeds", type=whole_numbers, metavar="0,1,...", help="default: compare.seeds")
    sweep.add_argument(
        "--baselines", type=names, default=(), metavar="A,B,...", help="methods to run for comparison (default: none)"
    )
    sweep.add_argument(
        "--metric",
        default="mean_local",
        metavar="NAME",
        help="metric of table and figure: any number of metrics.json, dotted if nested (default: mean_local)",
    )
    options.out(sweep, "runs/sweep")
    options.orchestration(sweep)

    tune = add("tune", commands.tune, "Tune a method's hyper-parameters on validation data; resumes if interrupted.")
    options.values(tune)
    tune.add_argument("--method", required=True, metavar="NAME", help="method to tune, see 'protofl list methods'")
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
        help="accuracy: the metric; accuracy,bytes: the Pareto front of metric and bytes sent (default: accuracy)",
    )
    tune.add_argument(
        "--metric",
        metavar="NAME",
        help="any number of metrics.json, dotted if nested; costs are minimised (default: top1_global, or mean_local "
        "without a global model)",
    )
    tune.add_argument(
        "--max-bytes",
        type=size,
        metavar="SIZE",
        help="exclude trials that send more, such as 50MB, from the results (default: none)",
    )
    tune.add_argument(
        "--max-steps",
        type=whole_number(1),
        metavar="N",
        help="end each trial's rounds after N mini-batches of its clients (default: federation.rounds)",
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
    stages = add.group("stage", "stages", "Run one stage of dvc.yaml, without any server.")
    code = stages("code", stage_code, "Write digests of the code that the other stages depend on, without comments.")
    options.out(code, "artifacts")
    for name, (summary, own) in _STAGES.items():
        stage = stages(name, commands.stage, summary, stage=name)
        options.values(stage)
        options.out(stage, "artifacts")
        stage.set_defaults(method=None, seed=None, restart=False)
        if "method" in own:
            stage.add_argument("--method", metavar="NAME", help="only this method of compare.methods")
        if "seed" in own:
            stage.add_argument("--seed", type=whole_number(0), metavar="N", help="only this seed of compare.seeds")
        if "restart" in own:
            options.restart(stage)


def _add_descriptions(add: _Commands) -> None:
    listing = add(
        "list", commands.list_, "List methods, datasets, partitioners, models, samplers, engines or analyses."
    )
    listing.add_argument("kind", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    options.params(listing, "parameter file; its plug-ins are listed too")
    options.as_json(listing, "a list of objects with all parameters")

    show = add(
        "show", commands.show, "Show one entry with its parameters; of a method also switches, stages and search space."
    )
    show.add_argument("kind", choices=tuple(SHOWN), metavar="KIND", help=", ".join(SHOWN))
    show.add_argument("name", metavar="NAME", help="see 'protofl list'")
    options.params(show, "parameter file; its plug-ins can be shown too")
    options.as_json(show, "an object")

    epilog = "First line of a parameter file that uses it:  # yaml-language-server: $schema=params.schema.json"
    add("schema", commands.schema, "Print the JSON Schema of parameter files, for editors; includes --plugin.", epilog)

    new = add("new", commands.new, "Create your own method and its test, outside the package.")
    new.add_argument("kind", choices=("method",), metavar="KIND", help="method")
    new.add_argument("name", metavar="NAME", help="name of the method: a-z, 0-9 and _, a letter first")
    options.out(new, ".", "folder of the two files")
    check_method.add_to(add)


def _add_results(add: _Commands) -> None:
    about = "Log runs to MLflow, for example after its server was away; or find the best run there."
    track = add("track", commands.track, about, _TRACK_EPILOG)
    track.add_argument(
        "directories",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="folders of runs, comparisons, sweeps or studies; or the word: best",
    )
    about = (
        "tracking store (default: tracking.uri of params.yaml, else MLFLOW_TRACKING_URI, else "
        "sqlite:///mlruns/mlflow.db)"
    )
    track.add_argument("--uri", metavar="URI", help=about)
    ranked = track.add_argument_group("of 'track best'")
    ranked.add_argument("--metric", metavar="NAME", help="rank by a figure of metrics.json, or its name in MLflow")
    ranked.add_argument(
        "--experiment", metavar="NAME", help="DATASET/PARTITION (default: the only one with this metric)"
    )
    ranked.add_argument("--where", metavar="FILTER", help="only runs that match this MLflow filter")
    ranked.add_argument("--promote", action="store_true", help="register its model with the alias champion")

    epilog = "analyses:\n" + "\n".join(f"  {name}: {summary}" for name, summary in SUMMARIES.items())
    analyse = add("analyse", commands.analyse, "Analyse a finished run and rewrite its report.", epilog)
    analyse.add_argument("directory", type=Path, metavar="RUN_DIR", help="the run's folder")
    analyse.add_argument(
        "--analyses", type=names, metavar="A,B,...", help="which (default: evaluation.analyses of the run)"
    )
    analyse.add_argument("--prepared", type=Path, metavar="DIR", help="prepared data (default: the run's)")
    analyse.add_argument("--partition", type=Path, metavar="DIR", help="partition (default: the run's)")

    about = "Pack a finished run or comparison, without the data, into one file that others can verify."
    proof.archive_options(add("archive", proof.archive, about, proof.ARCHIVE_EPILOG))
    about = "Rerun an archive and verify that its results are the same bytes."
    proof.reproduce_options(add("reproduce", proof.reproduce, about, proof.REPRODUCE_EPILOG))


def _add_machine(add: _Commands) -> None:
    up = add("up", commands.up, "Start servers on this machine: Prefect with a worker, MLflow, Optuna's dashboard.")
    for service, what in commands.SERVICES.items():
        up.add_argument(f"--no-{service}", action="store_false", dest=service, help=f"without {what}")
    deploy = add("deploy", commands.deploy, "Register the deployments with the configured Prefect server.")
    for command in (up, deploy):
        about = "flows that share a GPU of this machine (default: 1)"
        command.add_argument("--flows-per-gpu", type=whole_number(1), default=1, metavar="N", help=about)
    schedule.add_to(add.group)
    status = add("status", commands.status, "Show which of these servers run, and their addresses.", _STATUS_EPILOG)
    options.as_json(status, "a list of objects")
    add("down", commands.down, "Stop the servers that `up` started.")
    add("doctor", commands.doctor, "Check this machine, and say what to do about what is missing.", _DOCTOR_EPILOG)

    clean.add_to(add)
    bench = add("bench", commands.bench, "Run a benchmark; in a source checkout only.", _BENCH_EPILOG)
    bench.usage = "protofl bench [-h] [--debug] [--plugin FILE.py] NAME [--json] [OPTION]..."
    about = "a benchmark, then its options; `protofl bench NAME --help` lists them"
    words = bench.add_argument("words", nargs=argparse.REMAINDER, metavar="NAME [--json] [OPTION]...", help=about)
    words.required = True  # the versions of argparse differ; the generated page must not

    epilog = "bash:  protofl completion bash > ~/.local/share/bash-completion/completions/protofl"
    completion = add(
        "completion", commands.completion, "Print a script that completes commands and options in a shell.", epilog
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"), metavar="SHELL", help="bash, zsh or tcsh")

"""The command ``protofl``.

Exit codes: 0 done; 1 a fault of ours; 2 bad configuration or usage, before any data are read; 3 data missing or
damaged; 4 a run failed; 130 interrupted, can be resumed. Errors are one or two lines on standard error, with a
traceback only under
``--debug``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from flcore.errors import ConfigError, DataError, ProtoflError
from flcore.evaluation.analyses import SUMMARIES
from flcore.version import VERSION
from pipelines.bench import BENCHMARKS

if TYPE_CHECKING:
    from flcore.config import Config

EXIT_CODES = {ConfigError: 2, DataError: 3, ProtoflError: 4}
INTERRUPTED = 130

_SWEEP_EPILOG = """\
The method is method.name, with compare.settings for it. Finished runs are found again, those of protofl compare in the
same folder too; a run that fails does not stop the others. Writes sweep.csv (a row per point and seed), sweep.json,
sweep.md and sweep.png.

  influence of a value    --set method.name=gfpl --vary method.merge_distance=0.1,1,10 --baselines fedavg,local
  ablation table          --set method.name=gfpl --vary method.use_dcs=false,true --vary method.use_pfg=false,true
  a line per value        --set method.name=gfpl --vary method.components=1,4,8 --vary partition.alpha=0.1,1

A baseline takes over what is varied outside the section method: here it would be run for each partition.alpha.
"""
_RESTART = "throw away a checkpoint that cannot be used; one that can is gone on with"
_STAGES = ("prepare", "partition", "train", "evaluate", "report", "compare")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, and turn errors into lines and exit codes."""
    parsed = _parser().parse_args(arguments)
    _set_environment(parsed.debug)
    if parsed.debug:
        return _carry_out(parsed)
    sys.excepthook = _one_line
    try:
        return _carry_out(parsed)
    except ProtoflError as error:
        print(f"protofl: {error}", file=sys.stderr)
        return next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))
    except KeyboardInterrupt:
        print("protofl: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return INTERRUPTED
    except (PermissionError, NotADirectoryError, FileExistsError, IsADirectoryError) as error:
        print(
            f"protofl: {error.filename}: cannot write there ({error.strerror}); choose another --out", file=sys.stderr
        )
        return EXIT_CODES[ConfigError]
    except BrokenPipeError:
        # Whoever read our output has had enough; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _carry_out(arguments: argparse.Namespace) -> int:
    if arguments.plugins and not hasattr(arguments, "params"):  # else they are part of a configuration
        from flcore.plugins import load_all

        load_all(arguments.plugins)
    return int(arguments.command(arguments))


def _one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print(
        f"protofl: unexpected {kind.__name__}: {error}\nThis is a fault of protofl; see it with --debug.",
        file=sys.stderr,
    )


def _set_environment(debug: bool) -> None:
    """Before anything heavy is imported: one thread per process, quiet libraries, nothing sent anywhere."""
    for key, value in {
        "OMP_NUM_THREADS": "1",
        "PREFECT_LOGGING_LEVEL": "WARNING" if debug else "CRITICAL",
        "DVC_NO_ANALYTICS": "1",
    }.items():
        os.environ.setdefault(key, value)


class _Parser(argparse.ArgumentParser):
    """Options by their whole names alone, and errors in a line."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(allow_abbrev=False, **keywords)

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_CODES[ConfigError], f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    common = _Parser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show tracebacks")
    common.add_argument(
        "--plugin",
        action="append",
        default=[],
        type=Path,
        metavar="FILE.py",
        dest="plugins",
        help="load methods of one's own, see 'protofl new method'; several times for several files",
    )
    file = _Parser(add_help=False)
    file.add_argument(
        "--params", type=Path, metavar="FILE", help="parameter file (default: params.yaml, where there is one)"
    )
    values = _Parser(add_help=False, parents=[file])
    values.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="assignments",
        help="override, e.g. partition.alpha=0.1",
    )
    parser = _Parser(prog="protofl", description="Prototype-based federated learning on non-IID images.")
    parser.add_argument("--version", action="version", version=f"protofl {VERSION}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, function: Callable[..., int], summary: str, *parents: _Parser) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=summary, parents=[common, *parents])
        sub.set_defaults(command=function)
        return sub

    run = command("run", _run, "Run one configuration, from data to report; goes on where it was stopped.", values)
    run.add_argument(
        "--out", type=Path, metavar="DIR", help="run directory (default: runs/<method>-<dataset>-<partition>-s<seed>)"
    )
    run.add_argument(
        "--resume", action="store_true", help="take the configuration from the run directory's own config.json"
    )
    run.add_argument("--restart", action="store_true", help=_RESTART)
    run.add_argument("--json", action="store_true", help="print metrics.json, and nothing else, on standard output")

    stage = command("stage", _stage, "Run one stage inline, without any server; this is what dvc.yaml calls.", values)
    stage.add_argument("name", choices=_STAGES, help="the stage")
    stage.add_argument(
        "--out", type=Path, metavar="DIR", default=Path("artifacts"), help="where results go (default: artifacts)"
    )
    stage.add_argument("--prepared", type=Path, metavar="DIR", help="prepared data (default: <out>/prepared)")
    stage.add_argument("--partition", type=Path, metavar="DIR", help="partition (default: <out>/partition)")
    stage.add_argument("--method", help="run as this entry of the comparison: its name, with compare.settings")
    stage.add_argument("--seed", type=int, help="likewise: the seed")
    stage.add_argument("--restart", action="store_true", help=f"train: {_RESTART}")

    listing = command("list", _list, "List what there is.", file)
    listing.add_argument("kind", choices=("methods", "datasets", "partitioners", "models", "engines"))
    listing.add_argument("--json", action="store_true", help="as a list of objects")

    show = command("show", _show, "Describe one method: parameters, switches, server stages, search space.", file)
    show.add_argument("kind", choices=("method",))
    show.add_argument("name", metavar="NAME", help="see 'protofl list methods'")
    show.add_argument("--json", action="store_true", help="as an object")

    new = command("new", _new, "Write a method of one's own, outside the package, and its test: both work as written.")
    new.add_argument("kind", choices=("method",))
    new.add_argument("name", metavar="NAME", help="of the method: a-z, 0-9 and _, a letter first")
    new.add_argument("--out", type=Path, metavar="DIR", default=Path(), help="where the two files go (default: here)")

    compare = command(
        "compare", _compare, "Run methods × seeds, then one table; finished runs are found again.", values
    )
    compare.add_argument("--methods", type=_names, metavar="A,B,...", help="default: compare.methods")
    compare.add_argument("--seeds", type=_numbers, metavar="0,1,...", help="default: compare.seeds")
    compare.add_argument(
        "--out", type=Path, metavar="DIR", default=Path("runs/comparison"), help="default: runs/comparison"
    )

    sweep = command(
        "sweep",
        _sweep,
        "Run one method over a grid of values × seeds: how accuracy and traffic depend on them.",
        values,
    )
    sweep.formatter_class = argparse.RawDescriptionHelpFormatter
    sweep.epilog = _SWEEP_EPILOG
    sweep.add_argument(
        "--vary",
        action="append",
        required=True,
        metavar="KEY=A,B,...",
        help="a key and its values, as in YAML; several times for all combinations, the last key fastest",
    )
    sweep.add_argument("--seeds", type=_numbers, metavar="0,1,...", help="default: compare.seeds")
    sweep.add_argument(
        "--baselines", type=_names, default=[], metavar="A,B,...", help="methods to draw beside it (default: none)"
    )
    sweep.add_argument(
        "--metric",
        default="mean_local",
        metavar="NAME",
        help="of table and figure: top1_global, mean_local or pooled_local (default: mean_local)",
    )
    sweep.add_argument("--out", type=Path, metavar="DIR", default=Path("runs/sweep"), help="default: runs/sweep")

    tune = command("tune", _tune, "Search a method's hyper-parameters on validation data; resumable.", values)
    tune.add_argument("--method", required=True, help="whose search space, see 'protofl list methods'")
    tune.add_argument("--trials", type=int, default=20, metavar="N", help="finished trials wanted in all (default: 20)")
    tune.add_argument(
        "--objective", choices=("accuracy", "accuracy,bytes"), default="accuracy", help="what to optimise"
    )
    tune.add_argument("--storage", metavar="URL", help="Optuna storage (default: sqlite in the study's folder)")
    tune.add_argument("--out", type=Path, metavar="DIR", help="the study's folder (default: runs/tune-<method>)")

    track = command("track", _track, "Log finished or stopped runs to MLflow, for example after its server was away.")
    track.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="run directories")
    track.add_argument("--uri", help="tracking store (default: as configured in the run)")

    analyse = command("analyse", _analyse, "Analyse a finished run, and write its report again.")
    analyse.formatter_class = argparse.RawDescriptionHelpFormatter
    analyse.epilog = "analyses:\n" + "\n".join(f"  {name}: {summary}" for name, summary in SUMMARIES.items())
    analyse.add_argument("directory", type=Path, metavar="RUN_DIR", help="the run's folder")
    analyse.add_argument(
        "--analyses", type=_names, metavar="A,B,...", help="which (default: evaluation.analyses of the run)"
    )
    analyse.add_argument("--prepared", type=Path, metavar="DIR", help="prepared data (default: RUN_DIR/prepared)")
    analyse.add_argument("--partition", type=Path, metavar="DIR", help="partition (default: RUN_DIR/partition)")

    bench = command("bench", _bench, "Measure; medians of several alternating repetitions.")
    bench.formatter_class = argparse.RawDescriptionHelpFormatter
    bench.epilog = "benchmarks:\n" + "\n".join(f"  {name}: {summary}" for name, summary in BENCHMARKS.items())
    bench.add_argument("name", choices=BENCHMARKS, metavar="NAME", help=f"one of {', '.join(BENCHMARKS)}")
    bench.add_argument("--json", action="store_true", help="print JSON alone")
    measured = bench.add_argument_group("what is measured (each benchmark has its own defaults)")
    measured.add_argument("--rounds", type=int, metavar="N", help="of every run")
    measured.add_argument("--repetitions", type=int, metavar="N", help="of every case, in turn")
    measured.add_argument(
        "--peers",
        action="store_true",
        default=None,
        help="overhead: also Flower and pfl, in environments of their own that are made in the cache folder",
    )
    measured.add_argument("--clients", type=_counts, metavar="N,N,...", help="population: how many clients")
    measured.add_argument(
        "--workers", type=_counts, metavar="N,N,...", help="workers, cifar10-cross-device: how many worker processes"
    )
    measured.add_argument("--group-sizes", type=_counts, metavar="N,N,...", help="stack: clients in a stack")
    measured.add_argument(
        "--devices", type=_devices, metavar="cpu,cuda", help="stack, cifar10-cross-device: default: what is there"
    )
    measured.add_argument("--model", metavar="NAME", help="stack: see 'protofl list models'")
    measured.add_argument(
        "--scale", type=float, metavar="F", help="cifar10-cross-device: this share of it, for trying out"
    )

    command("doctor", _doctor, "Say what this machine offers, and what to do about what is missing.")
    return parser


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in _names(text)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected whole numbers separated by commas, such as 0,1,2"
        ) from error


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_numbers(text))


def _devices(text: str) -> tuple[str, ...]:
    return tuple(_names(text))


def _run(arguments: argparse.Namespace) -> int:
    from pipelines.orchestration.embedded_server import EmbeddedServer

    with EmbeddedServer() as server:  # first of all: it starts while torch is imported
        from flcore.config import Config
        from pipelines.orchestration.running import run

        config = _stored_config(arguments) if arguments.resume else Config.from_mapping(_raw(arguments))
        name = f"{config.method.name}-{config.source.name}-{config.partitioner.name}-s{config.seed}"
        out = arguments.out or Path("runs") / name
        metrics = run(config, out, server, quiet=arguments.json, restart=arguments.restart)
    if arguments.json:
        print(json.dumps(metrics, indent=2, sort_keys=True))
    return 0


def _raw(arguments: argparse.Namespace) -> dict[str, Any]:
    """The parameters that a command is given, not yet checked."""
    from pipelines.config.params import override, read_params, with_plugins

    return override(with_plugins(read_params(arguments.params), arguments.plugins), arguments.assignments)


def _stored_config(arguments: argparse.Namespace) -> Config:
    from flcore.run_folder import stored_config

    if arguments.out is None or arguments.params is not None or arguments.assignments or arguments.plugins:
        raise ConfigError(
            "--resume: name the run directory with --out; its configuration is its own, without --params, --set or "
            "--plugin"
        )
    return stored_config(arguments.out)


def _stage(arguments: argparse.Namespace) -> int:
    from flcore.config import Config
    from pipelines.config.params import for_entry

    if arguments.restart and arguments.name != "train":
        raise ConfigError(f"--restart: there is nothing to restart in the stage {arguments.name}")
    config = Config.from_mapping(for_entry(_raw(arguments), arguments.method, arguments.seed))
    from pipelines.orchestration.running import stage

    out: Path = arguments.out
    prepared, partition = arguments.prepared or out / "prepared", arguments.partition or out / "partition"
    stage(arguments.name, config, out, prepared, partition, restart=arguments.restart)
    return 0


def _load_plugins(arguments: argparse.Namespace) -> None:
    """Those of the parameter file and of the command, for what needs no configuration beside."""
    from flcore.plugins import load_all
    from pipelines.config.params import read_params, with_plugins

    load_all(with_plugins(read_params(arguments.params), arguments.plugins).get("plugins"))


def _show(arguments: argparse.Namespace) -> int:
    from pipelines.cli import registry as listing

    _load_plugins(arguments)
    described = listing.describe_method(arguments.name)
    print(json.dumps(described, indent=2) if arguments.json else "\n".join(listing.method_lines(described)))
    return 0


def _new(arguments: argparse.Namespace) -> int:
    from pipelines.cli.new_method import write

    method, test = write(arguments.name, arguments.out)
    print(f"{method}: the method; run it with  protofl run --plugin {method} --set method.name={arguments.name}")
    print(f"{test}: its test; run it with  python -m pytest {test}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from pipelines.cli import registry as listing

    if arguments.kind == "methods":
        _load_plugins(arguments)
    if arguments.json:
        print(json.dumps(listing.describe(arguments.kind), indent=2))
    else:
        print("\n".join(listing.lines(arguments.kind)))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from pipelines.orchestration.embedded_server import EmbeddedServer

    with EmbeddedServer() as server:
        from pipelines.orchestration.running import compare

        compare(_raw(arguments), arguments.methods, arguments.seeds, arguments.out, server)
    return 0


def _sweep(arguments: argparse.Namespace) -> int:
    from pipelines.orchestration.embedded_server import EmbeddedServer

    with EmbeddedServer() as server:
        from pipelines.orchestration.running import sweep

        given = (arguments.vary, arguments.seeds, arguments.baselines, arguments.metric, arguments.out)
        sweep(_raw(arguments), *given, server)
    return 0


def _tune(arguments: argparse.Namespace) -> int:
    from flcore.config import Config
    from pipelines.config.params import for_entry
    from pipelines.tuning.study import tune

    config = Config.from_mapping(for_entry(_raw(arguments), arguments.method, None))
    directory = arguments.out or Path("runs") / f"tune-{arguments.method}"
    tune(config, arguments.trials, arguments.objective, arguments.storage, directory)
    return 0


def _track(arguments: argparse.Namespace) -> int:
    from pipelines.orchestration.running import track

    return 0 if track(arguments.directories, arguments.uri) else 4


def _analyse(arguments: argparse.Namespace) -> int:
    from flcore.config import Config
    from flcore.run_folder import stored_mapping
    from pipelines import stages

    directory: Path = arguments.directory
    stored = stored_mapping(directory)
    chosen = stored["evaluation"].get("analyses") if arguments.analyses is None else arguments.analyses
    if not chosen:
        raise ConfigError(f"--analyses: name at least one of {', '.join(SUMMARIES)}")
    config = Config.from_mapping({**stored, "evaluation": {**stored["evaluation"], "analyses": chosen}})
    partition = arguments.partition or directory / "partition"
    print(stages.report(partition, directory, config=config, prepared=arguments.prepared or directory / "prepared"))
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from pipelines import bench

    options = ("rounds", "repetitions", "peers", "clients", "workers", "group_sizes", "devices", "model", "scale")
    given = {name: getattr(arguments, name) for name in options if getattr(arguments, name) is not None}
    result = bench.run(arguments.name, given)
    print(json.dumps(result, indent=2) if arguments.json else bench.describe(result))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from pipelines.cli.doctor import examine

    print("\n".join(examine()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The command line of the benchmarks: ``protofl bench`` in a checkout, or ``python -m benchmarks``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import BENCHMARKS, describe, run
from pipelines.cli.arguments import Parser, names, positive, whole_number, whole_numbers


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark that the arguments name and print its result; return the exit code."""
    epilog = "benchmarks:\n" + "\n".join(f"  {name}: {summary}" for name, summary in BENCHMARKS.items())
    bench = Parser(prog="protofl bench", description="Medians of several alternating repetitions.", epilog=epilog)
    bench.add_argument("name", choices=tuple(BENCHMARKS), metavar="NAME", help=f"one of {', '.join(BENCHMARKS)}")
    bench.add_argument("--json", action="store_true", help="print JSON, and nothing else, on standard output")
    measured = bench.add_argument_group("what is measured")
    options_of_benchmarks: list[str] = []

    def option(flag: str, **keywords: Any) -> None:
        options_of_benchmarks.append(measured.add_argument(flag, **keywords).dest)

    about = (
        "of every run (default: overhead 50, population and cifar10-cross-device 20, comparison and workers 10, else 6)"
    )
    option("--rounds", type=whole_number(1), metavar="N", help=about)
    about = "of every case, in turn (default: comparison and cifar10-cross-device 1, else 3)"
    option("--repetitions", type=whole_number(1), metavar="N", help=about)
    option(
        "--peers",
        action="store_true",
        default=None,
        help="overhead, gpu: also other simulators, in environments of their own that are made in the cache folder",
    )
    option("--only-peers", type=names, metavar="A,B,...", help="likewise: some of them, by name")
    option(
        "--peer-python",
        type=Path,
        metavar="FILE",
        help="gpu: where no registry is reached: an interpreter that has the packages of --peers (JAX, pfl)",
    )
    option("--cases", type=names, metavar="A,B,...", help="overhead: some of our commands alone, such as run_2_workers")
    about = "how many clients: population (default: 100,1000,10000), gpu (default: 100)"
    option("--clients", type=whole_numbers, metavar="N,N,...", help=about)
    about = "worker processes: workers (default: 1,2,4,... up to the cores), models (0,2), cifar10-cross-device (0)"
    option("--workers", type=whole_numbers, metavar="N,N,...", help=about)
    option("--group-sizes", type=whole_numbers, metavar="N,N,...", help="stack: clients in a stack")
    option("--devices", type=names, metavar="cpu,cuda", help="stack, cifar10-cross-device: default: what is there")
    option("--model", metavar="NAME", help="stack: see 'protofl list models'")
    option("--models", type=names, metavar="A,B,...", help="models: default: those that a paper trains")
    option("--scale", type=positive, metavar="F", help="cifar10-cross-device: this share of it, for trying out")
    option("--methods", type=names, metavar="A,B,...", help="comparison: default: eight of them")
    option("--seeds", type=whole_numbers, metavar="0,1,...", help="comparison: of each method")
    option("--cores", type=whole_numbers, metavar="N,N,...", help="comparison: how many it may use")
    option(
        "--engine",
        type=names,
        metavar="KEY=VALUE,...",
        help="comparison: of the section engine, such as stack=true; overhead: cases with these, beside those without",
    )
    option(
        "--data-root", type=Path, metavar="DIR", help="comparison: MNIST's files; default: random images of that shape"
    )
    option("--baseline", type=Path, metavar="DIR", help="comparison: sources of another version, measured in turn")

    parsed = vars(bench.parse_args(arguments))
    result = run(parsed["name"], {name: parsed[name] for name in options_of_benchmarks if parsed[name] is not None})
    print(json.dumps(result, indent=2) if parsed["json"] else describe(result))
    return 0

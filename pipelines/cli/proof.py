"""``protofl archive`` and ``protofl reproduce``: their options and their output."""

from __future__ import annotations

import argparse
from pathlib import Path

from flcore.core.errors import ConfigError, RunError, listed
from flcore.core.text import fit_to_print
from pipelines.cli.arguments import Parser, names

ARCHIVE_EPILOG = """\
protofl archive runs/first --out first.zip     a run
protofl archive runs/comparison                a comparison, with all its runs
protofl archive artifacts                      the results of make run

The same folder gives the same bytes. Of the data it has name, source, licence and fingerprint, never an image.
"""
REPRODUCE_EPILOG = """\
protofl reproduce first.zip --check            exit code 0: all equal; 3: damaged archive; 4: a result differs
protofl reproduce first.zip --check --set data.root=FOLDER     data that are not part of a package
protofl reproduce --golden                     every method on digits, in about a minute
"""


def archive_options(parser: Parser) -> None:
    """Add the options of ``protofl archive``."""
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="folder of a finished run or comparison; or artifacts"
    )
    parser.add_argument(
        "--out", type=Path, metavar="X.zip", help="archive to write (default: the folder's name, with .zip)"
    )
    parser.add_argument(
        "--licence",
        default="Apache-2.0",
        metavar="SPDX",
        help="licence of the results, by its SPDX name (default: Apache-2.0)",
    )


def reproduce_options(parser: Parser) -> None:
    """Add the options of ``protofl reproduce``."""
    parser.add_argument("archive", nargs="?", type=Path, metavar="X.zip", help="archive to reproduce")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="assignments",
        help="set a value that changes no result, such as data.root=FOLDER or engine.workers=2",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the results (default: runs/reproduced/<archive>)"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare every result with the archive: by hash, or by tolerance on another class of processor",
    )
    parser.add_argument(
        "--trust-plugins",
        action="store_true",
        help="run code from the archive; read it first, it may do anything",
    )
    golden = parser.add_argument_group("without an archive")
    golden.add_argument(
        "--golden",
        action="store_true",
        help="run every method on digits and compare with the recorded hashes",
    )
    golden.add_argument("--methods", type=names, metavar="A,B,...", help="with --golden: only these")
    golden.add_argument(
        "--record",
        action="store_true",
        help="with --golden: record the new hashes",
    )


def archive(arguments: argparse.Namespace) -> int:
    """Write a run or comparison to a file from which it can be reproduced (``protofl archive``)."""
    from flcore.experiment.run_folder import refuse_inside_a_run
    from pipelines.proof.archive import archive as write

    out = arguments.out or Path(f"{arguments.directory.resolve().name}.zip")
    refuse_inside_a_run(out)
    # Default names may collide, so only a named file is replaced.
    digest = write(arguments.directory, out, licence=arguments.licence, replace=arguments.out is not None)
    print(
        f"{out}: {out.stat().st_size / 1e6:.1f} MB, SHA-256 {digest}\nrepeat it with  protofl reproduce {out} --check"
    )
    return 0


def reproduce(arguments: argparse.Namespace) -> int:
    """Reproduce an archive, or compare every method with its recorded hashes (``protofl reproduce``).

    Raises:
        ConfigError: options exclude each other.
        RunError: a result differs from the recorded one.
    """
    _check_together(arguments)
    if arguments.golden:
        return _golden(arguments)
    from pipelines.plan.params import override
    from pipelines.proof.reproduce import report
    from pipelines.proof.reproduce import reproduce as carry_out

    override({}, arguments.assignments)  # refuse contradictions before the archive is read
    path: Path = arguments.archive
    findings = carry_out(
        path, arguments.out, arguments.assignments, check=arguments.check, trust_plugins=arguments.trust_plugins
    )
    if findings is None:
        return 0
    print("\n".join(map(fit_to_print, report(path, findings))))
    if findings.other:
        raise RunError(f"{path}: {len(findings.other)} results are not what it says; they are named above")
    return 0


def _check_together(arguments: argparse.Namespace) -> None:
    of_archives = [f"--{name}" for name, value in (("set", arguments.assignments), ("out", arguments.out),
                   ("check", arguments.check), ("trust-plugins", arguments.trust_plugins)) if value]  # fmt: skip
    if arguments.golden and (arguments.archive or of_archives):
        raise ConfigError(f"--golden: goes without {of_archives[0] if of_archives else 'an archive'}")
    if not arguments.golden and (arguments.methods or arguments.record):
        raise ConfigError(f"{'--methods' if arguments.methods else '--record'}: goes with --golden")
    if not arguments.golden and arguments.archive is None:
        raise ConfigError("reproduce: name an archive, or give --golden")


def _golden(arguments: argparse.Namespace) -> int:
    from pipelines.proof import golden

    if arguments.record:
        print(golden.record(arguments.methods))
        return 0
    outcome = golden.check(arguments.methods)
    print("\n".join(outcome.lines))
    if outcome.different:
        raise RunError(
            f"golden: {len(outcome.different)} of {outcome.checked} methods are not as recorded: "
            f"{listed(outcome.different)}\nwhere that is meant, protofl reproduce --golden --record keeps what came out"
        )
    return 0

"""The command ``protofl``: parses and runs a command line, and converts errors to messages and exit codes.

Exit codes: 0 done; 1 internal error; 2 bad configuration or usage, before any data are read; 3 data missing or
damaged; 4 a run failed; 130 interrupted, can be resumed. Errors are one or two lines on standard error, after the
traceback if ``--debug`` is given.
"""

from __future__ import annotations

import argparse
import errno
import os
import select
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TextIO

from flcore.core import portable
from flcore.core.errors import MLOPS, ConfigError, DataError, ProtoflError, RunError
from flcore.core.host import CACHE_VARIABLE, user_cache
from flcore.core.text import fit_to_print
from pipelines.addresses import remember
from pipelines.cli.arguments import USAGE
from pipelines.cli.parser import make_parser
from pipelines.cli.system_errors import has_working_folder, set_home, system_error
from pipelines.plan.files import dated
from pipelines.runs.standard_error import STANDARD_OUTPUT, let_go, safe_streams, tell

EXIT_CODES = {ConfigError: USAGE, DataError: 3, ProtoflError: 4}
FAULT = 1
INTERRUPTED = 130

_OWN = ".protofl"
_LONGEST = 300  # maximum number of characters of a library's message
_FULL = {errno.ENOSPC, errno.EDQUOT}
_DEFECTIVE = {errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO}
_OF_AN_EXTRA = {"prefect", "fastapi", "sqlalchemy", "mlflow", "dvc", "optuna", "optuna_dashboard", "psutil"}
_CANNOT_BE_WRITTEN = {errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.EROFS, errno.ENAMETOOLONG}


def main(arguments: Sequence[str] | None = None, today: date | None = None) -> int:
    """Run a command line.

    Args:
        arguments: default: this process's.
        today: replaces ``{date}`` in a folder's name; default: today, in UTC.

    Returns:
        The exit code.
    """
    with safe_streams():
        return _main(sys.argv[1:] if arguments is None else arguments, today, is_process=arguments is None)


def _main(given: Sequence[str], today: date | None, *, is_process: bool) -> int:
    for word in given:
        remember(word)
    parser = make_parser()
    if not given:
        parser.print_help(sys.stderr)
        return USAGE
    parsed = parser.parse_args(given)
    had_folder = has_working_folder()
    _set_environment(parsed.debug)
    try:
        if is_process:
            _compute_as_configured(parsed)
        if getattr(parsed, "out", None) is not None:
            parsed.out = dated(parsed.out, today or datetime.now(UTC).date())
        if parsed.plugins and not hasattr(parsed, "params"):  # else the configuration loads them
            from flcore.config.plugins import load_all

            load_all(parsed.plugins)
        code = int(parsed.command(parsed))
    except KeyboardInterrupt:
        tell("protofl: interrupted; run the same command to resume")
        code = INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _has_no_reader(sys.stdout):
            code = 0  # printing comes last: the work is complete
        else:
            message, code = _told(error, had_folder)
            if parsed.debug:
                tell(traceback.format_exc())
                if isinstance(error, RunError) and error.details:
                    tell(error.details)
            tell(f"protofl: {fit_to_print(message)}")
    return _all_written(code)


def _compute_as_configured(parsed: argparse.Namespace) -> None:
    """Restart this command with the processor's own kernels if ``engine.numerics`` requires them.

    Libraries choose their kernels at import, before a configuration is known.
    """
    if not {"params", "assignments"} <= vars(parsed).keys() or portable.wanted() == "native":
        return
    from pipelines.plan.files import read_params
    from pipelines.plan.params import override

    with suppress(ProtoflError):  # the command itself reports the error
        engine = override(read_params(parsed.params), parsed.assignments).get("engine")
        if isinstance(engine, Mapping) and engine.get("numerics") == "native":
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], portable.environment("native"))


def _all_written(code: int) -> int:
    """Flush standard output and return the exit code; a failure to write is an error unless there is no reader."""
    try:
        sys.stdout.flush()
    except OSError as error:
        let_go(sys.stdout)
        if code == 0 and not isinstance(error, BrokenPipeError):
            message, code = _told(error)
            tell(f"protofl: {message}")
    return code


def _has_no_reader(stream: TextIO) -> bool:
    """Return whether a stream is a pipe with a closed reading end."""
    asked = select.poll()
    asked.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in asked.poll(0))


def _set_environment(debug: bool) -> None:
    """Set up, before heavy imports, one thread per process, quiet libraries, and no telemetry."""
    os.environ["MPLBACKEND"] = "agg"  # figures go to files; a configured backend may not be installed
    if any(option.startswith("error") for option in sys.warnoptions):
        os.environ["PYTHONWARNINGS"] = "default"  # warnings of libraries must not stop a command
        warnings.simplefilter("default")
    set_home()
    for key, value in {
        "OMP_NUM_THREADS": "1",
        "PREFECT_LOGGING_LEVEL": "WARNING" if debug else "CRITICAL",
        "DVC_NO_ANALYTICS": "1",
    }.items():
        os.environ.setdefault(key, value)


def _told(error: Exception, had_folder: bool = True) -> tuple[str, int]:
    """Return message and exit code of an error."""
    if isinstance(error, ProtoflError):
        return str(error), next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))
    if isinstance(error, ModuleNotFoundError) and (package := str(error.name).partition(".")[0]) in _OF_AN_EXTRA:
        return f"the package {package} is not installed; pip install {MLOPS}", EXIT_CODES[ConfigError]
    refused = system_error(error, had_folder)
    if refused is not None:
        return refused, EXIT_CODES[ProtoflError]
    if isinstance(error, OSError):
        about = _about_file(error)
        if about is not None:
            return about
    # The first line only: the others may be another process's traceback.
    what = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:_LONGEST]}".removesuffix(": ")
    return f"unexpected {what}\nThis is a fault of protofl; see it with --debug.", FAULT


def _about_file(error: OSError) -> tuple[str, int] | None:
    """Return message and exit code of a failed read or write; None for other errors."""
    if error.errno in _FULL:
        place = error.filename or "a file"
        return f"{place}: the disk is full; make room, and the same command goes on", EXIT_CODES[ProtoflError]
    if error.filename is None:
        return None
    if error.filename == STANDARD_OUTPUT:
        return f"{STANDARD_OUTPUT}: cannot be written ({error.strerror})", EXIT_CODES[ProtoflError]
    path = Path(os.fsdecode(error.filename))
    if error.errno in _DEFECTIVE:
        what = f"the disk, or the way to it, fails ({error.strerror})"
        return f"{path}: {what}; when it works again, the same command goes on", EXIT_CODES[ProtoflError]
    if isinstance(error, PermissionError) and not _may_be_read(path):
        return f"{path}: cannot be read ({error.strerror}); allow it, or name another place", EXIT_CODES[DataError]
    # In a deleted working folder, no folder can be created.
    gone = isinstance(error, FileNotFoundError) and path.name == _OWN
    if gone or isinstance(error, PermissionError) or error.errno in _CANNOT_BE_WRITTEN:
        return f"{path}: cannot write there ({error.strerror}); {_elsewhere(path)}", EXIT_CODES[ConfigError]
    return None


def _elsewhere(path: Path) -> str:
    """Return advice on writing to another place."""
    cache = os.environ.get("PROTOFL_CACHE")
    if cache and path.absolute().is_relative_to(Path(cache).absolute()):
        return "name another folder in PROTOFL_CACHE"
    with suppress(ConfigError):  # there is no home folder
        if path.is_absolute() and path.is_relative_to(user_cache()):
            return f"name another folder in {CACHE_VARIABLE}"
    if _OWN in path.parts:
        return "caches and logs go below the folder that a command is typed in: cd to one that can be written to"
    return "choose another --out"


def _may_be_read(path: Path) -> bool:
    """Return whether this process may read a file or folder; if it is missing, its nearest existing parent."""
    place = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
    mode = os.R_OK | os.X_OK if place.is_dir() else os.R_OK
    return os.access(place, mode, effective_ids=os.access in os.supports_effective_ids)


if __name__ == "__main__":
    sys.exit(main())

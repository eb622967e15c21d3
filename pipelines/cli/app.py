"""The command ``protofl``: parses and runs a command line, and converts errors to messages and exit codes.

Exit codes: 0 done; 1 internal error; 2 bad configuration or usage, before any data are read; 3 data missing or
damaged; 4 a run failed; 130 interrupted, can be resumed. Errors are one or two lines on standard error, after the
traceback if ``--debug`` is given.
"""

from __future__ import annotations

import errno
import os
import select
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from cyclopts.exceptions import CycloptsError

from flcore.core import portable
from flcore.core.errors import MLOPS, ConfigError, DataError, ProtoflError, RunError
from flcore.core.host import CACHE_VARIABLE, user_cache
from flcore.core.text import fit_to_print
from pipelines.addresses import remember
from pipelines.cli.commands import make_app
from pipelines.cli.options import Common, Values
from pipelines.cli.system_errors import has_working_folder, set_home, system_error
from pipelines.cli.usage import missing_command, usage_error
from pipelines.runs.standard_error import STANDARD_OUTPUT, let_go, safe_streams, tell

USAGE = 2
EXIT_CODES = {ConfigError: USAGE, DataError: 3, ProtoflError: 4}
FAULT = 1
INTERRUPTED = 130

_OWN = ".protofl"
_LONGEST = 300  # maximum number of characters of a library's message
_FULL = {errno.ENOSPC, errno.EDQUOT}
_DEFECTIVE = {errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO}
_OF_AN_EXTRA = {"prefect", "fastapi", "sqlalchemy", "mlflow", "dvc", "optuna", "optuna_dashboard"}
_CANNOT_BE_WRITTEN = {errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.EROFS, errno.ENAMETOOLONG}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default this process's, and return the exit code."""
    with safe_streams():
        return _main(sys.argv[1:] if arguments is None else arguments, is_process=arguments is None)


def _main(words: Sequence[str], *, is_process: bool) -> int:
    for word in words:
        remember(word)
    app, had_folder, common = make_app(), has_working_folder(), Common(debug="--debug" in words)
    if not words:
        from pipelines.cli.help import help_text

        print(help_text(app, []), file=sys.stderr)
        return USAGE
    try:
        command, bound, _ = app.parse_args(words)
        if command == app.help_print and not {"--help", "-h"} & set(words):
            _, apps, _ = app.parse_commands(words)
            program = " ".join(["protofl", *words])
            tell(f"{program}: {missing_command(apps[-1])}; see {program} --help")
            return USAGE
        bound.apply_defaults()
        common = next((value for value in bound.arguments.values() if isinstance(value, Common)), common)
        _set_environment(common.debug)
        if isinstance(common, Values) and is_process:
            _compute_as_configured(common)
        if common.plugins and not isinstance(common, Values):  # else the configuration loads them
            from flcore.config.plugins import load_all

            load_all(common.plugins)
        code = int(command(*bound.args, **bound.kwargs) or 0)
    except CycloptsError as error:
        tell(usage_error(error))
        return USAGE
    except KeyboardInterrupt:
        tell("protofl: interrupted; run the same command to resume")
        code = INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _has_no_reader(sys.stdout):
            code = 0  # printing comes last: the work is complete
        else:
            message, code = _told(error, had_folder)
            if common.debug:
                tell(traceback.format_exc())
                if isinstance(error, RunError) and error.details:
                    tell(error.details)
            tell(f"protofl: {fit_to_print(message)}")
    return _all_written(code)


def _compute_as_configured(values: Values) -> None:
    """Restart this command with the processor's own kernels if ``engine.numerics`` requires them.

    Libraries choose their kernels at import, before a configuration is known.
    """
    if portable.wanted() == "native":
        return
    from pipelines.plan.files import read_params
    from pipelines.plan.params import override

    with suppress(ProtoflError):  # the command itself reports the error
        engine = override(read_params(values.params), values.assignments).get("engine")
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
        return f"{place}: the disk is full; free space, and repeat the command to resume", EXIT_CODES[ProtoflError]
    if error.filename is None:
        return None
    if error.filename == STANDARD_OUTPUT:
        return f"{STANDARD_OUTPUT}: cannot be written ({error.strerror})", EXIT_CODES[ProtoflError]
    path = Path(os.fsdecode(error.filename))
    if error.errno in _DEFECTIVE:
        what = f"the disk, or the way to it, fails ({error.strerror})"
        return f"{path}: {what}; when it works again, repeat the command to resume", EXIT_CODES[ProtoflError]
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

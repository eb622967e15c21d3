"""Wrong command lines in one line: what is wrong, what may have been meant, and where the help is."""

from __future__ import annotations

from cyclopts import App
from cyclopts.exceptions import (
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from flcore.core.text import fit_to_print, nearest, shorten
from pipelines.addresses import redact
from pipelines.cli.options import DEFAULTS

# Missing options that users expect, and advice.
_INSTEAD = {
    "--resume": "leave it out: the same command resumes where it stopped",
    "--rounds": "write --set federation.rounds=N",
    "--verbose": "there is --debug, which shows where an error comes from",
}


def usage_error(error: CycloptsError) -> str:
    """Return the line that reports a wrong command line."""
    program = " ".join(["protofl", *(error.command_chain or ())])
    message = fit_to_print(redact(_message(error)))
    return f"{program}: {message}{'' if message.endswith('?') else ';'} see {program} --help"


def missing_command(app: App) -> str:
    """Return the message for a command that lacks the name of one of its own."""
    return f"name one of {', '.join(_commands(app))}"


def _message(error: CycloptsError) -> str:
    word, *_ = error.unused_tokens or [""]
    match error:
        case UnknownCommandError() if word.startswith("-"):
            return f"no option {shorten(word)} here; options follow the command"
        case UnknownCommandError():
            return f"no command {shorten(word)!r}: {_choose(word, _commands(error.app))}"
        case UnknownOptionError():
            return _unknown_option(error.token.keyword or error.token.value, _flags(error))
        case UnusedCliTokensError():
            hint = f"; did you mean --set {shorten(word)}?" if "=" in word and "--set" in _flags(error) else ""
            return f"unexpected {shorten(word)}{hint}"
        case MissingArgumentError(keyword=None):
            unknown = [word for word in error.unused_tokens or () if word.startswith("--")]
            unknown = [word for word in unknown if word.partition("=")[0] not in _flags(error)]
            return _unknown_option(unknown[0], _flags(error)) if unknown else f"{_name(error)} is missing"
        case MissingArgumentError():
            return f"{error.keyword} needs a value"
        case RepeatArgumentError():
            flag = str(error.token.keyword)
            opposite = flag.replace("--no-", "--") if flag.startswith("--no-") else flag.replace("--", "--no-")
            if opposite in (error.root_input_tokens or ()):
                return f"{flag} contradicts {opposite}; remove one"
            return f"{flag} is given twice; {error.msg or 'remove one'}"
        case CoercionError(token=token) if token is not None:
            choices = error.argument.get_choices() if error.argument else None
            why = error.msg or (_choose(token.value, list(choices)) if choices else "takes no value")
            return f"{token.keyword or _name(error)} {shorten(token.value)!r}: {why}"
    error.verbose = False
    return str(error).removesuffix(".")


def _choose(word: str, choices: list[str]) -> str:
    near = nearest(word, choices)
    return f"{f'did you mean {near!r}? ' if near else ''}choose from {', '.join(choices)}"


def _unknown_option(word: str, flags: list[str]) -> str:
    flag = word.partition("=")[0]
    near = nearest(flag, flags, cutoff=0.75)
    if flag in _INSTEAD:
        return f"no option {flag}; {_INSTEAD[flag]}"
    if "." in flag and "--set" in flags:
        return f"no option {shorten(flag)}; did you mean --set {shorten(flag.lstrip('-'))}=VALUE?"
    return f"no option {shorten(flag)}" + (f"; did you mean {near}?" if near else "")


def _flags(error: CycloptsError) -> list[str]:
    arguments = error.app.assemble_argument_collection(default_parameter=DEFAULTS) if error.app else ()
    return [name for argument in arguments for name in argument.names]


def _commands(app: App | None) -> list[str]:
    return [name for name in app or () if not name.startswith("-")]


def _name(error: CycloptsError) -> str:
    """Return the argument as the help text calls it."""
    name, argument = error.argument.name if error.argument else "", error.argument
    return name if argument is None or name.startswith("-") else argument.parameter.metavar or name

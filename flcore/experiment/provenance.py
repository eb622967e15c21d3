"""The code that a run uses, by content: what a checkpoint is bound to, beside the configuration and the data.

It is the closure of imports, read from the sources, of the engine, the scorer, what makes figures of scores, and the
classes that the configuration names. Registries are tables of strings (`flcore/core/registry.py`), so other methods are
not in it: an edit in one of them changes no other run. Neither is what read and divided the data, since what they gave
has fingerprints of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flcore.config.imports import closure
from flcore.config.plugins import used
from flcore.config.schema import Config
from flcore.core.loaded_code import PACKAGE_SOURCES, EditedError, read_sources, refuse_edited, source_file
from flcore.core.loaded_code import ROOT as ROOT

_STEP_ENTRIES = tuple(f"flcore.engine.local.{name}" for name in ("step_function", "convolution", "compiler"))
_ENTRIES = (
    "flcore.engine.rounds",
    "flcore.engine.client",
    "flcore.engine.numerics",
    "flcore.evaluation.scoring",
    "flcore.evaluation.summaries",
)
# Sources and partitioners, and the table of methods, in which a line more concerns nobody else.
_REGISTRIES = ("flcore.data.sources", "flcore.data.partitioners")
_LEFT_OUT = (*_REGISTRIES, "flcore.methods.registry")


def code_modules(config: Config, root: Path = ROOT, entries: Sequence[str] = _ENTRIES) -> dict[str, str]:
    """The modules that a run of a configuration uses, each with the SHA-256 of its source; plug-ins too.

    Args:
        config: the run.
        root: the folder of `flcore`.
        entries: where the run enters the library.
    """
    plugins = {plugin.module: plugin.source for plugin in config.plugins}
    sources = _sources(root)

    def source_of(module: str) -> bytes | None:
        if module in plugins:
            return plugins[module]
        if module.startswith(_LEFT_OUT):
            return None
        return _library_source(module, sources)

    named = [type(entry).__module__ for entry in (*config.methods, config.model_spec, config.sampler)]
    named += [plugin.module for plugin in used(config.plugins, config.entries)]
    found = closure((*entries, *named), source_of)
    return {module: hashlib.sha256(source).hexdigest() for module, source in found.items()}


def code_fingerprint(config: Config, root: Path = ROOT) -> str:
    """SHA-256 over the names and sources of :func:`code_modules`."""
    return _digest(code_modules(config, root))


def step_fingerprint(config: Config, root: Path = ROOT) -> str:
    """SHA-256 of the code that a step of local training is made from: the loss, the model, what puts them together."""
    return _digest(code_modules(config, root, _STEP_ENTRIES))


def preparation_fingerprint(config: Config) -> str:
    """SHA-256 of the code that reads the configured source and brings its images into one form."""
    return _fingerprint_of(config, "flcore.data.dataset", config.source)


def division_fingerprint(config: Config) -> str:
    """SHA-256 of the code that divides prepared data among clients as configured."""
    return _fingerprint_of(config, "flcore.data.dividing", config.partitioner)


def _fingerprint_of(config: Config, start: str, chosen: object) -> str:
    plugins = {plugin.module: plugin.source for plugin in used(config.plugins, [chosen])}

    def source_of(module: str) -> bytes | None:
        if module in plugins:
            return plugins[module]
        return None if module in _REGISTRIES else _library_source(module, PACKAGE_SOURCES)  # these name all there are

    found = closure((start, type(chosen).__module__, *plugins), source_of)
    return _digest({module: hashlib.sha256(source).hexdigest() for module, source in found.items()})


def library_fingerprint(root: Path = ROOT) -> str:
    """SHA-256 over all sources of `flcore`, used or not: the same for all methods of a comparison."""
    return _digest({name: hashlib.sha256(source).hexdigest() for name, source in _sources(root).items()})


def package_versions(names: Sequence[str]) -> dict[str, str | None]:
    """Return the installed version of each package; None if it is missing."""
    return {name: _version(name) for name in names}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def refuse_edited_code(config: Config) -> None:
    """Stop before a run begins where a file that it uses is not the one that this process has imported.

    Args:
        config: the run.

    Raises:
        EditedError: names the file, of the package or of a plug-in.
    """
    refuse_edited(code_modules(config))
    for plugin in config.plugins:
        with suppress(OSError):  # a removed plug-in is still in memory; workers report it
            if plugin.path.read_bytes() != plugin.source:
                raise EditedError.of(plugin.path)


def _sources(root: Path) -> Mapping[str, bytes]:
    """The sources of the package: as this process began, or of a copy of it, as they are now."""
    return PACKAGE_SOURCES if root == ROOT else read_sources(root)


def _library_source(module: str, sources: Mapping[str, bytes]) -> bytes | None:
    name = source_file(module, sources)
    return None if name is None else sources[name]


def _digest(sources: dict[str, str]) -> str:
    text = "".join(f"{name} {digest}\n" for name, digest in sorted(sources.items()))
    return hashlib.sha256(text.encode()).hexdigest()

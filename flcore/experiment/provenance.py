"""The code that a run uses, by content; a checkpoint is bound to it, to the configuration and to the data.

Comments and empty lines of the library do not count. Of a plug-in they do: it may be written in a newer Python.

It is the closure of imports, read from the sources, of the engine, the scorer, the metrics, and the classes that the
configuration names. Registries are tables of strings (`flcore/core/registry.py`), so other methods are not in it, and
an edit of one changes no other run. The code that read and divided the data is left out, since data and partition have
their own fingerprints.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flcore.config.imports import closure
from flcore.config.plugins import Plugin, used
from flcore.config.schema import Config
from flcore.core.loaded_code import PACKAGE_SOURCES, EditedError, code_digest, read_sources, refuse_edited, source_file
from flcore.core.loaded_code import ROOT as ROOT

_STEP_ENTRIES = tuple(f"flcore.engine.local.{name}" for name in ("step_function", "convolution", "compiler"))
_ENTRIES = (
    "flcore.engine.rounds",
    "flcore.engine.client",
    "flcore.engine.numerics",
    "flcore.evaluation.scoring",
    "flcore.evaluation.summaries",
)
# A new line in the tables of sources, partitioners and methods changes no run.
_REGISTRIES = ("flcore.data.sources", "flcore.data.partitioners")
_LEFT_OUT = (*_REGISTRIES, "flcore.methods.registry")


def code_modules(config: Config, root: Path = ROOT, entries: Sequence[str] = _ENTRIES) -> dict[str, str]:
    """Return the modules that a run uses, plug-ins too, with the digest of each source.

    Args:
        config: the run.
        root: the folder of `flcore`.
        entries: modules where the run enters the library.
    """
    named = [type(entry).__module__ for entry in (*config.methods, config.model_spec, config.sampler)]
    named += [plugin.module for plugin in used(config.plugins, config.entries)]
    return _modules((*entries, *named), config.plugins, lambda module: module.startswith(_LEFT_OUT), root)


def code_fingerprint(config: Config, root: Path = ROOT) -> str:
    """Return the SHA-256 over the names and sources of :func:`code_modules`."""
    return _digest(code_modules(config, root))


def step_fingerprint(config: Config, root: Path = ROOT) -> str:
    """Return the SHA-256 of the code of a step of local training: loss, model and step function."""
    return _digest(code_modules(config, root, _STEP_ENTRIES))


def preparation_fingerprint(config: Config) -> str:
    """Return the SHA-256 of the code that reads and converts the configured source."""
    return _fingerprint_of(config, "flcore.data.dataset", config.source)


def division_fingerprint(config: Config) -> str:
    """Return the SHA-256 of the code that divides prepared data as configured."""
    return _fingerprint_of(config, "flcore.data.dividing", config.partitioner)


def _fingerprint_of(config: Config, start: str, chosen: object) -> str:
    plugins = used(config.plugins, [chosen])
    entries = (start, type(chosen).__module__, *(plugin.module for plugin in plugins))
    return _digest(_modules(entries, plugins, lambda module: module in _REGISTRIES))


def _modules(
    entries: Sequence[str], plugins: Sequence[Plugin], left_out: Callable[[str], bool], root: Path = ROOT
) -> dict[str, str]:
    """Return the digests of the closure of imports of some modules."""
    of_plugins, library = {plugin.module: plugin.source for plugin in plugins}, _sources(root)

    def source_of(module: str) -> bytes | None:
        if module in of_plugins:
            return of_plugins[module]
        name = None if left_out(module) else source_file(module, library)
        return None if name is None else library[name]

    return {
        module: hashlib.sha256(source).hexdigest() if module in of_plugins else code_digest(source)
        for module, source in closure(entries, source_of).items()
    }


def library_fingerprint(root: Path = ROOT) -> str:
    """Return the SHA-256 over all sources of `flcore`, the same for all methods of a comparison."""
    return _digest({name: code_digest(source) for name, source in _sources(root).items()})


def package_versions(names: Sequence[str]) -> dict[str, str | None]:
    """Return the installed version of each package; None if it is missing."""
    return {name: _version(name) for name in names}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def refuse_edited_code(config: Config) -> None:
    """Refuse a run that uses a file edited after its import.

    Raises:
        EditedError: names the file, of the package or of a plug-in.
    """
    refuse_edited(code_modules(config))
    for plugin in config.plugins:
        with suppress(OSError):  # a removed plug-in is still in memory; workers report it
            if plugin.path.read_bytes() != plugin.source:
                raise EditedError.of(plugin.path)


def _sources(root: Path) -> Mapping[str, bytes]:
    """Return the package's sources: as this process imported them, or a copy's, as they are now."""
    return PACKAGE_SOURCES if root == ROOT else read_sources(root)


def _digest(sources: dict[str, str]) -> str:
    text = "".join(f"{name} {digest}\n" for name, digest in sorted(sources.items()))
    return hashlib.sha256(text.encode()).hexdigest()

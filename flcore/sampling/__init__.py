"""Client samplers by name; adding one is adding a class and its line here."""

from collections.abc import Mapping
from typing import Any

from flcore.core.errors import ConfigError
from flcore.core.params import build
from flcore.core.registry import Registry
from flcore.core.text import to_yaml
from flcore.sampling.base import Sampler

SAMPLERS: Registry[type[Sampler]] = Registry(
    "sampler",
    {
        "uniform": "flcore.sampling.samplers:Uniform",
        "by_size": "flcore.sampling.samplers:BySize",
        "round_robin": "flcore.sampling.samplers:RoundRobin",
        "trace": "flcore.sampling.trace:Trace",
    },
)


def make_sampler(name: str, options: Mapping[str, Any]) -> Sampler:
    """Make the sampler of a configuration.

    Raises:
        ConfigError: there is none of this name, or it has other options.
    """
    if name not in SAMPLERS:
        raise ConfigError(f"federation.sampler = {to_yaml(name)}: must be one of {', '.join(SAMPLERS)}")
    return build(SAMPLERS[name], options, "federation.sampler_options")

"""Client samplers by name; adding one is adding a file and its line here."""

from flcore.core.registry import Registry
from flcore.sampling.base import Sampler

SAMPLERS: Registry[type[Sampler]] = Registry(
    "sampler",
    {
        "uniform": "flcore.sampling.uniform:Uniform",
        "by_size": "flcore.sampling.by_size:BySize",
        "round_robin": "flcore.sampling.round_robin:RoundRobin",
        "trace": "flcore.sampling.trace:Trace",
    },
)

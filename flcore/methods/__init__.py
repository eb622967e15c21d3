"""Methods by name. Adding one is adding its file, its test and its entry here."""

from __future__ import annotations

from flcore.methods.base import Method
from flcore.methods.central import Central
from flcore.methods.fedavg import FedAvg
from flcore.methods.fedproto import FedProto
from flcore.methods.fedprox import FedProx
from flcore.methods.local import Local

__all__ = ["METHODS", "Method"]

METHODS: dict[str, type[Method]] = {cls.name: cls for cls in (Local, Central, FedAvg, FedProx, FedProto)}

"""Methods by name. Adding one is adding its file, its test and its entry here."""

from __future__ import annotations

from flcore.methods.base import Method
from flcore.methods.ccvr import CCVR
from flcore.methods.central import Central
from flcore.methods.creff import CReFF
from flcore.methods.fedavg import FedAvg
from flcore.methods.fedcspc import FedCSPC
from flcore.methods.fedensemble import FedEnsemble
from flcore.methods.fedgen import FedGen
from flcore.methods.fedhkd import FedHKD
from flcore.methods.fedmlp import FedMLP
from flcore.methods.fedntd import FedNTD
from flcore.methods.fedpa import FedPA
from flcore.methods.fedper import FedPer
from flcore.methods.fedpg import FedPG
from flcore.methods.fedproc import FedProc
from flcore.methods.fedproto import FedProto
from flcore.methods.fedprox import FedProx
from flcore.methods.fedrep import FedRep
from flcore.methods.fesem import FeSEM
from flcore.methods.gfpl import GFPL
from flcore.methods.local import Local
from flcore.methods.moon import Moon
from flcore.methods.vhl import VHL

__all__ = ["METHODS", "Method"]

METHODS: dict[str, type[Method]] = {
    cls.name: cls
    for cls in (
        Local,
        Central,
        FedAvg,
        FedProx,
        FedProto,
        FedGen,
        FedPA,
        FedEnsemble,
        FedPG,
        VHL,
        Moon,
        GFPL,
        CCVR,
        FedPer,
        FedRep,
        FedCSPC,
        FedProc,
        FedHKD,
        FedNTD,
        CReFF,
        FedMLP,
        FeSEM,
    )
}

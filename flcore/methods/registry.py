"""Methods by name. Adding one is adding its file, its test and its line here; a plug-in needs no line."""

from __future__ import annotations

from flcore.core.registry import Registry
from flcore.methods.api import Method

METHODS: Registry[type[Method]] = Registry(
    "method",
    {
        "local": "flcore.methods.local:Local",
        "central": "flcore.methods.central:Central",
        "fedavg": "flcore.methods.fedavg:FedAvg",
        "fedprox": "flcore.methods.fedprox:FedProx",
        "fedproto": "flcore.methods.fedproto:FedProto",
        "fedgen": "flcore.methods.fedgen:FedGen",
        "fedpa": "flcore.methods.fedpa:FedPA",
        "fedensemble": "flcore.methods.fedensemble:FedEnsemble",
        "fedpg": "flcore.methods.fedpg:FedPG",
        "vhl": "flcore.methods.vhl:VHL",
        "moon": "flcore.methods.moon:Moon",
        "gfpl": "flcore.methods.gfpl:GFPL",
        "ccvr": "flcore.methods.ccvr:CCVR",
        "fedper": "flcore.methods.fedper:FedPer",
        "fedrep": "flcore.methods.fedrep:FedRep",
        "fedcspc": "flcore.methods.fedcspc:FedCSPC",
        "fedproc": "flcore.methods.fedproc:FedProc",
        "fedhkd": "flcore.methods.fedhkd:FedHKD",
        "fedntd": "flcore.methods.fedntd:FedNTD",
        "feddecorr": "flcore.methods.feddecorr:FedDecorr",
        "feddc": "flcore.methods.feddc:FedDC",
        "fedasam": "flcore.methods.fedasam:FedASAM",
        "fedfa": "flcore.methods.fedfa:FedFA",
        "creff": "flcore.methods.creff:CReFF",
        "fedmlp": "flcore.methods.fedmlp:FedMLP",
        "fesem": "flcore.methods.fesem:FeSEM",
        "scaffold": "flcore.methods.scaffold:Scaffold",
        "fednova": "flcore.methods.fednova:FedNova",
        "feddyn": "flcore.methods.feddyn:FedDyn",
        "ditto": "flcore.methods.ditto:Ditto",
        "fedavg_q": "flcore.methods.fedavg_q:FedAvgQ",
        "lda_head": "flcore.methods.lda_head:LdaHead",
        "closed_head": "flcore.methods.closed_head:ClosedHead",
        "linear_probe": "flcore.methods.linear_probe:LinearProbe",
        "protolda": "flcore.methods.protolda:ProtoLDA",
        "protolda_distilled": "flcore.methods.protolda_distilled:ProtoLDADistilled",
        "protolda_blocks": "flcore.methods.protolda_blocks:ProtoLDABlocks",
    },
)

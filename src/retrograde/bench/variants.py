"""The ways to train that are compared, as data: what a worker process is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any

PARTITIONS = (0.5, 0.3)  # of torch's activation_memory_budget
PEERS = {"revtorch": "revtorch", "memcnn": "memcnn", "revlib": "revlib", "reformer": "reformer_pytorch"}  # name: module
PACKAGES = {name: module.replace("_", "-") for name, module in PEERS.items()}
REFERENCE = "ordinary"


@dataclass(frozen=True)
class Variant:
    """One way to train the same pair blocks."""

    name: str
    way: str  # ordinary: a plain loop; checkpoint: torch's, around each function; retrograde; or the name of a peer
    compiled: str = "no"  # "functions": f and g of each block; "whole": the net, with fullgraph=True
    memory: Any = None  # of retrograde: "reverse", or {"budget": bytes}, {"store_share": share of all updates}
    partition: float | None = None  # torch's activation_memory_budget for what is compiled
    captured: bool = False  # the whole step is a CUDA graph

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def variants(budgets: Mapping[str, int], device: str = "cpu") -> list[Variant]:
    """All that there are on a device; `budgets` are bytes by the name that their rows will have."""

    def eager_and_compiled(name: str, way: str, **more: Any) -> list[Variant]:
        return [Variant(name, way, **more), Variant(f"{name}-compiled", way, "functions", **more)]

    found = [*eager_and_compiled("ordinary", "ordinary"), Variant("ordinary-fullgraph", "ordinary", "whole")]
    found += eager_and_compiled("checkpoint", "checkpoint")
    for share in PARTITIONS:
        found.append(Variant(f"partition-{share}", "ordinary", "functions", partition=share))
        found.append(Variant(f"partition-{share}-fullgraph", "ordinary", "whole", partition=share))
    found += eager_and_compiled("reverse", "retrograde", memory="reverse")
    found.append(Variant("reverse-fullgraph", "retrograde", "whole", memory="reverse"))
    found += eager_and_compiled("store-half", "retrograde", memory={"store_share": 0.5})
    if device == "cuda":
        found.append(Variant("ordinary-captured", "ordinary", captured=True))
        found.append(Variant("reverse-captured", "retrograde", memory="reverse", captured=True))
    for name, size in budgets.items():
        found += eager_and_compiled(f"budget-{name}", "retrograde", memory={"budget": size})
    return found + [Variant(name, name) for name in PEERS]


def installed(variant: Variant) -> bool:
    return variant.way not in PEERS or find_spec(PEERS[variant.way]) is not None


def chosen(every: Iterable[Variant], patterns: Sequence[str]) -> list[Variant]:
    """Those that a pattern names, and the one that all are compared with, in the order of `every`.

    A peer that is not installed is chosen by its full name alone. Raises ValueError for a pattern that names nothing.

    >>> [v.name for v in chosen(variants({}), ["reverse*"])]
    ['ordinary', 'reverse', 'reverse-compiled', 'reverse-fullgraph']
    """
    every = list(every)
    for pattern in patterns:
        if not any(fnmatchcase(v.name, pattern) for v in every):
            more = "; --budget 3GiB adds budget-3GiB" if "budget" in pattern else ""
            if any(fnmatchcase(v.name, pattern) for v in variants({}, "cuda")):
                more = "; that one is for a GPU: --device cuda"
            raise ValueError(f"no variant is called {pattern!r}, there are: {', '.join(v.name for v in every)}{more}")

    def wanted(variant: Variant) -> bool:
        if variant.name in patterns or variant.name == REFERENCE:
            return True
        return installed(variant) and (not patterns or any(fnmatchcase(variant.name, p) for p in patterns))

    return [variant for variant in every if wanted(variant)]

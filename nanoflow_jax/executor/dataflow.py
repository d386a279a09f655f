"""What the operations of a nano-operation read and write: what comes from outside, what others need, where the pool changes."""

from collections.abc import Mapping, Sequence

from nanoflow_jax.operations import OPERATIONS

POOL = ("k_pages", "v_pages")
"""Values that are a layer's whole pool, whatever the tokens."""
# A plan gives decoding and prompt tokens ranges of their own, each with a result of its own.
_RENAMED = {"decoded": "attended", "prefilled": "attended"}

Parts = tuple[tuple[str, ...], tuple[str, ...]]
"""Operations up to the first write of the pool, and the rest."""


def split_at_pool_write(names: Sequence[str]) -> Parts:
    """Those that may run asynchronously, and those from the first write of the pool on."""
    first = next((i for i, name in enumerate(names) if set(POOL) & set(OPERATIONS[name].writes)), len(names))
    return tuple(names[:first]), tuple(names[first:])


def readers(runs: Mapping[str, Parts]) -> dict[str, set[str]]:
    """Value -> the nodes that need it from outside. x has a reader that is no node: the next layer, or the logits."""
    found: dict[str, set[str]] = {"x": {"next layer"}}
    for node, (own, later) in runs.items():
        for value in external_reads([*own, *later]):
            found.setdefault(value, set()).add(node)
    return found


def needed_outside(node: str, runs: Mapping[str, Parts], readers: Mapping[str, set[str]]) -> set[str]:
    """Values written by the first part of `node` that its second part, another node or the next layer needs."""
    own, later = runs[node]
    needed = {value for value, nodes in readers.items() if nodes - {node}} | set(external_reads(later))
    return {write for name in own for write in OPERATIONS[name].writes if known_as(write) in needed}


def external_reads(names: Sequence[str]) -> list[str]:
    """Values that operations need from outside when they run in this order, the pool apart."""
    inside: set[str] = set()
    wanted = []
    for name in names:
        wanted += [r for r in OPERATIONS[name].reads if r not in inside and r not in POOL and r not in wanted]
        inside |= {known_as(write) for write in OPERATIONS[name].writes}
    return wanted


def written(names: Sequence[str]) -> set[str]:
    return {known_as(write) for name in names for write in OPERATIONS[name].writes}


def known_as(name: str) -> str:
    """Under which name others read what is written as `name`."""
    return _RENAMED.get(name, name)


def reads_pool(names: Sequence[str]) -> bool:
    return any(set(POOL) & set(OPERATIONS[name].reads) for name in names)

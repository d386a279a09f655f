"""All ranks of a kernel over peers' memory on one device of jax's interpreter, which knows neither peers nor semaphores."""

import dataclasses
from typing import Any, ClassVar

import jax
import numpy as np
from jax import lax

from pallas_kernels._collective_schedule import ADD, KIND, SEND, CollectiveSchedule
from pallas_kernels._peers import Peers


@dataclasses.dataclass(frozen=True)
class AllRanks(Peers):
    """Arrays have a leading axis of ranks. CTAs run one after the other: first all that multiply, then as many that add."""

    interpreted: ClassVar[bool] = True
    ctas: int = 1

    def array(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.ranks, *shape), dtype)

    def launched(self, ctas: int) -> int:
        return 2 * self.ranks * ctas

    def tables(self, plan: CollectiveSchedule) -> tuple[np.ndarray, np.ndarray]:
        segments, tasks = super().tables(plan)
        return np.concatenate([segments, np.zeros_like(segments)]), np.concatenate([_only(tasks, SEND), _only(tasks, ADD)])

    def table_row(self, ctas: int) -> jax.Array:
        return lax.axis_index("sm")

    def me(self) -> jax.Array:
        return lax.rem(lax.div(lax.axis_index("sm"), self.ctas), self.ranks)

    def mine(self, ref: Any) -> Any:
        return ref.at[self.me()]

    def of(self, rank: Any, ref: Any) -> Any:
        return ref.at[rank]

    def readers(self, out: Any) -> list[Any]:
        return [self.mine(out), *super().readers(out)[1:]]

    def semaphores(self, count: int) -> None:
        return None

    def signal(self, semaphores: Any, index: Any, rank: Any) -> None: ...

    def wait(self, semaphores: Any, index: Any, value: int) -> None: ...

    def meet(self, done: Any, ctas: int) -> None: ...


def _only(tasks: np.ndarray, kind: int) -> np.ndarray:
    """Each CTA's tasks of one kind, moved to the front."""
    kept = np.zeros_like(tasks)
    for row, mine in zip(kept, tasks, strict=True):
        chosen = mine[mine[:, KIND] == kind]
        row[: len(chosen)] = chosen
    return kept

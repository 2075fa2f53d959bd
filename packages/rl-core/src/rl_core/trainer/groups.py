"""A row of the data, which row each group plays, and the trajectories of a finished group."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from rl_core.interfaces import Row, Trajectory
from rl_core.seeds import generator_of


@attrs.frozen(eq=False)
class DataRow:
    """A row and its place in the data."""

    row: Row
    place: str
    """`file:number`. Rows are numbered from 1; a row of a JSON-lines file has the number of its line."""


class PromptSource:
    """Maps group numbers to rows, epoch after epoch. If rows are shuffled, each epoch has its own order, which depends
    only on the seed and the epoch."""

    def __init__(self, rows: Sequence[DataRow], *, seed: int, shuffle: bool):
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order = np.arange(len(rows))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, group_id: int) -> DataRow:
        """The row that group `group_id` plays. Group numbers continue from one epoch to the next."""
        epoch, position = divmod(group_id, len(self._rows))
        if self._shuffle and epoch != self._epoch:
            self._order = generator_of(self._seed, epoch).permutation(len(self._rows))
            self._epoch = epoch
        return self._rows[self._order[position]]


@attrs.frozen(kw_only=True, eq=False)
class FinishedGroup:
    """The trajectories of one prompt, ready to be trained on."""

    group_id: int
    start_version: int
    trajectories: tuple[Trajectory, ...]

"""Unbounded data: impressions and later actions, joined to labelled rows while a model trains on them.

[Note: a join between steps]
Rank 0 joins the records of both streams whenever the labelled rows do not fill a step, and writes the rows to
a local folder, which all ranks follow. It is the folder of [Note: a joined folder]: after a kill, all of its
rows are there again, in the same order, and later rows are those that would have come without the kill. A
position in this folder therefore determines all later steps. When a checkpoint is on disk, rank 0 saves the
state of the join, and removes the files that lie before the oldest checkpoint.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from typing_extensions import override

from meshrec.comms.agreement import together
from meshrec.comms.mesh import Axis
from meshrec.data.encoding import Encoding
from meshrec.data.faults import OnError
from meshrec.data.folder_join import FolderJoin
from meshrec.data.follow import Follow
from meshrec.data.streams import Burst, Position, Stream

_JOIN_SECONDS = 1.0
"""Time after which the consumer gets control again, although the join has read no rows for a step yet."""


class JoinedStream(Stream):
    """Labelled rows of impressions and later actions, in batches for all ranks.

    See [Note: a join between steps]. Only rank 0 reads the impressions and actions.

    Args:
        joiner: writer of the joined folder, which all ranks must see.
        features: fitted features that encode the rows. A feature's column is one of impressions, or the label
            of the join.
        on_error: "raise" for damaged rows, or "skip" to count and omit them.
        set_aside: as for `Follow`.

    Attributes:
        faults: counts of omitted rows on this rank, by reason. Those of the join are added at the end.

    Example::

        import pyarrow as pa
        import pyarrow.parquet as pq
        from pathlib import Path
        from meshrec.data import FolderJoin, JoinedStream, LabelJoin
        from meshrec.data.features import Features, Hashed, Label

        shown = pa.table({"request": [1, 2, 3, 4], "ts": [0, 5, 6, 99], "user": ["a", "b", "a", "c"]})
        for name, table in {"shown": shown, "clicks": pa.table({"request": [2, 9], "ts": [30, 99]})}.items():
            Path(name).mkdir()
            pq.write_table(table, f"{name}/0001.parquet")
        user = Hashed(name="user", num_embeddings=100)
        features = Features(labels=(Label(column="clicked"),), features=(user,))
        join = LabelJoin(key="request", time="ts", label="clicked", window_seconds=60)
        stream = JoinedStream(FolderJoin("shown", "clicks", Path("labelled"), join), features)
        for burst in stream.bursts(3, stop=lambda: True):
            for batch in burst.batches:
                print(batch.labels)  # 1 for b, and then 0 for both rows of a
    """

    def __init__(
        self,
        joiner: FolderJoin,
        features: Encoding,
        *,
        on_error: OnError = "raise",
        set_aside: Path | None = None,
    ) -> None:
        self._follow = Follow(
            joiner.output, features, on_error=on_error, set_aside=set_aside, extend=self._extend
        )
        self.faults, self.column_types = self._follow.faults, self._follow.column_types
        # Open on rank 0 while bursts are read.
        self._joiner, self._is_open = joiner, False

    @override
    def bursts(
        self,
        batch_size: int,
        *,
        position: Position | None = None,
        axis: Axis = Axis(),  # noqa: B008 - immutable
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Burst]:
        """Yield the steps whose rows are decided; see `Stream.bursts`.

        ``position`` is that of `Follow` in the joined folder.

        Raises:
            DataError: a record is damaged, a file has changed, or too many records wait for their labels.
            ValueError: an argument is wrong, another process writes to the joined folder, or it was joined
                with other options.
        """
        with ExitStack() as opened:
            with together(axis, "joining labels"):
                if axis.rank == 0:
                    opened.enter_context(self._joiner.opened())
                    self._is_open = True
            try:
                yield from self._follow.bursts(batch_size, position=position, axis=axis, stop=stop)
            finally:
                if self._is_open:
                    self._is_open = False
                    self._add_faults()

    @override
    def on_checkpoint(self, position: Position) -> None:
        if self._is_open:
            self._joiner.prune(position["file"])

    def _extend(self) -> bool:
        """Join the next records; return whether rows were written, or there may be more records."""
        num_before, deadline = self._joiner.num_written, time.monotonic() + _JOIN_SECONDS
        while self._joiner.advance():
            if self._joiner.num_written > num_before or time.monotonic() > deadline:
                return True
        return self._joiner.num_written > num_before

    def _add_faults(self) -> None:
        """Add the counts of the join to those of this rank."""
        counts = {name: num for name, num in self._joiner.counts.items() if num and name != "early_decisions"}
        if counts:
            self.faults.by_file["label join"] = {name.replace("_", " "): num for name, num in counts.items()}
        self.faults.by_file.update(self._joiner.faults.by_file)

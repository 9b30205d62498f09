"""All features of a model: fitted on the training data, saved as one JSON, applied alike everywhere."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from meshrec.data.dataset import Feature
from meshrec.data.encoding import Encoding, Place
from meshrec.data.faults import DataError, Faults
from meshrec.data.features.column_feature import from_json, need_fitted, to_json
from meshrec.data.features.derived import Buckets, Cross, DatePart
from meshrec.data.features.ids import Hashed, IdFeature, Integer
from meshrec.data.features.join import Join
from meshrec.data.features.keys import Key
from meshrec.data.features.label import Label
from meshrec.data.features.number import Number
from meshrec.data.features.sketches import Counts, Distinct, RowSample
from meshrec.data.features.times import Times
from meshrec.data.features.values import hashes_of, is_missing, kind_of, whole
from meshrec.data.features.vocabulary import Vocabulary
from meshrec.data.samples import Ints, Samples, Shape

ColumnFeature = Number | IdFeature
"""A feature of any kind."""

_VERSION = 1
_KINDS = {
    each.__name__: each
    for each in (Number, Hashed, Integer, Key, Vocabulary, Times, Cross, Buckets, DatePart)
}


class FitState(NamedTuple):
    """The state of a pass over a part of the data; merges exactly, in any order."""

    num_rows: int
    sample: RowSample
    counts: dict[str, Counts]

    def merged(self, other: "FitState") -> "FitState":
        """Return the state of both parts together."""
        counts = {name: mine.merged(other.counts[name]) for name, mine in self.counts.items()}
        return FitState(self.num_rows + other.num_rows, self.sample.merged(other.sample), counts)


class Coverage(NamedTuple):
    """The coverage of a table's rows by the values of its feature."""

    name: str
    """The name of the feature."""
    num_ids: int
    """The number of IDs seen."""
    missing: float
    """Share of the IDs that are null or empty."""
    distinct: int
    """Estimated number of distinct values."""
    rows: int
    """The number of rows of the table."""
    used_rows: int
    """The number of rows that some value has."""
    colliding: float
    """Share of the distinct values that share their row with another."""
    unseen: float | None
    """Share of the IDs that are in no vocabulary; None without a vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Features(Encoding):
    """The features that a model reads from a table, and the labels that it learns to predict.

    Args:
        labels: the labels. The first one selects the best weights.
        features: numbers become columns of ``Batch.dense``, others keys of ``Batch.sparse``, in this order.
        joins: tables whose columns are looked up first.
        weight: a column with the weight of each sample in the loss.
        num_labels: the number of labels, which stays known if the data has none.

    Raises:
        ValueError: a name occurs twice, the name of a table has a dot, or there is no feature of IDs.
    """

    labels: tuple[Label, ...]
    features: tuple[ColumnFeature, ...]
    joins: tuple[Join, ...] = ()
    weight: str | None = None
    num_labels: int = 0

    def __post_init__(self) -> None:
        if not self.num_labels:
            object.__setattr__(self, "num_labels", len(self.labels))
        dotted = [each for each in self.ids if "." in (each.table or each.name)]
        if dotted:
            name = dotted[0].table or dotted[0].name
            raise ValueError(
                f"a table's name has no dot, got {name!r} of feature {dotted[0].name!r}. Name it "
                f"{name.replace('.', '_')!r}, with column={dotted[0].source!r}."
            )
        self._check_vocabularies()
        queries = [at for at, each in enumerate(self.labels) if each.kind == "query"]
        if queries and (queries != [len(self.labels) - 1] or queries == [0]):
            raise ValueError(
                f"labels {[each.column for each in self.labels]}: a label of kind='query' is the last of two "
                "or more. Name the label that ranks the samples of a query first."
            )
        names = [each.name for each in self.features]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or not self.ids:
            raise ValueError(
                f"features need names of their own, and one of ids at least; names given twice: {twice}, "
                f"ids: {[each.name for each in self.ids]}."
            )

    def _check_vocabularies(self) -> None:
        """Raise ValueError unless vocabularies that share a table have the same options."""
        alike = ("min_count", "max_size", "num_unseen", "num_embeddings")
        first: dict[str, Vocabulary] = {}
        for each in self.ids:
            if not isinstance(each, Vocabulary):
                continue
            other = first.setdefault(each.table or each.name, each)
            for name in alike:
                mine, theirs = getattr(each, name), getattr(other, name)
                if mine != theirs:
                    raise ValueError(
                        f"vocabularies that share a table need the same {name}: feature {each.name!r} has "
                        f"{mine}, and {other.name!r} {theirs}. Give both the same, or tables of their own."
                    )

    @property
    def numbers(self) -> tuple[Number, ...]:
        """The features of ``Batch.dense``."""
        return tuple(each for each in self.features if isinstance(each, Number))

    @property
    def ids(self) -> tuple[IdFeature, ...]:
        """The features of ``Batch.sparse``."""
        return tuple(each for each in self.features if isinstance(each, IdFeature))

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of ``Batch.sparse``."""
        return tuple(each.name for each in self.ids)

    @property
    def shape(self) -> Shape:
        """The shape of samples. Data without labels has a column of NaN for each label."""
        return Shape(
            len(self.numbers),
            len(self.ids),
            max(self.num_labels, 1),
            self.weight is not None,
            self.is_weighted,
            query=next((at for at, each in enumerate(self.labels) if each.kind == "query"), 0),
        )

    def id_columns(self) -> tuple[str, ...]:
        """Return the columns that IDs come from, without those of joins."""
        joined = {column for join in self.joins for column in join.columns}
        return tuple(
            dict.fromkeys(
                each.source
                for each in self.ids
                if each.source in self.columns() and each.source not in joined
            )
        )

    def labels_of(self) -> tuple[str, ...]:
        """Return the names of the labels if there are several, otherwise nothing."""
        names = tuple(each.column for each in self.labels if each.kind != "query")
        return names if len(names) > 1 else ()

    @property
    def dense_names(self) -> tuple[str, ...]:
        """The names of the columns of ``Batch.dense``."""
        return tuple(each.name for each in self.numbers)

    @property
    def num_classes(self) -> int:
        """The number of classes of the label; 0 if it has none."""
        return len(self.labels[0].classes) if self.labels else 0

    @property
    def number_edges(self) -> tuple[tuple[float, ...], ...]:
        """The edges of the bins of each column of ``Batch.dense``; none of a number without bins."""
        return tuple(each.edges or () for each in self.numbers)

    @property
    def is_weighted(self) -> bool:
        """Whether IDs have weights."""
        return any(each.weights is not None for each in self.ids)

    @property
    def is_fitted(self) -> bool:
        """Whether all features are fitted."""
        return all(each.is_fitted for each in self.features)

    def __getitem__(self, name: str) -> ColumnFeature:
        """Return a feature by its name."""
        for each in self.features:
            if each.name == name:
                return each
        raise KeyError(f"there is no feature {name!r}; there are {[each.name for each in self.features]}.")

    def columns(self) -> list[str]:
        """Return the columns to read, each once: labels, weight, features, and the keys of joins."""
        joined = {column for join in self.joins for column in join.columns}
        names = [each.column for each in self.labels] + ([] if self.weight is None else [self.weight])
        names += [column for each in self.features for column in each.columns() if column not in joined]
        return list(dict.fromkeys([*names, *(join.key for join in self.joins)]))

    def fitted_kinds(self) -> Mapping[str, str]:
        """Return the kinds of the columns of fitted features, and of the keys of joins."""
        joined = {column for join in self.joins for column in join.columns}
        kinds: dict[str, str] = {join.key: join.key_kind() for join in self.joins}
        for each in self.features:
            if isinstance(each, Cross):
                kinds |= dict(zip(each.columns_crossed, each.found_crossed or (), strict=False))
            elif each.found is not None:
                kinds[each.source] = each.found
        return {column: kind for column, kind in kinds.items() if column not in joined}

    def wrong_columns(self, found: pa.Schema) -> list[str]:
        """Return a message for each column that is missing, or whose kind cannot be read."""
        missing = [name for name in self.columns() if found.get_field_index(name) < 0]
        if missing:
            return [f"there is no column {name!r} among {found.names}" for name in missing]
        kinds = {name: kind_of(found.field(name).type) for name in self.columns()}
        wrong = [each for join in self.joins if (each := join.wrong(kinds)) is not None]
        for join in self.joins:
            kinds |= join.kinds()
        wrong += [each for label in self.labels if (each := label.wrong(kinds)) is not None]
        if self.weight is not None and kinds[self.weight] not in ("integer", "number"):
            wrong.append(
                f"column {self.weight!r} holds {kinds[self.weight]}, and weights of samples are numbers"
            )
        wrong += [each for feature in self.features if (each := feature.wrong(kinds)) is not None]
        for ids in self.ids:
            if ids.weights is not None and kinds[ids.weights] == "text":
                wrong.append(f"column {ids.weights!r} holds text; weights are numbers")
        return wrong

    def unlabelled(self) -> "Features":
        """Return a copy for data without labels."""
        return replace(self, labels=(), weight=None)

    def described(self) -> tuple[Feature, ...]:
        """Return the description of the tables of the IDs for the model.

        Raises:
            UnfittedError: a feature is not fitted.
        """
        return tuple(each.feature() for each in self.ids)

    def encode(self, table: pa.Table, place: Place, faults: Faults) -> Samples:
        """Return the samples of a table's rows. Damaged rows are not ``kept``, or raise an error.

        Raises:
            UnfittedError: a feature is not fitted.
            DataError: rows are damaged, and ``faults`` does not skip them.
        """
        for each in self.features:
            need_fitted(each)
        num = table.num_rows
        for join in self.joins:
            table = join.joined(table)
        kept = np.ones(num, np.bool_)
        dense = np.empty((num, len(self.numbers)), np.float32)
        for at, number in enumerate(self.numbers):
            dense[:, at] = number.encode(table[number.source], place, kept, faults)
        labels = np.full((num, self.shape.num_labels), np.nan, np.float32)
        for at, label in enumerate(self.labels):
            labels[:, at] = label.encode(table[label.column], place, kept, faults)
        ids = tuple(each.encode(table, place, kept, faults) for each in self.ids)
        if self.is_weighted:
            ids = tuple(each.weighted() for each in ids)
        weights = None
        if self.weight is not None:
            weights = Number(name=self.weight).encode(table[self.weight], place, kept, faults)
            faults.check(
                kept,
                weights >= 0,
                f"{place.name}, column {self.weight!r}: row {{row}} has a negative weight",
                place.first_row,
                place.file,
            )
        whole_labels = labels[:, 0] if labels.shape[1] == 1 else labels
        return Samples(dense, whole_labels, ids, None if kept.all() else kept, weights=weights)

    # -- fitting -----------------------------------------------------------------------------------------

    def state_of(self, table: pa.Table, rows: Ints) -> FitState:
        """Return the state of some rows of the training data.

        Args:
            table: their columns.
            rows: their numbers in all of the data: they decide which rows are in the sample.
        """
        for join in self.joins:
            table = join.joined(table)
        wanted = {each.source for each in self.features if isinstance(each, Number | Buckets)}
        wanted |= {each.source for each in self.ids if values_are_lists(table, each)}
        sampled = (
            table.select(sorted(wanted)) if wanted else pa.table({"": np.zeros(table.num_rows, np.bool_)})
        )
        counts = {}
        for each in self.ids:
            if isinstance(each, Vocabulary):
                array = each.values(table).array
                plain = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
                counts[each.name] = Counts.of(plain)
        return FitState(table.num_rows, RowSample.of(sampled, rows), counts)

    def fitted(self, state: FitState, found: pa.Schema) -> "Features":
        """Return another object, fitted to a state.

        Args:
            state: of all of it.
            found: the columns' types, those of joins included.

        Raises:
            DataError: a column has nothing to fit on, or a vocabulary does not fit into its table.
        """
        features: list[ColumnFeature] = []
        counts = self._counts_of_tables(state)
        for each in self.features:
            kind = kind_of(found.field(each.source).type) if each.source in found.names else None
            if isinstance(each, Number | Buckets):
                each = each.fitted(whole(state.sample.table[each.source]))
            elif isinstance(each, Vocabulary):
                assert kind is not None
                each = each.fitted_counts(kind, counts[each.table or each.name])
            elif isinstance(each, Cross):
                crossed = tuple(kind_of(found.field(column).type) for column in each.columns_crossed)
                each = replace(each, found_crossed=crossed)
            else:
                each = replace(each, found=kind)
            if isinstance(each, IdFeature) and each.source in state.sample.table.column_names:
                each = replace(each, average_length=_average_length(each, state.sample.table))
            features.append(each)
        return replace(self, features=tuple(features))

    def _counts_of_tables(self, state: FitState) -> dict[str, Counts]:
        """Fit the vocabularies that share a table together, so that a value has one row in all of them."""
        found: dict[str, Counts] = {}
        for name, counts in state.counts.items():
            table = self[name].table or name  # type: ignore[union-attr]
            try:
                found[table] = found[table].merged(counts) if table in found else counts
            except pa.ArrowException as error:
                raise DataError(
                    f"the vocabularies of table {table!r} have values of different types: {error}. Make the "
                    "columns of one type, or give the features tables of their own."
                ) from error
        return found

    def fit(self, tables: Iterable[pa.Table]) -> "Features":
        """Fit on tables, one after another: see `state_of` and `fitted`."""
        state, first, schema = None, 0, None
        for table in tables:
            rows = np.arange(first, first + table.num_rows, dtype=np.int64)
            wrong = self.wrong_columns(table.schema)
            if wrong:
                raise ValueError(f"{wrong[0]}.")
            mine, first = self.state_of(table, rows), first + table.num_rows
            state, schema = (mine if state is None else state.merged(mine)), self.joined_schema(table.schema)
        if state is None or schema is None or not state.num_rows:
            raise ValueError("there is no row to fit features on.")
        return self.fitted(state, schema)

    def joined_schema(self, found: pa.Schema) -> pa.Schema:
        """Add the columns that joins bring."""
        for join in self.joins:
            for field in join.fields():
                if field.name in found.names:
                    raise DataError(
                        f"column {field.name!r} is in the data, and in {join.path}, which is joined. Rename "
                        "one of them, or do not join it."
                    )
                found = found.append(field)
        return found

    # -- looking -----------------------------------------------------------------------------------------

    def coverage(self, tables: Iterable[pa.Table]) -> list[Coverage]:
        """Return collisions, unseen values and rows in use of each table, for some data."""
        seen: dict[str, _Seen] = {each.name: _Seen(each) for each in self.ids}
        for table in tables:
            for join in self.joins:
                table = join.joined(table)
            for each in seen.values():
                each.add(table)
        return [each.coverage() for each in seen.values()]

    def to_json(self) -> dict[str, Any]:
        """Return all features as plain JSON types."""
        return {
            "version": _VERSION,
            "labels": [each.to_json() for each in self.labels],
            "features": [to_json(each) for each in self.features],
            "joins": [each.to_json() for each in self.joins],
            "weight": self.weight,
        }

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> "Features":
        """Make features from what `to_json` gave. ValueError for another version or unknown features."""
        if saved.get("version") != _VERSION:
            raise ValueError(
                f"these features were saved in version {saved.get('version')!s:.100}, not {_VERSION}. Fit "
                "them again."
            )
        return Features(
            labels=tuple(Label(**each) for each in saved["labels"]),
            features=tuple(from_json(each, _KINDS) for each in saved["features"]),
            joins=tuple(Join.from_json(each) for each in saved["joins"]),
            weight=saved["weight"],
        )

    def save(self, path: str | Path) -> None:
        """Write one JSON file."""
        Path(path).write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> "Features":
        """Read what `save` wrote."""
        return Features.from_json(json.loads(Path(path).read_text(encoding="utf-8")))


def values_are_lists(table: pa.Table, feature: IdFeature) -> bool:
    """Return whether the column of a feature has lists, or texts of several values."""
    if feature.source not in table.column_names:
        return False
    return feature.separator is not None or kind_of(table[feature.source].type).startswith("list")


def _average_length(feature: IdFeature, sample: pa.Table) -> float:
    if not values_are_lists(sample, feature):
        return 1.0
    lengths = np.diff(feature.values(sample).offsets)
    limit = feature.max_length or int(lengths.max(initial=0))
    return round(float(np.minimum(lengths, limit).mean()), 4) if len(lengths) else 0.0


class _Seen:
    """Collects the figures of `Coverage`."""

    def __init__(self, feature: IdFeature) -> None:
        self._feature = feature
        self._num = self._missing = self._unseen = 0
        self._used = np.zeros(feature.rows, np.bool_)
        self._distinct = Distinct(np.zeros(0, np.uint64))

    def add(self, table: pa.Table) -> None:
        array = self._feature.values(table).array
        rows = self._feature.rows_of(array)
        self._num += len(rows)
        self._used[rows[rows >= 0]] = True
        if pa.types.is_struct(array.type):
            return
        missing = is_missing(array)
        self._missing += 0 if missing is None else int(missing.sum())
        self._distinct = self._distinct.merged(Distinct.of(array))
        if isinstance(self._feature, Vocabulary):
            unseen = self._feature.lookup(hashes_of(array)) < 0
            self._unseen += int(unseen.sum() if missing is None else (unseen & ~missing).sum())

    def coverage(self) -> Coverage:
        distinct, rows = self._distinct.count(), self._feature.rows
        used = int(self._used.sum())
        # Of distinct values thrown on rows, those that are alone: n (1 - 1/m)^(n-1).
        shared = 0.0
        if distinct > 1 and not isinstance(self._feature, Vocabulary) and self._feature.is_fitted:
            shared = 1.0 - (1.0 - 1.0 / rows) ** (distinct - 1)
        num = max(self._num, 1)
        unseen = self._unseen / num if isinstance(self._feature, Vocabulary) else None
        return Coverage(
            self._feature.name, self._num, self._missing / num, distinct, rows, used, shared, unseen
        )

"""All features and labels of a model, fitted on training data and saved as JSON."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from typing_extensions import override

from meshrec.data.dataset import Feature
from meshrec.data.encoding import Encoding, RowChecks, RowOrigin
from meshrec.data.exact_columns import plain_table
from meshrec.data.faults import DataError, Faults
from meshrec.data.features.column_feature import from_json, need_fitted, to_json
from meshrec.data.features.derived import Buckets, Cross, DatePart
from meshrec.data.features.ids import Hashed, IdFeature, Integer
from meshrec.data.features.join import Join, RequestColumns
from meshrec.data.features.keys import Key
from meshrec.data.features.label import Label
from meshrec.data.features.number import Number
from meshrec.data.features.sketches import Counts, RowSample
from meshrec.data.features.storage import map_vocabularies, vocabularies_in, write_vocabularies
from meshrec.data.features.times import Times
from meshrec.data.features.values import Kind, decoded, floats_of, is_whole, kind_of, values_of, whole
from meshrec.data.features.vocabulary import Vocabulary
from meshrec.data.samples import Floats, Ints, Ragged, Samples, Shape

ColumnFeature = Number | IdFeature
"""Any feature that reads columns: dense values, or IDs."""

_VERSION, _VERSION_WITH_FILE = 1, 2
"""Versions of the JSON format: with vocabularies, and with vocabularies in an Arrow file. Files with another
version are refused."""
# Feature classes by the name that the JSON format stores.
_KINDS = {
    kind.__name__: kind
    for kind in (Number, Hashed, Integer, Key, Vocabulary, Times, Cross, Buckets, DatePart)
}


class FitState(NamedTuple):
    """Statistics of some training rows, from which features are fitted.

    If the data is divided into parts, merging the states of all parts, in any order, gives exactly the state
    of the whole data.
    """

    num_rows: int
    """Row count."""
    sample: RowSample
    """Sample of the rows, with numeric and list columns."""
    counts: dict[str, Counts]
    """Occurrence count by value, for every vocabulary, by feature name."""
    fractional: frozenset[str] = frozenset()
    """Columns of hashed features with decimals, or lists of numbers, some of which have a fraction."""

    def merged(self, *others: "FitState") -> "FitState":
        """Merge with the states of other rows. The result is the state of all these rows together."""
        counts = {
            name: counts.merged(*(other.counts[name] for other in others))
            for name, counts in self.counts.items()
        }
        return FitState(
            self.num_rows + sum(other.num_rows for other in others),
            self.sample.merged(*(other.sample for other in others)),
            counts,
            self.fractional.union(*(other.fractional for other in others)),
        )


class ModelInputs(NamedTuple):
    """Inputs of a model for B samples."""

    dense: Floats
    """Dense values, float32 [B, D]; [1, D] if they are shared."""
    ids: tuple[Ragged, ...]
    """IDs per ID feature, for B samples, or for one if the feature is shared."""
    shared: frozenset[str] = frozenset()
    """Features with a single row for all samples."""
    is_dense_shared: bool = False
    """Whether the dense values are a single row for all samples."""


@dataclass(frozen=True, kw_only=True)
class Features(Encoding):
    """Features that a model reads from a table, and labels that it predicts.

    Args:
        labels: labels. The best weights are selected by the first label.
        features: features. A `Number` is a column of ``Batch.dense``, and any other feature a key of
            ``Batch.sparse``, in this order.
        joins: other tables, whose columns are added to the data before features are read.
        weight: column with the weight of a sample in the loss; None: all samples have equal weights.
        num_labels: labels per sample. It differs from the length of ``labels`` only for data without labels,
            whose samples have as many NaN labels. 0: the length of ``labels``.

    Raises:
        ValueError: a duplicate name, a table name with a dot, or no ID feature.

    Example::

        import pyarrow as pa

        user = Hashed(name="user", num_embeddings=100)
        features = Features(labels=(Label(column="click"),), features=(user,))
        table = pa.table({"click": [0, 1], "user": ["a", "b"]})
        samples = features.fit([table]).encode(table, RowOrigin("memory", 0), Faults("raise"))
        assert samples.labels.tolist() == [0.0, 1.0] and len(samples.ids[0].values) == 2
    """

    labels: tuple[Label, ...]
    features: tuple[ColumnFeature, ...]
    joins: tuple[Join, ...] = ()
    weight: str | None = None
    num_labels: int = 0

    def __post_init__(self) -> None:
        if not self.num_labels:
            # The only way to assign on a frozen dataclass.
            object.__setattr__(self, "num_labels", len(self.labels))
        dotted = [feature for feature in self.ids if "." in (feature.table or feature.name)]
        if dotted:
            name = dotted[0].table or dotted[0].name
            raise ValueError(
                f"a table's name has no dot, got {name!r} of feature {dotted[0].name!r}. Name it "
                f"{name.replace('.', '_')!r}, with column={dotted[0].source!r}."
            )
        self._check_vocabularies()
        queries = [position for position, label in enumerate(self.labels) if label.kind == "query"]
        if queries and (queries != [len(self.labels) - 1] or queries == [0]):
            raise ValueError(
                f"labels {[label.column for label in self.labels]}: a label of kind='query' is the last of "
                "two or more. Name the label that ranks the samples of a query first."
            )
        names = [feature.name for feature in self.features]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or not self.ids:
            raise ValueError(
                f"features need names of their own, and one of ids at least; names given twice: {twice}, "
                f"ids: {[feature.name for feature in self.ids]}."
            )

    def _check_vocabularies(self) -> None:
        """Raise ValueError if vocabularies that share a table have different options."""
        options = ("min_count", "max_size", "num_unseen", "num_embeddings")
        first: dict[str, Vocabulary] = {}
        for feature in self.ids:
            if not isinstance(feature, Vocabulary):
                continue
            # The first vocabulary with this table, with which the others are compared.
            other = first.setdefault(feature.table or feature.name, feature)
            for name in options:
                value, other_value = getattr(feature, name), getattr(other, name)
                if value != other_value:
                    raise ValueError(
                        f"vocabularies that share a table need the same {name}: feature {feature.name!r} has "
                        f"{value}, and {other.name!r} {other_value}. Give both the same, or separate tables."
                    )

    @property
    def numbers(self) -> tuple[Number, ...]:
        """Numeric features, in the column order of ``Batch.dense``."""
        return tuple(feature for feature in self.features if isinstance(feature, Number))

    @property
    def ids(self) -> tuple[IdFeature, ...]:
        """ID features, in the key order of ``Batch.sparse``."""
        return tuple(feature for feature in self.features if isinstance(feature, IdFeature))

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the ID features: the keys of ``Batch.sparse``, in order."""
        return tuple(feature.name for feature in self.ids)

    @property
    def shape(self) -> Shape:
        """Layout of the samples from `encode`. For data without labels, samples have NaN for every label."""
        return Shape(
            len(self.numbers),
            len(self.ids),
            max(self.num_labels, 1),
            self.weight is not None,
            self.is_weighted,
            query=next((k for k, label in enumerate(self.labels) if label.kind == "query"), 0),
        )

    def id_columns(self) -> tuple[str, ...]:
        """Return the data columns from which IDs are read, without columns added by joins."""
        joined = {column for join in self.joins for column in join.columns}
        # A join adds these columns to the data, so data files do not have them.
        return tuple(
            dict.fromkeys(
                feature.source
                for feature in self.ids
                if feature.source in self.columns() and feature.source not in joined
            )
        )

    def labels_of(self) -> tuple[str, ...]:
        """Return the names of all labels except a query; an empty tuple if there is at most one name."""
        names = tuple(label.column for label in self.labels if label.kind != "query")
        return names if len(names) > 1 else ()

    @property
    def dense_names(self) -> tuple[str, ...]:
        """Names of the numeric features: the columns of ``Batch.dense``, in order."""
        return tuple(number.name for number in self.numbers)

    @property
    def num_classes(self) -> int:
        """Classes of a class label; 0 for other labels."""
        return len(self.labels[0].classes) if self.labels and self.labels[0].kind == "class" else 0

    @property
    def number_edges(self) -> tuple[tuple[float, ...], ...]:
        """Bin edges per column of ``Batch.dense``; empty for a column without bins."""
        return tuple(number.edges or () for number in self.numbers)

    @property
    def is_weighted(self) -> bool:
        """Whether IDs have weights."""
        return any(feature.weights is not None for feature in self.ids)

    @property
    def is_fitted(self) -> bool:
        """Whether all features are fitted."""
        return all(feature.is_fitted for feature in self.features)

    def __getitem__(self, name: str) -> ColumnFeature:
        """Return the feature with the given name; KeyError if there is none."""
        for feature in self.features:
            if feature.name == name:
                return feature
        raise KeyError(
            f"there is no feature {name!r}; there are {[feature.name for feature in self.features]}."
        )

    def columns(self) -> list[str]:
        """Return the columns to read from the data, without duplicates.

        Columns of labels, weight, features and join keys are read. Columns added by joins are not.
        """
        joined = {column for join in self.joins for column in join.columns}
        names = [label.column for label in self.labels] + ([] if self.weight is None else [self.weight])
        names += [column for feature in self.features for column in feature.columns() if column not in joined]
        return list(dict.fromkeys([*names, *(join.key for join in self.joins)]))

    def fitted_kinds(self) -> Mapping[str, str]:
        """Return the known column kinds, by column name, which override inference for CSV files.

        A fitted column's kind is the fitted one. "numeric" is an integer or another number.
        """
        joined = {column for join in self.joins for column in join.columns}
        numeric_features = (Number, Buckets, Integer, DatePart)
        # Later entries replace earlier ones, so the kind found in a fit comes last.
        kinds: dict[str, str] = {
            feature.source: "numeric" for feature in self.features if isinstance(feature, numeric_features)
        }
        for label in self.labels:
            if label.kind in ("binary", "number") and not label.classes:
                kinds[label.column] = "numeric"
            elif label.classes and all(isinstance(value, str) for value in label.classes):
                kinds[label.column] = "text"  # also where a CSV file has "1"
        kinds |= {} if self.weight is None else {self.weight: "numeric"}
        kinds |= {join.key: join.key_kind() for join in self.joins}
        for feature in self.features:
            if isinstance(feature, Cross):
                kinds |= dict(zip(feature.columns_crossed, feature.found_crossed or (), strict=False))
            elif feature.found is not None:
                kinds[feature.source] = feature.found
        return {column: kind for column, kind in kinds.items() if column not in joined}

    def wrong_columns(self, schema: pa.Schema) -> list[str]:
        """Return an error message for every missing or unreadable column; empty if the schema is right."""
        # Other checks read the columns, so a missing column is reported alone.
        missing = [name for name in self.columns() if schema.get_field_index(name) < 0]
        if missing:
            return [f"there is no column {name!r} among {schema.names}" for name in missing]
        kinds = {name: kind_of(schema.field(name).type) for name in self.columns()}
        wrong = [message for join in self.joins if (message := join.kind_error(kinds)) is not None]
        # From here on with the joined columns, which labels and features may read.
        for join in self.joins:
            kinds |= join.kinds()
        wrong += [message for label in self.labels if (message := label.kind_error(kinds)) is not None]
        if self.weight is not None and kinds[self.weight] not in ("integer", "number"):
            wrong.append(
                f"column {self.weight!r} holds {kinds[self.weight]}, and weights of samples are numbers"
            )
        wrong += [message for feature in self.features if (message := feature.kind_error(kinds)) is not None]
        for ids in self.ids:
            if ids.weights is not None and kinds[ids.weights] == "text":
                wrong.append(f"column {ids.weights!r} holds text; weights are numbers")
        return wrong

    def unlabelled(self) -> "Features":
        """Return the same features for data without labels and weights."""
        return replace(self, labels=(), weight=None)

    def described(self) -> tuple[Feature, ...]:
        """Return a `Feature` per ID feature: the description from which models size embedding tables.

        Raises:
            UnfittedError: a feature is not fitted.
        """
        return tuple(feature.feature() for feature in self.ids)

    @override
    def encode(self, table: pa.Table, origin: RowOrigin, faults: Faults) -> Samples:
        """Convert a table's rows to samples with features, labels and weights.

        Raises:
            UnfittedError: a feature is not fitted.
            DataError: rows are damaged, and ``faults`` does not skip them.
        """
        checks = RowChecks(origin, np.ones(table.num_rows, np.bool_), faults)
        dense, ids, *_ = self.inputs(table, checks)
        # NaN where the data has no labels, as for scoring.
        labels = np.full((table.num_rows, self.shape.num_labels), np.nan, np.float32)
        for position, label in enumerate(self.labels):
            labels[:, position] = label.encode(table[label.column], checks)
        weights = None
        if self.weight is not None:
            values = floats_of(whole(table[self.weight]), None, "s")
            # Weights become float32, in which larger values would be infinite.
            good = (values >= 0) & (values <= np.finfo(np.float32).max)
            if not good.all():
                bad = values[(checks.valid & ~good).argmax()]
                text = "null" if np.isnan(bad) else f"{bad:g}"
                allowed = "a weight is finite and not negative, and 0 leaves a row out"
                checks.require(good, self.weight, f"has the sample weight {text}; {allowed}")
            weights = np.where(good, values, 0.0).astype(np.float32)
        is_valid = None if checks.valid.all() else checks.valid
        return Samples(
            dense, labels[:, 0] if labels.shape[1] == 1 else labels, ids, is_valid, weights=weights
        )

    def inputs(self, table: pa.Table, checks: RowChecks, shared: pa.Table | None = None) -> ModelInputs:
        """Convert raw values to model inputs; see [Note: raw values] in data/raw_values.py.

        Args:
            table: columns with a row per sample.
            checks: updated with the samples that have damaged values.
            shared: columns whose values are the same for all samples, with a single row. They must not be in
                ``table``.

        Raises:
            UnfittedError: a feature is not fitted.
            DataError: rows are damaged, and ``faults`` does not skip them.
        """
        for feature in self.features:
            # Check all features before converting any, so a failed call has no effect.
            need_fitted(feature)
        shared = pa.table({}) if shared is None else plain_table(shared)
        columns = RequestColumns(plain_table(table), shared, self.joins)
        tables = [columns.table_of(feature.columns()) for feature in self.numbers]
        # Dense values are one matrix, so they are shared only if all columns are.
        is_dense_shared = bool(tables) and all(feature is columns.shared for feature in tables)
        dense = np.empty((1 if is_dense_shared else table.num_rows, len(tables)), np.float32)
        for position, (number, read) in enumerate(zip(self.numbers, tables, strict=True)):
            dense[:, position] = number.encode(read[number.source], checks.of_first(read.num_rows))
        ids, shared_features = [], set()
        for feature in self.ids:
            read = columns.table_of(feature.columns())
            if read is columns.shared:
                # One row serves all samples of a request, so the row's tables are read once.
                shared_features.add(feature.name)
            if isinstance(feature, Times):
                read = self._without_unseen(read, feature)
            ragged = feature.encode(read, checks.of_first(read.num_rows))
            ids.append(ragged.weighted() if self.is_weighted else ragged)
        return ModelInputs(dense, tuple(ids), frozenset(shared_features), is_dense_shared)

    def _without_unseen(self, table: pa.Table, times: Times) -> pa.Table:
        """Drop the items that `Vocabulary.known_only` excludes, together with their history timestamps.

        The table is returned unchanged if no item feature excludes items.
        """
        for feature in self.ids:
            if isinstance(feature, Vocabulary) and feature.known_only and feature.source == times.history:
                return feature.aligned(table, times.source)
        return table

    # -- fitting -----------------------------------------------------------------------------------------

    def state_of(self, table: pa.Table, rows: Ints, max_hash: np.uint64 | None = None) -> FitState:
        """Compute the statistics of some training rows, for `fitted`.

        Args:
            table: the rows.
            rows: row numbers in the whole data, int64 [n]. Hashes of them decide which rows are sampled.
            max_hash: as for `RowSample.of`.
        """
        table = plain_table(table)
        for join in self.joins:
            table = join.joined(table)
        sampled_columns = {
            feature.source for feature in self.features if isinstance(feature, Number | Buckets)
        }
        sampled_columns |= {feature.source for feature in self.ids if values_are_lists(table, feature)}
        # Without sampled columns, a placeholder column carries the number of rows.
        sampled = (
            table.select(sorted(sampled_columns))
            if sampled_columns
            else pa.table({"": np.zeros(table.num_rows, np.bool_)})
        )
        counts = {}
        for feature in self.ids:
            if isinstance(feature, Vocabulary):
                array = feature.values(table).array
                # Files may have different dictionaries, so count values, not codes.
                counts[feature.name] = Counts.of(decoded(array))
        hashed = {feature.source for feature in self.ids if isinstance(feature, Hashed)}
        fractional = frozenset(name for name in hashed if _has_fractions(table[name]))
        return FitState(table.num_rows, RowSample.of(sampled, rows, max_hash=max_hash), counts, fractional)

    def fitted(self, state: FitState, schema: pa.Schema) -> "Features":
        """Return the features fitted to training data: with vocabularies, normalization and bucket edges.

        Args:
            state: statistics of all training rows.
            schema: the data's Arrow schema, including columns added by joins.

        Raises:
            DataError: a column has nothing to fit on, or a vocabulary exceeds the table.
        """
        features: list[ColumnFeature] = []
        # By table, because features with the same table have the same vocabulary.
        counts = self._counts_of_tables(state)
        for feature in self.features:
            kind = kind_of(schema.field(feature.source).type) if feature.source in schema.names else None
            if isinstance(feature, Number | Buckets):
                feature = feature.fitted(whole(state.sample.table[feature.source]))
            elif isinstance(feature, Vocabulary):
                assert kind is not None
                feature = feature.fitted_counts(kind, counts[feature.table or feature.name])
            elif isinstance(feature, Cross):
                crossed = (kind_of(schema.field(column).type) for column in feature.columns_crossed)
                # Crosses read numbers as integers, see `Cross.values`.
                whole_kinds: dict[Kind, Kind] = {"number": "integer"}
                kinds = tuple(whole_kinds.get(column_kind, column_kind) for column_kind in crossed)
                feature = replace(feature, found_crossed=kinds)
            else:
                if (
                    isinstance(feature, Hashed)
                    and kind is not None
                    and feature.source not in state.fractional
                ):
                    kind = _integral_kind(kind, schema.field(feature.source).type)
                feature = replace(feature, found=kind)
            if isinstance(feature, IdFeature) and feature.source in state.sample.table.column_names:
                feature = replace(feature, average_length=_average_length(feature, state.sample.table))
            features.append(feature)
        return replace(self, features=tuple(features))

    def continued(self, earlier: "Features") -> "Features":
        """Return these fitted features with the fit of an earlier model, which continues to learn.

        A feature with the options of an earlier feature of the same name keeps its fit, such as bucket edges.
        The values of a vocabulary keep their rows, and new values get the rows after them.

        Args:
            earlier: fitted features of the earlier model.

        Raises:
            DataError: a vocabulary has values of another type than before, or exceeds its table.
        """
        features: list[ColumnFeature] = []
        for feature in self.features:
            before: Any = earlier._with_rows_of(feature)
            # Features whose options changed start again.
            is_same = before is not None and feature.has_rows_of(before)
            features.append(feature.continued(before) if is_same else feature)
        return replace(self, features=tuple(features))

    def changed_since(self, earlier: "Features") -> list[str]:
        """Return the names of features whose values have other rows than before, as their options changed."""
        return [
            feature.name
            for feature in self.features
            if (before := earlier._with_rows_of(feature)) is not None and not feature.has_rows_of(before)
        ]

    def _with_rows_of(self, feature: ColumnFeature) -> ColumnFeature | None:
        """Return the feature in these features that a later feature continues; None for a new feature."""
        if isinstance(feature, Vocabulary):
            # By table, because a new feature may share the table of an earlier feature.
            tables = {other.table or other.name: other for other in self.ids if isinstance(other, Vocabulary)}
            if (feature.table or feature.name) in tables:
                return tables[feature.table or feature.name]
        return next((other for other in self.features if other.name == feature.name), None)

    def _counts_of_tables(self, state: FitState) -> dict[str, Counts]:
        """Return the value counts by table name. Counts of vocabularies that share a table are added up.

        These features get the same vocabulary, so a value has the same row for all of them.
        """
        merged_counts: dict[str, Counts] = {}
        for name, counts in state.counts.items():
            table = self[name].table or name  # type: ignore[union-attr]
            try:
                merged_counts[table] = (
                    merged_counts[table].merged(counts) if table in merged_counts else counts
                )
            except pa.ArrowException as error:
                raise DataError(
                    f"the vocabularies of table {table!r} have values of different types: {error}. Make the "
                    "columns of one type, or give the features tables of their own."
                ) from error
        return merged_counts

    def fit(self, tables: Iterable[pa.Table]) -> "Features":
        """Return the features fitted to training data, given as consecutive tables.

        Raises:
            DataError: a column has nothing to fit on, or a vocabulary exceeds the table.
            ValueError: a column is missing or has a wrong kind, or the data is empty.
        """
        state, first, schema = None, 0, None
        for table in tables:
            # Hashes of row numbers decide which rows are sampled, so the numbers continue from table to
            # table.
            rows = np.arange(first, first + table.num_rows, dtype=np.int64)
            messages = self.wrong_columns(table.schema)
            if messages:
                raise ValueError(f"{messages[0]}.")
            table_state, first = self.state_of(table, rows), first + table.num_rows
            state, schema = (
                (table_state if state is None else state.merged(table_state)),
                self.joined_schema(table.schema),
            )
        if state is None or schema is None or not state.num_rows:
            raise ValueError("there is no row to fit features on.")
        return self.fitted(state, schema)

    def joined_schema(self, schema: pa.Schema) -> pa.Schema:
        """Return the data schema with the columns added by joins.

        Raises:
            DataError: the data has a column that a join adds.
        """
        for join in self.joins:
            for field in join.fields():
                if field.name in schema.names:
                    raise DataError(
                        f"column {field.name!r} is in the data, and in {join.path}, which is joined. Rename "
                        "one of them, or do not join it."
                    )
                schema = schema.append(field)
        return schema

    def to_json(self) -> dict[str, Any]:
        """Return labels and features as JSON types, including all values of vocabularies."""
        return self._with_features([to_json(feature) for feature in self.features])

    def _with_features(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "version": _VERSION,
            "labels": [label.to_json() for label in self.labels],
            "features": features,
            "joins": [join.to_json() for join in self.joins],
            "weight": self.weight,
        }

    def write_vocabularies(self, path: str | Path) -> dict[str, Any]:
        """Write the vocabularies to the Arrow file of a JSON file; see data/features/storage.py.

        Without a vocabulary, no file is written.

        Args:
            path: path of the JSON file.

        Returns:
            The content for the JSON file, as JSON types.
        """
        vocabularies: dict[str, Any] = {}
        saved = []
        for feature in self.features:
            if not isinstance(feature, Vocabulary) or feature.vocabulary is None:
                saved.append(to_json(feature))
                continue
            # Features that share a table have the same values.
            equal = (name for name, values in vocabularies.items() if values.equals(feature.vocabulary))
            column = next(equal, feature.name)
            vocabularies[column] = feature.vocabulary
            saved.append({**to_json(replace(feature, vocabulary=None)), "vocabulary": {"column": column}})
        others = self._with_features(saved)
        if not vocabularies:
            return others
        digest = write_vocabularies(vocabularies, path)
        return {**others, "version": _VERSION_WITH_FILE, "vocabularies": digest}

    @staticmethod
    def from_json(
        saved: Mapping[str, Any], vocabularies: Mapping[str, Any] = MappingProxyType({})
    ) -> "Features":
        """Create features from the result of `to_json` or `write_vocabularies`.

        Args:
            saved: the result.
            vocabularies: values by column of the Arrow file, if there is one.

        Raises:
            ValueError: another version wrote it, a feature type is unknown, or a vocabulary is missing.
        """
        if saved.get("version") not in (_VERSION, _VERSION_WITH_FILE):
            raise ValueError(
                f"these features were saved in version {saved.get('version')!s:.100}, not {_VERSION} or "
                f"{_VERSION_WITH_FILE}. Fit them again."
            )
        features = []
        for feature in saved["features"]:
            # A dict names a column in the Arrow file. A vocabulary in the JSON itself is a list.
            if isinstance(feature.get("vocabulary"), dict):
                column = feature["vocabulary"]["column"]
                if column not in vocabularies:
                    raise ValueError(
                        f"the vocabulary of feature {feature['name']!r} is in column {column!r} of an Arrow "
                        f"file, and there are the columns {list(vocabularies)}. Read the features with "
                        "Features.load."
                    )
                feature = {**feature, "vocabulary": vocabularies[column]}
            features.append(from_json(feature, _KINDS))
        return Features(
            labels=tuple(Label(**label) for label in saved["labels"]),
            features=tuple(features),
            joins=tuple(Join.from_json(join) for join in saved["joins"]),
            weight=saved["weight"],
        )

    def save(self, path: str | Path) -> None:
        """Write the features to a JSON file, and vocabularies to an Arrow file with the suffix ``.arrow``.

        Existing files are replaced.
        """
        saved = self.write_vocabularies(path)
        Path(path).write_text(json.dumps(saved) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> "Features":
        """Read features from the files that `save` wrote. Vocabularies are mapped into memory.

        Raises:
            DataError: the Arrow file is missing or damaged.
            ValueError: as for `from_json`.
        """
        return Features.from_saved(json.loads(Path(path).read_text(encoding="utf-8")), path)

    @staticmethod
    def from_saved(saved: Mapping[str, Any], path: str | Path) -> "Features":
        """Create features from the content of a JSON file, and from its Arrow file.

        Args:
            saved: content of the JSON file.
            path: path of the JSON file.

        Raises:
            DataError: the Arrow file is missing or damaged.
            ValueError: as for `from_json`.
        """
        if "vocabularies" not in saved:
            return Features.from_json(saved)
        return Features.from_json(saved, vocabularies_in(map_vocabularies(saved["vocabularies"], path)))


def values_are_lists(table: pa.Table, feature: IdFeature) -> bool:
    """Return whether a feature's column has lists, or strings with several values."""
    if feature.source not in table.column_names:
        return False
    return feature.separator is not None or kind_of(table[feature.source].type).startswith("list")


def _integral_kind(kind: Kind, of: pa.DataType) -> Kind:
    """Return the kind for a column whose numbers are all integral.

    Decimals and lists of numbers get the integer kind. Float columns keep their kind: earlier runs hashed
    them as floats, and their rows must not change.
    """
    if kind == "list of number":
        return "list of integer"
    return "integer" if kind == "number" and pa.types.is_decimal(of) else kind


def _has_fractions(column: Any) -> bool:
    """Return whether a column has decimals or lists of numbers, some of which have a fraction."""
    kind = kind_of(column.type)
    return _integral_kind(kind, column.type) != kind and not is_whole(values_of(column).array)


def _average_length(feature: IdFeature, sample: pa.Table) -> float:
    """Return the mean IDs per sampled row, after long lists are cut."""
    if not values_are_lists(sample, feature):
        return 1.0
    lengths = np.diff(feature.values(sample).offsets)
    limit = feature.max_length or int(lengths.max(initial=0))
    return round(float(np.minimum(lengths, limit).mean()), 4) if len(lengths) else 0.0

"""Recipes: everything that defines a training run, as frozen dataclasses.

A recipe is a function without arguments that returns a `Recipe`. ``meshrec train`` turns its fields into
options.
"""

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from torch import nn

from meshrec.comms.wire import FULL_PRECISION, FULL_WIRES, TableWires
from meshrec.data.csv_dialects import DETECTED, CsvFormat
from meshrec.optim import FTRL, OptimizerSpec, RowWiseAdagrad
from meshrec.planner.wire_choice import AUTO, WireBound
from meshrec.train.losses import BinaryCrossEntropy, Huber, Loss, Ranking, Softmax, SquaredError, Tasks
from meshrec.train.schedule import Schedule

if TYPE_CHECKING:
    import pyarrow as pa

    from meshrec.data import Dataset, Split
    from meshrec.data.encoding import Encoding
    from meshrec.data.faults import Faults
    from meshrec.data.features import Features
    from meshrec.data.streaming import Source
    from meshrec.train.ranks import Ranks

Precision = Literal["fp32", "bf16", "auto"]
"""Dense precision in training; see `Training.dense_precision`."""


@dataclass(frozen=True, kw_only=True)
class DataSource(ABC):
    """Base class of data sources, whose fields are command-line options."""

    @abstractmethod
    def load(self) -> "Dataset":
        """Open the data. Every rank opens all data and reads a part."""

    def all_rows(self) -> "DataSource":
        """Return a source that also trains on this source's validation and test rows.

        Raises:
            ValueError: the source has no such variant.
        """
        raise ValueError(
            f"{type(self).__name__} has no source of all rows for --final all. Leave --final "
            "out, or train on Parquet, Csv, Frame or Log."
        )


@runtime_checkable
class FittedSource(Protocol):
    """A source whose rows are converted to samples by fitted `Features`, such as vocabularies.

    A run fits the features once and stores them; evaluation and scoring read the stored features.
    """

    def fit(self) -> "Features":
        """Fit the features on the training data."""

    def dataset(self, features: "Features") -> "Dataset":
        """Open the data with fitted features."""

    def scored(self, features: "Features", data: Any, *, labelled: bool) -> "Dataset":
        """Open other data in the same form, unshuffled, as a dataset's training part.

        Args:
            features: fitted features.
            data: paths, folders, patterns or a table.
            labelled: whether the data has labels.
        """


@runtime_checkable
class RawSource(FittedSource, Protocol):
    """A fitted source whose samples are table rows, so that server requests can contain them."""

    def raw_schema(self, features: "Features") -> "pa.Schema":
        """Return the schema of a row."""


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    """Split of a source's samples into training, validation and test data."""

    split_by: Literal["time", "hash", "random"] | None = None
    """Split that takes validation and test rows, a tenth each, out of the training data."""
    split_column: str | None = None
    """Column for a split by hash."""
    seed: int = 0
    """Shuffle seed."""

    def split(self) -> "Split | None":
        """Return the split; None without ``split_by``."""
        return _split_of(self)


@dataclass(frozen=True, kw_only=True)
class FileParts:
    """Files with training, validation and test data."""

    train: tuple[str, ...]
    """Training data; with a split, all data."""
    validation: tuple[str, ...] | None = None
    """Validation files, which select the best weights."""
    test: tuple[str, ...] | None = None
    """Test files, which evaluate the selected weights once."""

    def all_rows(self) -> Any:
        """Return a source that also trains on this source's validation and test files."""
        files = (*self.train, *(self.validation or ()), *(self.test or ()))
        return replace(self, train=files, validation=None, test=None, split_by=None)  # type: ignore[call-arg]


@dataclass(frozen=True, kw_only=True)
class TableSource(ABC):
    """Base class of sources with table rows, converted to samples by `Features` fitted on the training rows.

    A run fits the features once and stores them in the run folder. All later evaluation and scoring reads the
    stored features.
    """

    features: Any
    """Features to make from the columns: `meshrec.data.features.Features`."""
    split_by: Literal["time", "hash", "random"] | None = None
    """Split of validation and test rows from the training data; if none, they have separate files."""
    split_column: str | None = None
    """Column that decides the split: numbers or times for time, any type for hash."""
    split_validation: float = 0.1
    """Share of rows for validation, which selects the best weights."""
    split_test: float = 0.1
    """Share of rows for the final test, which is read once."""
    split_time_format: str | None = None
    """Format of a split column with times as text, as strptime takes it; if none, ISO 8601."""
    on_error: Literal["raise", "skip"] = "raise"
    """Handling of damaged rows."""
    window: int = 8192
    """Number of rows in the shuffle buffer."""
    seed: int = 0
    """Seed for shuffle and split."""

    def parts(self) -> tuple[Any, Any, Any]:
        """Return training, validation and test data as paths or tables; the latter two may be None.

        By default, these are the fields ``train``, ``validation`` and ``test``.
        """
        train, validation, test = (getattr(self, name) for name in ("train", "validation", "test"))
        return train, validation, test

    def fit(self) -> "Features":
        """Fit the features on the training rows, in one pass over the data."""
        from meshrec.data.features.fitting import fit_features

        train = self.parts()[0]
        features: Features = self.features
        return fit_features(features, self._open, train, split=self._split(), on_error=self.on_error)

    def dataset(self, features: "Features") -> "Dataset":
        """Open the data with fitted features."""
        from meshrec.data.tables import table_dataset

        train, validation, test = self.parts()
        return table_dataset(
            self._open,
            train=train,
            validation=validation,
            test=test,
            split=self._split(),
            schema=features,
            name=type(self).__name__.lower(),
            seed=self.seed,
            on_error=self.on_error,
            window=self.window,
        )

    def scored(self, features: "Features", data: Any, *, labelled: bool) -> "Dataset":
        """Open other data in the same form, unshuffled, as a dataset's training part.

        Args:
            features: fitted features.
            data: paths, folders, patterns or a table.
            labelled: whether the data has labels.
        """
        from meshrec.data.tables import described_by, ordered_reader

        reader = ordered_reader(
            self._open, data, features, labelled=labelled, on_error=self.on_error, window=self.window
        )
        return described_by(features, reader, type(self).__name__.lower())

    def raw_schema(self, features: "Features") -> "pa.Schema":
        """Return the schema of a training row."""
        from meshrec.data.faults import Faults
        from meshrec.data.tables import Tables

        source = self._open(self.parts()[0], features, Faults("raise"))
        assert isinstance(source, Tables)
        return source.arrow_schema

    @property
    def csv_format(self) -> "CsvFormat":
        """CSV format of the data files."""
        return DETECTED

    def _open(self, data: Any, schema: "Encoding", faults: "Faults") -> "Source":
        """Open paths or a table; ``schema`` has the columns to read."""
        from meshrec.data.frames import open_tables

        return open_tables(data, schema, faults, self.csv_format)

    def load(self) -> "Dataset":
        """Fit the features, and open the data."""
        return self.dataset(self.fit())

    def _split(self) -> "Split | None":
        """Return the rule that assigns rows to validation and test; None if they have separate files."""
        return _split_of(
            self,
            validation=self.split_validation,
            test=self.split_test,
            time_format=self.split_time_format,
        )


def _split_of(source: SplitOptions | TableSource, **options: Any) -> "Split | None":
    from meshrec.data import Split

    if source.split_by is None:
        return None
    return Split(by=source.split_by, column=source.split_column, seed=source.seed, **options)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """Base class of model configurations; `build` makes the model with sizes from a dataset."""

    @abstractmethod
    def build(self, dataset: "Dataset") -> nn.Module:
        """Build the model, with tables on ``meta``.

        Called as ``model(dense, sparse)``, it returns logits, [B] or [B, 1]; for T labels, [B, T].
        """

    @property
    def attention_width(self) -> int:
        """Self-attention width over histories, with cost quadratic in history length; 0: none."""
        return 0

    def start(
        self, model: nn.Module, recipe: "Recipe", dataset: "Dataset", ranks: "Ranks"
    ) -> dict[str, Any] | None:
        """Fit initial weights of a new model to the data, if this configuration has such a fit. Collective.

        Args:
            model: the new model, whose weights are replaced.
            recipe: the recipe.
            dataset: the dataset.
            ranks: the ranks, from `join`.

        Returns:
            None if nothing was fitted. Otherwise options of this configuration with which a refit on all rows
            repeats the fit without validation data; the weights are then evaluated before the first step.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class DenseOptimizer:
    """Optimizer for all parameters outside the tables."""

    kind: Literal["adam", "adamw", "adagrad", "sgd"] = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Training:
    """Options of the training loop."""

    batch_size: int = 1024
    """Samples per step over all ranks."""
    epochs: int = 1
    """Maximum number of passes over the training data."""
    max_steps: int | None = None
    """Maximum number of steps."""
    end_step: int | None = None
    """End after this step, although learning rates follow the schedule for all steps; if none, after the
    last.
    """
    evaluate_every: int | None = None
    """Steps between evaluations; if none, one per epoch."""
    patience: int | None = None
    """Stop after this many evaluations without a better AUC, and keep the best weights."""
    chance_patience: int | None = None
    """Stop after this many evaluations whose validation loss is not below the previous best by more than
    chance, in a paired test over samples, and keep the best weights; if none, the test is off.
    """
    accumulate: int = 1
    """Number of batches per update, whose gradients are added up."""
    clip_norm: float | None = None
    """Maximum gradient norm per update, over dense parameters, tables and all ranks; if none, no clipping."""
    dense_precision: Precision = "fp32"
    """Dense precision in training: fp32; bf16, with fp32 master weights; auto: bf16 where every rank's CPU or
    GPU has native bf16 products. Evaluation, scoring and serving compute in fp32.
    """
    dense_gradients: Literal["fp32", "bf16"] = "fp32"
    """Format in which ranks exchange dense gradients. Their mean is computed in fp32."""
    bf16: bool = False
    """Old name of dense_precision bf16; the next release removes it."""
    pipeline: bool = True
    """Exchange the next batch while this one computes, if there are several ranks. Results are the same."""
    balance: bool = True
    """Whether several ranks divide a step's samples so that history costs are equal. A step has the same
    samples as without balancing.
    """
    seed: int = 0
    """Seed for initial weights and sample order."""
    log_every: int = 20
    """Steps between lines of metrics."""
    phases_every: int = 50
    """Steps between recordings of the time per phase; 0: none."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; if none, one at the end."""
    keep_checkpoints: int = 3
    """Number of checkpoints to keep."""
    publish_every: int | None = None
    """Steps between deltas for servers, written to ``deltas`` in the run folder; a further delta precedes
    every checkpoint. If none, no delta is written.
    """
    prefetch: int = 2
    """Number of batches to read ahead."""

    def __post_init__(self) -> None:
        if self.bf16:
            if self.dense_precision == "auto":
                raise ValueError(
                    "training.bf16 is the old name of training.dense_precision bf16, and "
                    "training.dense_precision is auto. Leave training.bf16 out."
                )
            warnings.warn(
                "training.bf16 is now training.dense_precision bf16, and the next release removes the old "
                "name.",
                FutureWarning,
                stacklevel=3,
            )
            # Reset, so that dataclasses.replace(training, dense_precision="fp32") has its effect.
            object.__setattr__(self, "dense_precision", "bf16")
            object.__setattr__(self, "bf16", False)
        for name, allowed in (
            ("dense_precision", ("fp32", "bf16", "auto")),
            ("dense_gradients", ("fp32", "bf16")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"training.{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}."
                )
        for name in (
            "batch_size",
            "epochs",
            "max_steps",
            "evaluate_every",
            "patience",
            "chance_patience",
            "accumulate",
            "log_every",
            "checkpoint_every",
            "keep_checkpoints",
            "publish_every",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"training.{name} is {value}; it must be at least 1.")
        if self.end_step is not None and self.end_step < 0:
            raise ValueError(f"training.end_step is {self.end_step}; it must be at least 0.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"training.clip_norm is {self.clip_norm}; it must be above 0.")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Planner options."""

    sharded: bool = True
    """Split the tables over ranks as planned; otherwise one process trains the plain model."""
    hardware: str | None = None
    """A profile (cpu, a100, h100, h200), or a file of `meshrec calibrate`; if none, the device's."""
    memory_gib: float | None = None
    """Memory per rank; if none, the profile's."""
    min_partition: int | None = None
    """Minimum number of columns in a column shard; if none, 32."""
    sharding_types: tuple[str, ...] | None = None
    """Sharding types that the planner may choose from."""
    wire: str = str(FULL_PRECISION)
    """Wire format of embeddings and gradients: fp32, fp16, bf16, int8, int4, or one for each: int8/bf16.
    +stochastic rounds at random; +feedback adds the error to the next gradients. For single tables:
    int8/bf16,users:fp32. auto: the fastest within wire_auc_loss and wire_error."""
    wire_auc_loss: float | None = 5e-4
    """For wire auto: AUC that the formats may cost, by MeshRec's measurements; none: no limit."""
    wire_error: float | None = None
    """For wire auto: maximum error of a value relative to its row's largest value; none: no limit."""
    replicate_mib: float | None = None
    """Tables larger than this are split, never copied to every rank; if none, the planner decides."""
    sample_batches: int = 4
    """Batches to measure pooling factors and hot rows on before planning; 0: assume one ID per bag."""
    plan: Path | None = None
    """A saved plan to use unchanged."""

    def __post_init__(self) -> None:
        try:
            if self.wire != AUTO:
                TableWires.parse(self.wire)
            _ = self.wire_bound
        except ValueError as error:
            raise ValueError(f"placement.wire: {error}") from error

    @property
    def wire_bound(self) -> WireBound:
        """Limits on the cost of wire formats."""
        return WireBound(auc_loss=self.wire_auc_loss, error=self.wire_error)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run."""

    name: str
    """Recipe name."""
    data: DataSource
    model: ModelConfig
    loss: Loss = field(default_factory=BinaryCrossEntropy)
    tables: OptimizerSpec = field(default_factory=lambda: RowWiseAdagrad(lr=0.02))
    dense: DenseOptimizer = DenseOptimizer()
    schedule: Schedule = field(default_factory=Schedule)
    training: Training = Training()
    placement: Placement = Placement()

    def __post_init__(self) -> None:
        kinds = {
            "data": DataSource,
            "model": ModelConfig,
            "tables": OptimizerSpec,
            "dense": DenseOptimizer,
            "schedule": Schedule,
            "training": Training,
            "placement": Placement,
        }
        for name, kind in kinds.items():
            value = getattr(self, name)
            if isinstance(value, kind):
                continue
            is_class = isinstance(value, type)
            given = f"the class {value.__name__}" if is_class else repr(value)
            lacks_call = is_class and issubclass(value, kind)
            remedy = f"Write {value.__name__}(...)" if lacks_call else f"Give a {kind.__name__}"
            raise ValueError(
                f"recipe {self.name!r}: its field {name!r} must be a {kind.__name__}, got {given}. {remedy}."
            )

    def check(self, world_size: int) -> None:
        """Raise ValueError for settings that cannot run on ``world_size`` ranks."""
        training = self.training
        if isinstance(self.data, TableSource):
            _check_labels(self.data.features, self.loss)
        if training.batch_size % world_size:
            below = training.batch_size - training.batch_size % world_size
            choices = f"{below} or {below + world_size}" if below else world_size
            raise ValueError(
                f"training.batch_size {training.batch_size} cannot be divided among {world_size} ranks; "
                f"take {choices}."
            )
        if training.chance_patience is not None and type(self.loss).per_sample is Loss.per_sample:
            raise ValueError(
                f"training.chance_patience is {training.chance_patience}, but {type(self.loss).__name__} has "
                "no loss per sample to test. Leave it out, or set training.patience instead."
            )
        if not self.placement.sharded and training.publish_every is not None:
            raise ValueError(
                "training.publish_every needs sharded tables, also on one rank. Leave placement.sharded True."
            )
        if not self.placement.sharded and self.placement.wire not in (AUTO, str(FULL_WIRES)):
            raise ValueError(
                f"placement.wire is {self.placement.wire}, but with placement.sharded False nothing travels "
                "between ranks. Leave placement.wire out, or placement.sharded True."
            )
        if not self.placement.sharded and world_size > 1:
            raise ValueError(
                f"placement.sharded is False, which trains in one process, but there are {world_size} ranks. "
                "Take --nproc 1, or leave the tables sharded."
            )
        if isinstance(self.tables, FTRL) and self.schedule.decay != "constant" and self.schedule.final == 0:
            raise ValueError(
                f"schedule.decay {self.schedule.decay!r} ends with a learning rate of 0, and FTRL divides by "
                "it: its rows are in proportion to the rate. Take --schedule.decay constant, or "
                "--schedule.final 0.1."
            )
        if training.patience is not None and training.max_steps is not None:
            between = training.evaluate_every
            if between is not None and between > training.max_steps:
                raise ValueError(
                    f"training.evaluate_every {between} is more than training.max_steps "
                    f"{training.max_steps}: early stopping would never see an evaluation. "
                    "Evaluate more often."
                )


def _check_labels(features: "Features", loss: Loss) -> None:
    """Raise ValueError if a built-in loss does not match the labels."""
    ours = BinaryCrossEntropy | SquaredError | Huber | Tasks
    if isinstance(loss, ours | Softmax | Ranking):
        _check_classes(features, loss)
    if not isinstance(loss, ours):
        return
    losses = [task.loss for task in loss.tasks] if isinstance(loss, Tasks) else [loss]
    names = [label.column for label in features.labels]
    if len(losses) != len(names):
        raise ValueError(
            f"the labels are {names}, and the loss is for {len(losses)}. Give loss=Tasks(...) one task for "
            "each label, or a single loss for a single label."
        )
    for label, label_loss in zip(features.labels, losses, strict=True):
        if label.kind == "number" and isinstance(label_loss, BinaryCrossEntropy):
            raise ValueError(
                f"label {label.column!r} is a number, and BinaryCrossEntropy takes 0 to 1. Take SquaredError "
                "or Huber, or a label of kind='binary', with positive_from where it is another range."
            )


def _check_classes(features: "Features", loss: Loss) -> None:
    """Raise ValueError unless the loss matches: `Softmax` for class labels, `Ranking` for query labels."""
    labels = features.labels
    classes = labels[0].classes if labels and labels[0].kind == "class" else ()
    if isinstance(loss, Softmax) != bool(classes) or (isinstance(loss, Softmax) and loss.classes != classes):
        given = f"loss.classes {list(loss.classes)}" if isinstance(loss, Softmax) else type(loss).__name__
        raise ValueError(
            f"label {labels[0].column!r} has classes {list(classes)}, and the loss is {given}. Take "
            f"loss=Softmax(classes={classes!r}) for a label of classes, and for no other."
        )
    is_query = bool(labels) and labels[-1].kind == "query"
    if isinstance(loss, Ranking) != is_query or (is_query and len(labels) != 2):
        raise ValueError(
            f"the labels are {[f'{label.column} ({label.kind})' for label in labels]}, and the loss is "
            f"{type(loss).__name__}. Ranking takes two labels, the second of kind='query', and no other loss "
            "takes a query."
        )

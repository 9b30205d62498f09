"""Recipes: everything that defines a training run, as frozen dataclasses.

A recipe is a function without arguments that returns a `Recipe`. ``meshrec train`` turns its fields into
options.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
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
    from meshrec.comms.mesh import Axis
    from meshrec.data import Dataset, Split
    from meshrec.data.encoding import Encoding
    from meshrec.data.faults import Faults
    from meshrec.data.features import Features
    from meshrec.data.features.fitting import Engine
    from meshrec.data.streaming import Source
    from meshrec.train.ranks import Ranks

YAML_SUFFIXES = (".yaml", ".yml")
"""Suffixes of recipes that are YAML files."""

Precision = Literal["fp32", "bf16", "auto"]
"""Values of `Training.dense_precision`."""


@dataclass(frozen=True, kw_only=True)
class DataSource(ABC):
    """Base class for data sources. Its subclasses are dataclasses, whose fields are command-line options."""

    @abstractmethod
    def load(self) -> "Dataset":
        """Open the data. Every rank opens all data, but reads only a part of it."""

    def all_rows(self) -> "DataSource":
        """Return a source whose training data includes this source's validation and test rows.

        Raises:
            ValueError: this kind of source does not support it.
        """
        raise ValueError(
            f"{type(self).__name__} has no source of all rows for --final all. Leave --final "
            "out, or train on Parquet, Csv, Frame or Log."
        )


@runtime_checkable
class FittedSource(Protocol):
    """Interface of a data source whose rows are converted to samples by fitted `Features`.

    Fitting learns, for example, vocabularies and bucket edges. A run fits the features once and stores them.
    Evaluation and scoring read the stored features.
    """

    def fit(self) -> "Features":
        """Fit the features on the training data."""

    def dataset(self, features: "Features") -> "Dataset":
        """Open the data with fitted features."""

    def dataset_for_scoring(self, features: "Features", data: Any, *, labelled: bool) -> "Dataset":
        """Open other data with the same columns, in data order.

        Args:
            features: fitted features.
            data: paths, folders, patterns or a table.
            labelled: whether the data has labels.

        Returns:
            Dataset with the data as its training part.
        """


@runtime_checkable
class RankFittedSource(FittedSource, Protocol):
    """Interface of a fitted source whose features all ranks can fit together."""

    def fit_on_ranks(self, axis: "Axis", tell: Callable[[float], None]) -> "Features | None":
        """Fit the features on the training data, of which every rank reads a share. Collective.

        Args:
            axis: the ranks.
            tell: called with the finished share of this rank's work, from 0 to 1.

        Returns:
            The result of `fit` on rank 0, None on other ranks.

        Raises:
            Exception: a rank failed; raised on every rank.
        """


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    """Options by which a source's rows are split into training, validation and test data."""

    split_by: Literal["time", "hash", "random"] | None = None
    """How to take validation and test rows out of the training data. If not set, they have separate files."""
    split_column: str | None = None
    """Column by which rows are split: numbers or times for a split by time, any type for a split by hash."""
    split_validation: float = 0.1
    """Share of rows for validation, on which the best weights are selected."""
    split_test: float = 0.1
    """Share of rows for the final test, which are read once."""
    split_time_format: str | None = None
    """Format (as for strptime) of a split column with times as strings. If not set, ISO 8601."""
    seed: int = 0
    """Seed for shuffle and split."""

    def split(self) -> "Split | None":
        """Return the rule that assigns rows to data parts; None without ``split_by``."""
        from meshrec.data import Split

        if self.split_by is None:
            return None
        return Split(
            by=self.split_by,
            column=self.split_column,
            validation=self.split_validation,
            test=self.split_test,
            seed=self.seed,
            time_format=self.split_time_format,
        )


@dataclass(frozen=True, kw_only=True)
class FileParts:
    """Options with the files of training, validation and test data."""

    train: tuple[str, ...]
    """Training files; with a split, files with all data."""
    validation: tuple[str, ...] | None = None
    """Validation files, on which the best weights are selected."""
    test: tuple[str, ...] | None = None
    """Test files, on which the selected weights are evaluated once."""

    def all_rows(self) -> Any:
        """Return a source whose training files include this source's validation and test files."""
        files = (*self.train, *(self.validation or ()), *(self.test or ()))
        # Features must be fitted again: on more rows.
        fitted: dict[str, Any] = {"fitted": None} if isinstance(self, TableSource) else {}
        return replace(self, train=files, validation=None, test=None, split_by=None, **fitted)  # type: ignore[call-arg]


@dataclass(frozen=True, kw_only=True)
class TableSource(ABC):
    """Base class for data sources with table rows, which fitted `Features` convert to samples.

    A data source derives from `SplitOptions`, too.

    A run fits the features once, on the training rows, and stores them in the run folder. All later
    evaluation and scoring reads the stored features.
    """

    features: Any
    """Features to make from the columns: `meshrec.data.features.Features`."""
    on_error: Literal["raise", "skip"] = "raise"
    """Whether a damaged row raises an error or is skipped."""
    window: int = 8192
    """Number of rows in the shuffle buffer."""
    seed: int
    """Seed for shuffle and split, a field of `SplitOptions`."""
    fitted: Path | None = None
    """Folder with features that `meshrec fit` has fitted. If not set, the run fits them."""

    @abstractmethod
    def split(self) -> "Split | None":
        """Return the rule that assigns rows to data parts, as `SplitOptions` does."""

    def parts(self) -> tuple[Any, Any, Any]:
        """Return the training, validation and test data, as paths or tables.

        The defaults are the fields ``train``, ``validation`` and ``test``. Validation and test data may be
        None.
        """
        train, validation, test = (getattr(self, name) for name in ("train", "validation", "test"))
        return train, validation, test

    def fit(self, engine: "Engine" = map) -> "Features":
        """Fit the features on the training rows, in a single pass over the data.

        If there are fitted features, read them instead.

        Args:
            engine: as for `meshrec.data.features.fitting.fit_features`.
        """
        from meshrec.data.features.fit_folder import read_fit
        from meshrec.data.features.fitting import fit_features

        if self.fitted is not None:
            return read_fit(self.fitted, self.fit_options())
        features: Features = self.features
        return fit_features(
            features,
            self._open,
            self.parts()[0],
            split=self.split(),
            on_error=self.on_error,
            engine=engine,
        )

    def fit_options(self) -> dict[str, Any]:
        """Return the options on which fitted features depend, except for the files, as JSON types."""
        split = self.split()
        return {
            "features": self.features.to_json(),
            "split": None if split is None else asdict(split),
            "on_error": self.on_error,
        }

    def fit_on_ranks(self, axis: "Axis", tell: Callable[[float], None]) -> "Features | None":
        """Fit the features on all ranks together; see `RankFittedSource`.

        Args:
            axis: the ranks.
            tell: called with the finished share of this rank's work, from 0 to 1.
        """
        from meshrec.comms.agreement import together
        from meshrec.data.features.fitting import fit_on_ranks

        if self.fitted is not None:
            with together(axis, "reading fitted features"):
                return self.fit() if axis.rank == 0 else None
        train = self.parts()[0]
        features: Features = self.features
        return fit_on_ranks(
            features, self._open, train, axis, split=self.split(), on_error=self.on_error, tell=tell
        )

    def dataset(self, features: "Features") -> "Dataset":
        """Open the data with fitted features."""
        from meshrec.data.tables import table_dataset

        train, validation, test = self.parts()
        return table_dataset(
            self._open,
            train=train,
            validation=validation,
            test=test,
            split=self.split(),
            schema=features,
            name=type(self).__name__.lower(),
            seed=self.seed,
            on_error=self.on_error,
            window=self.window,
        )

    def dataset_for_scoring(self, features: "Features", data: Any, *, labelled: bool) -> "Dataset":
        """Open other data with the same columns, in data order.

        Args:
            features: fitted features.
            data: paths, folders, patterns or a table.
            labelled: whether the data has labels.

        Returns:
            Dataset with the data as its training part.
        """
        from meshrec.data.tables import ordered_reader, training_dataset

        reader = ordered_reader(
            self._open, data, features, labelled=labelled, on_error=self.on_error, window=self.window
        )
        return training_dataset(features, reader, type(self).__name__.lower())

    @property
    def csv_format(self) -> "CsvFormat":
        """CSV format of the data files."""
        return DETECTED

    def _open(self, data: Any, schema: "Encoding", faults: "Faults") -> "Source":
        """Open data files or a table for reading."""
        from meshrec.data.frames import open_tables

        return open_tables(data, schema, faults, self.csv_format)

    def load(self) -> "Dataset":
        """Fit the features, and open the data with them."""
        return self.dataset(self.fit())


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """Base class for model configurations, whose fields are command-line options.

    `build` creates the model, with input and table sizes from a dataset.
    """

    @abstractmethod
    def build(self, dataset: "Dataset") -> nn.Module:
        """Build the model for a dataset, with tables on ``meta``.

        The model is called as ``model(dense, sparse)``. It returns logits, [B] or [B, 1], or for T labels,
        [B, T].
        """

    @property
    def attention_width(self) -> int:
        """Width of the self-attention over histories; 0 without self-attention.

        The cost of self-attention is quadratic in the history length. The width is needed to estimate this
        cost, and to distribute the samples so that all ranks have about the same cost.
        """
        return 0

    @property
    def samples_per_thread(self) -> int:
        """Smallest share of a rank's batch for which a CPU thread pays in a training step.

        Threads wait for one another after every operator. They spin meanwhile, so too many of them take CPU
        time, and on a busy machine also make steps slower.
        """
        return 1

    def start(
        self, model: nn.Module, recipe: "Recipe", dataset: "Dataset", ranks: "Ranks"
    ) -> dict[str, Any] | None:
        """Fit initial weights to the data before the first training step, for models that support it.

        Collective. The default does nothing. Fitted weights are evaluated before the first step.

        Args:
            model: the new model, whose weights are replaced.
            recipe: the recipe.
            dataset: the dataset.
            ranks: the ranks, from `join`.

        Returns:
            The options of this configuration selected during the fit, with their values. A refit on all rows
            has no validation data to select them, so it sets them to repeat the fit. None if nothing was
            fitted.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class DenseOptimizer:
    """Optimizer for the dense part: all parameters except embedding tables."""

    kind: Literal["adam", "adamw", "adagrad", "sgd"] = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Training:
    """Options of the training loop."""

    batch_size: int = 1024
    """Number of samples per batch, over all ranks."""
    epochs: int = 1
    """Maximum number of passes over the training data."""
    max_steps: int | None = None
    """Maximum number of steps, which also ends the learning rate schedule."""
    end_step: int | None = None
    """Step after which to end, without changing the learning rate schedule. If not set, the last step."""
    evaluate_every: int | None = None
    """Steps between evaluations on validation data. If not set, evaluate after every epoch."""
    patience: int | None = None
    """Stop after this many evaluations without a better AUC, and keep the best weights."""
    chance_patience: int | None = None
    """Stop after this many evaluations without a significantly lower validation loss (in a paired test over
    samples), and keep the best weights. If not set, the test is not made.
    """
    accumulate: int = 1
    """Number of batches whose gradients are added up for an update (a step)."""
    clip_norm: float | None = None
    """Maximum norm of an update's gradient, over dense parameters, tables and all ranks. If not set,
    gradients are not clipped.
    """
    dense_precision: Precision = "fp32"
    """Precision of the dense part in training. fp32; bf16, with master weights in fp32; or auto, which is
    bf16 if the CPU or GPU of every rank has instructions for bf16 products, else fp32. Evaluation, scoring
    and serving compute in fp32.
    """
    dense_gradients: Literal["fp32", "bf16"] = "fp32"
    """Format in which ranks exchange dense gradients. Their mean is computed in fp32."""
    pipeline: bool = True
    """Whether ranks exchange the next batch's IDs while the current batch computes. Results are the same."""
    balance: bool = True
    """Whether the samples of a step are divided among ranks such that their histories cost equal time. The
    step has the same samples as without balancing.
    """
    seed: int = 0
    """Seed for initial weights and sample order."""
    log_every: int = 20
    """Steps between metrics lines."""
    phases_every: int = 50
    """Steps between measurements of the time per phase; 0: no measurements."""
    checkpoint_every: int | None = None
    """Steps between checkpoints. If not set, only one is saved, at the end."""
    keep_checkpoints: int = 3
    """Number of checkpoints to keep."""
    publish_every: int | None = None
    """Steps between deltas (changed weights for servers), written to ``deltas`` in the run folder.
    A further delta is written before every checkpoint. If not set, no deltas are written.
    """
    prefetch: int = 2
    """Number of batches to read ahead."""

    def __post_init__(self) -> None:
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
    """Options for the planner, which decides how tables are placed on ranks."""

    sharded: bool = True
    """Whether to shard tables over ranks as planned. If False, a single process trains the plain model."""
    hardware: str | None = None
    """Hardware profile: cpu, a100, h100, h200, or a file written by `meshrec calibrate`. If not set, the
    device's profile.
    """
    memory_gib: float | None = None
    """Memory per rank, in GiB. If not set, from the hardware profile."""
    min_partition: int | None = None
    """Minimum number of columns in a column shard. If not set, 32."""
    sharding_types: tuple[str, ...] | None = None
    """Sharding types from which the planner may choose. If not set, all types."""
    wire: str = str(FULL_PRECISION)
    """Wire format, in which ranks send embeddings and gradients: fp32, fp16, bf16, int8 or int4. Two formats,
    such as int8/bf16, are for embeddings and gradients. +stochastic rounds at random, and +feedback adds
    rounding errors to later gradients. int8/bf16,users:fp32 sets another format for table "users". auto: the
    fastest format within wire_auc_loss and wire_error."""
    wire_auc_loss: float | None = 5e-4
    """For wire auto: maximum loss in AUC, by MeshRec's measurements; none: no limit."""
    wire_error: float | None = None
    """For wire auto: maximum error of a value, relative to the largest value in the row; none: no limit."""
    replicate_mib: float | None = None
    """Maximum size, in MiB, of tables that may be copied to every rank. If not set, the planner decides."""
    sample_batches: int = 4
    """Number of batches on which pooling factors (IDs per bag) and hot rows are measured before planning. 0:
    assume one ID per bag.
    """
    plan: Path | None = None
    """File with a saved plan, to be used unchanged."""

    def __post_init__(self) -> None:
        try:
            if self.wire != AUTO:
                TableWires.parse(self.wire)
            _ = self.wire_bound
        except ValueError as error:
            raise ValueError(f"placement.wire: {error}") from error

    @property
    def wire_bound(self) -> WireBound:
        """Limits within which wire ``auto`` chooses formats."""
        return WireBound(auc_loss=self.wire_auc_loss, error=self.wire_error)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Complete definition of a training run: data, model, loss, optimizers and training options."""

    name: str
    """Recipe name, from which run folders are named."""
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
            # A common mistake: the class DLRMConfig instead of an instance DLRMConfig().
            is_class = isinstance(value, type)
            given = f"the class {value.__name__}" if is_class else repr(value)
            lacks_call = is_class and issubclass(value, kind)
            remedy = f"Write {value.__name__}(...)" if lacks_call else f"Give a {kind.__name__}"
            raise ValueError(
                f"recipe {self.name!r}: its field {name!r} must be a {kind.__name__}, got {given}. {remedy}."
            )

    def check(self, world_size: int) -> None:
        """Check that the recipe can run on ``world_size`` ranks.

        Raises:
            ValueError: an option does not fit the number of ranks or another option; the message names it.
        """
        training = self.training
        if isinstance(self.data, TableSource):
            _check_labels(self.data.features, self.loss)
        # Every rank gets an equal share of a batch.
        if training.batch_size % world_size:
            below = training.batch_size - training.batch_size % world_size
            choices = f"{below} or {below + world_size}" if below else world_size
            raise ValueError(
                f"training.batch_size {training.batch_size} cannot be divided among {world_size} ranks; "
                f"take {choices}."
            )
        # The base class's method means that the loss has no values per sample.
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
    """Raise ValueError if a built-in loss does not fit the labels. User-defined losses are not checked."""
    ours = BinaryCrossEntropy | SquaredError | Huber | Tasks
    if isinstance(loss, ours | Softmax | Ranking):
        _check_label_loss(features, loss)
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


def _check_label_loss(features: "Features", loss: Loss) -> None:
    """Check that the loss fits labels of the kinds "class" and "query".

    A class label needs the loss `Softmax` with the same classes. A query label must follow one other label,
    and needs the loss `Ranking`. Both losses are for these labels only.
    """
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

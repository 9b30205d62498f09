"""Configuration for the wide & deep model, whose initial weights are fitted to the data.

`meshrec inspect` proposes this model for click data.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from meshrec.data import Batch
from meshrec.models import WideDeep
from meshrec.modules import EmbeddingBagCollection
from meshrec.modules.boosted_trees import BoostedTrees, Branch, Leaf
from meshrec.tables.initial import init_table
from meshrec.train.architectures import tables_on_meta
from meshrec.train.boosting import NUM_LEVELS, TreeSamples, fit_boosted, refit_boosted, row_scores
from meshrec.train.lightgbm_import import import_lightgbm
from meshrec.train.linear import (
    LabelledSamples,
    Regression,
    design_matrix,
    first_samples,
    fit_regression,
    refit_regression,
    validation_mask,
    weights_of,
)
from meshrec.train.losses import BinaryCrossEntropy
from meshrec.train.recipe import ModelConfig, Recipe

if TYPE_CHECKING:
    from meshrec.data import Dataset
    from meshrec.train.ranks import Ranks


# Number of folds for out-of-fold scores; see `_out_of_fold_samples`. Every fold costs another regression.
_FOLDS = 4


@dataclass(frozen=True, kw_only=True)
class WideDeepConfig(ModelConfig):
    """Wide & deep model, whose logit is the sum of linear terms, pairwise products and MLPs.

    Numeric features have embeddings, too.
    """

    embedding_dim: int = 8
    """Embedding width, the same for every table. The first column is the ID's linear weight."""
    table_std: float | None = 0.01
    """Standard deviation for initial table values. None: small values whose size depends on the row count."""
    layers: tuple[int, ...] = (128, 64)
    """Hidden layer sizes for the MLPs."""
    members: int = 1
    """Number of MLPs in the ensemble. They share most weights."""
    dropout: float = 0.3
    """Dropout rate for hidden values in training."""
    id_dropout: float = 0.1
    """Dropout rate for ID embeddings in training."""
    wide_scale: float = 1.0
    """Factor for the linear ID weights. With Adam, they learn this many times as fast as embeddings."""
    fit_wide: bool = False
    """Whether to start with linear weights from a logistic regression. Embeddings then learn the residual."""
    fit_trees: int = 0
    """Maximum number of boosted trees in addition to the regression from fit_wide; 300 are enough. They need
    LightGBM: pip install "meshrec[lightgbm]".
    """
    fit_penalty: float | None = None
    """L2 penalty for the regression from fit_wide. If not set, validation data selects it."""
    fit_tree_counts: tuple[int, int] | None = None
    """Number of trees that learn the regression's residual, and number of trees that learn without it. If not
    set, validation data selects both.
    """
    shrinkage: float = 0.0
    """L2 penalty per table row, over the whole training data. It keeps the weights of rare IDs near 0."""

    def __post_init__(self) -> None:
        for name in ("dropout", "id_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}; it must be in [0, 1).")
        if not self.layers or min(self.layers) < 1:
            raise ValueError(f"model.layers is {self.layers}; it must be one size or more, such as 128 64.")
        if self.members < 1:
            raise ValueError(f"model.members is {self.members}; it must be at least 1.")
        if self.fit_trees < 0:
            raise ValueError(f"model.fit_trees is {self.fit_trees}; it must be at least 0.")
        if self.fit_penalty is not None and not self.fit_penalty > 0:
            raise ValueError(f"model.fit_penalty is {self.fit_penalty}; it must be above 0.")
        counts = self.fit_tree_counts
        if counts is not None and (min(counts) < 0 or sum(counts) > self.fit_trees):
            raise ValueError(
                f"model.fit_tree_counts is {list(counts)}; both must be at least 0, and together at most "
                f"model.fit_trees, {self.fit_trees}."
            )
        if self.fit_trees and not self.fit_wide:
            raise ValueError(
                f"model.fit_trees is {self.fit_trees}, and model.fit_wide is False: trees learn what fitted "
                "linear weights leave over. Take model.fit_wide True, or fit_trees 0."
            )

    @property
    @override
    def samples_per_thread(self) -> int:
        # Measured: a second thread slows steps of 1,024 samples down, and speeds up those of 4,096.
        return 1024

    def build(self, dataset: "Dataset") -> nn.Module:
        """Build the model, with tables on ``meta``."""
        tables = tables_on_meta(dataset, self.embedding_dim, std=self.table_std)
        return WideDeep(
            tables,
            dataset.number_edges or ((),) * dataset.num_dense,
            self.layers,
            num_outputs=max(1, dataset.num_classes),
            num_members=self.members,
            dropout=self.dropout,
            id_dropout=self.id_dropout,
            wide_scale=self.wide_scale,
            shrink=self._shrink(tables, dataset),
            trees=BoostedTrees(self.fit_trees, NUM_LEVELS) if self.fit_trees else None,
        )

    @override
    def start(
        self, model: nn.Module, recipe: Recipe, dataset: "Dataset", ranks: "Ranks"
    ) -> dict[str, Any] | None:
        """Fit linear weights and trees on rank 0, and load them into the model on all ranks. Collective.

        Does nothing unless ``fit_wide`` is set. See `ModelConfig.start`.

        Raises:
            ValueError: the loss is not `BinaryCrossEntropy`, or weight decay on tables would change the row
                scores on which trees split.
            ModuleNotFoundError: trees are to be fitted, but LightGBM is not installed.
        """
        if not self.fit_wide:
            return None
        if not isinstance(recipe.loss, BinaryCrossEntropy):
            raise ValueError(
                f"model.fit_wide is True, and the loss is {type(recipe.loss).__name__}: a logistic "
                "regression learns one label, 0 or 1. Take BinaryCrossEntropy, or model.fit_wide False."
            )
        # Unwrap a model for several ranks.
        wide = getattr(model, "module", model)
        assert isinstance(wide, WideDeep)
        if wide.trees is not None:
            # Check on every rank, although only rank 0 fits, so that all ranks raise the error.
            import_lightgbm()
            if getattr(recipe.tables, "weight_decay", 0):
                raise ValueError(
                    f"model.fit_trees is {self.fit_trees}, and tables.weight_decay is "
                    f"{recipe.tables.weight_decay}: it would change the scores that trees split. Take 0, and "
                    "model.shrinkage."
                )
        seed = recipe.training.seed
        fitted = ranks.broadcast(_fit_initial_values(wide, dataset, self, seed) if ranks.is_first else None)
        # Not strict: parameters without fitted values keep their initial values.
        model.load_state_dict(_initial_state(wide, fitted, seed), strict=False)
        if wide.trees is not None:
            wide.trees.set_trees(fitted.trees)
        return {"fit_penalty": fitted.penalty} | ({"fit_tree_counts": fitted.counts} if wide.trees else {})

    def _shrink(self, tables: EmbeddingBagCollection, dataset: "Dataset") -> list[float]:
        """Return the L2 penalty per row lookup, a value per feature; empty if ``shrinkage`` is 0.

        Features are ordered by table. ``shrinkage`` is the penalty of a row over an epoch. A row is penalized
        at every lookup, so ``shrinkage`` is divided by the expected number of row lookups in an epoch.
        """
        if not self.shrinkage:
            return []
        # The minimum avoids a division by 0 for a feature that has no IDs in any sample.
        lengths = {feature.name: max(feature.average_length, 1e-6) for feature in dataset.features}
        num_samples = dataset.train.num_samples
        if not num_samples:
            raise ValueError(
                f"model.shrinkage is {self.shrinkage}, a penalty per epoch, and a stream has no epochs. "
                "Start from a run, whose training samples then count as an epoch (--from RUN), or take "
                "model.shrinkage 0."
            )
        return [
            self.shrinkage * config.num_embeddings / (num_samples * sum(map(lengths.__getitem__, names)))
            for config in tables.embedding_bag_configs()
            for names in [config.feature_names]
            for _ in names
        ]


class _InitialValues(NamedTuple):
    """Initial values of a wide & deep model, fitted to the first training samples.

    Attributes:
        linear: weights of the regression. There is a weight for every table row, for every bin of every
            numeric feature, and for every numeric feature as a whole. The bias is last. Hashed tables, which
            find rows by the hash of an ID, have no weights.
        scores: row scores per table (see `row_scores`), without hashed tables; empty without trees.
        trees: boosted trees.
        penalty: L2 penalty of the regression.
        counts: numbers of residual trees and independent trees; see `fit_boosted`.
    """

    linear: Tensor
    scores: list[Tensor]
    trees: list[Branch | Leaf]
    penalty: float
    counts: tuple[int, int]


def _fit_initial_values(
    model: WideDeep, dataset: "Dataset", config: WideDeepConfig, seed: int
) -> _InitialValues:
    """Fit the linear weights, and trees if the model has any, to the first training samples.

    Validation data selects the penalty and the tree count, unless the configuration sets them. Without
    validation data, a tenth of the training samples is held out for this.
    """
    train = first_samples(dataset.train)
    validation = None if dataset.validation is None else first_samples(dataset.validation)

    def labelled(samples: Batch) -> LabelledSamples:
        """Convert samples to inputs for the regression."""
        encoding = model.numbers.encoding
        shares = encoding(samples.dense.to(encoding.scale.device)).cpu()
        # Add an input that is linear over all bins to the inputs per bin. The penalty then prefers straight
        # lines to other functions of a number.
        dense = torch.cat([shares.flatten(1), (shares * encoding.widths.cpu()).sum(-1)], dim=1)
        return LabelledSamples.of(samples, design_matrix(dataset, samples, dense, shared=True))

    regression_samples = labelled(train)
    validation_samples = None if validation is None else labelled(validation)
    fit = fit_regression(regression_samples, validation_samples, penalty=config.fit_penalty)
    linear = torch.from_numpy(fit.weights)
    if model.trees is None:
        return _InitialValues(linear.float(), [], [], fit.penalty, (0, 0))
    # Samples that select the tree count must not contribute to the scores on which trees split.
    uses_all = validation is not None or config.fit_tree_counts is not None
    fit_mask = torch.from_numpy(~validation_mask(len(train)) | uses_all)
    scores = _table_row_scores(dataset, train, fit_mask)

    def tree_samples(samples: Batch, matrix: Any) -> TreeSamples:
        """Convert samples, and their input matrix for the regression, to samples for the trees."""
        logits = torch.from_numpy(matrix @ fit.weights)
        return TreeSamples(
            _tree_inputs(dataset, samples, scores), samples.labels, logits, weights_of(samples)
        )

    out_of_fold_samples = _out_of_fold_samples(dataset, train, regression_samples, fit, fit_mask).where(
        fit_mask
    )
    if config.fit_tree_counts is not None:
        result = refit_boosted(out_of_fold_samples, config.fit_tree_counts, seed=seed)
    else:
        held_out = (
            tree_samples(train, regression_samples.inputs).where(~fit_mask)
            if validation is None or validation_samples is None
            else tree_samples(validation, validation_samples.inputs)
        )
        result = fit_boosted(out_of_fold_samples, held_out, model.trees.num_trees, seed=seed)
    # If independent trees are used, the model's part of the logit is halved; see `BoostedModel`.
    linear *= result.share
    # After the multiplication: the bias of the trees is not a part of the regression's logit.
    linear[-1] += result.bias
    return _InitialValues(linear.float(), scores, result.trees, fit.penalty, result.counts)


def _out_of_fold_samples(
    dataset: "Dataset", samples: Batch, regression_samples: LabelledSamples, fit: Regression, fit_mask: Tensor
) -> TreeSamples:
    """Return training samples for trees. A sample's label does not contribute to its row scores and logit.

    Every sample belongs to a fold. Its row scores and logit come from a fit to the other folds. Scores that
    were fitted to a sample predict its label better than the labels of new samples. Trees would rely on such
    scores too much.

    Args:
        fit: an earlier regression, which gives the penalty and the weights from which fits start.
        fit_mask: which samples may contribute to fits, bool [B].
    """
    folds = torch.arange(len(samples)) % _FOLDS
    inputs, logits = [], []
    for fold in range(_FOLDS):
        in_other_folds = fit_mask & (folds != fold)
        coefficients = refit_regression(fit, regression_samples.where(in_other_folds.numpy()))
        inputs.append(_tree_inputs(dataset, samples, _table_row_scores(dataset, samples, in_other_folds)))
        logits.append(torch.from_numpy(regression_samples.inputs @ coefficients))
    sample_indices = torch.arange(len(samples))
    return TreeSamples(
        # For every sample, the fit that has left its fold out.
        torch.stack(inputs)[folds, sample_indices],
        samples.labels,
        torch.stack(logits)[folds, sample_indices],
        weights_of(samples),
    )


def _table_row_scores(dataset: "Dataset", samples: Batch, fit_mask: Tensor) -> list[Tensor]:
    """Compute the row scores of every table (see `row_scores`), from samples where ``fit_mask`` [B] is True.

    Return a tensor [rows] per table, in the dataset's table order. Hashed tables are left out.
    """
    table_scores, weights = [], weights_of(samples)
    for table in dataset.tables(1):
        if table.keys is not None:
            continue
        jagged = [samples.sparse[name] for name in table.feature_names]
        # Sample index of every ID.
        owners = torch.cat([torch.arange(len(samples)).repeat_interleave(bag.lengths()) for bag in jagged])
        ids, counts = torch.cat([bag.values() for bag in jagged]), fit_mask[owners]
        owners = owners[counts]
        scores = row_scores(ids[counts], samples.labels[owners], weights[owners], table.num_embeddings)
        table_scores.append(scores)
    return table_scores


def _tree_inputs(dataset: "Dataset", samples: Batch, scores: list[Tensor]) -> Tensor:
    """Return the inputs of the trees, [B, N + F].

    The first N columns are the numeric features. The other columns belong to the F features with tables, in
    table order. Such a column has the row scores of the feature's IDs, pooled like embeddings, or zeros if
    the table is hashed.
    """
    inputs, remaining = [samples.dense], iter(scores)
    for table in dataset.tables(1):
        of_rows = None if table.keys is not None else next(remaining)[:, None]
        for name in table.feature_names:
            jagged = samples.sparse[name]
            if of_rows is None:
                # Zeros instead of no column: trees refer to their inputs by position.
                inputs.append(torch.zeros(len(samples), 1))
                continue
            firsts, mode = jagged.offsets()[:-1], table.pooling.value.lower()
            inputs.append(nn.functional.embedding_bag(jagged.values(), of_rows, firsts, mode=mode))
    return torch.cat(inputs, dim=1)


def _initial_state(model: WideDeep, fit: _InitialValues, seed: int) -> dict[str, Tensor]:
    """Return a state dict with the fitted values, and with weights that make the deep part's output 0."""
    state: dict[str, Tensor] = {}
    # The fitted weights follow the order in `design_matrix`: table rows, bins, lines, bias.
    encoding, start, fitted, scores = model.numbers.encoding, 0, fit.linear, iter(fit.scores)
    for config in model.sparse_arch.embedding_bag_collection.embedding_bag_configs():
        if config.keys is not None:
            continue
        weight = torch.empty(config.num_embeddings, config.embedding_dim)
        init_table(weight, table=config.name, init_fn=config.init_weight, seed=seed)
        # The model multiplies the first column by `wide_scale`.
        weight[:, 0] = fitted[start : start + len(weight)] / model.wide_scale
        if model.trees is not None:
            # The column with row scores, on which trees split.
            weight[:, model.num_outputs] = next(scores)
        start += len(weight)
        state[f"sparse_arch.embedding_bag_collection.embedding_bags.{config.name}.weight"] = weight
    num_bins = encoding.N * encoding.T
    bins, lines = fitted[start : start + num_bins], fitted[start + num_bins : -1]
    number_weights = model.numbers.weight.detach().cpu().clone()
    number_weights[:, :, 0] = bins.view(encoding.N, encoding.T) + lines[:, None] * encoding.widths.cpu()
    state["numbers.weight"] = number_weights
    # With a head of zeros, the model gives the same predictions as the fitted values before the first step.
    state["mlp.head"] = torch.zeros_like(model.mlp.head)
    state["mlp.bias"] = torch.full_like(model.mlp.bias, float(fitted[-1]))
    return state

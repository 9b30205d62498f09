"""Configuration of the wide & deep model, which `meshrec inspect` proposes, and the fit of its start."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from meshrec.data import Batch
from meshrec.data.faults import needs
from meshrec.models import WideDeep
from meshrec.modules import EmbeddingBagCollection
from meshrec.modules.boosted_trees import BoostedTrees, Branch, Leaf
from meshrec.tables.initial import init_table
from meshrec.train.architectures import tables_on_meta
from meshrec.train.boosting import NUM_LEVELS, TreeSamples, fit_boosted, refit_boosted, row_scores
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


# Folds for out-of-fold scores, see `_out_of_fold_samples`.
_FOLDS = 4


@dataclass(frozen=True, kw_only=True)
class WideDeepConfig(ModelConfig):
    """Wide & deep model: linear terms, pairwise products, and MLPs; numbers have embeddings too."""

    embedding_dim: int = 8
    """Embedding width, the same for every table; the first column is the linear weight."""
    table_std: float | None = 0.01
    """Standard deviation of initial table values; if none, small values that depend on the number of rows."""
    layers: tuple[int, ...] = (128, 64)
    """Hidden layer sizes of the MLPs."""
    members: int = 1
    """Number of MLPs in the ensemble; they share most weights."""
    dropout: float = 0.3
    """Dropout rate for hidden values in training."""
    id_dropout: float = 0.1
    """Dropout rate for ID embeddings in training."""
    wide_scale: float = 1.0
    """Factor for the linear ID weights: with Adam, they learn this many times as fast as embeddings."""
    fit_wide: bool = False
    """Start with linear weights from a logistic regression; the embeddings learn the residual."""
    fit_trees: int = 0
    """Maximum number of boosted trees next to the regression from fit_wide; 300 are enough. They need
    LightGBM: pip install "meshrec[lightgbm]".
    """
    fit_penalty: float | None = None
    """L2 penalty for the regression from fit_wide; if none, validation data selects it."""
    fit_tree_counts: tuple[int, int] | None = None
    """Number of trees that learn the regression's residual, and that learn without it; if none, validation
    data selects both.
    """
    shrinkage: float = 0.0
    """L2 penalty per table row, over the whole training data: weights for rare IDs stay near 0."""

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
        """Fit linear weights and trees on rank 0, if ``fit_wide`` is set, and load them on all ranks.

        Args:
            model: the new model, maybe wrapped for data parallelism.
            recipe: the recipe.
            dataset: the dataset.
            ranks: the ranks, from `join`.

        Raises:
            ValueError: the loss is not `BinaryCrossEntropy`, or weight decay on tables would change scores.
            ModuleNotFoundError: there are trees, and LightGBM is not installed.
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
            needs("lightgbm", "lightgbm")  # on every rank, although the first one fits
            if getattr(recipe.tables, "weight_decay", 0):
                raise ValueError(
                    f"model.fit_trees is {self.fit_trees}, and tables.weight_decay is "
                    f"{recipe.tables.weight_decay}: it would change the scores that trees split. Take 0, and "
                    "model.shrinkage."
                )
        seed = recipe.training.seed
        fitted = ranks.share(_fit_initial_values(wide, dataset, self, seed) if ranks.is_first else None)
        # Not strict: parameters without fitted values keep their initial values.
        model.load_state_dict(_initial_state(wide, fitted, seed), strict=False)
        if wide.trees is not None:
            wide.trees.set_trees(fitted.trees)
        return {"fit_penalty": fitted.penalty} | ({"fit_tree_counts": fitted.counts} if wide.trees else {})

    def _shrink(self, tables: EmbeddingBagCollection, dataset: "Dataset") -> list[float]:
        """Return the penalty per lookup, by feature: the row penalty divided by the expected lookups
        per row.
        """
        if not self.shrinkage:
            return []
        lengths = {feature.name: max(feature.average_length, 1e-6) for feature in dataset.features}
        num_samples = dataset.train.num_samples
        return [
            self.shrinkage * config.num_embeddings / (num_samples * sum(map(lengths.__getitem__, names)))
            for config in tables.embedding_bag_configs()
            for names in [config.feature_names]
            for _ in names
        ]


class _InitialValues(NamedTuple):
    """Initial values of a wide & deep model, fitted to the first training samples."""

    linear: Tensor
    """A weight per table row, bin and number, and the bias; hashed tables have no weights."""
    scores: list[Tensor]
    """Row scores by table, without hashed tables; empty without trees."""
    trees: list[Branch | Leaf]
    penalty: float
    """L2 penalty of the regression."""
    counts: tuple[int, int]
    """Number of residual trees, and of independent trees; see `fit_boosted`."""


def _fit_initial_values(
    model: WideDeep, dataset: "Dataset", config: WideDeepConfig, seed: int
) -> _InitialValues:
    """Fit the linear weights, and trees if the model has them, on the first training samples.

    Without validation data, a tenth of these samples selects the penalty and the number of trees, unless the
    configuration sets them.
    """
    train = first_samples(dataset.train)
    validation = None if dataset.validation is None else first_samples(dataset.validation)

    def labelled(samples: Batch) -> LabelledSamples:
        encoding = model.numbers.encoding
        shares = encoding(samples.dense.to(encoding.scale.device)).cpu()
        # A line through all bins in addition to a weight per bin: the penalty then prefers straight lines.
        dense = torch.cat([shares.flatten(1), (shares * encoding.widths.cpu()).sum(-1)], dim=1)
        return LabelledSamples.of(samples, design_matrix(dataset, samples, dense, shared=True))

    learnt = labelled(train)
    chooses = None if validation is None else labelled(validation)
    fit = fit_regression(learnt, chooses, penalty=config.fit_penalty)
    linear = torch.from_numpy(fit.weights)
    if model.trees is None:
        return _InitialValues(linear.float(), [], [], fit.penalty, (0, 0))
    # Samples that select the number of trees must not contribute to the scores that trees split.
    uses_all = validation is not None or config.fit_tree_counts is not None
    learns = torch.from_numpy(~validation_mask(len(train)) | uses_all)
    scores = _table_row_scores(dataset, train, learns)

    def judged(samples: Batch, matrix: Any) -> TreeSamples:
        logits = torch.from_numpy(matrix @ fit.weights)
        return TreeSamples(
            _tree_inputs(dataset, samples, scores), samples.labels, logits, weights_of(samples)
        )

    crossed = _out_of_fold_samples(dataset, train, learnt, fit, learns).where(learns)
    if config.fit_tree_counts is not None:
        result = refit_boosted(crossed, config.fit_tree_counts, seed=seed)
    else:
        judges = (
            judged(train, learnt.inputs).where(~learns)
            if validation is None or chooses is None
            else judged(validation, chooses.inputs)
        )
        result = fit_boosted(crossed, judges, model.trees.num_trees, seed=seed)
    linear *= result.share
    linear[-1] += result.bias
    return _InitialValues(linear.float(), scores, result.trees, fit.penalty, result.counts)


def _out_of_fold_samples(
    dataset: "Dataset", samples: Batch, learnt: LabelledSamples, fit: Regression, learns: Tensor
) -> TreeSamples:
    """Return training samples with scores and logits from fits on the other folds.

    Scores and weights fitted on a sample's own label predict it better than they predict new samples, so
    trees would rely on them too much.
    """
    folds = torch.arange(len(samples)) % _FOLDS
    inputs, logits = [], []
    for fold in range(_FOLDS):
        in_other_folds = learns & (folds != fold)
        coefficients = refit_regression(fit, learnt.where(in_other_folds.numpy()))
        inputs.append(_tree_inputs(dataset, samples, _table_row_scores(dataset, samples, in_other_folds)))
        logits.append(torch.from_numpy(learnt.inputs @ coefficients))
    sample_indices = torch.arange(len(samples))
    return TreeSamples(
        torch.stack(inputs)[folds, sample_indices],
        samples.labels,
        torch.stack(logits)[folds, sample_indices],
        weights_of(samples),
    )


def _table_row_scores(dataset: "Dataset", samples: Batch, learns: Tensor) -> list[Tensor]:
    """Return row scores by table, from samples where ``learns`` [B] is True."""
    table_scores, weights = [], weights_of(samples)
    for table in dataset.tables(1):
        if table.keys is not None:
            continue
        jagged = [samples.sparse[name] for name in table.feature_names]
        owners = torch.cat([torch.arange(len(samples)).repeat_interleave(bag.lengths()) for bag in jagged])
        ids, counts = torch.cat([bag.values() for bag in jagged]), learns[owners]
        owners = owners[counts]
        scores = row_scores(ids[counts], samples.labels[owners], weights[owners], table.num_embeddings)
        table_scores.append(scores)
    return table_scores


def _tree_inputs(dataset: "Dataset", samples: Batch, scores: list[Tensor]) -> Tensor:
    """Return tree inputs [B, N + F]: numbers, then pooled ID scores per feature; 0 for hashed tables."""
    inputs, remaining = [samples.dense], iter(scores)
    for table in dataset.tables(1):
        of_rows = None if table.keys is not None else next(remaining)[:, None]
        for name in table.feature_names:
            jagged = samples.sparse[name]
            if of_rows is None:
                inputs.append(torch.zeros(len(samples), 1))
                continue
            firsts, mode = jagged.offsets()[:-1], table.pooling.value.lower()
            inputs.append(nn.functional.embedding_bag(jagged.values(), of_rows, firsts, mode=mode))
    return torch.cat(inputs, dim=1)


def _initial_state(model: WideDeep, fit: _InitialValues, seed: int) -> dict[str, Tensor]:
    """Return a state dict with the fitted values, and a deep part whose output is 0."""
    state: dict[str, Tensor] = {}
    # The fitted weights follow the order in `design_matrix`: table rows, bins, lines, bias.
    encoding, start, fitted, scores = model.numbers.encoding, 0, fit.linear, iter(fit.scores)
    for config in model.sparse_arch.embedding_bag_collection.embedding_bag_configs():
        if config.keys is not None:
            continue
        weight = torch.empty(config.num_embeddings, config.embedding_dim)
        init_table(weight, table=config.name, init_fn=config.init_weight, seed=seed)
        weight[:, 0] = fitted[start : start + len(weight)] / model.wide_scale
        if model.trees is not None:
            weight[:, model.num_outputs] = next(scores)
        start += len(weight)
        state[f"sparse_arch.embedding_bag_collection.embedding_bags.{config.name}.weight"] = weight
    num_bins = encoding.N * encoding.T
    bins, lines = fitted[start : start + num_bins], fitted[start + num_bins : -1]
    number_weights = model.numbers.weight.detach().cpu().clone()
    number_weights[:, :, 0] = bins.view(encoding.N, encoding.T) + lines[:, None] * encoding.widths.cpu()
    state["numbers.weight"] = number_weights
    # A zero head: before the first step, the model predicts as the regression does.
    state["mlp.head"] = torch.zeros_like(model.mlp.head)
    state["mlp.bias"] = torch.full_like(model.mlp.bias, float(fitted[-1]))
    return state

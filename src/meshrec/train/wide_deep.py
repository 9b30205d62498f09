"""Wide & deep, which `meshrec inspect` proposes, sized by the dataset."""

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
from meshrec.train.boosting import NUM_LEVELS, TreeSamples, boosted, scores_of
from meshrec.train.linear import Regression, chosen, columns, first_samples, fitted_again, regression
from meshrec.train.losses import BinaryCrossEntropy
from meshrec.train.recipe import ModelConfig, Recipe

if TYPE_CHECKING:
    from meshrec.data import Dataset
    from meshrec.train.linear import Labelled
    from meshrec.train.ranks import Ranks


_FOLDS = 4


@dataclass(frozen=True, kw_only=True)
class WideDeepConfig(ModelConfig):
    """Wide and deep: linear terms, products of pairs, and an ensemble of MLPs, with embeddings of numbers."""

    embedding_dim: int = 8
    """Width of every table; the first column is the linear weight."""
    table_std: float | None = 0.01
    """Standard deviation of the tables' initial values; if none, small values that depend on the number of
    rows.
    """
    layers: tuple[int, ...] = (128, 64)
    """Hidden layer sizes of the MLPs."""
    members: int = 1
    """Number of MLPs of the ensemble; they share most of their weights."""
    dropout: float = 0.3
    """Share of the hidden values that training drops."""
    id_dropout: float = 0.1
    """Share of the IDs' embeddings that training drops."""
    wide_scale: float = 1.0
    """Factor of the linear weights of IDs: with Adam, they learn that many times as fast as embeddings."""
    fit_wide: bool = False
    """Begin with the linear weights of a logistic regression; the embeddings learn what it cannot tell."""
    fit_trees: int = 0
    """Number of boosted trees, at most, beside the regression of fit_wide; 300 are enough. They need
    LightGBM: pip install "meshrec[lightgbm]".
    """
    shrinkage: float = 0.0
    """L2 penalty of each row of a table, over the whole training data: what occurs rarely stays near 0."""

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
        if self.fit_trees and not self.fit_wide:
            raise ValueError(
                f"model.fit_trees is {self.fit_trees}, and model.fit_wide is False: trees learn what fitted "
                "linear weights leave over. Take model.fit_wide True, or fit_trees 0."
            )

    def build(self, dataset: "Dataset") -> nn.Module:
        """Build the model, with its tables on ``meta``."""
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
    def start(self, model: nn.Module, recipe: Recipe, dataset: "Dataset", ranks: "Ranks") -> bool:
        """Fit linear weights and trees on the first rank, if ``fit_wide`` asks for it, for all ranks.

        Raises:
            ValueError: the loss is not `BinaryCrossEntropy`, or the tables' weight decay would change scores.
            ModuleNotFoundError: there are trees, and LightGBM is not installed.
        """
        if not self.fit_wide:
            return False
        if not isinstance(recipe.loss, BinaryCrossEntropy):
            raise ValueError(
                f"model.fit_wide is True, and the loss is {type(recipe.loss).__name__}: a logistic "
                "regression learns one label, 0 or 1. Take BinaryCrossEntropy, or model.fit_wide False."
            )
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
        found = ranks.share(_fitted(wide, dataset, seed) if ranks.is_first else None)
        model.load_state_dict(_first_state(wide, found, seed), strict=False)
        if wide.trees is not None:
            wide.trees.grow(found.trees)
        return True

    def _shrink(self, tables: EmbeddingBagCollection, dataset: "Dataset") -> list[float]:
        """Return the penalty of a lookup by feature: its row's, divided by how often a row is looked up."""
        if not self.shrinkage:
            return []
        lengths = {each.name: max(each.average_length, 1e-6) for each in dataset.features}
        num_samples = dataset.train.num_samples
        return [
            self.shrinkage * config.num_embeddings / (num_samples * sum(map(lengths.__getitem__, names)))
            for config in tables.embedding_bag_configs()
            for names in [config.feature_names]
            for _ in names
        ]


class _Fitted(NamedTuple):
    """The first values of a model."""

    linear: Tensor
    """A weight per row of each table, per bin and per number, and the bias; hashed tables have none."""
    scores: list[Tensor]
    """The scores of each table's rows, without hashed tables; none without trees."""
    trees: list[Branch | Leaf]


def _fitted(model: WideDeep, dataset: "Dataset", seed: int) -> _Fitted:
    """Fit the linear weights, and trees if the model has them, on the first training samples."""
    train = first_samples(dataset.train)
    others = None if dataset.validation is None else first_samples(dataset.validation)

    def labelled(samples: Batch) -> "Labelled":
        encoding = model.numbers.encoding
        shares = encoding(samples.dense.to(encoding.scale.device)).cpu()
        # A line through all bins, beside a weight per bin: the penalty then prefers straight lines.
        dense = torch.cat([shares.flatten(1), (shares * encoding.widths.cpu()).sum(-1)], dim=1)
        return columns(dataset, samples, dense, shared=True), samples.labels.double().numpy()

    learnt = labelled(train)
    chooses = None if others is None else labelled(others)
    found = regression(learnt, chooses)
    linear = torch.from_numpy(found.weights)
    if model.trees is None:
        return _Fitted(linear.float(), [], [])
    # Samples that choose the number of trees must not be in the scores that trees split.
    learns = torch.from_numpy(~chosen(len(train)) | (others is not None))
    scores = _scores(dataset, train, learns)

    def judged(samples: Batch, matrix: Any) -> TreeSamples:
        logits = torch.from_numpy(matrix @ found.weights)
        return TreeSamples(_inputs(dataset, samples, scores), samples.labels, logits)

    if others is None or chooses is None:
        judges = judged(train, learnt[0]).where(~learns)
    else:
        judges = judged(others, chooses[0])
    crossed = _crossed(dataset, train, learnt, found, learns).where(learns)
    share, bias, trees = boosted(crossed, judges, model.trees.num_trees, seed=seed)
    linear *= share
    linear[-1] += bias
    return _Fitted(linear.float(), scores, trees)


def _crossed(
    dataset: "Dataset", samples: Batch, learnt: "Labelled", found: Regression, learns: Tensor
) -> TreeSamples:
    """Return training samples with the scores and logits that the other folds of them give.

    Scores and weights that have seen a sample's own label say more about it than about new samples: trees
    would trust them too much.
    """
    data, labels = learnt
    folds = torch.arange(len(samples)) % _FOLDS
    inputs, logits = [], []
    for fold in range(_FOLDS):
        rest = learns & (folds != fold)
        weights = fitted_again(found, (data[rest.numpy()], labels[rest.numpy()]))
        inputs.append(_inputs(dataset, samples, _scores(dataset, samples, rest)))
        logits.append(torch.from_numpy(data @ weights))
    own = torch.arange(len(samples))
    return TreeSamples(torch.stack(inputs)[folds, own], samples.labels, torch.stack(logits)[folds, own])


def _scores(dataset: "Dataset", samples: Batch, learns: Tensor) -> list[Tensor]:
    """Return the scores of the rows of each table, from the samples where ``learns`` [B] is True."""
    found = []
    for table in dataset.tables(1):
        if table.keys is not None:
            continue
        jagged = [samples.sparse[name] for name in table.feature_names]
        owners = torch.cat([torch.arange(len(samples)).repeat_interleave(each.lengths()) for each in jagged])
        ids, counts = torch.cat([each.values() for each in jagged]), learns[owners]
        found.append(scores_of(ids[counts], samples.labels[owners[counts]], table.num_embeddings))
    return found


def _inputs(dataset: "Dataset", samples: Batch, scores: list[Tensor]) -> Tensor:
    """Return what trees split [B, N + F]: numbers, and scores of IDs, pooled as the tables do; 0 for hashed
    tables.
    """
    inputs, rest = [samples.dense], iter(scores)
    for table in dataset.tables(1):
        of_rows = None if table.keys is not None else next(rest)[:, None]
        for name in table.feature_names:
            jagged = samples.sparse[name]
            if of_rows is None:
                inputs.append(torch.zeros(len(samples), 1))
                continue
            firsts, mode = jagged.offsets()[:-1], table.pooling.value.lower()
            inputs.append(nn.functional.embedding_bag(jagged.values(), of_rows, firsts, mode=mode))
    return torch.cat(inputs, dim=1)


def _first_state(model: WideDeep, found: _Fitted, seed: int) -> dict[str, Tensor]:
    """Return the fitted values of the parameters, and a deep part that adds 0."""
    state: dict[str, Tensor] = {}
    encoding, place, fitted, scores = model.numbers.encoding, 0, found.linear, iter(found.scores)
    for config in model.sparse_arch.embedding_bag_collection.embedding_bag_configs():
        if config.keys is not None:
            continue
        weight = torch.empty(config.num_embeddings, config.embedding_dim)
        init_table(weight, table=config.name, init_fn=config.init_weight, seed=seed)
        weight[:, 0] = fitted[place : place + len(weight)] / model.wide_scale
        if model.trees is not None:
            weight[:, model.num_outputs] = next(scores)
        place += len(weight)
        state[f"sparse_arch.embedding_bag_collection.embedding_bags.{config.name}.weight"] = weight
    num_bins = encoding.N * encoding.T
    bins, lines = fitted[place : place + num_bins], fitted[place + num_bins : -1]
    numbers = model.numbers.weight.detach().cpu().clone()
    numbers[:, :, 0] = bins.view(encoding.N, encoding.T) + lines[:, None] * encoding.widths.cpu()
    state["numbers.weight"] = numbers
    state["mlp.head"] = torch.zeros_like(model.mlp.head)
    state["mlp.bias"] = torch.full_like(model.mlp.bias, float(fitted[-1]))
    return state

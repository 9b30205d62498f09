"""Wide & deep, which `meshrec inspect` proposes, sized by the dataset."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from typing_extensions import override

from meshrec.models import WideDeep
from meshrec.modules import EmbeddingBagCollection
from meshrec.tables.initial import init_table
from meshrec.train.architectures import tables_on_meta
from meshrec.train.linear import columns, first_samples, regression
from meshrec.train.losses import BinaryCrossEntropy
from meshrec.train.recipe import ModelConfig, Recipe

if TYPE_CHECKING:
    from meshrec.data import Dataset, Reader
    from meshrec.train.linear import Labelled
    from meshrec.train.ranks import Ranks


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
        )

    @override
    def start(self, model: nn.Module, recipe: Recipe, dataset: "Dataset", ranks: "Ranks") -> bool:
        """Fit the linear weights on the first rank, if ``fit_wide`` asks for it, and load them on all ranks.

        Raises:
            ValueError: the loss is not `BinaryCrossEntropy`.
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
        fitted = ranks.share(_fitted(wide, dataset) if ranks.is_first else None)
        model.load_state_dict(_with_linear_weights(wide, fitted, recipe.training.seed), strict=False)
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


def _fitted(model: WideDeep, dataset: "Dataset") -> Tensor:
    """Return a weight per row of each table, per bin and per number, and the bias."""

    def labelled(reader: "Reader") -> "Labelled":
        samples = first_samples(reader)
        encoding = model.numbers.encoding
        shares = encoding(samples.dense.to(encoding.scale.device)).cpu()
        # A line through all bins, beside a weight per bin: the penalty then prefers straight lines.
        dense = torch.cat([shares.flatten(1), (shares * encoding.widths.cpu()).sum(-1)], dim=1)
        return columns(dataset, samples, dense, shared=True), samples.labels.double().numpy()

    judged = None if dataset.validation is None else labelled(dataset.validation)
    return torch.from_numpy(regression(labelled(dataset.train), judged)).float()


def _with_linear_weights(model: WideDeep, fitted: Tensor, seed: int) -> dict[str, Tensor]:
    """Return first values of the parameters with these linear weights, and with a deep part that adds 0."""
    state: dict[str, Tensor] = {}
    encoding, place = model.numbers.encoding, 0
    for config in model.sparse_arch.embedding_bag_collection.embedding_bag_configs():
        if config.keys is not None:
            continue
        weight = torch.empty(config.num_embeddings, config.embedding_dim)
        init_table(weight, table=config.name, init_fn=config.init_weight, seed=seed)
        weight[:, 0] = fitted[place : place + len(weight)] / model.wide_scale
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

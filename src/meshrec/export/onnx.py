"""ONNX files of dense models: plain operators, with tables and layers as initializers.

[Note: ONNX]

A file takes ``dense`` [B, D], and per feature ``NAME.values``, int64 [N], and ``NAME.lengths``, int64 [B]. It
returns ``scores`` [B], or ``vectors`` [B, V]. Requests with raw values are for packages: encode values with
`meshrec.data.raw_values.RawValues`.

ONNX has no operator for jagged bags. The sum of a bag is a ``ScatterElements`` of gathered rows, so a file is
slower than a package. A negative ID counts from the table end in ONNX, but is an error in a package.
Models that need other MeshRec operators cannot be exported: models with hashed or quantized tables, and
history models.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from meshrec.data.faults import needs
from meshrec.export.whole_tables import with_whole_tables
from meshrec.modules import DataType, EmbeddingBagCollection, PoolingType
from meshrec.modules.embedding_modules import TableCollection
from meshrec.ops.interaction.naive import dot_interaction
from meshrec.quant.quantize import copy_except
from meshrec.sparse import KeyedJaggedTensor, KeyedTensor

# B samples, N IDs in a feature, D width, V vector width

DENSE, VALUES, LENGTHS = "dense", ".values", ".lengths"
# If initializers take more bytes, they go to a second file, because a protobuf message has at most 2 GiB.
_MAX_INITIALIZER_BYTES = 1 << 30
_REMEDY = "Export a package instead (`meshrec export` without --format onnx)."


def export_onnx(
    model: nn.Module,
    path: str | Path,
    *,
    features: Sequence[str],
    num_dense: int,
    scores: Callable[[Tensor], Tensor] | None = torch.sigmoid,
) -> Path:
    """Write a model as an ONNX file; see [Note: ONNX].

    Args:
        model: called as ``model(dense [B, num_dense], sparse)``; returns logits, [B] or [B, 1].
        path: new file, ending in .onnx, which must not exist yet. Initializers above 1 GiB go into a
            second file in the same folder.
        features: keys in ``sparse``.
        num_dense: dense input columns.
        scores: maps logits [B] to scores; None: the model returns vectors [B, V].

    Returns:
        The path.

    Raises:
        ValueError: the file exists already, or ONNX has no operators for the model.
        ModuleNotFoundError: onnxscript is missing.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        raise ValueError(f"{path} must end in .onnx. Name such a file.")
    if path.exists():
        raise ValueError(f"{path} exists already. Name another file, or remove it.")
    needs("onnxscript", "onnx")
    # In evaluation mode, so that dropout is not exported.
    scores = _sigmoid if scores is torch.sigmoid else scores
    program = OnnxModel(with_whole_tables(model), features, scores).eval()
    num_bytes = sum(tensor.nbytes for tensor in (*program.parameters(), *program.buffers()))
    batch = 5
    any_size = {0: torch.export.Dim.DYNAMIC}
    dense = torch.zeros(batch, num_dense)
    values, lengths = [], []
    # All sizes differ, because torch.export takes equal sizes for the same dimension.
    for num_ids, _ in enumerate(features, start=batch + 2):
        lengths.append(torch.tensor([num_ids - batch + 1] + [1] * (batch - 1)))
        values.append(torch.zeros(num_ids, dtype=torch.int64))
    inputs = (dense, values, lengths)
    any_sizes = [any_size for _ in features]
    with torch.no_grad(), warnings.catch_warnings():
        # Torch's exporter copies tree specs, whose class is deprecated.
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        exported = torch.export.export(
            program, inputs, dynamic_shapes=(any_size, any_sizes, list(any_sizes)), strict=False
        )
        # ONNX lacks this operator, so it is replaced by its plain torch version.
        exported = exported.run_decompositions({torch.ops.meshrec.dot_interaction.default: dot_interaction})
        targets = {str(node.target) for node in exported.graph.nodes}
        if unknown := sorted(target for target in targets if target.startswith("meshrec.")):
            raise ValueError(f"ONNX has no operators for {unknown} of this model. {_REMEDY}")
        written = torch.onnx.export(
            exported,
            dynamo=True,
            input_names=[DENSE] + [name + part for part in (VALUES, LENGTHS) for name in features],
            output_names=["vectors" if scores is None else "scores"],
            verbose=False,
        )
    assert written is not None
    written.save(path, external_data=num_bytes > _MAX_INITIALIZER_BYTES)
    return path


def _sigmoid(logits: Tensor) -> Tensor:
    """Return the sigmoid by other operators than ONNX's Sigmoid.

    In onnxruntime, Sigmoid has an absolute error of 6e-8, and is 0 for logits below -18
    (findings/onnxruntime_sigmoid_loses_rare_clicks.sh). This has the relative error of float32.
    """
    return torch.reciprocal(1 + torch.exp(-logits))


class OnnxModel(nn.Module):
    """A model as a function of plain tensors, in which table lookups use only operators that ONNX has.

    Args:
        model: model with unsharded tables; see `export_onnx`.
        features: feature names, in the order of the inputs.
        scores: see `export_onnx`.

    Raises:
        ValueError: ONNX has no operators for a table.
    """

    def __init__(
        self, model: nn.Module, features: Sequence[str], scores: Callable[[Tensor], Tensor] | None
    ) -> None:
        super().__init__()
        collections = {
            id(child): _OnnxEmbeddingBags(child)
            for child in model.modules()
            if isinstance(child, TableCollection)
        }
        self._bags = list(collections.values())
        self.model = collections.get(id(model)) or copy_except(model, collections)
        self._features, self._scores = list(features), scores

    def forward(self, dense: Tensor, values: list[Tensor], lengths: list[Tensor]) -> Tensor:
        """Return scores [B], or vectors [B, V]; see `export_onnx`.

        Args:
            dense: dense features [B, F].
            values: IDs per feature, [N].
            lengths: IDs per sample for each feature, [B].
        """
        bags = dict(zip(self._features, zip(values, lengths, strict=True), strict=True))
        for collection in self._bags:
            collection.bags = bags
        sparse = KeyedJaggedTensor(
            self._features, torch.cat(values), lengths=torch.cat(lengths), stride=dense.shape[0]
        )
        outputs: Tensor = self.model(dense, sparse)
        if self._scores is None:
            return outputs.float()
        return self._scores(outputs.reshape(-1).float())


class _OnnxEmbeddingBags(nn.Module):
    """EmbeddingBagCollection replacement that pools with ONNX operators only.

    Raises:
        ValueError: ONNX has no operators for the collection or a table.
    """

    # Set by `OnnxModel` before every call. They cannot be read from the KeyedJaggedTensor: ONNX would have to
    # slice its concatenated IDs at data-dependent positions.
    bags: Mapping[str, tuple[Tensor, Tensor]]
    """IDs [N] and lengths [B] by feature."""

    def __init__(self, collection: TableCollection) -> None:
        super().__init__()
        if not isinstance(collection, EmbeddingBagCollection):
            raise ValueError(
                f"ONNX has no operators for histories, which {type(collection).__name__} looks up. {_REMEDY}"
            )
        if collection.is_weighted():
            raise ValueError(f"ONNX files take no weights of IDs, and this model has some. {_REMEDY}")
        # A feature in several tables gets the name feature@table, as in EmbeddingBagCollection.
        readers = [name for config in collection.embedding_bag_configs() for name in config.feature_names]
        # For every output: its name, the feature, the attribute with the table, and whether to pool by mean.
        self._lookups: list[tuple[str, str, str, bool]] = []
        weights = {config.name: weight for config, weight in collection.tables().values()}
        for number, config in enumerate(collection.embedding_bag_configs()):
            if config.keys is not None or config.data_type is not DataType.FP32:
                kind = "hashed keys" if config.keys is not None else f"{config.data_type.value} rows"
                raise ValueError(f"ONNX has no operators for table {config.name!r} with {kind}. {_REMEDY}")
            self.register_parameter(
                f"table{number}", nn.Parameter(weights[config.name].detach(), requires_grad=False)
            )
            for feature in config.feature_names:
                name = feature if readers.count(feature) == 1 else f"{feature}@{config.name}"
                is_mean = config.pooling is PoolingType.MEAN
                self._lookups.append((name, feature, f"table{number}", is_mean))

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return the pooled rows by feature. IDs are taken from ``bags`` instead of ``features``."""
        pooled = []
        for _, feature, table, is_mean in self._lookups:
            values_N, lengths_B = self.bags[feature]
            rows_ND = getattr(self, table).index_select(0, values_N)
            # The bag index per ID: the number of bags ending at or before it.
            ends_B = lengths_B.cumsum(0)
            marks = values_N.new_zeros(values_N.shape[0] + 1).scatter_add(0, ends_B, torch.ones_like(ends_B))
            bag_N = marks.cumsum(0)[: values_N.shape[0]]
            sums_BD = rows_ND.new_zeros(lengths_B.shape[0], rows_ND.shape[1])
            sums_BD = sums_BD.scatter_add(0, bag_N[:, None].expand_as(rows_ND), rows_ND)
            if is_mean:
                sums_BD = sums_BD / lengths_B.clamp(min=1)[:, None]
            pooled.append(sums_BD)
        names = [name for name, *_ in self._lookups]
        return KeyedTensor.unchecked(
            names, [vectors_BD.shape[1] for vectors_BD in pooled], torch.cat(pooled, dim=1), 1
        )

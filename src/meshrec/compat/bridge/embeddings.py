"""Tables and their collections with TorchRec's arguments, and TorchRec's draws of the first weights."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshrec.compat.bridge.adapted import Adapted
from meshrec.modules import embedding_configs, embedding_modules
from meshrec.modules.embedding_configs import DataType, PoolingType

_NOT_HERE = {
    "num_embeddings_post_pruning": None,
    "need_pos": False,
    "input_dim": None,
    "total_num_buckets": None,
    "use_virtual_table": False,
    "virtual_table_eviction_policy": None,
    "enable_embedding_update": False,
    "stash_weights": False,
}


def _config(
    num_embeddings: int,
    embedding_dim: int,
    name: str = "",
    data_type: DataType = DataType.FP32,
    feature_names: Sequence[str] = (),
    weight_init_max: float | None = None,
    weight_init_min: float | None = None,
    num_embeddings_post_pruning: int | None = None,
    init_fn: Callable[[Tensor], object] | None = None,
    **more: Any,
) -> dict[str, Any]:
    given = {"num_embeddings_post_pruning": num_embeddings_post_pruning, **more}
    for argument, value in given.items():
        if argument not in _NOT_HERE:
            raise TypeError(f"an embedding config has no argument {argument!r}. Leave it out.")
        if value != _NOT_HERE[argument]:
            raise ValueError(
                f"table {name!r}: MeshRec has no {argument}, got {value!r}. Leave it out: "
                "docs/from-torchrec.md says what is nearest."
            )
    return {
        "num_embeddings": num_embeddings,
        "embedding_dim": embedding_dim,
        "name": name,
        "data_type": data_type,
        # TorchRec's collections read a feature of the table's name where none is given.
        "feature_names": list(feature_names) or [name],
        "weight_init_max": weight_init_max,
        "weight_init_min": weight_init_min,
        "init_fn": init_fn,
    }


def _bag_config(
    *args: Any, pooling: PoolingType = PoolingType.SUM, **kwargs: Any
) -> embedding_configs.EmbeddingBagConfig:
    """TorchRec's ``EmbeddingBagConfig(num_embeddings, embedding_dim, name="", ...)``."""
    return embedding_configs.EmbeddingBagConfig(**_config(*args, **kwargs), pooling=pooling)


def _sequence_config(*args: Any, **kwargs: Any) -> embedding_configs.EmbeddingConfig:
    """TorchRec's ``EmbeddingConfig(num_embeddings, embedding_dim, name="", ...)``."""
    return embedding_configs.EmbeddingConfig(**_config(*args, **kwargs))


def _bag_collection(
    tables: Sequence[embedding_configs.EmbeddingBagConfig],
    is_weighted: bool = False,
    device: torch.device | str | None = None,
) -> embedding_modules.EmbeddingBagCollection:
    """TorchRec's ``EmbeddingBagCollection(tables, is_weighted=False, device=None)``.

    With a seed it has the weights that TorchRec's has: there every table is drawn twice, and the first draws
    of all tables come before the second ones.
    """
    _skip_draws(tables, device)
    return embedding_modules.EmbeddingBagCollection(tables, is_weighted, device)


def _sequence_collection(
    tables: Sequence[embedding_configs.EmbeddingConfig],
    device: torch.device | str | None = None,
    need_indices: bool = False,
    use_gather_select: bool = False,
    use_gather_select_per_sharding: dict[str, bool] | None = None,
) -> embedding_modules.EmbeddingCollection:
    """TorchRec's ``EmbeddingCollection(tables, device=None, ...)``, with the weights that it has for a
    seed."""
    if need_indices:
        raise ValueError(
            "MeshRec's EmbeddingCollection does not return the ids as weights (need_indices). They are the "
            "values of the input: features[name].values()."
        )
    collection = embedding_modules.EmbeddingCollection(tables, torch.device("meta"))
    where = torch.get_default_device() if device is None else torch.device(device)
    if where.type == "meta":
        return collection
    collection.to_empty(device=where)
    for config, weight in collection.tables().values():
        _skip_draws([config], where)
        config.init_weight(weight)
    return collection


def _skip_draws(
    tables: Sequence[embedding_configs.BaseEmbeddingConfig], device: torch.device | str | None
) -> None:
    """Moves the random numbers on by the normal draws with which torch's own tables start."""
    if device is not None and torch.device(device).type == "meta":
        return
    for config in tables:
        shape = (config.num_embeddings, config.embedding_dim)
        torch.empty(shape, dtype=config.data_type.dtype, device=device).normal_()


EmbeddingBagConfig = Adapted(embedding_configs.EmbeddingBagConfig, _bag_config)
EmbeddingConfig = Adapted(embedding_configs.EmbeddingConfig, _sequence_config)
EmbeddingBagCollection = Adapted(embedding_modules.EmbeddingBagCollection, _bag_collection)
EmbeddingCollection = Adapted(embedding_modules.EmbeddingCollection, _sequence_collection)


def data_type_to_dtype(data_type: DataType) -> torch.dtype:
    """The torch dtype of a DataType."""
    return data_type.dtype


def dtype_to_data_type(dtype: torch.dtype) -> DataType:
    """The DataType of a torch dtype.

    Raises:
        ValueError: for a dtype that tables cannot have.
    """
    for data_type in DataType:
        if data_type.dtype == dtype:
            return data_type
    raise ValueError(f"tables have {[str(d.dtype) for d in DataType]}, got {dtype}. Choose one of these.")


def pooling_type_to_str(pooling_type: PoolingType) -> str:
    """``"sum"`` or ``"mean"``.

    Raises:
        ValueError: for NONE.
    """
    if pooling_type is PoolingType.NONE:
        raise ValueError("PoolingType.NONE pools nothing, so it has no word. Use an EmbeddingCollection.")
    return str(pooling_type.value).lower()

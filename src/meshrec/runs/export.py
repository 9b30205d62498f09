"""Export a run as a package: a folder with the exported model, from which a server answers requests."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.checkpoint import find_checkpoint, load
from meshrec.data import Dataset
from meshrec.data.features import Key
from meshrec.data.interactions import SEEN
from meshrec.data.log_columns import ITEM
from meshrec.data.logs import requests_of_histories, vocabulary_of
from meshrec.data.raw_values import RawValues
from meshrec.export.next_items import NextItemQuery, RankedItems
from meshrec.export.onnx import export_onnx
from meshrec.export.package import export
from meshrec.export.towers import Side, Tower, TowerQuery
from meshrec.export.whole_tables import allocate_rows
from meshrec.models import HistoryModel, TowerRanking
from meshrec.models.settings import copy_settings
from meshrec.modules import DataType
from meshrec.modules.embedding_modules import TableCollection
from meshrec.ops.index import mix
from meshrec.quant.collections import empty_like
from meshrec.quant.quantize import copy_except
from meshrec.runs.fitting import data_of_run, description_of_run, features_of
from meshrec.runs.recommending import ItemValues
from meshrec.runs.saved_recipe import load_recipe
from meshrec.tables.hashed.table import HashedTable
from meshrec.train.log_sources import LogSource
from meshrec.train.losses import Tasks
from meshrec.train.progress import origin_of
from meshrec.train.recipe import FittedSource, Recipe
from meshrec.train.run_folder import RunFolder


def export_run(
    run: RunFolder,
    folder: str | Path,
    *,
    step: int | None = None,
    last: bool = False,
    quantised: str | Path | None = None,
    tower: Side | None = None,
    shared: Sequence[str] = (),
    compile: bool = True,
    torchscript: bool = False,
    sign: str | Path | None = None,
    onnx: bool = False,
) -> Path:
    """Write a package (or an ONNX file) with the run's reported weights.

    The export runs in a single process with unsharded tables, whatever the run's plan and number of ranks. If
    the run fitted features, the package contains them, and requests have raw values instead of IDs.

    Args:
        run: the run.
        folder: the package folder, which must not exist.
        step, last: which weights to export if not the reported ones; see
            ``meshrec.checkpoint.find_checkpoint``.
        quantised: checkpoint from `meshrec.runs.quantize.quantize_run` with quantized tables for this run's
            model. If given, the package gets the weights in this checkpoint instead of the run's.
        tower: export only this tower of a two-tower model; the package then returns vectors.
        shared: names of ID features, such as user features, that all samples in a request may share. The
            name "dense" stands for all numeric values together. See `export`.
        compile, torchscript, sign: see `export`.
        onnx: write ``folder`` as an ONNX file instead; see [Note: ONNX] in ``export/onnx.py``.

    Returns:
        Path to the package folder or file.

    Raises:
        ValueError: the run's recipe or checkpoint is missing, the run has several labels, no record of its
            stream has had a value in a column, or the quantized checkpoint belongs to another run; also as
            for `export`.
    """
    recipe = load_recipe(run)
    # Checked first, before data and weights are loaded.
    if isinstance(recipe.loss, Tasks):
        raise ValueError(
            f"{run.path} learned {[task.name for task in recipe.loss.tasks]}, and a package gives one score. "
            "Export a module that returns one of them with meshrec.export.export, or use `meshrec predict`."
        )
    dataset = description_of_run(recipe.data, run)
    model = recipe.model.build(dataset)
    # Entries for the manifest, which tell where the weights come from.
    about: dict[str, Any] = {"run": run.name, "recipe": recipe.name}
    # Method with which a quantized checkpoint was rounded; None for unquantized weights.
    rounding = None
    if quantised is None:
        checkpoint = find_checkpoint(run.path, step=step, last=last)
        model = _allocate_rows(model)
        load(checkpoint, {"model": model})
        about |= origin_of(checkpoint)
    else:
        if step is not None or last:
            raise ValueError("a quantised checkpoint has weights of one step. Leave step and last out.")
        model, description = _load_quantised(model, Path(quantised), run.name)
        about |= {name: description.get(name) for name in ("step", "checkpoint", "published")}
        rounding = description["rounding"]
    # The model below may be replaced by a part of it; deltas keep the names of the trained model.
    trained = model
    # A package lists all items, so its item table must have a row per item.
    if isinstance(recipe.data, LogSource) and recipe.data.hashed is not None:
        model, recipe, dataset = _unhash_items(model, recipe, recipe.data, run, quantised)
    parts = _package_parts(model, recipe, run, dataset)
    if tower is None and isinstance(parts.model, TowerRanking) and isinstance(recipe.data, LogSource):
        parts = _query_tower_parts(parts, run, recipe.data)
    elif tower is not None:
        parts, about = _single_tower_parts(parts, tower), {**about, "tower": tower}
    if onnx:
        if parts.items is not None:
            raise ValueError(
                f"{run.path} learned next items, and an ONNX file has no operators for histories. Export a "
                "package instead (`meshrec export` without --format onnx)."
            )
        return export_onnx(
            parts.model,
            folder,
            features=parts.features,
            num_dense=parts.num_dense,
            scores=parts.scores,
        )
    _check_types(parts.raw, run)
    about |= _trained_names(trained, parts.model)
    return export(
        parts.model,
        folder,
        features=parts.features,
        num_dense=parts.num_dense,
        scores=parts.scores,
        shared=shared,
        raw=parts.raw,
        items=parts.items,
        rounding=rounding,
        about=about,
        compile=compile,
        torchscript=torchscript,
        sign=sign,
    )


def _trained_names(trained: nn.Module, exported: nn.Module) -> dict[str, Any]:
    """Return manifest entries that map weight names in the package to weight names in the trained model.

    A server needs the entries to apply deltas, which use the trained model's names. A package may have only
    a part of the model, such as a history encoder or a tower. Such a package uses other names, lacks some
    weights, and may have weights computed from others.

    Returns:
        Dict with ``trained_names``, the trained name by package name, and ``left_out``, the trained names of
        weights missing from the package. Empty if all names are equal.
    """
    # The same tensor object in both models is the same weight.
    names, weights = (
        {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        for model in (trained, exported)
    )
    if set(names.values()) == set(weights.values()):
        return {}
    return {
        "trained_names": {name: names[key] for key, name in weights.items() if key in names},
        "left_out": sorted(name for key, name in names.items() if key not in weights),
    }


class _PackageParts(NamedTuple):
    """Arguments of `meshrec.export.export` that depend on the model type.

    Attributes:
        model: module to export.
        features: names of the ID features in a request.
        num_dense: number of dense inputs.
        raw: conversion from raw request values to IDs; None: requests have IDs.
        scores: function from model outputs to scores; None: the outputs are returned as they are.
        items: catalog to recommend from; None unless the model recommends items.
    """

    model: nn.Module
    features: list[str]
    num_dense: int
    raw: RawValues | None
    scores: Callable[[Tensor], Tensor] | None
    items: RankedItems | None = None


def _package_parts(model: nn.Module, recipe: Recipe, run: RunFolder, dataset: Dataset) -> _PackageParts:
    """Return the package parts for a run's model, depending on the model type.

    A next-item model is reduced to the part that computes query vectors from histories, and the package gets
    the catalog of items to recommend. Any other model is exported as a whole.
    """
    if isinstance(model, TowerRanking) and isinstance(recipe.data, LogSource):
        return _tower_parts(model, recipe.data, run)
    if not isinstance(model, HistoryModel):
        features, raw = [feature.name for feature in dataset.features], _raw_values(recipe, run, dataset)
        return _PackageParts(model, features, dataset.num_dense, raw, recipe.loss.scores)
    if not isinstance(recipe.data, LogSource):
        raise ValueError(
            f"{run.path} was trained on {type(recipe.data).__name__}, and a package of next items needs a "
            "log. Train on meshrec.train.Log, or export a module of your own with meshrec.export.export."
        )
    fitted = features_of(run)
    query, catalog = NextItemQuery(model), ItemValues.of(recipe.data, fitted)
    raw = RawValues(
        *requests_of_histories(
            vocabulary_of(fitted, ITEM),
            history=recipe.data.history,
            times=model.features.times is not None,
        )
    )
    ids_I = torch.from_numpy(catalog.ids)
    # Scores for users without a history, whose query vector is 0.
    scores_I = model.new_user_scores(ids_I).numpy() if model.scores_new_users else None
    items = RankedItems.of(
        query,
        catalog.ids,
        catalog.values,
        new_user_scores_I=scores_I,
        trends_I=None if model.trends is None else model.trends(ids_I).numpy(),
        keep_seen=not recipe.data.exclude_seen,
    )
    return _PackageParts(query, raw.keys, 0, raw, None, items)


def _tower_parts(model: TowerRanking, log: LogSource, run: RunFolder) -> _PackageParts:
    """Return the package parts for a two-tower model trained on a log, with the features of both towers."""
    fitted, towers = features_of(run), model.model
    tower_features = {*towers.query_features, *towers.item_features}
    raw = RawValues(
        *requests_of_histories(
            vocabulary_of(fitted, ITEM),
            history=log.history,
            times=False,
            more=[
                vocabulary_of(fitted, feature.name)
                for feature in fitted.ids
                if feature.name in tower_features
            ],
        )
    )
    return _PackageParts(model, raw.keys, 0, raw, None)


def _query_tower_parts(parts: _PackageParts, run: RunFolder, log: LogSource) -> _PackageParts:
    """Reduce the package parts of a two-tower model to the query tower and a catalog to recommend from.

    The package has precomputed vectors for all items in the log instead of the item tower.
    """
    assert isinstance(parts.model, TowerRanking)
    assert parts.raw is not None
    catalog = ItemValues.of(log, features_of(run))
    query, trends = TowerQuery(parts.model, catalog.ids), parts.model.trends
    names = [name for name in parts.features if name in (*query.tower.features, SEEN)]
    # The stored item vectors are normalized already. Scores are divided by the temperature, as in training.
    items = RankedItems(
        catalog.ids,
        catalog.values,
        "item_vectors",
        False,
        1 / parts.model.similarity.options[1],
        keep_seen=not log.exclude_seen,
        trends_I=None if trends is None else trends(torch.from_numpy(catalog.ids)).numpy(),
    )
    return _PackageParts(query, names, 0, parts.raw.of(names, dense=False), None, items)


def _single_tower_parts(parts: _PackageParts, tower: Side) -> _PackageParts:
    """Reduce the package parts of a two-tower model to one tower, with only the features it reads."""
    model = Tower(parts.model, tower)
    features = [feature for feature in parts.features if feature in model.features]
    raw = None if parts.raw is None else parts.raw.of(features, dense=bool(model.num_dense))
    return _PackageParts(model, features, model.num_dense, raw, None)


def _unhash_items(
    model: nn.Module, recipe: Recipe, log: LogSource, run: RunFolder, quantised: str | Path | None
) -> tuple[nn.Module, Recipe, Dataset]:
    """Replace hashed item tables by tables with a row per vocabulary item, because a package lists all items.

    A hashed table assigns rows to item IDs as they occur. In the new tables, the vocabulary determines the
    row. The rows for missing and unknown items are copies of the hashed table's row for missing items.
    """
    if quantised is not None:
        raise ValueError(
            f"{run.path} has hashed keys for its items, and {quantised} their quantised rows, from which no "
            "table with a row for each item is made. Export the run without --quantised."
        )
    recipe, fitted = replace(recipe, data=replace(log, hashed=None)), features_of(run)  # type: ignore[arg-type]
    dataset = data_of_run(recipe.data, run)
    unhashed = _allocate_rows(recipe.model.build(dataset))
    item, key = vocabulary_of(fitted, ITEM), log.key
    assert key is not None
    # The ID under which the hashed table knows each row of the new table.
    ids_I = torch.full((item.rows,), Key.missing_key)
    ids_I[item.rows_of(item.vocabulary)] = torch.from_numpy(key.rows_of(item.vocabulary))
    # Hashed tables by parameter name, which is the same in both models.
    hashed = {
        f"{path}.{name}": child.hashed_tables()[config.name]
        for path, child in model.named_modules()
        if isinstance(child, TableCollection)
        for name, (config, _) in child.tables().items()
        if config.keys is not None
    }
    trained = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in unhashed.named_parameters():
            weight.copy_(_hashed_rows(hashed[name], ids_I) if name in hashed else trained[name])
        if isinstance(unhashed, HistoryModel) and unhashed.scores_new_users:
            assert isinstance(model, HistoryModel)
            unhashed.new_user_scores.scores_I.copy_(
                model.new_user_scores(ids_I[unhashed.new_user_scores.ids_I])
            )
        if isinstance(unhashed, HistoryModel | TowerRanking) and unhashed.trends is not None:
            assert isinstance(model, HistoryModel | TowerRanking)
            assert model.trends is not None
            unhashed.trends.trends_I.copy_(model.trends.trends_of(ids_I[unhashed.trends.ids_I]))
    copy_settings(model, unhashed)
    return unhashed, recipe, dataset


def _hashed_rows(table: HashedTable, ids_N: Tensor) -> Tensor:
    """Return the rows of a hashed table for IDs, fp32 [N, D].

    An ID without a row in the table gets the initial values of a new row for this ID.
    """
    rows = table.storage.initial.values(ids_N)
    slots = table.key_index.find(mix(ids_N, table.storage.keys.seed))
    is_alive = slots >= 0
    # A slot of -1 means that the table has no row for the ID.
    rows[is_alive] = table.store.gather(slots[is_alive], (0, rows.shape[1]))["weight"].float()
    return rows


def _allocate_rows(model: nn.Module) -> nn.Module:
    """Allocate uninitialized rows for the embedding tables of a model, which were built on the meta device.

    Return the given model, changed in place, if the rows of all tables are ordinary parameters. Otherwise,
    for example with rows in a file (`FileRows`), return a copy with a new embedding collection.
    """
    # Replacements by ID of the replaced module.
    memo: dict[int, nn.Module] = {}
    for child in model.modules():
        if not isinstance(child, TableCollection):
            continue
        configs = [config for config, _ in child.tables().values()]
        if all(config.storage is None for config in configs):
            child.to_empty(device=torch.device("cpu"))
            continue
        types = {config.name: config.data_type for config in configs}
        memo[id(child)] = collection = empty_like(child, types, child.bounds_check, child.output_dtype)
        allocate_rows(collection, configs)
    return memo.get(id(model)) or (copy_except(model, memo) if memo else model)


def _load_quantised(model: nn.Module, checkpoint: Path, run: str) -> tuple[nn.Module, dict[str, Any]]:
    """Load a quantized checkpoint into a quantized copy of the model.

    Args:
        model: the run's unquantized model. Table values are not read, so the tables may be on the meta
            device.

    Returns:
        The loaded model, and the checkpoint's entry ``quantised``; see ``quantised_about``.
    """
    state: dict[str, Any] = {"quantised": {}}
    load(checkpoint, state)
    # Loaded before the model, because it has the data types of the tables.
    description = state["quantised"]
    if description.get("run") != run:
        raise ValueError(
            f"{checkpoint} is of run {description.get('run')!r}, and {run!r} is to be exported. Name "
            "its own run."
        )
    types = {name: DataType[table["data_type"]] for name, table in description["tables"].items()}
    memo: dict[int, nn.Module] = {}
    for child in model.modules():
        if isinstance(child, TableCollection):
            collection = empty_like(child, types, child.bounds_check, child.output_dtype)
            allocate_rows(collection, [config for config, _ in child.tables().values()])
            memo[id(child)] = collection
    result = memo.get(id(model)) or copy_except(model, memo)
    load(checkpoint, {"model": result})
    return result, description


def _raw_values(recipe: Recipe, run: RunFolder, dataset: Dataset) -> RawValues | None:
    """Return the conversion from raw data columns to IDs, for requests with raw values.

    Return None if requests must have IDs: the data source cannot read table rows, or IDs have weights.
    """
    is_fitted = isinstance(recipe.data, FittedSource)
    if not is_fitted or dataset.arrow_schema is None or dataset.has_id_weights:
        return None
    return RawValues(features_of(run), dataset.arrow_schema)


def _check_types(raw: RawValues | None, run: RunFolder) -> None:
    """Raise ValueError if a column has had no value in the run's stream; see `ColumnTypes`.

    A guessed type would give other IDs than the values of later records.
    """
    untyped = [] if raw is None else [name for name, kind in raw.kinds.items() if kind == "other"]
    if untyped:
        raise ValueError(
            f"{run.path}: no record has had a value in the columns {untyped}. Their types are unknown, and a "
            "package needs them for requests. Export a later checkpoint, when records have values, or train "
            "without the features."
        )

"""A rank that was started differently, for ``test_same_start.py``."""

import os
from dataclasses import replace

from meshrec.runs import same_start
from meshrec.runs.same_start import compare_ranks, describe_start
from meshrec.train import join


def compare_with_a_change(recipe, kind):
    """Rank 1 differs; what each rank is told."""
    ranks, options = join("cpu"), {"device": "cpu"}
    before = dict(os.environ)
    changed = bool(ranks.rank)
    try:
        versions = dict(same_start.versions())
        if changed and kind.startswith("version of "):
            versions[kind.removeprefix("version of ")] = "another"
        if changed and kind.startswith("variable "):
            os.environ[kind.removeprefix("variable ")] = "1"
        if changed and kind == "option rank_timeout":
            options["rank_timeout"] = 3.0
        if changed and kind == "training.seed":
            recipe = replace(recipe, training=replace(recipe.training, seed=7))
        real, same_start.versions = same_start.versions, lambda: versions
        try:
            mine = describe_start(recipe, "dlrm_benchmark", options)
        finally:
            same_start.versions = real
        compare_ranks(ranks, mine, "were not started alike")
    except ValueError as error:
        return str(error)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return None

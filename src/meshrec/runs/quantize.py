"""Quantize the embedding tables of a run's model, and save the result as a checkpoint."""

from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from meshrec.checkpoint import load, save
from meshrec.metrics.binary import log_losses
from meshrec.modules import DataType
from meshrec.quant.budget import Choice, choose_precision
from meshrec.quant.from_checkpoint import quantised_about
from meshrec.quant.page import html_page
from meshrec.quant.precision import Rounding
from meshrec.quant.quantize import quantize
from meshrec.runs.fitting import data_of_run
from meshrec.runs.scoring import TrainedModel, load_trained_model
from meshrec.train.evaluation import outputs_of
from meshrec.train.progress import origin_of
from meshrec.train.ranks import Ranks
from meshrec.train.run_folder import RunFolder


class QuantisedRun(NamedTuple):
    """Result of `quantize_run`.

    Attributes:
        model: the quantized model.
        choice: data types selected per table within the loss budget; None without a budget.
    """

    model: nn.Module
    choice: Choice | None


def quantize_run(
    run: RunFolder,
    ranks: Ranks,
    folder: str | Path,
    *,
    max_loss: float | None = None,
    weights: DataType = DataType.INT8,
    rounding: Rounding = "search",
    step: int | None = None,
    last: bool = False,
    measured: RunFolder | None = None,
) -> QuantisedRun:
    """Quantize the tables of a run's model with the reported weights, and save the model as a checkpoint.

    The checkpoint has the entries ``model`` and ``quantised`` (a description; see ``quantised_about``). With
    a loss budget, the folder also contains a page ``report.html``.

    Args:
        run: the run.
        ranks: the ranks of a single process.
        folder: folder for the new checkpoint; it must not exist.
        max_loss: loss budget. It is the maximum relative increase of the log loss on the run's validation
            data, such as 0.0002 for 0.02 %. Data types are then chosen per table (see ``choose_precision``).
            None: all tables get the data type ``weights``.
        weights: data type for all tables, if no budget is given.
        rounding: rounding method; see ``quantize``.
        step: training step of the checkpoint to quantize; None: the checkpoint with the reported weights.
        last: whether to quantize the run's last checkpoint instead of the reported weights.
        measured: run on whose model the loss is measured. Needed if ``run`` is the refit of that run on all
            rows, which has learned from the validation data. None: measure on ``run``.

    Raises:
        ValueError: a budget is given but the run has no validation data; the folder exists; or as for
            ``quantize``.
    """
    folder = Path(folder)
    # Checked before the model is loaded, which may take long.
    if folder.exists():
        raise ValueError(f"{folder} exists. Name another folder, or remove it.")
    trained = load_trained_model(run, step=step, last=last)
    choice = None
    if max_loss is None:
        quantised = quantize(trained.model, weights, rounding=rounding)
    else:
        # For a refit, data types are chosen on the first fit, and applied to the refit.
        judged = run if measured is None else measured
        model = trained if judged.path == run.path else load_trained_model(judged)
        choice = _choose_precisions(model, judged, ranks, max_loss, rounding)
        quantised = quantize(
            trained.model, per_table=choice.types, output_dtype=DataType.FP32, rounding=rounding
        )
    about = quantised_about(quantised, run=run.name, rounding=rounding, **origin_of(trained.checkpoint))
    if choice is not None:
        about |= {"budget": choice.budget, "rise": choice.rise.mean, "rise_bound": choice.rise.bound}
    save(folder, {"model": quantised, "quantised": about})
    if choice is not None:
        (folder / "report.html").write_text(html_page(choice, f"Precisions of {run.name}"))
    return QuantisedRun(quantised, choice)


def _choose_precisions(
    trained: TrainedModel, run: RunFolder, ranks: Ranks, max_loss: float, rounding: Rounding
) -> Choice:
    """Choose a data type per table. The run's validation loss rises by at most the fraction ``max_loss``."""
    reader = data_of_run(trained.recipe.data, run).validation
    if reader is None:
        raise ValueError(
            f"{trained.checkpoint} is of a run without validation data to hold the budget on. Train with "
            "some, or give weights."
        )

    def losses(scored: nn.Module) -> Tensor:
        """Return a model's log loss per validation sample, float64 [N], scaled by the sample weights."""
        logits, labels, weights = outputs_of(scored, reader, ranks)
        values = log_losses(logits.double(), labels.double())
        # The budget limits the plain mean of these values; scaled like this, it is the weighted mean.
        return values if weights is None else values * weights / weights.double().mean()

    return choose_precision(trained.model, losses, max_loss=max_loss, rounding=rounding)


def quantised_run_name(checkpoint: str | Path) -> str | None:
    """Return the name of the run from which `quantize_run` made a checkpoint; ``NAME/final`` for a refit.

    Return None if the checkpoint does not name a run.
    """
    state: dict[str, dict[str, str]] = {"quantised": {}}
    load(checkpoint, state)
    return state["quantised"].get("run")

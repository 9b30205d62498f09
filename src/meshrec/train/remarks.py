"""Write remarks on a run's result, with a next step for the user."""

import math
from collections.abc import Mapping
from typing import Any

from meshrec.metrics.named import leading_metric, metric_title
from meshrec.train.recipe import Training

_CHANCE_DEVIATIONS = 2.0
"""An AUC within this many standard deviations of 0.5 counts as chance."""


def remarks(summary: Mapping[str, Any], training: Training, num_evaluations: int) -> list[str]:
    """Return remarks for the user on a finished run.

    Reasons for a remark: the result is not better than chance, the run was still improving at the end, or
    only a sample of users was evaluated.

    Args:
        summary: ``summary.json`` content.
        training: training options.
        num_evaluations: number of validation evaluations.
    """
    # Other runs have no final result to remark on.
    if summary["state"] != "finished":
        return []
    messages = []
    for data in ("test", "validation"):
        text = _chance_remark(data, summary[data], summary["curves"].get(data))
        if text is not None:
            messages.append(text)
            # One remark is enough: test data first, then validation data.
            break
    last = summary["step"]
    limited = summary["num_steps"] == last  # neither early stopping nor the user ended it
    if not messages and limited and summary["best_step"] == last and num_evaluations > 1:
        by = metric_title(leading_metric(summary["validation"]) or "loss")
        option = f"--training.epochs {2 * training.epochs}"
        if training.max_steps is not None and training.max_steps == last:
            option = f"--training.max-steps {2 * last}"
        messages.append(
            f"the last step is the best by validation {by}: it was still improving. Train longer: {option}."
        )
    sample = _sample_remark(summary)
    return messages if sample is None else [*messages, sample]


def winner(summary: Mapping[str, Any]) -> str | None:
    """Return a sentence that compares the model with the best baseline, or None without baselines.

    The comparison uses the leading metric, on test data if there is some, else on validation data.
    """
    for data, key in (("test", "baselines_test"), ("validation", "baselines")):
        # The metric that selects the best weights, such as AUC.
        lead = leading_metric(summary[data])
        rivals = (
            {name: metrics[lead] for name, metrics in summary[key].items() if lead in metrics} if lead else {}
        )
        if lead is None or not rivals:
            continue
        best, ours = max(rivals, key=lambda name: rivals[name]), summary[data][lead]
        result = f"{data} {metric_title(lead)}"
        if ours >= rivals[best]:
            return f"{summary['recipe']} won: {result} {ours:.4f}; next is {best} with {rivals[best]:.4f}"
        return f"{best} won: {result} {rivals[best]:.4f}; {summary['recipe']} has {ours:.4f}"
    return None


def _sample_remark(summary: Mapping[str, Any]) -> str | None:
    """Return a remark if the test metrics are from a sample of all users, else None.

    The remark has a 95 % confidence interval for every recall. A recall is a share of users, so the interval
    is the normal approximation for a share.
    """
    if "test" not in summary.get("evaluated_users", {}):
        return None
    num_evaluated, num_held_out = summary["evaluated_users"]["test"]
    spans = [
        f"{metric_title(name)} {share:.4f} +- {1.96 * math.sqrt(share * (1 - share) / num_evaluated):.4f}"
        for name, share in summary["test"].items()
        if name.startswith("recall@")
    ]
    return (
        f"the test metrics are from {num_evaluated:,} of {num_held_out:,} users, drawn at random: "
        f"{', '.join(spans)} (95 %). For all users: --data.evaluated-users None."
    )


def _chance_remark(
    data: str, metrics: Mapping[str, float], samples: Mapping[str, float] | None
) -> str | None:
    """Return a remark if the AUC cannot be distinguished from that of random scores, else None.

    The standard deviation of a random AUC is that of the Mann-Whitney statistic (Hanley and McNeil, "The
    meaning and use of the area under a ROC curve", 1982).
    """
    if "auc" not in metrics or not samples or not samples["positive"] or not samples["negative"]:
        return None
    positive, negative = samples["positive"], samples["negative"]
    # Standard deviation of the AUC of random scores, from the Mann-Whitney U test.
    deviation = math.sqrt((positive + negative + 1) / (12 * positive * negative))
    if metrics["auc"] > 0.5 + _CHANCE_DEVIATIONS * deviation:
        return None
    return (
        f"the {data} AUC of {metrics['auc']:.4f} is no better than chance: with {positive:,.0f} positive and "
        f"{negative:,.0f} negative samples, a guess has 0.5 +- {_CHANCE_DEVIATIONS * deviation:.4f}. Look at "
        "the label and the features (`meshrec inspect`), or give more data."
    )

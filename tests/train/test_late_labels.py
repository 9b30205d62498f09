"""Training on labels that come later: calibrated as training on final labels, although rows come at once."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from meshrec.data import LabelJoin
from meshrec.train import BinaryCrossEntropy

HOUR = 3600
NUM, NUM_ADS, DAYS = 200_000, 20, 10
BATCH = 500


@pytest.fixture(scope="module")
def streams():
    """Ten days of impressions and clicks, in calls of an hour. Half of the clicks come after one hour."""
    rng = np.random.default_rng(0)
    rates = rng.uniform(0.02, 0.5, NUM_ADS)
    times = np.sort(rng.uniform(0, DAYS * 24 * HOUR, NUM)).astype(np.int64)
    ads = rng.integers(0, NUM_ADS, NUM)
    # Exponential delays with a median of one hour: one click in 2 ** 24 comes after a day.
    delays = rng.exponential(HOUR / np.log(2), NUM).astype(np.int64)
    clicked = np.flatnonzero(rng.random(NUM) < rates[ads])
    clicked = clicked[np.argsort(times[clicked] + delays[clicked], kind="stable")]
    shown = {"request": np.arange(NUM), "ts": times, "ad": ads}
    clicks = {"request": clicked, "ts": times[clicked] + delays[clicked]}

    def calls():
        for hour in range(24 * DAYS):
            parts = []
            for stream in (shown, clicks):
                start, stop = np.searchsorted(stream["ts"], [hour * HOUR, (hour + 1) * HOUR])
                parts.append(pa.table({name: values[start:stop] for name, values in stream.items()}))
            yield parts

    return calls


def mean_prediction(streams, window_hours, negatives, loss):
    """Train a rate per ad on the rows in their order, once, and return the mean prediction for all ads."""
    join = LabelJoin(
        key="request", time="ts", label="y", window_seconds=window_hours * HOUR, negatives=negatives
    )
    rows = pa.concat_tables([join.add(*call) for call in streams()])
    ads, labels = (torch.from_numpy(rows[name].to_numpy()) for name in ("ad", "y"))
    logits = torch.zeros(NUM_ADS, requires_grad=True)
    num_steps = len(ads) // BATCH
    for step in range(num_steps):
        part = slice(step * BATCH, (step + 1) * BATCH)
        value = loss.sum(logits[ads[part]], labels[part].float(), None)
        (gradient,) = torch.autograd.grad(value, logits)
        with torch.no_grad():
            logits -= 0.2 / (1 + 20 * step / num_steps) * gradient
    return loss.scores(logits.detach()).mean().item()


def test_predictions_are_calibrated_although_half_of_the_clicks_come_after_the_window(streams):
    plain, weighted = BinaryCrossEntropy(), BinaryCrossEntropy(fake_negative_weighting=True)
    final = mean_prediction(streams, 24, "at_window_end", plain)
    at_once = mean_prediction(streams, 24, "at_once", weighted)
    assert at_once == pytest.approx(final, rel=0.02)
    # A window of one hour loses half of the clicks, and without weights most clicks count as negatives, too.
    assert mean_prediction(streams, 1, "at_window_end", plain) < 0.6 * final
    assert mean_prediction(streams, 24, "at_once", plain) < 0.9 * final

"""Alarms of a run on a stream: predictions have drifted from labels, or feature values from earlier ones."""

import json
import logging
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from meshrec.metrics.drift import MAX_FROZEN_SECONDS, Drift
from meshrec.train.observers import Event, Logged, Reported
from meshrec.train.progress import StreamProgress
from meshrec.train.stream_options import StreamOptions

_logger = logging.getLogger("meshrec.train")

_CALIBRATION, _SAMPLES, _DRIFT = "calibration@hour", "samples@hour", "drift"
_END_FRACTION = 0.8
"""Part of the way to a limit within which a metric must be for an alarm to end, so that it does not begin and
end again and again at the limit.
"""
_MIN_SAMPLES = 1000
"""Samples in the window below which calibration is mostly chance."""
_TIMEOUT_SECONDS = 10.0
_MAX_NAMED = 5
"""Features that the text of an alarm names; a report as JSON has all."""


class Alarms:
    """Alarms while a metric of the last hour is outside its limits. Equal on all ranks; rank 0 reports them.

    The alarms that last are in ``progress.alarms``, so that a resumed run neither forgets nor repeats them.

    Args:
        options: has the limits, and the webhook.
        progress: progress of the run.
        run: run name, for the webhook.
        notify: passes events to the observers; None on all ranks but the first.
    """

    def __init__(
        self,
        options: StreamOptions,
        progress: StreamProgress,
        run: str,
        notify: Callable[[Event], None] | None,
    ) -> None:
        self._options, self._progress, self._run, self._notify = options, progress, run, notify
        # Requests to the webhook, until `close`.
        self._threads: list[threading.Thread] = []

    @property
    def reason(self) -> str:
        """The alarms that last, as text; empty without any."""
        return "; ".join(self._progress.alarms.values())

    def drop_disabled(self) -> None:
        """Drop the alarms of a resumed run whose limit the options do not have any more."""
        limits = {_CALIBRATION: self._options.calibration_limit, _DRIFT: self._options.drift_limit}
        self._progress.alarms = {
            metric: text for metric, text in self._progress.alarms.items() if limits.get(metric) is not None
        }

    @property
    def has_drift(self) -> bool:
        """Whether an alarm about drift lasts."""
        return _DRIFT in self._progress.alarms

    def check(
        self, line: Mapping[str, Any], drifts: Mapping[str, Drift], *, drift_seconds: float = 0.0
    ) -> None:
        """Look at metrics, and report each alarm that begins or ends.

        An alarm ends once the metric is within `_END_FRACTION` of the way from its best value to the limit.

        Args:
            line: line of training metrics, equal on all ranks as far as alarms read it; without enough
                samples, it changes nothing.
            drifts: drift of features, equal on all ranks; without any, it changes nothing.
            drift_seconds: event time since the alarm about drift began.
        """
        self._check_calibration(line)
        if self._options.drift_limit is not None and drifts:
            self._check_drift(self._options.drift_limit, line["step"], drifts, drift_seconds)

    def _check_drift(self, limit: float, step: int, drifts: Mapping[str, Drift], seconds: float) -> None:
        """Begin or end the alarm about drift; see `check`."""
        bound = _END_FRACTION * limit if self.has_drift else limit
        over = {name: drift for name, drift in drifts.items() if drift.psi > bound}
        values = {_DRIFT: {name: drift._asdict() for name, drift in over.items()}}
        if not over:
            text = f"no feature has drifted by more than {bound:g} (PSI) any more"
        else:
            text = f"features have drifted by more than {bound:g} (PSI): {_describe(over)}"
        if seconds > MAX_FROZEN_SECONDS:
            days = MAX_FROZEN_SECONDS // 86400
            text = f"the alarm ends after {days} days, and the last day is the reference; {text}"
            over = {}
        self._set(_DRIFT, bool(over), text, step, values)

    def _check_calibration(self, line: Mapping[str, Any]) -> None:
        """Begin or end the alarm about calibration."""
        limit, value = self._options.calibration_limit, line.get(_CALIBRATION)
        if limit is not None and value is not None and line[_SAMPLES] >= _MIN_SAMPLES:
            # A model that predicts nothing has the calibration 0.
            bound = 1 + _END_FRACTION * (limit - 1) if _CALIBRATION in self._progress.alarms else limit
            is_on = not 1 / bound <= value <= bound
            state = "is off by more than" if is_on else "is again within"
            text = f"the {_CALIBRATION} is {value:.3f}, which {state} a factor of {bound:g}"
            self._set(_CALIBRATION, is_on, text, line["step"], {_CALIBRATION: value})

    def _set(self, metric: str, is_on: bool, text: str, step: int, values: Mapping[str, Any]) -> None:
        """Begin or end an alarm, and report it, if it does not have this state already.

        Args:
            metric: name of the metric.
            is_on: whether the alarm lasts from now on.
            text: message.
            step: training step.
            values: values for the report.
        """
        alarms = self._progress.alarms
        if is_on == (metric in alarms):
            return
        if is_on:
            alarms[metric] = text
        else:
            del alarms[metric]
        if self._notify is not None:
            self._notify(Reported(f"alarm: {text}"))
        self.report("alarm", text, step, {**values, "on": is_on})

    def report(self, kind: str, text: str, step: int, values: Mapping[str, Any]) -> None:
        """Report an event on rank 0: in the log, the metrics lines and by the webhook, not on the screen.

        Args:
            kind: kind of the metrics line.
            text: message.
            step: training step.
            values: further entries of the line.
        """
        if self._notify is None:
            return
        # The screen shows warnings, and the text is there already.
        _logger.info("step %d: %s: %s", step, kind, text)
        about = {"kind": kind, "step": step, "time": int(time.time()), **values}
        self._notify(Logged(about))
        if self._options.alarm_webhook is not None:
            # In a thread, because training must not wait for another host.
            content = json.dumps({**about, "run": self._run, "text": text}).encode()
            args = (self._options.alarm_webhook, content)
            thread = threading.Thread(target=_post, args=args, daemon=True)
            thread.start()
            self._threads = [*(one for one in self._threads if one.is_alive()), thread]

    def close(self) -> None:
        """Wait until the webhook has received all reports, at most for the timeout of a request."""
        for thread in self._threads:
            thread.join(_TIMEOUT_SECONDS)


def _describe(drifts: Mapping[str, Drift]) -> str:
    """Return the features that have drifted most as text, with their shares of missing and unseen values."""
    largest = sorted(drifts.items(), key=lambda item: -item[1].psi)
    texts = [
        f"{name} {drift.psi:.2f} (missing {drift.missing[1]:.1%} before, {drift.missing[0]:.1%} now; "
        f"outside the vocabulary {drift.unseen[1]:.1%} before, {drift.unseen[0]:.1%} now)"
        for name, drift in largest[:_MAX_NAMED]
    ]
    more = len(largest) - len(texts)
    return ", ".join(texts) + (f", and {more} more" if more else "")


def _post(url: str, content: bytes) -> None:
    """Send JSON to a webhook. A failure is logged."""
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS):
            pass
    except (OSError, ValueError) as error:
        _logger.warning("the alarm did not reach its webhook: %s", error)

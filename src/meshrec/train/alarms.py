"""Alarms of a run on a stream: the predictions have drifted from the labels."""

import json
import logging
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from meshrec.train.observers import Event, Logged, Reported
from meshrec.train.stream_options import StreamOptions

_logger = logging.getLogger("meshrec.train")

_METRIC, _SAMPLES = "calibration@hour", "samples@hour"
_MIN_SAMPLES = 1000
"""Samples in the window below which calibration is mostly chance."""
_TIMEOUT_SECONDS = 10.0


class CalibrationAlarm:
    """Alarm while the calibration of the last hour is off by more than a factor. Used on rank 0.

    Args:
        options: has the factor, and the webhook.
        run: run name, for the webhook.
        notify: passes events to the observers.
    """

    def __init__(self, options: StreamOptions, run: str, notify: Callable[[Event], None]) -> None:
        self._limit, self._webhook = options.calibration_limit, options.alarm_webhook
        self._run, self._notify = run, notify
        self.is_on = False
        """Whether the alarm lasts."""

    def check(self, line: Mapping[str, Any]) -> None:
        """Look at a metrics line, and report if the alarm begins or ends.

        Args:
            line: line of training metrics; without enough samples, it changes nothing.
        """
        value = line.get(_METRIC)
        if self._limit is None or value is None or line[_SAMPLES] < _MIN_SAMPLES:
            return
        # A model that predicts nothing has the calibration 0.
        is_on = not 1 / self._limit <= value <= self._limit
        if is_on == self.is_on:
            return
        self.is_on = is_on
        state = "is off by more than" if is_on else "is again within"
        text = f"alarm: the {_METRIC} is {value:.3f}, which {state} a factor of {self._limit:g}"
        _logger.warning("step %d: %s", line["step"], text)
        about = {"kind": "alarm", "step": line["step"], "time": int(time.time()), _METRIC: value, "on": is_on}
        self._notify(Reported(text))
        self._notify(Logged(about))
        if self._webhook is not None:
            # In a thread, because training must not wait for another host.
            content = json.dumps({**about, "run": self._run, "text": text}).encode()
            threading.Thread(target=_post, args=(self._webhook, content), daemon=True).start()


def _post(url: str, content: bytes) -> None:
    """Send JSON to a webhook. A failure is logged."""
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS):
            pass
    except (OSError, ValueError) as error:
        _logger.warning("the alarm did not reach its webhook: %s", error)

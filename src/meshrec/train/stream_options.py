"""Options of training on a stream, which are command-line options."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

TimeUnit = Literal["s", "ms", "us", "ns"]
OnAlarm = Literal["log", "hold"]


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Options of training on a stream."""

    time: str | None = None
    """Column with the event time. If not set, the time of arrival: in a folder, that of the file."""
    time_unit: TimeUnit = "s"
    """Unit of event times that are numbers."""
    set_aside: Path | None = None
    """Folder that receives omitted records as JSON lines. If not set, they are only counted."""
    checkpoint_minutes: float = 10.0
    """Minutes between checkpoints. A killed run continues from the last one."""
    delta_seconds: float | None = 5.0
    """Seconds between deltas (changed weights for servers); none: no deltas are written."""
    log_seconds: float = 10.0
    """Seconds between metrics lines."""
    stop_when_idle: float | None = None
    """End the run if no records have arrived for this many seconds; none: wait forever."""
    keep_delta_hours: float | None = 6.0
    """Hours for which deltas are kept, for servers that fall behind; none: all. Deltas that a kept checkpoint
    does not contain are always kept.
    """
    keep_metric_days: float | None = 7.0
    """Days for which metrics lines are kept; none: all."""

    calibration_limit: float | None = None
    """Alarm if the sum of the last hour's predictions differs from that of the labels by more than this
    factor; none: no alarm.
    """
    drift_limit: float | None = None
    """Alarm if the population stability index of a feature's values, of the last hour against up to a day
    before, is above this limit, such as 0.25; none: no alarm.
    """
    alarm_webhook: str | None = None
    """HTTP address that receives alarms as JSON; none: they are only logged."""
    on_alarm: OnAlarm = "log"
    """What an alarm does. With log, it is only reported; with hold, the run publishes no deltas until the
    alarm ends, so that servers keep the last good weights.
    """

    page: int | None = None
    """Port of a web page about the run, at 127.0.0.1 of rank 0's host; 0: any free port; none: no page."""
    page_server: str | None = None
    """Freshness address of a server, whose state the page shows:
    http://localhost:8080/v2/models/MODEL/freshness. None: the page shows no server.
    """

    def __post_init__(self) -> None:
        for field in fields(StreamOptions):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not value > 0 and field.name != "page":
                raise ValueError(f"{field.name} is {value}; it must be above 0. Take {field.default or 60}.")
        if self.calibration_limit is not None and not self.calibration_limit > 1:
            raise ValueError(
                f"calibration_limit is {self.calibration_limit}; it is a factor above 1. Take 1.5."
            )
        for name in ("alarm_webhook", "page_server"):
            address = getattr(self, name)
            if address is not None and not address.startswith(("http://", "https://")):
                raise ValueError(f"{name} is {address}; it must start with http:// or https://.")
        if self.page is not None and not 0 <= self.page < 1 << 16:
            raise ValueError(f"page is {self.page}; a port is from 0 to {(1 << 16) - 1:,}. Take 0 for any.")
        if self.on_alarm not in get_args(OnAlarm):
            raise ValueError(f"on_alarm is {self.on_alarm!r}; it must be one of {get_args(OnAlarm)}.")
        if self.on_alarm == "hold" and self.calibration_limit is None and self.drift_limit is None:
            raise ValueError(
                "on_alarm is 'hold', and no limit raises an alarm. Set calibration_limit, such as 1.5, or "
                "drift_limit, such as 0.25; or take on_alarm 'log'."
            )
        if self.on_alarm == "hold" and self.delta_seconds is None:
            raise ValueError(
                "on_alarm is 'hold', and delta_seconds is None, so there are no deltas to hold back. Set "
                "delta_seconds, such as 5, or take on_alarm 'log'."
            )
        if self.page_server is not None and self.page is None:
            raise ValueError(
                f"page_server is {self.page_server}, and there is no page to show it. Set page to a port, "
                "such as 8000 or 0 for any, or page_server to none."
            )

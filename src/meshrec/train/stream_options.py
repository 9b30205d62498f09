"""Options of training on a stream, which are command-line options."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

from meshrec.checkpoint.finding import Hold

TimeUnit = Literal["s", "ms", "us", "ns"]
OnAlarm = Literal["log", "hold", "roll-back"]
AfterRollBack = Literal["reread", "skip"]


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
    alarm ends, so that servers keep the last good weights; with roll-back, run and servers also return to a
    checkpoint from at least an hour before, and training stops.
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
        if self.on_alarm != "log" and self.calibration_limit is None and self.drift_limit is None:
            raise ValueError(
                f"on_alarm is {self.on_alarm!r}, and no limit raises an alarm. Set calibration_limit, "
                "such as 1.5, or drift_limit, such as 0.25; or take on_alarm 'log'."
            )
        if self.on_alarm != "log" and self.delta_seconds is None:
            raise ValueError(
                f"on_alarm is {self.on_alarm!r}, and delta_seconds is None, so servers get no deltas. Set "
                "delta_seconds, such as 5, or take on_alarm 'log'."
            )
        if self.page_server is not None and self.page is None:
            raise ValueError(
                f"page_server is {self.page_server}, and there is no page to show it. Set page to a port, "
                "such as 8000 or 0 for any, or page_server to none."
            )


def check_roll_back(name: str, hold: Hold | None, after_roll_back: AfterRollBack | None) -> None:
    """Check that a run which was rolled back is resumed with a choice about its records, and only such a run.

    Args:
        name: run name.
        hold: hold or roll-back of the run; None: there is none.
        after_roll_back: the choice; None: none was made.

    Raises:
        ValueError: a choice is missing, or nothing is left to choose.
    """
    if hold is not None and hold.delta is not None:
        choice = after_roll_back or hold.choice
        if choice is None:
            raise ValueError(f"{name} was rolled back to step {hold.step:,}: {hold.reason}. {advice(name)}")
        if hold.choice not in (None, choice):
            raise ValueError(
                f"after_roll_back is {choice!r}, and {name} continues with {hold.choice!r} already, but has "
                f"been interrupted. Take --after-roll-back {hold.choice}."
            )
    elif after_roll_back is not None:
        state = "was not rolled back" if hold is None else f"is not rolled back yet: {hold.text}"
        raise ValueError(f"after_roll_back is {after_roll_back!r}, and {name} {state}. Leave the option out.")


def advice(name: str) -> str:
    """Return how to continue a run that was rolled back.

    Args:
        name: run name.
    """
    command = f"meshrec follow --resume --name {name} --after-roll-back"
    return (
        f"Continue with `{command} reread`, which trains all records since then again, once they are mended; "
        f"or with `{command} skip`, which continues with the records after the alarm."
    )

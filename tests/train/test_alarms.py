"""Alarms when predictions drift from labels: once at the start and once at the end, also by a webhook."""

import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from meshrec.metrics.drift import Drift
from meshrec.train.alarms import Alarms
from meshrec.train.observers import Logged, Reported
from meshrec.train.progress import StreamProgress
from meshrec.train.stream_options import StreamOptions


@pytest.fixture
def webhook():
    """Address of a server, and a queue of what it has received."""
    received = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            received.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/alarms", received
        server.shutdown()
        thread.join()


def line(step, value, samples=5000.0):
    return {"kind": "train", "step": step, "calibration@hour": value, "samples@hour": samples}


def test_an_alarm_begins_and_ends_once(webhook):
    address, received = webhook
    events = []
    options = StreamOptions(calibration_limit=1.5, alarm_webhook=address)
    alarms = Alarms(options, StreamProgress(), "live", events.append)
    for step, value in enumerate([1.0, 1.4, 1.6, 2.0, 1.2, 0.6]):
        alarms.check(line(step, value), {})
    lines = [event.line for event in events if isinstance(event, Logged)]
    assert [(each["step"], each["on"]) for each in lines] == [(2, True), (4, False), (5, True)]
    assert "0.6" in alarms.reason
    sent = sorted((received.get(timeout=60) for _ in range(3)), key=lambda each: each["step"])
    assert [each["calibration@hour"] for each in sent] == [1.6, 1.2, 0.6]
    assert {each["run"] for each in sent} == {"live"}
    alarms.close()
    alarms.report("roll-back", "text", 9, {"delta": 4})
    sent = received.get(timeout=60)
    assert (sent["kind"], sent["text"], sent["delta"]) == ("roll-back", "text", 4)


def test_an_alarm_at_the_limit_ends_only_clearly_within_it():
    events = []
    alarms = Alarms(
        StreamOptions(calibration_limit=1.5, drift_limit=0.5), StreamProgress(), "live", events.append
    )
    for step, value in enumerate([1.51, 1.49, 1.51, 1.41, 1.39, 1.49, 0.66, 0.7, 0.72]):
        alarms.check(line(step, value), {})
    for step, value in enumerate([0.51, 0.49, 0.41, 0.39, 0.49], 10):
        alarms.check(line(step, 1.0), {"price": Drift(value, (0.0, 0.0), (0.0, 0.0))})
    lines = [event.line for event in events if isinstance(event, Logged)]
    assert [(reported["step"], reported["on"]) for reported in lines] == [
        *((0, True), (4, False)),  # within a factor of 1.4
        *((6, True), (8, False)),
        *((10, True), (13, False)),
    ]


def test_an_alarm_about_drift_ends_after_a_week():
    events = []
    alarms = Alarms(StreamOptions(drift_limit=0.25), StreamProgress(), "live", events.append)
    drifts = {"price": Drift(0.75, (0.5, 0.125), (0.0, 0.0))}
    for step, days in enumerate([0, 6, 7, 8]):
        alarms.check(line(step, 1.0), drifts, drift_seconds=86400 * days)
    lines = [event.line for event in events if isinstance(event, Logged)]
    assert [(reported["step"], reported["on"]) for reported in lines] == [(0, True), (3, False)]
    assert "7 days" in [event.text for event in events if isinstance(event, Reported)][-1]


def test_few_samples_and_lines_without_calibration_change_nothing():
    alarms = Alarms(StreamOptions(calibration_limit=1.5), StreamProgress(), "live", None)
    alarms.check(line(1, 9.0, samples=999.0), {})
    alarms.check({"kind": "train", "step": 2}, {})
    assert not alarms.reason


def test_drift_names_the_features_and_their_values():
    events = []
    alarms = Alarms(StreamOptions(drift_limit=0.25), StreamProgress(), "live", events.append)
    calm = Drift(0.1, (0.0, 0.0), (0.0, 0.0))
    alarms.check(line(1, 1.0), {"city": calm, "price": calm})
    alarms.check(line(2, 1.0), {"city": calm, "price": Drift(0.75, (0.5, 0.125), (0.0, 0.0))})
    assert "price 0.75 (missing 12.5% before, 50.0% now" in alarms.reason
    assert "city" not in alarms.reason
    alarms.check(line(3, 1.0), {})
    alarms.check(line(4, 1.0), {"city": calm, "price": calm})
    lines = [event.line for event in events if isinstance(event, Logged)]
    assert [(reported["step"], reported["on"]) for reported in lines] == [(2, True), (4, False)]
    assert lines[0]["drift"]["price"]["psi"] == 0.75


def test_a_resumed_run_has_the_alarms_of_its_checkpoint_unless_they_are_switched_off():
    progress, resumed = StreamProgress(), StreamProgress()
    options = StreamOptions(calibration_limit=1.5)
    Alarms(options, progress, "live", None).check(line(1, 9.0), {})
    resumed.load_state_dict(progress.state_dict())
    events = []
    alarms = Alarms(options, resumed, "live", events.append)
    alarms.drop_disabled()
    alarms.check(line(2, 9.0), {})
    assert alarms.reason
    assert not events
    Alarms(StreamOptions(), resumed, "live", None).drop_disabled()
    assert not alarms.reason


def test_options_of_alarms_are_checked():
    with pytest.raises(ValueError, match="calibration_limit is 1"):
        StreamOptions(calibration_limit=1)
    with pytest.raises(ValueError, match="on_alarm is 'stop'"):
        StreamOptions(on_alarm="stop")
    # Options without an effect.
    with pytest.raises(ValueError, match=r"on_alarm is 'hold'.*drift_limit"):
        StreamOptions(on_alarm="hold")
    with pytest.raises(ValueError, match=r"on_alarm is 'roll-back'.*drift_limit"):
        StreamOptions(on_alarm="roll-back")
    with pytest.raises(ValueError, match="delta_seconds is None"):
        StreamOptions(on_alarm="roll-back", drift_limit=0.25, delta_seconds=None)
    with pytest.raises(ValueError, match="page_server is http://a"):
        StreamOptions(page_server="http://a")
    with pytest.raises(ValueError, match="ftp://host"):
        StreamOptions(alarm_webhook="ftp://host")

"""The page of a run on a stream: figures while it trains, names that are not markup, and its end."""

import json
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from meshrec.checkpoint.finding import HOLD
from meshrec.runs.following import follow_rank
from meshrec.runs.job import Job
from meshrec.runs.live_page import live_page
from meshrec.train.observers import Logged, Reported
from meshrec.train.run_folder import CONFIG, RunFolder
from meshrec.train.stream_options import StreamOptions
from tests.browser import drawn, needs_browser
from tests.train.events import recipe, write_events

NAME = "<!--<script>alert(1)</script>"


def answer(address, **headers):
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=30) as response:
        return response.read().decode()


def data_of(address):
    return json.loads(answer(f"{address}data"))


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / NAME.replace("/", "|"))
    folder.path.mkdir()
    folder.write_json(CONFIG, {"recipe": {"name": "clicks"}, "stream": NAME, "ranks": 2, "device": "cpu"})
    folder.write_state("running", step=0)
    manifest = folder.path / "checkpoints" / "step-0000000002" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    return folder


def append(folder, step, **values):
    folder.append_metrics({"kind": "train", "step": step, "time": step, "samples_per_second": 1.5, **values})


def test_the_page_has_the_figures_of_a_run_that_trains_and_ends_with_it(tmp_path):
    write_events(tmp_path / "in", 0, 400)
    pages = []

    def observe(event):
        if isinstance(event, Reported) and event.text.startswith("page: "):
            pages.append(event.text.removeprefix("page: "))
        if isinstance(event, Logged) and event.line["kind"] == "train":
            pages.append(data_of(pages[0]))

    options = StreamOptions(time="ts", stop_when_idle=0.2, page=0)
    follow_rank(
        Job(
            recipe=recipe(), runs=tmp_path, device="cpu", stream=str(tmp_path / "in"), stream_options=options
        ),
        lambda _: observe,
    )
    address, *shown = pages
    last = shown[-1]["last"]["train"]
    assert (last["step"], last["samples@hour"]) == (20, 400)
    assert 0 < last["auc@hour"] < 1
    assert (shown[-1]["ranks"], shown[-1]["state"]["name"]) == (1, "running")
    with pytest.raises(urllib.error.URLError):
        answer(address)


def test_lines_are_thinned_and_removed_lines_vanish(folder):
    with live_page(folder, 0) as address:
        for step in range(1500):
            append(folder, step, **{"auc@hour": 0.75, "secret": 1.0})
        data = data_of(address)
        steps = [line["time"] for line in data["lines"]]
        assert 500 < len(steps) <= 801
        assert (steps[0], steps[-400:]) == (0, [*range(1100, 1500)])
        assert "secret" not in json.dumps(data)
        folder.remove_lines_after(10, evaluated=False)
        with (folder.path / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "train", "step": 11')  # its writer has not finished it
        assert [line["time"] for line in data_of(address)["lines"]] == [*range(11)]


def test_the_page_is_for_this_machine(folder):
    with live_page(folder, 0) as address:
        for host in ("attacker.example:80", "127.0.0.1.attacker.example:80"):
            with pytest.raises(urllib.error.HTTPError, match="403"):
                answer(address, Host=host)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            answer(f"{address}config.json")
        assert (
            "default-src 'none'"
            in urllib.request.urlopen(address, timeout=30).headers["Content-Security-Policy"]
        )
        port = int(address.rstrip("/").rpartition(":")[2])
        with pytest.raises(ValueError, match=str(port)), live_page(folder, port):
            pass


def test_the_page_asks_a_server_what_it_serves(folder):
    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"delta": 7, "step": 70, "reason": "", "event_time": 5.0}')

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v2/models/m/freshness"
    with live_page(folder, 0, server=url) as address:
        assert data_of(address)["served"] == {"delta": 7, "step": 70, "reason": "", "event_time": 5.0}
    server.shutdown()
    server.server_close()
    with live_page(folder, 0, server=url) as address:
        assert "error" in data_of(address)["served"]


@needs_browser
def test_a_browser_draws_names_as_text(folder):
    append(folder, 3, loss=0.5, **{"auc@hour": 0.8125, "auc@day": 0.75})
    folder.append_metrics({"kind": "delta", "step": 3, "time": 3, "delta": 12, "freshness": 2.5})
    folder.write_json(HOLD, {"step": 2, "reason": f"alarm of {NAME}"}, seal=True)
    folder.append_metrics({"kind": "alarm", "step": 3, "time": 3, "calibration@hour": 2.0, "on": True})
    with live_page(folder, 0) as address, ThreadPoolExecutor(1) as thread:
        page = thread.submit(drawn, address).result()
    for text in (
        "0.8125",
        "from event to delta 12",
        "calibration@hour 2.000",
        "recipe clicks",
        "2 ranks",
        "checkpoint of step 2",
        "held back: alarm",
    ):
        assert text in page
    assert page.count("&lt;!--&lt;script&gt;") >= 3
    assert "<script>alert" not in page

import json
import re

from meshrec.planner.plan_report import make_report, to_html, write_html
from tests.browser import drawn, needs_browser


def test_the_page_needs_nothing_else(small_plan):
    page = to_html(make_report(small_plan))
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org/2000/svg)", page)
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert json.loads(data[1])["seconds"] == small_plan.seconds


@needs_browser
def test_a_browser_draws_it(small_plan, tmp_path):
    write_html(make_report(small_plan), tmp_path / "plan.html")
    page = drawn(f"file://{tmp_path}/plan.html#search=t1&open=1").split("<noscript>")[0]
    assert page.count(">rank 3<") >= 2  # its load and its memory
    assert "1 of 6" in page
    assert "moving only this table to" in page
    assert '<svg class="map"' in page
    assert "What the planner reckoned with" in page
    assert "Tables, as the cost model sees them" in page

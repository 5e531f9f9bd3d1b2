from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from tests.lab.bench.test_main import FakeServer, measure
from tests.lab.bench.test_versus import burst, of

from engine_lab.bench.page import page


class Balanced(HTMLParser):
    """Fails where an element is not closed in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def results():
    argv = ["--output-tokens", "3", "--requests", "6"]
    return {
        "run": measure(FakeServer(), *argv, "--slo", "ttft=60s", "--slice", "1"),
        "rates": measure(FakeServer(), *argv, "--rate", "300,600"),
        "two servers": of([(burst(0.1), burst(0.2)) for _ in range(8)]),
    }


@pytest.mark.parametrize("which", ["run", "rates", "two servers"])
def test_the_page_is_whole_and_holds_the_result_without_network_or_scripts(results, which):
    text = page(results[which])
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert "default-src 'none'" in text and text.count("<svg") >= 2
    assert not re.search(r"(src|href)=", text) and text.count("<script") == 1
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(data)["schema"] == results[which]["schema"]

from __future__ import annotations

import pytest

from engine_lab.bench.options import base_url
from engine_lab.bench.quirks import api_of
from engine_lab.bench.target import Target


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ("http://a:8000", "http://a:8000/v1/completions"),
        ("http://a:8000/v1/", "http://a:8000/v1/completions"),
        ("http://a:8000/v3", "http://a:8000/v3/completions"),
        ("https://a/openai/v1", "https://a/openai/v1/completions"),
    ],
)
def test_the_api_is_where_the_url_says(url, asked):
    assert Target(base_url(url), "m", "completions").url == f"{api_of(base_url(url))}/completions" == asked

"""What the words of ``engine fleet`` ask for."""

import pytest

from engine_lab.fleet.words import URL, Asked, parse


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("", Asked("show", URL, "")),
        ("http://a:1", Asked("show", "http://a:1", "")),
        ("show http://a:1/v1", Asked("show", "http://a:1/v1", "")),
        ("restart", Asked("restart", URL, "")),
        ("restart replica-1", Asked("restart", URL, "replica-1")),
        ("restart https://a replica-1", Asked("restart", "https://a", "replica-1")),
        ("drain http://a:1 replica-0", Asked("drain", "http://a:1", "replica-0")),
        ("undrain replica-0", Asked("undrain", URL, "replica-0")),
        ("resize http://a:1 3", Asked("resize", "http://a:1", "3")),
    ],
)
def test_an_action_may_be_followed_by_a_url_and_an_engine(words, asked):
    assert parse(words.split()) == asked


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("stop", "unexpected 'stop'; expected one of show, restart"),
        ("http://a http://b", "unexpected 'http://b'"),
        ("restart http://a replica-0 replica-1", "unexpected 'replica-1'"),
        ("drain http://a", "drain needs the id of an engine"),
        ("resize http://a", "resize needs N"),
        ("resize http://a two", "expected a number of engines"),
    ],
)
def test_words_that_make_no_sense_are_named(words, wrong):
    with pytest.raises(ValueError, match=wrong):
        parse(words.split())


def test_an_id_and_force_are_parts_of_the_query():
    assert parse(["restart"]).path(False) == "/engine/fleet/restart"
    assert parse(["restart", "a b&c"]).path(True) == "/engine/fleet/restart?engine=a+b%26c&force=1"
    assert parse(["resize", "2"]).path(False) == "/engine/fleet/resize?replicas=2"

"""From overrides to the parts of a gateway."""

from __future__ import annotations

import pytest

from engine.assembly.errors import AssemblyError
from engine.assembly.gateway import gateway_parts
from engine_plugins.router.prefix import PrefixRouter
from engine_plugins.router.round_robin import RoundRobinRouter

A, B = "http://127.0.0.1:9001", "https://example.com:9002/v1"


def problems(*words: str) -> str:
    with pytest.raises(AssemblyError) as refused:
        gateway_parts(words)
    return "\n".join(refused.value.problems)


@pytest.mark.parametrize(
    "words",
    [(A, B), (f"targets=[{A},{B}]",), (f"gateway.targets=[{A},{B}]",), (A, "server.port=9000", B)],
)
def test_targets_are_urls_or_a_list(words: tuple[str, ...]) -> None:
    parts = gateway_parts(words)
    assert parts.settings.gateway.targets == [A, B]
    assert parts.settings.server.port == (9000 if "server.port=9000" in words else 8000)


def test_each_call_makes_a_router_of_the_kind_that_was_chosen() -> None:
    parts = gateway_parts([A, B, "router=round_robin"])
    routers = [parts.make_router() for _ in range(2)]
    assert all(isinstance(router, RoundRobinRouter) for router in routers) and routers[0] is not routers[1]
    assert parts.router.name == "round_robin"


def test_settings_of_a_router_are_taken() -> None:
    parts = gateway_parts([A, B, "router=prefix", "router.max_blocks=7"])
    assert isinstance(parts.make_router(), PrefixRouter)
    assert parts.router.config["max_blocks"] == 7


def test_exporters_are_built_without_a_model() -> None:
    assert [type(one).__name__ for one in gateway_parts([A, "exporter=[prometheus]"]).exporters] == [
        "PrometheusExporter"
    ]


@pytest.mark.parametrize("word", ["model.path=/somewhere", "scheduler=fcfs", "device=cpu", "+attention_kernel=x"])
def test_what_a_gateway_does_not_have_is_refused(word: str) -> None:
    assert f"{word}: a gateway has gateway, server, router, exporter, plugins alone" in problems(A, word)


def test_all_of_it_is_told_at_once() -> None:
    found = problems(A, "model.path=x", "seed=1")
    assert "model.path=x" in found and "seed=1" in found


@pytest.mark.parametrize("words", [(), ("targets=[]",), ("server.port=9000",)])
def test_a_gateway_without_targets_is_told_how_to_name_them(words: tuple[str, ...]) -> None:
    assert "engine gateway http://HOST:PORT http://HOST:PORT" in problems(*words)


@pytest.mark.parametrize("word", ["localhost:8000", "10.0.0.1:8000", "gpu-1:8000/v1"])
def test_a_target_without_a_scheme_is_told_what_to_write(word: str) -> None:
    assert f"write http://{word}" in problems(A, word)


def test_an_address_of_ipv6_is_a_target() -> None:
    assert gateway_parts(["http://[::1]:8000"]).settings.gateway.targets == ["http://[::1]:8000"]


@pytest.mark.parametrize("second", [A, f"{A}/v1", f"{A}/"])
def test_a_server_is_named_once(second: str) -> None:
    assert "name each one once" in problems(A, second)


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://h:port",
        "http://h:1?a=b",
        "ftp://h:1",
        "http://u:p@h:1",
        "http://h:99999",
        "http://h:0",
        "http://[:::]:80",
    ],
)
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    assert "is no URL like http://HOST:PORT" in problems(f"targets=['{url}']")


def test_an_unknown_router_is_refused_with_those_there_are() -> None:
    found = problems(A, "router=prefixx")
    assert "prefixx" in found and "prefix" in found


@pytest.mark.parametrize("word", ["gateway.probe_s=0", "gateway.silence_s=-1", "gateway.first_byte_s=nan"])
def test_times_are_checked(word: str) -> None:
    assert word.partition("=")[0] in problems(A, word)

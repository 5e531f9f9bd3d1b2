"""From overrides to the parts of a gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.assembly.errors import AssemblyError
from engine.assembly.gateway import gateway_parts
from engine.contracts.config import GatewaySettings, ProviderSettings
from engine_plugins.router.prefix import PrefixRouter
from engine_plugins.router.round_robin import RoundRobinRouter

P = "gateway.providers.p={{{}}}"
PRESET = """\
# @package _global_
gateway:
  models: {auto: [small, large]}
  providers:
    p: {url: https://h/v1, key_env: THEIR_KEY, models: {large: a/b}, input_price: 0.5}
"""
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
    assert f"{word}: a gateway has gateway, server, router, exporter, plugins, preset alone" in problems(A, word)


def test_a_short_key_that_is_misspelt_gets_what_was_meant() -> None:
    assert problems(f"target=[{A}]").endswith("alone; did you mean 'targets'?")
    assert problems(A, "seed=1").endswith("alone; leave it out")


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("gateway.providers.p.ulr=https://h/v1", "no such key 'ulr' in 'gateway.providers.p'; did you mean 'url'?"),
        ("gateway.providers={p: {url: 'https://h/v1', models: {m: m}, drop: [user, messages]}}", "messages cannot be"),
        (
            "gateway.providers={p: {url: 'https://h/v1', models: {m: m}, drop: [model]}}",
            "drop: model cannot be left out",
        ),
        ("gateway.providers={p: {key_evn: K}}", "no such key 'key_evn' in 'gateway.providers.p'"),
        ("gateway.providers={a.b: {url: 'https://h/v1'}}", "'a.b': expected a name without a dot"),
        ("gateway.providers={p: {models: [x]}}", "gateway.providers.p.models=['x']: "),
        ("gateway.providers={p: {models: [x]}}", "expected dict[str, str]"),
        ("gateway.providers={p: {input_price: cheap}}", "gateway.providers.p.input_price=cheap: "),
    ],
)
def test_a_mistake_within_a_provider_is_told_by_its_key(word: str, words: str) -> None:
    assert words in problems(A, word)


def test_names_of_models_may_have_dots() -> None:
    word = "gateway.providers={p: {url: 'https://h/v1', models: {llama-3.1: meta/3.1}}}"
    assert gateway_parts([word]).settings.gateway.providers["p"].models == {"llama-3.1": "meta/3.1"}


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


def test_names_and_providers_may_be_given_as_overrides_or_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_KEY", "sesame")
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset" / "mine.yaml").write_text(PRESET)
    given = (
        "gateway.models={auto:[small,large]}",
        "gateway.providers.p={url:'https://h/v1',key_env:THEIR_KEY,models:{large:a/b},input_price:0.5}",
    )
    overridden = gateway_parts([A, *given]).settings.gateway
    filed = gateway_parts([A, "+preset=mine"], [tmp_path]).settings.gateway
    assert overridden == filed
    assert filed.models == {"auto": ["small", "large"]} and filed.providers["p"].models == {"large": "a/b"}
    changed = gateway_parts([A, "+preset=mine", "gateway.providers.p.input_price=2"], [tmp_path]).settings.gateway
    assert (changed.providers["p"].input_price, changed.providers["p"].url) == (2.0, "https://h/v1")


def test_a_gateway_of_providers_alone_needs_no_target() -> None:
    assert gateway_parts([P.format("url:'https://h/v1',models:{a:b}")]).settings.gateway.targets == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("url:'https://h/v1',models:{}", "gateway.providers.p.models is empty"),
        ("url:'ftp://h',models:{a:b}", "gateway.providers.p.url: 'ftp://h' is no URL like https://HOST/v1"),
        ("models:{a:b}", "url"),
        ("url:'https://h/v1'", "models"),
        ("url:'https://h/v1',models:{a:b},input_price:-1", "gateway.providers.p.input_price=-1"),
        ("url:'https://h/v1',models:{a:b},overflow_ms:nan", "gateway.providers.p.overflow_ms=nan"),
        ("url:'https://h/v1',models:{a:b},first_byte_s:0", "gateway.providers.p.first_byte_s=0"),
        ("url:'https://h/v1',models:{a:b},key:sesame", "gateway.providers.p.key: no such key 'key'"),
        ("url:'https://h/v1',models:{a:b},key_env:ses-ame", "gateway.providers.p.key_env: expected the name of"),
        ("url:'https://h/v1',models:{a:b},key_env:''", "gateway.providers.p.key_env: expected the name of"),
        ("url:'https://h/v1',models:{a:b},input_price:x", "gateway.providers.p.input_price=x"),
        ("url:'https://h/v1',models:{a:null}", "gateway.providers.p.models.a"),
        (
            "url:'https://h/v1',models:{a:b},key_env:NO_SUCH_VARIABLE",
            "gateway.providers.p.key_env=NO_SUCH_VARIABLE: the",
        ),
    ],
)
def test_a_provider_that_cannot_work_is_refused_with_what_is_wrong(settings: str, said: str) -> None:
    found = problems(A, P.format(settings))
    assert said in found and "sesame" not in found and "ses-ame" not in found


@pytest.mark.parametrize("key", ["sesame\n", " sesame", "ses\x07ame", ""])
def test_a_key_that_no_header_can_have_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIR_KEY", key)
    found = problems(A, P.format("url:'https://h/v1',models:{a:b},key_env:THEIR_KEY"), "gateway.key_env=THEIR_KEY")
    assert "gateway.providers.p.key_env=THEIR_KEY: the" in found and "gateway.key_env=THEIR_KEY: the" in found
    assert "sesame" not in found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gateway.providers.p.imput_price=2"], "no such key 'imput_price' in 'gateway.providers.p'; did you mean"),
        (["gateway.providers.a.b={url:'https://h/v1'}"], "no such key 'b' in 'gateway.providers.a'"),
        (["gateway.providers={a.b:{url:'https://h/v1'}}"], "gateway.providers: 'a.b': expected a name without a dot"),
        (["gateway.models.gpt-4.1=[a]"], "write gateway.models={gpt-4.1: ...}"),
        (["gateway.providers.p.models.gpt-4.1=a"], "write gateway.providers.p.models={gpt-4.1: ...}"),
        (["gateway.providers.p=7"], "gateway.providers.p is a group of keys (url, models"),
        (["gateway.providers=null"], "gateway.providers"),
    ],
)
def test_a_name_or_key_that_cannot_be_is_refused_with_what_can(words: list[str], said: str) -> None:
    assert said in problems(A, *words)


def test_names_here_and_models_there_may_have_dots() -> None:
    provider = P.format("url:'https://h/v1',models:{m-4.1:their/m-4.1}")
    settings = gateway_parts([A, provider, "gateway.models={m-4:[m-4.1,other-2.5]}"]).settings.gateway
    assert settings.providers["p"].models == {"m-4.1": "their/m-4.1"}
    assert settings.models == {"m-4": ["m-4.1", "other-2.5"]}


@pytest.mark.parametrize("models", ["{auto:[]}", "{auto:[a,a]}"])
def test_a_name_stands_for_at_least_one_model_each_once(models: str) -> None:
    assert "gateway.models.auto" in problems(A, f"gateway.models={models}")


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a\r\nX-Target: b", "\x00", " a"])
def test_names_can_be_sent_in_headers(name: str) -> None:
    for given in (
        {"models": {name: ["a"]}},
        {"models": {"a": [name]}},
        {"providers": {name: ProviderSettings("https://p/v1", {"a": "b"})}},
        {"providers": {"p": ProviderSettings("https://p/v1", {name: "b"})}},
        {"providers": {"p": ProviderSettings("https://p/v1", {"a": name})}},
    ):
        with pytest.raises(ValueError, match=r"gateway\.\S+: .* is no name"):
            GatewaySettings(["http://h:1"], **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", ["-1", "61", "nan", "inf"])
def test_patience_has_an_end(seconds: str) -> None:
    assert f"gateway.patience_s={float(seconds)}" in problems(A, f"gateway.patience_s={seconds}")


def test_a_provider_is_not_named_like_a_target() -> None:
    with pytest.raises(ValueError, match="name it otherwise"):
        GatewaySettings(["http://h:1"], providers={"h:1": ProviderSettings("https://p/v1", {"a": "b"})})


@pytest.mark.parametrize("router", ["response_cache", "semantic_cache"])
def test_routers_that_answer_from_tokens_are_refused_and_what_to_use_is_said(router: str) -> None:
    said = problems(A, f"router={router}")
    assert f"router={router}: it answers from stored tokens, and a gateway has no tokens; use it at the servers" in said

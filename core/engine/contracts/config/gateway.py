"""Servers elsewhere behind one listener."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from engine.contracts.config.checks import at_least, between

_TARGET = re.compile(r"https?://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._\-]+)(?::[0-9]{1,5})?(?:/[A-Za-z0-9._~/\-]*)?")
"""Of a server: keys do not belong into URLs."""
NEEDED_FIELDS = ("model", "messages", "prompt", "stream")
"""Fields of a request without which its answer would be another one, or none."""
OWN_FIELDS = ("cache_salt", "priority")
"""Fields of a request that say nothing to servers of other makers, some of which refuse them."""


@dataclass(frozen=True)
class ProviderSettings:
    """Somebody else's service with the OpenAI API, to which a gateway may send requests. It is not probed."""

    url: str = ""
    """The base URL, as clients of that API are given it: ``https://HOST/v1``. Requests cannot name another one."""
    models: dict[str, str] = field(default_factory=dict)
    """The names that models have at the gateway, and those that they have there."""
    key_env: str | None = None
    """The environment variable with the API key."""
    drop: list[str] = field(default_factory=lambda: [*OWN_FIELDS])
    """Fields of requests that it is not sent, since it would refuse them. With ``stream_options`` streams are not asked
    for their usage."""
    input_price: float = 0.0
    """Of a million prompt tokens, in any currency. The cost is in the metrics, by provider."""
    output_price: float = 0.0
    """Of a million output tokens."""
    overflow_ms: float | None = None
    """It gets the requests whose first token is expected later than this from the targets of their model. ``null``: it
    gets those that no target takes."""
    first_byte_s: float = 60.0
    """As ``gateway.first_byte_s``, for this provider."""


@dataclass(frozen=True)
class CascadeSettings:
    """A model that is asked for the beginning of an answer first, and answers if that shows confidence."""

    table: str = ""
    """A file of ``engine calibrate``: of which model, and how often it agrees with a larger one by its confidence."""
    agreement: float = 0.9
    """It answers where at least this share of its answers is expected to agree."""
    streams: bool = False
    """Also where the answer is streamed: the first token waits for the look."""
    limit_s: float = 5.0
    """How long the look may take."""


@dataclass(frozen=True)
class ShadowSettings:
    """Some of the requests that a smaller model answered are sent to the largest one, too, and compared."""

    share: float = 0.0
    """Of the requests, 0 to 1."""
    provider: str | None = None
    """The provider that is asked, which costs money; ``null``: targets that are idle, and no provider."""
    most: int = 2
    """At once."""


@dataclass(frozen=True)
class GatewaySettings:
    """Servers elsewhere behind one listener: ``engine gateway``."""

    targets: list[str] = field(default_factory=list)
    """URLs of servers of the OpenAI API, this engine or others, with or without ``/v1`` at the end."""
    key_env: str | None = None
    """The environment variable with the API key of the targets. The keys of clients are not passed on."""
    providers: dict[str, ProviderSettings] = field(default_factory=dict)
    """By name. Those of a model are tried after its targets, in this order."""
    models: dict[str, list[str]] = field(default_factory=dict)
    """Further names that clients may use, and the models that each stands for, in the order in which they are tried
    unless the router chooses: ``{auto: [small, large]}``. A model may name itself: ``{large: [large, small]}``."""
    cascade: dict[str, CascadeSettings] = field(default_factory=dict)
    """By name of ``gateway.models``."""
    shadow: dict[str, ShadowSettings] = field(default_factory=dict)
    """By name of ``gateway.models``, whose last model is the largest."""
    connect_s: float = 3.0
    """How long connecting to a target may take."""
    first_byte_s: float = 600.0
    """How long a target may take to begin with a stream, or to end a whole answer. One that is no longer ready loses it
    sooner."""
    silence_s: float = 60.0
    """How long a stream that has begun may be silent."""
    total_s: float = 3600.0
    """How long a request may take in all."""
    patience_s: float = 2.0
    """A model is left for another one only after its last target was tried twice. It is waited for as its
    ``Retry-After`` asks, where that is no longer than this: at most 60."""
    probe_s: float = 1.0
    """How often each target is asked whether it is ready, and how long it may take to say so."""

    def __post_init__(self) -> None:
        for url in self.targets:
            if not _is_target(url):
                raise ValueError(f"gateway.targets: {url!r} is no URL like http://HOST:PORT")
        names = {url.split("/")[2] for url in self.targets}
        if len(names) < len(self.targets):
            raise ValueError(f"gateway.targets: {len(self.targets)} URLs of {len(names)} servers; name each one once")
        for name in ("connect_s", "first_byte_s", "silence_s", "total_s", "probe_s"):
            at_least(f"gateway.{name}", getattr(self, name), 0.1)
        between("gateway.patience_s", self.patience_s, 0.0, 60.0)
        if both := names & {*self.providers}:
            raise ValueError(f"gateway.providers.{min(both)} is the name of a target, too; name it otherwise")
        for name, provider in self.providers.items():
            _check_provider(f"gateway.providers.{name}", provider)
        for name, models in self.models.items():
            _check_names("gateway.models", (name, *models))
            if not models or len({*models}) < len(models):
                raise ValueError(f"gateway.models.{name}: {models}: expected at least one model, each once")
        for name, cascade in self.cascade.items():
            _check_cascade(f"gateway.cascade.{name}", cascade, self.models.get(name, []))
        for name, shadow in self.shadow.items():
            _check_shadow(f"gateway.shadow.{name}", shadow, self.models.get(name, []), self.providers)


def _is_target(url: str) -> bool:
    try:
        return _TARGET.fullmatch(url) is not None and urlsplit(url).port != 0
    except ValueError:  # the address or the port is none
        return False


def _check_names(key: str, names: Iterable[str]) -> None:
    """They are sent in headers."""
    for name in names:
        if not name.isprintable() or name != name.strip() or not name:
            raise ValueError(f"{key}: {name!r} is no name; expected printable characters, no space at the ends")


def _check_provider(key: str, provider: ProviderSettings) -> None:
    if not _is_target(provider.url):
        raise ValueError(f"{key}.url: {provider.url!r} is no URL like https://HOST/v1")
    _check_names("gateway.providers", (key.removeprefix("gateway.providers."),))
    _check_names(f"{key}.models", (*provider.models, *provider.models.values()))
    if not provider.models:
        raise ValueError(f"{key}.models is empty; say which it has: {{NAME HERE: NAME THERE}}")
    if needed := [name for name in provider.drop if name in NEEDED_FIELDS]:
        raise ValueError(f"{key}.drop: {needed[0]} cannot be left out of a request; drop what the provider refuses")
    for name in ("input_price", "output_price", "overflow_ms"):
        at_least(f"{key}.{name}", getattr(provider, name) or 0.0, 0.0)
    at_least(f"{key}.first_byte_s", provider.first_byte_s, 0.1)


def _check_several(key: str, models: Sequence[str]) -> None:
    if len(models) < 2:
        raise ValueError(f"{key}: expected a name of gateway.models that stands for two models or more")


def _check_cascade(key: str, cascade: CascadeSettings, models: Sequence[str]) -> None:
    _check_several(key, models)
    if not cascade.table:
        raise ValueError(f"{key}.table is empty; give the file that engine calibrate has written")
    between(f"{key}.agreement", cascade.agreement, 0.0, 1.0)
    at_least(f"{key}.limit_s", cascade.limit_s, 0.1)


def _check_shadow(
    key: str, shadow: ShadowSettings, models: Sequence[str], providers: Mapping[str, ProviderSettings]
) -> None:
    _check_several(key, models)
    between(f"{key}.share", shadow.share, 0.0, 1.0)
    at_least(f"{key}.most", shadow.most, 1)
    if (name := shadow.provider) is not None and (name not in providers or models[-1] not in providers[name].models):
        raise ValueError(f"{key}.provider={name}: expected a provider that has the largest model, {models[-1]}")

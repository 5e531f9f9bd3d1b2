"""The engine's own settings, and the settings every plugin of a slot has.

These dataclasses are the root of the configuration: ``engine config`` prints exactly this tree. A plugin's config
dataclass derives from its slot's base here (for example :class:`SchedulerConfig`), so keys that other parts rely
on exist whichever plugin is selected.
"""

from __future__ import annotations

import math
import os.path
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from engine.contracts.model import DeviceFacts, ModelFacts

MOST_REPLICAS = 64
_LISTEN = re.compile(r"[0-9]{1,5}|(?:[A-Za-z0-9.\-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}|unix:.+")
"""Where gRPC may listen."""
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.\-]*://(?:\[[0-9a-f:.]+\]|[a-z0-9.\-]+)(?::[0-9]{1,5})?")
"""As browsers send it."""
_CLASS = re.compile(r"[A-Za-z0-9_\-]{1,64}")
_TARGET = re.compile(r"https?://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._\-]+)(?::[0-9]{1,5})?(?:/[A-Za-z0-9._~/\-]*)?")
"""Of a server: keys do not belong into URLs."""


@dataclass(frozen=True)
class SlotConfig:
    """Base of every plugin's config."""

    def unsupported(self, model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
        """Why these values do not go with this model or device (empty: they do); asked after the provider's own
        ``unsupported``. It must not import torch."""
        return ()

    def requires(self) -> Mapping[str, tuple[str, ...]]:
        """Capabilities that these values need of the plugins of other slots, by slot, beside the provider's own
        ``requires``."""
        return {}


@dataclass(frozen=True)
class SchedulerConfig(SlotConfig):
    max_requests: int = 32
    """Most requests running at once (rows of the device tables)."""
    token_budget: int = 2048
    """Most tokens in one step."""
    itl_target_ms: float = 0.0
    """A step that holds decoding requests should take no longer than this; 0 means no target."""

    def __post_init__(self) -> None:
        at_least("scheduler.max_requests", self.max_requests, 1)
        at_least("scheduler.token_budget", self.token_budget, 1)
        at_least("scheduler.itl_target_ms", self.itl_target_ms, 0)


BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
"""That a KV block may have, in tokens."""


@dataclass(frozen=True)
class KVAllocatorConfig(SlotConfig):
    block_size: int = 16
    """Tokens per KV block, of each rank that caches other ones (``parallelism.dcp``): a power of two, 8 to 256."""

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"kv_allocator.block_size={self.block_size}: expected a power of two from 8 to 256")


@dataclass(frozen=True)
class DrafterConfig(SlotConfig):
    path: str = "auto"
    """Checkpoint of drafters that have weights; ``auto`` finds the one that ships with the model."""
    max_width: int = 4
    """Most draft tokens per request and step; the engine chooses 0..max_width online."""
    adaptive: bool = True
    """False: always draft ``max_width`` tokens."""

    def __post_init__(self) -> None:
        between("drafter.max_width", self.max_width, 0, 32)


@dataclass(frozen=True)
class QuantizerConfig(SlotConfig):
    weight_bits: ClassVar[int | None] = None
    """Bits of a weight in a linear layer, scales apart, where the plugin rounds on load; ``None``: it does not. A model
    that does not fit is told about plugins with fewer bits."""
    activations: str = "bf16"
    """``bf16`` (weight-only), ``int8`` or ``fp8``."""

    def __post_init__(self) -> None:
        one_of("quantizer.activations", self.activations, ("bf16", "int8", "fp8"))


@dataclass(frozen=True)
class Joining:
    """How a process becomes the worker of a rank."""

    address: str
    """``HOST:PORT`` of the engine process."""
    rank: int
    environment: Mapping[str, str]
    """Variables to set for it."""


@dataclass(frozen=True)
class ParallelismConfig(SlotConfig):
    tp: int = 1
    """Tensor parallelism: ranks that share out every layer."""
    pp: int = 1
    """Pipeline parallelism: stages that hold some layers each."""
    stage_layers: list[int] | None = None
    """How many layers each stage has; null: so that weights are as equal as can be, the head's included."""
    ep: int = 1
    """Expert parallelism: over how many ranks whole experts are spread; a divisor of ``tp``, or all ``tp * pcp`` ranks
    of a stage."""
    dcp: int = 1
    """Decode context parallelism: how many of a stage's ``tp`` ranks that hold the same key-value heads cache different
    tokens; divides ``tp``."""
    pcp: int = 1
    """Prefill context parallelism: how many times the ``tp`` ranks of a stage are there, to share out the tokens of
    large steps."""
    pcp_min_tokens: int = 256
    """Tokens of the smallest step that is shared out so; each rank computes smaller ones alone."""
    count_experts: bool = False
    """Count how often each expert is chosen, for ``GET /engine/expert_load``. Not with ``pp`` or ``pcp`` above 1."""
    expert_load: str | None = None
    """What ``GET /engine/expert_load`` answered, as a file: the experts of each layer are dealt to the ``ep`` shares so
    that these are chosen about as often. Read where the engine is started; ranks get the counts with the plan."""
    nodes: int = 1
    """Machines, with as many ranks each."""
    share_devices: bool = False
    """Several ranks may use one GPU, for tests: it is no faster."""
    timeout_s: float = 20.0
    """When a rank has died, or has not got on for so long, every stream has ended in an error event."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "dcp", "pcp", "pcp_min_tokens", "nodes"):
            at_least(f"parallelism.{name}", getattr(self, name), 1)
        at_least("parallelism.timeout_s", self.timeout_s, 2)
        check_layout(self.tp, self.ep, self.dcp, self.pcp)
        if self.stage_layers is not None and (
            len(self.stage_layers) != self.pp or min(self.stage_layers, default=0) < 1
        ):
            raise ValueError(
                f"parallelism.stage_layers={self.stage_layers}: expected {self.pp} numbers from 1 on, one for each "
                f"stage of parallelism.pp={self.pp}"
            )
        if self.count_experts and self.pp * self.pcp > 1:
            raise ValueError(
                f"parallelism.count_experts=true {self.sizes}: one rank counts, which has all layers and computes all "
                "tokens; use parallelism.pp=1 and parallelism.pcp=1 to measure"
            )
        if self.expert_load is not None and self.ep == 1:
            raise ValueError(
                f"parallelism.expert_load={self.expert_load}: says which share an expert is on, and parallelism.ep=1; "
                "set parallelism.ep, or leave it out"
            )
        if self.num_ranks % self.nodes:
            ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)} of {self.sizes}"
            raise ValueError(
                f"parallelism.nodes={self.nodes}: does not divide the {ranks}; each machine has as many: set "
                "parallelism.pp to a multiple of it"
            )

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pcp * self.pp

    @property
    def sizes(self) -> str:
        """What the ranks are for, for messages."""
        pcp = f" parallelism.pcp={self.pcp}" if self.pcp > 1 else ""
        return f"parallelism.tp={self.tp} parallelism.pp={self.pp}{pcp}"

    def requires(self) -> Mapping[str, tuple[str, ...]]:
        return {"communicator": ("several_machines",)} if self.nodes > 1 else {}

    def joins(self) -> Joining | None:
        """Where every rank is started with the same command: how this very process joins the one that serves; ``None``:
        it serves. Raises ``ValueError`` where that cannot be told."""
        return None


def check_layout(tp: int, ep: int, dcp: int, pcp: int) -> None:
    """Raise ``ValueError`` for sizes of a stage that do not go together."""
    if tp % ep and ep != tp * pcp:
        of_all = f" and is not parallelism.tp x pcp={tp * pcp}" if pcp > 1 else ""
        said = f"parallelism.ep={ep}: does not divide parallelism.tp={tp}{of_all}"
        raise ValueError(f"{said}; set parallelism.tp to a multiple of it")
    if dcp > 1 and pcp > 1:
        raise ValueError(
            f"parallelism.pcp={pcp} parallelism.dcp={dcp}: ranks that share out the tokens of a step have the whole "
            "cache; use one of them"
        )
    if tp % dcp:
        raise ValueError(
            f"parallelism.dcp={dcp}: does not divide parallelism.tp={tp}; set parallelism.tp to a multiple of it"
        )


@dataclass(frozen=True)
class CommunicatorConfig(SlotConfig):
    """How long a call may take is ``parallelism.timeout_s``, whatever carries it."""


@dataclass(frozen=True)
class ConstraintConfig(SlotConfig):
    """What a request's grammar may be. A request beyond these limits is refused."""

    max_bytes: int = 128 * 1024
    """Most bytes of a grammar."""
    max_properties: int = 500
    """Most properties of a JSON schema, of all of its objects together."""
    max_enum: int = 5000
    """Most values of the enums of a JSON schema, of all of them together."""
    max_depth: int = 64
    """How deep a JSON schema may be nested."""
    max_text: int = 8192
    """Most characters of a choice, of a constant, a name or a pattern of a JSON schema, of a text of another grammar,
    and of a regular expression: a mask may take time for each."""
    compile_s: float = 2.0
    """CPU time that a grammar may take to be compiled."""
    mask_ms: float = 5.0
    """CPU time that the masks of a request may take in the mean, beyond a tenth of a second in all."""
    max_cached: int = 64
    """Verdicts on grammars that are kept for further requests, and compiled ones for requests that have not begun."""

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_properties", "max_enum", "max_depth", "max_text", "max_cached"):
            at_least(f"constraint.{name}", getattr(self, name), 1)
        at_least("constraint.compile_s", self.compile_s, 0.1)
        at_least("constraint.mask_ms", self.mask_ms, 0.1)


@dataclass(frozen=True)
class ModelSettings:
    path: str = "bundled"
    """``bundled``, a local directory in Hugging Face layout, or a hub id."""
    name: str = ""
    """Name under which the model is served; empty: derived from ``path``."""
    dtype: str = "auto"
    """``auto``, ``float32``, ``bfloat16`` or ``float16``. auto: the checkpoint's, but float32 for the bundled
    model on a CPU."""
    max_len: int | None = None
    """Most tokens per request (prompt + output); null: what the model allows."""

    def __post_init__(self) -> None:
        one_of("model.dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        if self.max_len is not None:
            at_least("model.max_len", self.max_len, 2)


@dataclass(frozen=True)
class MemorySettings:
    fraction: float = 0.9
    """Share of the device's free memory the engine may use."""
    kv_tokens: int | None = None
    """Size of the KV pool in tokens; null: from ``fraction``, at most what ``scheduler.max_requests`` can use. Layers
    with a window have fewer, in proportion."""

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise ValueError(f"memory.fraction={self.fraction}: expected a number in (0, 1]")
        if self.kv_tokens is not None:
            at_least("memory.kv_tokens", self.kv_tokens, 16)


@dataclass(frozen=True)
class GrpcSettings:
    """The gRPC transport, see ``docs/grpc.md``; needs the extra ``engine[grpc]``."""

    listen: str | None = None
    """``HOST:PORT``, ``PORT`` (on ``server.host``) or ``unix:PATH``; null: no gRPC."""
    cert: str | None = None
    """A PEM file with the server's certificate chain; with ``key``: TLS."""
    key: str | None = None
    """A PEM file with the private key of ``cert``."""
    client_ca: str | None = None
    """A PEM file with authorities: a client must have a certificate of one of them (mutual TLS)."""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("server.grpc.cert and server.grpc.key belong together: give both, or none")
        if self.client_ca is not None and self.cert is None:
            raise ValueError("server.grpc.client_ca needs server.grpc.cert and server.grpc.key")
        if self.listen is not None and not _is_listen(self.listen):
            raise ValueError(
                f"server.grpc.listen={self.listen}: expected HOST:PORT, [IPV6]:PORT, PORT or unix:PATH, "
                "for example 127.0.0.1:50051"
            )


@dataclass(frozen=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    """When set, every route but ``/`` and health needs ``Authorization: Bearer <api_key>`` or ``x-api-key: <api_key>``;
    see also ``ui``."""
    keys: str | None = None
    """A file of YAML or JSON with a key for each client, see `Keys` in ``docs/serving.md``: each tenant has caches,
    stored responses and a turn in the queue of its own. ``api_key`` goes on to be taken."""
    cors_origins: list[str] = field(default_factory=list)
    """Web pages of these origins, such as ``https://chat.example.org``, may call the server from a browser; ``*``: all
    web pages."""
    ui: bool | None = None
    """The page at ``/ui/``. null: behind the key like everything else, so that browsers see it only where no key is
    set; true: its files, which hold no data, need no key, and it asks for the key; false: there is none."""
    max_queue: int = 256
    """Most sequences (prompts x n) waiting or running; a request beyond that is answered 429."""
    max_n: int = 128
    """Most sequences one API request may ask for (prompts x n)."""
    trust_user: bool = False
    """Clients, who take turns and share the queue, are told apart by the field ``user`` of their requests, as a gateway
    in front of the server sets it; false: by their addresses."""
    least_priority: int = 0
    """The most urgent ``priority`` that a request may have; lower values run first."""
    lame_duck_s: float = 0.0
    """After SIGTERM, how long requests are still taken while ``/ready`` is 503 already: until a load balancer has seen
    that, 10 to 15 s behind most. Ctrl-C does not wait for it."""
    drain_s: float = 30.0
    """After that, how long running requests may take to finish; also those of an engine that is restarted."""
    stall_s: float = 30.0
    """An engine that answers nothing for so long, or whose step takes so much longer than it should, is killed and
    started again. ``/ready`` is 503 after 5 s of this."""
    max_connections: int | None = None
    """Most open connections; null: as many as the limit on open files allows."""
    max_body_bytes: int = 8 * 1024 * 1024
    store_bytes: int = 64 * 1024 * 1024
    """Most bytes of responses that are kept in memory for ``previous_response_id``; 0: none is."""
    store_s: float = 24 * 3600.0
    """How long a response is kept at most."""
    keepalive_s: float = 5.0
    """Silence in a stream after which a comment line is sent; 0: never."""
    compression: bool = True
    """Answers of at least 1,024 bytes leave in a coding that the client accepts (gzip, zstd)."""
    compress_streams: bool = False
    """So do streams of events (gzip)."""
    tool_syntax: str | None = None
    """How the model writes calls of tools: the name of a syntax, or a file of JSON with one of your own, see
    `Tools` in ``docs/serving.md``; null: as the text of its chat template tells."""
    grpc: GrpcSettings = field(default_factory=GrpcSettings)

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("server.host is empty; give an address, 127.0.0.1 for this machine alone")
        between("server.port", self.port, 0, 65535)
        at_least("server.max_queue", self.max_queue, 1)
        at_least("server.max_n", self.max_n, 1)
        at_least("server.lame_duck_s", self.lame_duck_s, 0)
        at_least("server.drain_s", self.drain_s, 0)
        at_least("server.stall_s", self.stall_s, 5)
        at_least("server.max_body_bytes", self.max_body_bytes, 1)
        at_least("server.store_bytes", self.store_bytes, 0)
        at_least("server.store_s", self.store_s, 1)
        if self.max_connections is not None:
            at_least("server.max_connections", self.max_connections, 1)
        at_least("server.keepalive_s", self.keepalive_s, 0)
        if self.compress_streams and not self.compression:
            raise ValueError("server.compress_streams=true needs server.compression=true")
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"server.cors_origins: {origin!r}: expected '*', or scheme, host and perhaps port in lower case, "
                    "with nothing after, such as https://chat.example.org or http://localhost:3000"
                )
        if self.keys == "":
            raise ValueError("server.keys is empty; give a file, or server.keys=null for none")
        if self.api_key == "":
            raise ValueError("server.api_key is empty; give a key, or server.api_key=null for none")


@dataclass(frozen=True)
class AutoscaleSettings:
    """More and fewer engines as the load asks for them."""

    min: int = 1
    """Fewest engines. 0: the last one ends where nothing is left to do, and requests wait while one starts again."""
    max: int | None = None
    """Most engines: memory and devices are shared out for so many. null: their number does not change by itself."""
    backlog_s: float = 2.0
    """One more is started where prompts for more than so many seconds of computing wait at each engine, or no row or KV
    block is left,"""
    up_after_s: float = 2.0
    """for so long."""
    down_after_s: float = 120.0
    """One ends where the others would be at most half full without it, for so long."""

    def __post_init__(self) -> None:
        between("fleet.autoscale.min", self.min, 0, MOST_REPLICAS)
        if self.max is None:
            if self.min != 1:
                raise ValueError(f"fleet.autoscale.min={self.min} needs fleet.autoscale.max, the most engines")
        else:
            between("fleet.autoscale.max", self.max, max(1, self.min), MOST_REPLICAS)
        at_least("fleet.autoscale.backlog_s", self.backlog_s, 0.1)
        at_least("fleet.autoscale.up_after_s", self.up_after_s, 0)
        at_least("fleet.autoscale.down_after_s", self.down_after_s, 1)


@dataclass(frozen=True)
class FleetSettings:
    """Several engines behind one listener."""

    replicas: int = 1
    """Engines with this plan, each in a process of its own. They share the CPU cores and the memory of this machine; on
    GPUs each takes the next devices. With ``fleet.autoscale.max`` it is that, of which some are stopped."""
    autoscale: AutoscaleSettings = field(default_factory=AutoscaleSettings)
    launcher: str = "local"
    """Who starts the processes of engines: ``local`` does on this machine. Another plugin of slot ``parallelism`` that
    can, such as ``ray``: each engine runs on a machine that it finds."""
    launch: dict[str, Any] = field(default_factory=dict)
    """Settings of that plugin, by the names that they have there: ``fleet.launch.address``."""

    def __post_init__(self) -> None:
        between("fleet.replicas", self.replicas, 1, MOST_REPLICAS)
        most = self.autoscale.max
        if most is not None and self.replicas not in (1, most):
            raise ValueError(
                f"fleet.replicas={self.replicas} and fleet.autoscale.max={most}: leave fleet.replicas out; "
                "fleet.autoscale.min is how many there are at the start"
            )
        object.__setattr__(self, "replicas", most or self.replicas)

    @property
    def at_start(self) -> int | None:
        """Engines that are started with the server: at least one, which shows whether the plan can run; ``None``:
        all."""
        return None if self.autoscale.max is None else max(1, self.autoscale.min)


@dataclass(frozen=True)
class SloClass:
    """A class of requests by what its clients are promised (a service level objective)."""

    ttft_ms: float = 0.0
    """The first token should come so long after the request: what waits is served in the order of these due times."""
    itl_ms: float = 0.0
    """While one of its requests decodes, steps should take no longer than this; 0: ``scheduler.itl_target_ms``."""
    refuse_late: bool = False
    """A request whose first token is expected too late is answered 429 at once."""
    cancel_late: bool = False
    """A request is ended once its first token is late."""


@dataclass(frozen=True)
class SloSettings:
    """Classes of requests, see `Classes` in ``docs/serving.md``."""

    classes: dict[str, SloClass] = field(default_factory=dict)
    """By name. Keys say which of them their holders may use (``server.keys``); requests ask with the header
    ``X-SLO-Class``."""
    default: str = ""
    """The class of requests that ask for none; empty: that with the longest ``ttft_ms``."""
    late_s: float = 10.0
    """How long a request that is late already makes way for those that can still be in time."""

    def __post_init__(self) -> None:
        for name, one in self.classes.items():
            if not _CLASS.fullmatch(name):
                raise ValueError(f"slo.classes: {name!r} is no name; expected letters, digits, '-' and '_', at most 64")
            at_least(f"slo.classes.{name}.ttft_ms", one.ttft_ms, 1)
            at_least(f"slo.classes.{name}.itl_ms", one.itl_ms, 0)
        if self.default and self.default not in self.classes:
            names = ", ".join(self.classes) or "none"
            raise ValueError(f"slo.default={self.default}: expected one of slo.classes ({names})")
        at_least("slo.late_s", self.late_s, 0)

    @property
    def usual(self) -> str:
        """The class of a request that asks for none; empty: there are no classes."""
        return self.default or max(self.classes, key=lambda name: self.classes[name].ttft_ms, default="")


@dataclass(frozen=True)
class BatchSettings:
    """Files of requests that are answered while nobody waits: ``/v1/files``, ``/v1/batches``."""

    path: str = "auto"
    """Where files, batches and results lie: ``auto``: ``~/.local/state/engine/batches`` (below ``$XDG_STATE_HOME``
    where that is set), ``none``: there are no batches, or an absolute path. One server has it at a time."""
    max_file_bytes: int = 200 * 1024 * 1024
    """Most bytes of one uploaded file."""
    max_lines: int = 50_000
    """Most requests of one batch."""
    total_bytes: int = 10 * 1024**3
    """A tenant whose files, those with results included, have more bytes uploads no more."""
    max_in_flight: int | None = None
    """Most sequences of batches that run at once; null: an eighth of ``scheduler.max_requests`` of each
    engine."""
    quiet_s: float = 1.0
    """Lines begin once no request of a client has waited or run for so long."""

    def __post_init__(self) -> None:
        if self.path not in ("auto", "none") and not os.path.isabs(self.path):
            raise ValueError(f"batches.path={self.path}: expected auto, none or an absolute path")
        for name in ("max_file_bytes", "max_lines", "total_bytes"):
            at_least(f"batches.{name}", getattr(self, name), 1)
        if self.max_in_flight is not None:
            at_least("batches.max_in_flight", self.max_in_flight, 1)
        at_least("batches.quiet_s", self.quiet_s, 0)


def _is_listen(address: str) -> bool:
    port = address.rpartition(":")[2]
    return _LISTEN.fullmatch(address) is not None and (address.startswith("unix:") or int(port) <= 65535)


def _is_target(url: str) -> bool:
    try:
        return _TARGET.fullmatch(url) is not None and urlsplit(url).port != 0
    except ValueError:  # the address or the port is none
        return False


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


@dataclass(frozen=True)
class PluginSettings:
    third_party: bool = True
    """False: only the built-in plugins are loaded."""
    allow: list[str] | None = None
    """Distribution names whose plugins may be loaded besides the built-in ones; null: all installed ones."""
    disable: list[str] = field(default_factory=list)
    """Distribution names whose plugins are not loaded."""


@dataclass(frozen=True)
class Settings:
    """The settings that belong to no slot."""

    model: ModelSettings = field(default_factory=ModelSettings)
    device: str = "auto"
    """``auto``, ``cpu`` or ``cuda``."""
    execution: str = "auto"
    """``auto``, ``eager``, ``compile`` or ``graphs``."""
    overlap: bool = True
    """Plan the next step while the device runs this one."""
    seed: int = 0
    """Seeds of requests that bring none are drawn from this and a running number."""
    threads: int | None = None
    """CPU threads of each rank; null: as ``OMP_NUM_THREADS`` says, or else as many as the CPUs this process may run on,
    shared out to the ranks."""
    calibration: str = "auto"
    """Where measured step costs are kept for the next start: ``auto``: ``~/.cache/engine/step_cost`` (below
    ``$XDG_CACHE_HOME`` where that is set), ``none``, or an absolute path."""
    memory: MemorySettings = field(default_factory=MemorySettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    fleet: FleetSettings = field(default_factory=FleetSettings)
    slo: SloSettings = field(default_factory=SloSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    batches: BatchSettings = field(default_factory=BatchSettings)
    plugins: PluginSettings = field(default_factory=PluginSettings)

    def __post_init__(self) -> None:
        one_of("device", self.device, ("auto", "cpu", "cuda"))
        one_of("execution", self.execution, ("auto", "eager", "compile", "graphs"))
        if self.threads is not None:
            at_least("threads", self.threads, 1)
        if self.calibration not in ("auto", "none") and not os.path.isabs(self.calibration):
            raise ValueError(f"calibration={self.calibration}: expected auto, none or an absolute path")


def at_least(key: str, value: float, low: float) -> None:
    """Raise ``ValueError`` naming the key unless ``value`` is a finite number from ``low`` on."""
    if not low <= value < math.inf:
        raise ValueError(f"{key}={value}: expected " + ("a finite number" if value == math.inf else f"at least {low}"))


def between(key: str, value: float, low: float, high: float) -> None:
    """Raise ``ValueError`` naming the key unless ``low <= value <= high``."""
    if not low <= value <= high:
        raise ValueError(f"{key}={value}: expected {low} to {high}")


def one_of(key: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise ``ValueError`` naming the key unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{key}={value}: expected one of {', '.join(map(str, choices))}")

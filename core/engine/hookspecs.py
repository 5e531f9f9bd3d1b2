"""Every extension point of the engine. A plugin is one Python file with some of these functions and one entry point.

.. code-block:: toml

    [project.entry-points."engine.plugins.v1"]
    mine = "engine_mine"

The examples below are parts of such a file, which begins with

.. code-block:: python

    from dataclasses import dataclass

    from engine.contracts.command import CommandProvider
    from engine.contracts.config import ConstraintConfig, DrafterConfig, ParallelismConfig, QuantizerConfig, SlotConfig
    from engine.contracts.provider import Provider
    from engine.hookspecs import hookimpl

Each hook of a slot returns a list of :class:`~engine.contracts.provider.Provider` records. Hooks *describe*; nothing is
built and the factory's module is not imported until its plugin is selected. Hooks are called when plugins are
looked for, never while an engine runs.
"""

from __future__ import annotations

import pluggy

from engine.contracts.command import CommandProvider
from engine.contracts.provider import Provider

PROJECT = "engine"
ENTRY_POINT_GROUP = "engine.plugins.v1"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def engine_scheduler() -> list[Provider]:  # type: ignore[empty-body]
    """Offer schedulers: who runs this step, with how many tokens? Contract: ``engine.contracts.scheduler``.

    .. code-block:: python

        @hookimpl
        def engine_scheduler():
            return [Provider("shortest_first", "engine_mine:ShortestFirst", doc="Shortest prompt first.")]
    """


@hookspec
def engine_kv_allocator() -> list[Provider]:  # type: ignore[empty-body]
    """Offer KV allocators: where do keys and values live? Contract: ``engine.contracts.kv_allocator``.

    .. code-block:: python

        @hookimpl
        def engine_kv_allocator():
            return [Provider("radix", "engine_mine:Radix", provides=("prefix_cache",))]
    """


@hookspec
def engine_kv_format() -> list[Provider]:  # type: ignore[empty-body]
    """Offer KV formats: how is a cached key or value stored? Contract: ``engine.contracts.kv_format``.

    .. code-block:: python

        def needs_fp8_units(model, device):
            return () if device.kind == "cuda" else ("needs a GPU with units for float8",)


        @hookimpl
        def engine_kv_format():
            return [Provider("fp8_units", "engine_mine:Fp8KV", unsupported=needs_fp8_units)]
    """


@hookspec
def engine_quantizer() -> list[Provider]:  # type: ignore[empty-body]
    """Offer quantizers: how is a weight stored and multiplied? Contract: ``engine.contracts.quantizer``.

    .. code-block:: python

        @dataclass(frozen=True)
        class Int3Config(QuantizerConfig):
            group_size: int = 64


        @hookimpl
        def engine_quantizer():
            return [Provider("int3", "engine_mine:Int3", config=Int3Config)]
    """


@hookspec
def engine_drafter() -> list[Provider]:  # type: ignore[empty-body]
    """Offer drafters: what might come next? Contract: ``engine.contracts.drafter``.

    .. code-block:: python

        @dataclass(frozen=True)
        class EchoConfig(DrafterConfig):
            distance: int = 8


        @hookimpl
        def engine_drafter():
            return [Provider("echo", "engine_mine:Echo", config=EchoConfig, provides=("drafts", "host_drafter"))]
    """


@hookspec
def engine_attention_kernel() -> list[Provider]:  # type: ignore[empty-body]
    """Offer attention kernels: attention over the paged cache. Contract: ``engine.contracts.attention_kernel``.

    .. code-block:: python

        def needs_blackwell(model, device):
            return () if (device.capability or (0, 0)) >= (10, 0) else ("needs compute capability 10.0",)


        @hookimpl
        def engine_attention_kernel():
            return [Provider("fa9", "engine_mine:FA9", provides=("capturable",), unsupported=needs_blackwell)]
    """


@hookspec
def engine_constraint() -> list[Provider]:  # type: ignore[empty-body]
    """Offer constraints: which tokens may come next? Contract: ``engine.contracts.constraint``.

    .. code-block:: python

        @dataclass(frozen=True)
        class AutomatonConfig(ConstraintConfig):
            max_states: int = 10_000


        @hookimpl
        def engine_constraint():
            return [Provider("automaton", "engine_mine:Automaton", config=AutomatonConfig)]
    """


@hookspec
def engine_kv_store() -> list[Provider]:  # type: ignore[empty-body]
    """Offer KV stores: where else may keys and values live? Contract: ``engine.contracts.kv_store``.

    .. code-block:: python

        @dataclass(frozen=True)
        class BucketConfig(SlotConfig):
            url: str = ""


        @hookimpl
        def engine_kv_store():
            needs = {"kv_allocator": ("prefix_cache",)}
            return [Provider("bucket", "engine_mine:Bucket", config=BucketConfig, requires=needs)]
    """


@hookspec
def engine_embedder() -> list[Provider]:  # type: ignore[empty-body]
    """Offer embedders: what does this text mean? Contract: ``engine.contracts.embedder``.

    .. code-block:: python

        @dataclass(frozen=True)
        class WordsConfig(SlotConfig):
            path: str = "vectors.bin"


        @hookimpl
        def engine_embedder():
            return [Provider("words", "engine_mine:Words", config=WordsConfig, doc="The mean of word vectors.")]
    """


@hookspec
def engine_router() -> list[Provider]:  # type: ignore[empty-body]
    """Offer routers: who answers this API request? Contract: ``engine.contracts.router``.

    .. code-block:: python

        @dataclass(frozen=True)
        class StickyConfig(SlotConfig):
            forget_after_s: float = 600.0


        @hookimpl
        def engine_router():
            return [Provider("sticky", "engine_mine:Sticky", config=StickyConfig)]
    """


@hookspec
def engine_exporter() -> list[Provider]:  # type: ignore[empty-body]
    """Offer exporters: where do events go? Contract: ``engine.contracts.exporter``.

    .. code-block:: python

        @dataclass(frozen=True)
        class StatsdConfig(SlotConfig):
            address: str = "127.0.0.1:8125"


        @hookimpl
        def engine_exporter():
            return [Provider("statsd", "engine_mine:Statsd", config=StatsdConfig)]
    """


@hookspec
def engine_parallelism() -> list[Provider]:  # type: ignore[empty-body]
    """Offer launchers: how are the workers of further ranks started? Contract: ``engine.contracts.parallelism``.

    .. code-block:: python

        @dataclass(frozen=True)
        class PodConfig(ParallelismConfig):
            namespace: str = "default"


        @hookimpl
        def engine_parallelism():
            return [Provider("pods", "engine_mine:Pods", config=PodConfig, doc="A pod for each rank.")]
    """


@hookspec
def engine_communicator() -> list[Provider]:  # type: ignore[empty-body]
    """Offer ways in which ranks exchange tensors. Contract: ``engine.contracts.communicator``.

    .. code-block:: python

        def needs_cuda(model, device):
            return () if device.kind == "cuda" else ("needs a CUDA device",)


        @hookimpl
        def engine_communicator():
            return [Provider("nvshmem", "engine_mine:Nvshmem", unsupported=needs_cuda)]
    """


@hookspec
def engine_architecture() -> list[Provider]:  # type: ignore[empty-body]
    """Offer model families as typed ops. Contract: ``engine.contracts.architecture``.

    .. code-block:: python

        def only_mamba(model, device):
            return () if model.architecture == "MambaForCausalLM" else (f"it computes Mamba, not {model.architecture}",)


        @hookimpl
        def engine_architecture():
            return [Provider("mamba", "engine_mine:Mamba", unsupported=only_mamba)]
    """


@hookspec
def engine_config_searchpath() -> list[str]:  # type: ignore[empty-body]
    """Offer folders of YAML (presets, variants) as Hydra search paths, for example ``pkg://engine_mine.conf``.

    .. code-block:: python

        @hookimpl
        def engine_config_searchpath():
            return ["pkg://engine_mine.conf"]
    """


@hookspec
def engine_command() -> list[CommandProvider]:  # type: ignore[empty-body]
    """Offer subcommands of ``engine``. Contract: ``engine.contracts.command``.

    .. code-block:: python

        @hookimpl
        def engine_command():
            return [CommandProvider("replay", "engine_mine:REPLAY", "replay recorded requests")]
    """

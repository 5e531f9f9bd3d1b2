"""The engine's own settings, and the settings every plugin of a slot has.

These dataclasses are the root of the configuration: ``engine config`` prints exactly this tree. A plugin's config
dataclass derives from its slot's base here (for example :class:`SchedulerConfig`), so keys that other parts rely
on exist whichever plugin is selected.
"""

from engine.contracts.config.batches import BatchSettings
from engine.contracts.config.checks import at_least, between, one_of
from engine.contracts.config.fleet import MOST_REPLICAS, AutoscaleSettings, FleetSettings
from engine.contracts.config.gateway import (
    NEEDED_FIELDS,
    OWN_FIELDS,
    CascadeSettings,
    GatewaySettings,
    ProviderSettings,
    ShadowSettings,
)
from engine.contracts.config.parallelism import Joining, ParallelismConfig, check_layout
from engine.contracts.config.server import GrpcSettings, ServerSettings
from engine.contracts.config.settings import MemorySettings, ModelSettings, PluginSettings, Settings
from engine.contracts.config.slo import SloClass, SloSettings
from engine.contracts.config.slots import (
    BLOCK_SIZES,
    CommunicatorConfig,
    ConstraintConfig,
    DrafterConfig,
    KVAllocatorConfig,
    QuantizerConfig,
    SchedulerConfig,
    SlotConfig,
)

__all__ = [
    "BLOCK_SIZES", "MOST_REPLICAS", "NEEDED_FIELDS", "OWN_FIELDS", "AutoscaleSettings", "BatchSettings",
    "CascadeSettings", "CommunicatorConfig", "ConstraintConfig", "DrafterConfig", "FleetSettings",
    "GatewaySettings", "GrpcSettings", "Joining", "KVAllocatorConfig", "MemorySettings", "ModelSettings",
    "ParallelismConfig", "PluginSettings", "ProviderSettings", "QuantizerConfig", "SchedulerConfig",
    "ServerSettings", "Settings", "ShadowSettings", "SloClass", "SloSettings", "SlotConfig", "at_least", "between",
    "check_layout", "one_of",
]  # fmt: skip

"""Would a plan start here? Everything short of loading weights, in this process."""

from __future__ import annotations

from collections.abc import Mapping

from engine.assembly.bind import bind_api
from engine.assembly.errors import AssemblyError
from engine.assembly.plan import EnginePlan
from engine.checkpoint.files import CheckpointError
from engine.checkpoint.headers import TensorHeader, read_headers
from engine.service.template_worker import NUM_CHILDREN
from engine.service.tokenizer import Tokenizer, TokenizerError
from engine.service.tool_syntax import told_syntax
from engine.startup.headers import check_tensors
from engine.startup.memory.report import describe_ranks, size


def check_files(plan: EnginePlan) -> tuple[str, ...]:
    """Read the headers of the model's weights, and its tokenizer, as the API process and the engine do. Imports torch,
    as quantizers do. Returns what the user should know of how the weights are read.

    Raises :class:`AssemblyError` with what is wrong with them.
    """
    check_headers(plan)
    load_tokenizer(plan).close()
    return check_tensors(plan)


def load_tokenizer(plan: EnginePlan) -> Tokenizer:
    """The model's tokenizer, which knows how the model writes calls. Raises :class:`AssemblyError` saying why it cannot
    be used."""
    told = plan.settings.server.tool_syntax
    try:
        syntax = None if told is None else told_syntax(told)
    except ValueError as error:
        raise AssemblyError([f"server.tool_syntax={told}: {error}"]) from error
    try:
        tokenizer = Tokenizer.from_directory(plan.model.path, plan.model.vocab_size, renderers=NUM_CHILDREN)
    except TokenizerError as error:
        raise AssemblyError([str(error)]) from error
    tokenizer.told_syntax = syntax
    return tokenizer


def check_headers(plan: EnginePlan) -> None:
    """Read the headers of the model's weights. Raises :class:`AssemblyError`."""
    try:
        _check_vocabulary(read_headers(plan.model.path).tensors, plan.model.vocab_size)
    except CheckpointError as error:
        where = "" if plan.model.path in str(error) else f"model.path={plan.model.path}: "
        raise AssemblyError([f"{where}{error}"]) from error


def _check_vocabulary(headers: Mapping[str, TensorHeader], vocab_size: int) -> None:
    """A tokenizer is read up to the size that ``config.json`` states, so that has to be the model's."""
    largest = max((max(header.shape, default=0) for header in headers.values()), default=0)
    if largest < vocab_size:
        raise CheckpointError(
            f"config.json says vocab_size={vocab_size}, and no tensor of the weights has more than {largest} rows"
        )


def describe_placement(plan: EnginePlan) -> str:
    """Which rank would hold what: a table; and what placing experts by load gains. Builds the engine's plugins, as far
    as they are needed for that.

    Raises :class:`engine.assembly.errors.AssemblyError` for a model that cannot be shared out so, or does not fit.
    """
    from engine.startup.memory.fit import check_memory  # imports torch, as the engine's plugins do
    from engine.startup.placing import describe_expert_load, rank_infos

    ranks = describe_ranks(rank_infos(plan, check_memory(plan)))
    return f"{ranks}\n{describe_expert_load(plan)}" if plan.expert_load else ranks


def try_plan(plan: EnginePlan) -> str:
    """Build every selected plugin and estimate the memory; what came of it, for people.

    Raises :class:`engine.assembly.errors.AssemblyError` with what stands against it.
    """
    from engine.startup.memory.fit import check_memory  # imports torch, as the engine's plugins do

    memory = max(check_memory(plan), key=lambda rank: rank.estimate.smallest)
    bind_api(plan)
    estimate = memory.estimate
    tokens = (estimate.smallest_blocks - 1) * estimate.pool.block_size
    who = "the engine" if plan.layout.size == 1 else "the largest rank"
    if (replicas := plan.settings.fleet.replicas) > 1:
        who = (
            f"each of {replicas} engines"
            if plan.layout.size == 1
            else f"the largest rank of each of {replicas} engines"
        )
    return (
        f"every selected plugin is built; weights take {size(estimate.weights)}, with a KV pool of {tokens} tokens "
        f"{who} needs {size(estimate.smallest)} of the {size(memory.budget.usable)} it may use"
    )

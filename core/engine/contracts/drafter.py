"""Slot ``drafter``: what might come next?

A drafter proposes chains of tokens. The core verifies them, samples so that the output distribution is exactly
the target model's, applies stops, commits, and chooses how many drafts to ask for (0 included) from
measured acceptance.

There are two kinds, see ``placement``. A :class:`HostDrafter` looks at token ids on the CPU; it is called from the
engine's loop. A :class:`DeviceDrafter` runs after the
target's forward pass: it may have weights of its own, keys and values in the target's cache (``kv``), and see the
target's hidden states (``aux_layers``); it is called on the device's thread under ``torch.inference_mode()``.

What a drafter keeps beyond a request may be used for requests of the same tenant alone: :attr:`DraftRow.salt` says
which that is. A drafter on the device is told no tenants: what it keeps belongs to a row, and ends with
:meth:`Drafter.release`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from engine.contracts.graph import Cached, Graph
from engine.contracts.model import ModelFacts
from engine.contracts.ops import LinearSpec, Norm

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DrafterKV:
    """Keys and values that a drafter keeps, as further caches on the target's block ids."""

    caches: tuple[Cached, ...] = ()
    """Of its own layers, in the order in which they are written."""
    shared_layers: int = 0
    """Without any: it reads and writes those of so many first layers of the target."""


@runtime_checkable
class Drafter(Protocol):
    """What every drafter declares. One that is not a :class:`DeviceDrafter` is a :class:`HostDrafter`."""

    placement: Literal["host", "device"]
    """``host``: reads tokens on the CPU, so the next step waits for this one's tokens (the plan prints that).
    ``device``: runs after the target's forward pass on the device."""
    max_width: int
    """Most tokens it can propose; 0 switches speculation off."""

    def release(self, row_id: int) -> None:
        """The request in this row is gone; forget what was kept for it."""
        ...


# Drafters on the host --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One request that wants drafts."""

    row_id: int
    """Its row in the device tables."""
    tokens: Sequence[int]
    """All its tokens so far, prompt included."""
    prompt_len: int
    num_draft_tokens: int
    """At most this many tokens are wanted (>= 1)."""
    salt: str = ""
    """The tenant, as in :attr:`EngineRequest.cache_salt <engine.contracts.request.EngineRequest.cache_salt>`: tokens
    of one must never show in another's drafts."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposals for a batch of rows, in the order of the rows.

    ``tokens[i]`` has at most ``rows[i].num_draft_tokens`` ids; fewer (or none) when the drafter has nothing to say.
    """

    tokens: tuple[tuple[int, ...], ...]


@runtime_checkable
class HostDrafter(Drafter, Protocol):
    """A drafter that needs nothing but token ids."""

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        """Propose continuations."""
        ...


# Drafters on the device ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TargetStep:
    """What the target has just computed: the tokens of all rows, one row after another.

    Drafts that were rejected are among them, with keys that mean nothing and are overwritten when their positions
    are computed again; nothing ever attends to them.
    """

    tokens: Tensor
    """int64 ``[num_tokens]``"""
    next_tokens: Tensor
    """int64 ``[num_tokens]``: what follows each, known or just sampled."""
    positions: Tensor
    """int64 ``[num_tokens]``"""
    q_lens: tuple[int, ...]
    """Tokens of each row."""
    row_ids: Tensor
    """int64 ``[num_tokens]``: the row of the device tables each token belongs to."""
    aux_hidden_states: tuple[Tensor, ...]
    """The hidden states asked for, ``[num_tokens, hidden_size]`` each."""
    metadata: Any
    """Where these tokens are in the cache: for :meth:`DraftLayers.run`."""
    drafts_follow: bool = True
    """Drafts may be wanted after this step. ``False``: all that is needed of it is what later steps read in the
    cache."""


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The rows of the last :class:`TargetStep` that want drafts."""

    index: tuple[int, ...]
    """Which rows of the step these are."""
    row_ids: Tensor
    """int64 ``[num_rows]``"""
    last: Tensor
    """int64 ``[num_rows]``: where, among the step's tokens, each row's last settled one is."""
    tokens: Tensor
    """int64 ``[num_rows]``: the token that follows it, the newest of the request; not computed yet."""
    positions: Tensor
    """int64 ``[num_rows]``: that token's position."""
    lengths: tuple[int, ...]
    """Bounds of these on the host. ``()`` in a capture (:class:`CapturableDrafter`)."""
    num_draft_tokens: tuple[int, ...]
    """Drafts wanted, at least 1 each."""
    sampled: bool = False
    """Some of these requests are sampled, not greedy."""
    capture: Any = None
    """The core's own: the forward metadata of the capture that is being made; ``None``: none is."""

    @property
    def most_draft_tokens(self) -> int:
        """Most drafts that a row wants."""
        return max(self.num_draft_tokens, default=0)


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Proposals for :class:`DraftRows`, on the device.

    ``tokens``: int64 ``[num_rows, num_draft_tokens]``, all of the vocabulary; what is beyond the number that a row
    wants is not used. A row for which there is nothing to say gets tokens, too, its newest again for example: they cost
    their verification, and what is not accepted lowers how many the core asks for.
    """

    tokens: Tensor


ChainStep = Callable[["Tensor", "Tensor | None", Any], "tuple[Tensor, Tensor | None]"]
"""``(tokens, hidden, metadata) -> (logits, hidden)``: of one more token for each row, ``[num_rows, V]``. ``tokens``:
int64 ``[num_rows]``, the newest of each row, whose keys go where ``metadata`` says; ``hidden``: what the step before
returned, ``[num_rows, size]``."""
ChainFirst = Callable[["Tensor"], "Tensor"]
"""``hidden -> logits``: what is known without a step."""


class DraftChain(Protocol):
    """Drafts chains, see :meth:`DraftEngine.chain`."""

    def __call__(self, rows: DraftRows, hidden: Tensor | None = None) -> DraftTokens:
        """A chain for each row, as long as the longest that is wanted. ``hidden``: ``[num_tokens, size]`` for the
        tokens of the last :class:`TargetStep`; that of each row's last settled one is what its chain begins with. The
        result is good until the next call."""
        ...


class DraftLayers(Protocol):
    """Layers that are ready to run."""

    def run(self, *inputs: Tensor, metadata: Any) -> Tensor:
        """The residual stream ``[num_tokens, hidden]`` after the layers, which write their keys and values.

        ``inputs``: the graph's, in their order; of a whole model, what enters its first layer. They may be changed in
        place.
        """
        ...

    def write(self, x: Tensor, metadata: Any) -> None:
        """Write the first layer's keys and values, which are made of ``x``, and compute nothing else."""
        ...


class DraftWeights(Protocol):
    """A drafter's checkpoint while it is being loaded. Every method raises ``ValueError`` for a tensor that is missing
    or of another shape."""

    names: frozenset[str]

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """As stored, on the host."""
        ...

    def embedding(self, name: str, vocab_size: int, size: int) -> Any:
        """``token_ids [T] -> [T, size]``"""
        ...

    def enter(self, graph: Graph) -> Any:
        """What enters the graph's layers, :attr:`Graph.entering <engine.contracts.graph.Graph.entering>`: ``token_ids
        [T] ->`` a tuple of the residual stream ``[T, hidden]`` and any others. A tied head shares its table."""
        ...

    def norm(self, op: Norm) -> Any:
        """``[T, size] -> [T, size]``"""
        ...

    def norms(self, ops: tuple[Norm, Norm], embed: Callable[[Tensor], Tensor]) -> Any:
        """``(token_ids [T], x [T, size]) ->`` ``[T, 2 * size]``, the first norm of ``embed(token_ids)`` beside the
        second of ``x``, and that one by itself, ``[T, size]``. ``embed``: :meth:`embedding` or
        :meth:`DraftEngine.embed`; on a GPU one kernel computes all of it."""
        ...

    def linear(self, spec: LinearSpec) -> Any:
        """``[T, in_features] -> [T, out_features]``, by the plan's quantizer."""
        ...

    def layers(self, graph: Graph, first: int = 0) -> DraftLayers:
        """The graph's layers. Their keys and values are the drafter's own (:attr:`DeviceDrafter.kv`), from its
        ``first`` cache on."""
        ...

    def head(self, graph: Graph) -> Any:
        """The graph's head: ``[T, hidden] -> logits [T, vocab]`` float32, the final norm included."""
        ...

    def finish(self, ignored: Sequence[str] = ()) -> None:
        """Raise ``ValueError`` if a tensor is left over: a weight that would silently be dropped. ``ignored``: names,
        or their ends, that are no weights."""
        ...


class DraftEngine(Protocol):
    """What the core lends a drafter on the device."""

    device: str
    dtype: Any
    """``torch.dtype`` that is computed with."""

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embedding: int64 ``[T]`` -> ``[T, hidden_size]``."""
        ...

    def enter(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """What the target's layers are run on: :meth:`embed`, and whatever else they read of the tokens."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """The target's final norm and vocabulary projection: ``[T, hidden_size]`` -> float32 ``[T, vocab]``."""
        ...

    def lm_head(self, normed: Tensor) -> Tensor:
        """:meth:`head` without the norm: the projection of rows that the drafter has normed."""
        ...

    def target_layers(self, count: int) -> DraftLayers:
        """The target's first ``count`` layers, on its own cache (``kv.shared_layers``)."""
        ...

    def open(self, model: ModelFacts) -> DraftWeights:
        """The checkpoint at ``model.path``. Raises ``ValueError`` if it cannot be read."""
        ...

    def describe(self, model: ModelFacts) -> Any:
        """The :class:`~engine.contracts.graph.Graph` of a model, by the plan's architecture plugin."""
        ...

    def chain(self, step: ChainStep, first: ChainFirst | None = None, ids: Tensor | None = None) -> DraftChain:
        """What drafts token after token with ``step``; with ``first``, that has each chain's first token from the
        hidden states alone. Tokens are chosen as :meth:`choose` does.

        Both must be as :meth:`captured` wants functions.
        """
        ...

    def choose(self, logits: Tensor, rows: DraftRows, ids: Tensor | None = None) -> Tensor:
        """Drafts from logits ``[num_rows * num_draft_tokens, V]``, each row's one after another: int64 ``[num_rows,
        num_draft_tokens]``.

        Greedy requests get the most likely tokens. For sampled ones the noise is that of verification, at the request's
        temperature and filters: where the drafter has the target's logits, a draft is the target's token. ``ids``:
        int64 ``[V]``, the target's token that each column stands for, where it is not the same.
        """
        ...

    def captured(self, function: Callable[..., Tensor | None]) -> Callable[..., Any]:
        """The same function, which takes tensors, ``[num_tokens, ...]`` each, and ``metadata=`` of these tokens.
        It may change its arguments.

        On a CPU its work on few tokens is a program: the function is called once for each number of tokens with values
        (:mod:`engine.kernels.cpu.program`) in place of tensors, and what it computes of them is run from then on. So it
        must compute with what is lent here and by :class:`DraftWeights` and with views, depend on nothing but its
        arguments and weights, and leave nothing behind but keys, values and its result. A function that computes with
        torch is called with tensors as ever; start-up says which and why.
        """
        ...

    def cat(self, parts: Sequence[Tensor]) -> Tensor:
        """``torch.cat(parts, dim=-1)`` of matrices."""
        ...

    def chain_metadata(self, rows: DraftRows, steps: int) -> Sequence[Any]:
        """Where the next ``steps`` tokens of each row go, for :meth:`DraftLayers.run`: entry ``j`` is one token a
        row at position ``rows.positions[row] + j``, attending to everything before it."""
        ...

    def block_metadata(self, rows: DraftRows, num_tokens: int) -> Any:
        """Where the next ``num_tokens`` tokens of each row go, all at once and each attending to all of them: no mask
        within the block."""
        ...


@runtime_checkable
class DeviceDrafter(Drafter, Protocol):
    """A drafter that runs after the target's forward pass.

    The core calls :meth:`extend` after target forward passes with a prompt among their rows or drafts wanted after
    them, and after all while drafting pays; and then :meth:`propose` if drafts are wanted. While drafting is off,
    decode steps pass without either: a request's keys may then lack some positions, or be those of a block's former
    owner. That costs acceptance, which is measured, never correctness.
    """

    aux_layers: tuple[int, ...]
    """Hidden states wanted: for ``i`` the residual entering layer ``i``; ``num_layers``: that before the final norm."""
    kv: DrafterKV | None
    kv_lookahead: int
    """> 0: draft keys at ``i`` depend on token ``i + kv_lookahead``, so a prefix hit ends so many tokens before the
    cached text and the new one part."""
    weights_bytes: int
    """What its own weights will take on the device, as far as headers tell."""

    def start(self, engine: DraftEngine) -> None:
        """Called once, when target and cache exist: load weights here. Raises ``ValueError`` for a checkpoint
        that does not fit."""
        ...

    def extend(self, step: TargetStep) -> None:
        """Draft KV sync: compute and write the keys and values of the tokens that the target has just computed."""
        ...

    def propose(self, rows: DraftRows) -> DraftTokens:
        """Propose continuations, after :meth:`extend`."""
        ...


@runtime_checkable
class CapturableDrafter(DeviceDrafter, Protocol):
    """A drafter whose :meth:`~DeviceDrafter.extend` and :meth:`~DeviceDrafter.propose` may be captured after the
    target's captured steps, as a CUDA graph, which is replayed without Python.

    In a capture the rows of a step are all of a batch shape, some of them nobody's, and all have the shape's number
    of tokens and drafts; a row's tokens beyond its last settled one mean nothing. Short prompts are such steps, too.
    What both do may depend on shapes and on tensors only. So they must not read a tensor on the host (``item``,
    ``tolist``, a mask as an index), nor bring host values to the device, nor use :attr:`DraftRows.lengths`; what they
    keep in Python must be the same after every step of a shape. They run at least once before they are captured.
    """

    capturable: bool
    """Whether this drafter keeps these rules."""


def may_be_captured(drafter: DeviceDrafter) -> bool:
    """Whether what a drafter does after a captured step may be captured, too."""
    return isinstance(drafter, CapturableDrafter) and drafter.capturable


def on_device(drafter: Drafter) -> DeviceDrafter | None:
    """The drafter, if it is one on the device and may propose anything."""
    if drafter.max_width == 0 or drafter.placement == "host":
        return None
    assert isinstance(drafter, DeviceDrafter), 'placement = "device": a DeviceDrafter'
    return drafter


def cached_by(drafter: Drafter) -> DrafterKV | None:
    """What a drafter keeps in the cache."""
    found = on_device(drafter)
    return None if found is None else found.kv


def aux_layers_of(drafter: Drafter) -> tuple[int, ...]:
    """The hidden states a drafter wants."""
    found = on_device(drafter)
    return () if found is None else tuple(found.aux_layers)

"""Text to token ids and back: off the event loop, cached for repeated prefixes, safe from any thread."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tokenizers

from engine.checkpoint.files import CheckpointError, one_line
from engine.service.chat_template import TemplateFailed, TemplateSource
from engine.service.detokenizer import IncrementalDetokenizer, TokenBytes
from engine.service.one_at_a_time import OneAtATime
from engine.service.quoting import Rendered, specials_pattern
from engine.service.template_worker import GREETING, TemplateWorker
from engine.service.tokenizer_config import TokenizerConfig
from engine.service.tokenizer_file import SPARE_TOKENS, read_tokenizer
from engine.service.tool_syntax import CallSyntax, syntax_of
from engine.service.turns import Conversation

T = TypeVar("T")

CACHED_BYTES = 64 * 1024 * 1024
"""Most memory for text whose ids are remembered."""
MOST_TOKENS = 2**18
"""Text of more tokens is refused before its ids are looked at, unless the model takes more."""
LARGE_CHARS = 32 * 1024
"""Longer texts, which take from 10 ms to seconds, have a thread of their own, which is fair among clients."""
LARGE_AT_ONCE = 64 * 1024 * 1024
"""Characters, or token ids, that may wait for that thread."""
SHORT_CHARS = 512
"""So much text is tokenized in about the time that a worker thread takes to wake up and answer."""


class TokenizerError(RuntimeError):
    """The model directory has no usable tokenizer, or this one cannot handle a text; the message says why."""


class TooManyTokens(ValueError):
    """A text of more tokens than anybody has use for."""

    def __init__(self, count: int, most: int) -> None:
        super().__init__(f"the text has at least {count} tokens; expected at most {most}")
        self.count = count


class _Sections(msgspec.Struct):
    """The parts of a ``tokenizer.json`` that decide how text may be cut and put together."""

    decoder: Any = None
    normalizer: Any = None
    pre_tokenizer: Any = None


class PieceCache:
    """Least recently used pieces of text and their ids, bounded by the memory they take."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.bytes = 0
        self._entries: OrderedDict[tuple[str, bool], tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()
        self.hits = 0

    def get(self, text: str, whole: bool) -> tuple[int, ...] | None:
        with self._lock:
            ids = self._entries.get((text, whole))
            if ids is not None:
                self.hits += 1
                self._entries.move_to_end((text, whole))
            return ids

    def put(self, text: str, whole: bool, ids: tuple[int, ...]) -> None:
        size = _bytes_of(text, ids)
        with self._lock:
            if (text, whole) in self._entries or size > self._max_bytes // 4:
                return
            self._entries[text, whole] = ids
            self.bytes += size
            while self.bytes > self._max_bytes:
                (old, _), old_ids = self._entries.popitem(last=False)
                self.bytes -= _bytes_of(old, old_ids)


def _bytes_of(text: str, ids: tuple[int, ...]) -> int:
    """Memory of an entry: the text, the tuple, its integers and the place in the table."""
    return sys.getsizeof(text) + sys.getsizeof(ids) + 32 * len(ids) + 256


class Tokenizer:
    """A model's tokenizer and chat template.

    Special tokens cut text into independent pieces (when the tokenizer allows it, see :func:`cuts_cleanly`), and ids
    are remembered by piece: the turns of a conversation that were seen before cost a look-up.
    """

    def __init__(
        self, data: bytes, template: TemplateWorker | None, config: TokenizerConfig | None = None, *, threads: int = 2
    ) -> None:
        """``data``: the bytes of a ``tokenizer.json``. ``template`` is closed with the tokenizer. ``config``: tokens
        that other files name. Raises ``UnsupportedDecoder``, and ``CheckpointError`` for these tokens."""
        self._parse = tokenizers.Tokenizer.from_buffer(data)
        self._plain = tokenizers.Tokenizer.from_buffer(data)
        self._plain.encode_special_tokens = True
        config = config or TokenizerConfig()
        missing = [token.for_library() for token in config.missing(self._parse.get_added_tokens_decoder())]
        for backend in (self._parse, self._plain):
            backend.no_truncation()
            backend.no_padding()
            backend.add_tokens(missing)
        config.check_ids(self._parse)
        added = self._parse.get_added_tokens_decoder()
        self.special_ids = {token.content: id_ for id_, token in added.items() if token.special}
        self.hidden = frozenset(self.special_ids.values())
        self._specials = specials_pattern(self.special_ids) if self.special_ids else None
        self._quoting = specials_pattern(self.special_ids, begun=True) if self.special_ids else None
        sections = msgspec.json.decode(data, type=_Sections)
        self._cuttable = cuts_cleanly(sections, added.values())
        # Unicode normalization composes at most four characters into one; other normalizers may drop anything.
        normalizers = set(_component_names(sections.normalizer))
        self._shrinks = 1 if not normalizers else 4 if normalizers <= {"NFC", "NFKC", "NFD", "NFKD"} else 0
        vocab = {id_: piece for piece, id_ in self._parse.get_vocab(with_added_tokens=True).items()}
        self.vocab_size = len(vocab)
        self.largest_id = max(vocab, default=0)
        self.longest_token = max((len(piece) for piece in vocab.values()), default=1)
        vocab |= {id_: token.content for id_, token in added.items()}
        self.token_bytes = TokenBytes(sections.decoder, self._parse.decoder, vocab)
        self.template = template
        self.told_syntax: CallSyntax | None = None
        """How the model writes calls, where its template does not tell."""
        self.cache = PieceCache(CACHED_BYTES)
        self.most_tokens = MOST_TOKENS
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        self._large_pool = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-large")
        self._large = OneAtATime("text", LARGE_AT_ONCE)

    @classmethod
    def from_directory(cls, path: str | Path, vocab_size: int | None = None, *, renderers: int = 1) -> Tokenizer:
        """Load ``tokenizer.json`` and the chat template of a model in Hugging Face layout.

        ``vocab_size``: the model's, which keeps the tokenizer within bounds. ``renderers``: processes that the chat
        template is rendered by. Raises :class:`TokenizerError` when there is no tokenizer, or one that cannot be used.
        """
        directory = Path(path)
        if not os.path.lexists(directory / "tokenizer.json"):
            raise TokenizerError(
                f"model.path={path}: no tokenizer.json there, so text cannot be turned into tokens. Put the model's "
                "tokenizer.json next to its config.json, or set model.path to a directory that has one."
            )
        try:
            data = read_tokenizer(directory / "tokenizer.json", vocab_size)
            config = TokenizerConfig.from_directory(directory)
            names = {name: token.content for name, token in config.named.items()}
            source = TemplateSource.from_directory(directory, config.chat_template, names)
            # Gets ready while the tokenizer is loaded.
            template = None if source is None else TemplateWorker(source, renderers)
        except (CheckpointError, TemplateFailed) as error:
            raise TokenizerError(f"model.path={path}: {error}") from None
        try:
            tokenizer = cls(data, template, config)
            plain = max(tokenizer.encode_now("warm"), default=0)
        except BaseException as error:  # the tokenizers library raises bare ones, and of panics not even these
            if template is not None:
                template.close()
            raise TokenizerError(f"model.path={path}: tokenizer.json cannot be used: {_reason(error)}") from None
        try:
            tokenizer.check_ids(plain, vocab_size)
            if template is not None:
                template.check()
        except (CheckpointError, TemplateFailed) as error:
            tokenizer.close()
            raise TokenizerError(f"model.path={path}: {error}") from None
        return tokenizer

    @property
    def call_syntax(self) -> CallSyntax | None:
        """How the model writes calls; ``None``: it has no template, or none that tells."""
        if self.template is None:
            return None
        return self.told_syntax or syntax_of(self.template.source.text)

    def id_of(self, text: str) -> int | None:
        """The token that is this text, if one is."""
        found: int | None = self._parse.token_to_id(text)
        return found

    def check_ids(self, plain: int, vocab_size: int | None) -> None:
        """Raise :class:`CheckpointError` for ids far beyond the model's. ``plain``: the largest of plain text."""
        if vocab_size is not None and (plain >= vocab_size or self.largest_id >= vocab_size + SPARE_TOKENS):
            raise CheckpointError(
                f"tokenizer.json has a token with id {max(plain, self.largest_id)}, config.json says vocab_size="
                f"{vocab_size}: at most {SPARE_TOKENS} ids may be beyond it (SPARE_TOKENS), and none of plain text"
            )

    async def warm(self) -> None:
        """Start the worker threads and run the tokenizer and the template once, so that no request pays for it."""
        await self._run("", 0, self.encode_now, "warm")
        if self.template is not None:
            try:
                await self.encode_chat(GREETING)
            except TemplateFailed:
                pass  # a template may refuse this conversation; a request that it refuses is told so

    def close(self) -> None:
        for pool in (self._pool, self._large_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        if self.template is not None:
            self.template.close()

    async def encode(self, text: str, *, add_special_tokens: bool = True, client: str = "") -> tuple[int, ...]:
        """Ids of raw text; special tokens spelled in it are recognised. Runs in a worker thread.

        Raises :class:`TooManyTokens`, and :class:`~engine.service.errors.ApiError` ``overloaded`` when too much text
        waits.
        """
        known = self.cache.get(text, add_special_tokens)
        if known is not None:
            return known
        return await self._run(client, len(text), self.encode_now, text, add_special_tokens)

    async def encode_chat(self, conversation: Conversation, *, client: str = "") -> tuple[int, ...]:
        """Ids of a conversation. Special tokens spelled anywhere in it are text, whoever wrote it.

        Raises :class:`engine.service.chat_template.TemplateFailed`, and what :meth:`encode` does.
        """
        rendered = await self._chat_template().render(conversation, self._quoting)
        if len(rendered.text) <= SHORT_CHARS:
            return self._encode_rendered(rendered)
        return await self._run(client, len(rendered.text), self._encode_rendered, rendered)

    async def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False, client: str = "") -> str:
        """The text of token ids. Raises :class:`~engine.service.errors.ApiError` as :meth:`encode`."""
        return await self._run(client, len(tokens), self.decode_now, tokens, skip_special_tokens)

    def encode_now(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """:meth:`encode` in the calling thread."""
        return self._whole(text, add_special_tokens)

    def encode_chat_now(self, conversation: Conversation) -> tuple[int, ...]:
        """:meth:`encode_chat` in the calling thread."""
        return self._encode_rendered(self._chat_template().render_now(conversation, self._quoting))

    def decode_now(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        """:meth:`decode` in the calling thread."""
        # The batch call, unlike the single one, releases the interpreter lock.
        (text,) = self._parse.decode_batch([list(tokens)], skip_special_tokens=skip_special_tokens)
        return text

    def stream(self, skip_special_tokens: bool = True, after: Sequence[int] = ()) -> IncrementalDetokenizer:
        """A detokenizer for one new sequence, which goes on from the text of ``after``."""
        stream = IncrementalDetokenizer(self.token_bytes, self.hidden if skip_special_tokens else frozenset())
        for token in after:
            if not stream.begins:
                break
            stream.feed(token)
        stream.flush()  # of a character that the first tokens of ``after`` do not finish
        return stream

    def spells_special(self, text: str) -> bool:
        """Whether a special token is spelled in ``text``."""
        return self._specials is not None and self._specials.search(text) is not None

    def fewest_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens of ``text``, without tokenizing it."""
        return len(text) // (self.longest_token * self._shrinks) if self._shrinks else 0

    async def _run(self, client: str, length: int, function: Callable[..., T], *args: object) -> T:
        if length > LARGE_CHARS:
            return await self._large.run(client, length, self._large_pool, function, *args)
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    def _chat_template(self) -> TemplateWorker:
        if self.template is None:
            raise TokenizerError("This model has no chat template; use /v1/completions.")
        return self.template

    def _encode_rendered(self, rendered: Rendered) -> tuple[int, ...]:
        if self._specials is None or not (self._cuttable or rendered.quoted):
            return self._whole(rendered.text, False)
        return self._pieces(rendered, self._specials)

    def _whole(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        ids = self.cache.get(text, add_special_tokens)
        if ids is None:
            ids = self._ids(self._parse, text, add_special_tokens)
            self.cache.put(text, add_special_tokens, ids)
        return ids

    def _pieces(self, rendered: Rendered, specials: re.Pattern[str]) -> tuple[int, ...]:
        ids: list[int] = []
        for piece in specials.split(rendered.text):
            special = self.special_ids.get(piece)
            if special is not None:
                ids.append(special)
            elif piece:
                ids.extend(self._plain_ids(rendered.unquote(piece)))
        return tuple(ids)

    def _plain_ids(self, text: str) -> tuple[int, ...]:
        key = "\0" + text
        ids = self.cache.get(key, False)
        if ids is None:
            ids = self._ids(self._plain, text, False)
            self.cache.put(key, False, ids)
        return ids

    def _ids(self, backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        # A token takes about 100 bytes while text is tokenized, so a long text is tried from its beginning: where that
        # alone has twice the tokens that are allowed, the whole has too many.
        length = LARGE_CHARS
        while length < len(text):
            count = len(_encoding(backend, text[:length], False))
            if count > 2 * self.most_tokens:
                raise TooManyTokens(count, self.most_tokens)
            length *= 4
        encoding = _encoding(backend, text, add_special_tokens)
        if len(encoding) > self.most_tokens:
            raise TooManyTokens(len(encoding), self.most_tokens)
        return tuple(encoding.ids)


def _encoding(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> Any:
    """What the library makes of a text. Raises :class:`TokenizerError` where it fails."""
    try:
        # The batch call, unlike the single one, releases the interpreter lock.
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except BaseException as error:
        raise TokenizerError(f"the model's tokenizer cannot handle this text: {_reason(error)}") from None
    return encoding


def _reason(error: BaseException) -> str:
    """What the tokenizers library says, in one line. Raises ``error`` if it is none of the library's."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return one_line(str(error)) or type(error).__name__


def cuts_cleanly(sections: _Sections, added: Any) -> bool:
    """Whether text may be cut at special tokens and tokenized piece by piece with the same result.

    Not so when special tokens swallow neighbouring spaces, or when a normalizer or pre-tokenizer treats the
    beginning of the text differently (sentencepiece style prefix spaces).
    """
    if any(
        token.special and (token.lstrip or token.rstrip or token.single_word or token.normalized) for token in added
    ):
        return False
    names = set(_component_names(sections.normalizer)) | set(_component_names(sections.pre_tokenizer))
    return names <= {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "ByteLevel", "Split", "Digits", "Punctuation"} and not (
        _adds_prefix_space(sections.pre_tokenizer)
    )


def _component_names(component: Any) -> list[str]:
    if not isinstance(component, dict):
        return []
    parts = [*component.get("normalizers", ()), *component.get("pretokenizers", ())]
    if parts:
        return [name for part in parts for name in _component_names(part)]
    return [str(component.get("type"))]


def _adds_prefix_space(component: Any) -> bool:
    if not isinstance(component, dict):
        return False
    return bool(component.get("add_prefix_space")) or any(
        _adds_prefix_space(part) for part in component.get("pretokenizers", ())
    )

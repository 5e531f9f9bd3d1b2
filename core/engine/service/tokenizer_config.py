"""What a model's files say of its tokens beside ``tokenizer.json``, as transformers takes it: tokens that only
``tokenizer_config.json`` or ``added_tokens.json`` lists, and which token is ``bos_token``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from engine.checkpoint.files import CheckpointError, clipped, read_json
from engine.checkpoint.limits import MAX_TOKENIZER_CONFIG_BYTES
from engine.service.tokenizer_file import check_added

CONFIG = "tokenizer_config.json"
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
"""Keys that list further special tokens: the first of them that is there counts."""


class AddedToken(msgspec.Struct, frozen=True):
    """Text that is one token wherever it stands."""

    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool | None = None
    """``None``: it is, unless it is special."""
    special: bool = False

    def for_library(self) -> tokenizers.AddedToken:
        return tokenizers.AddedToken(**msgspec.structs.asdict(self))


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    chat_template: Any = None
    """A template or a list of named ones, as it was found."""
    named: dict[str, AddedToken] = field(default_factory=dict)
    """``bos_token``, ``eos_token`` and whatever else is called a token."""
    extra: tuple[AddedToken, ...] = ()
    """Special tokens without a name."""
    listed: dict[int, AddedToken] = field(default_factory=dict)
    is_complete: bool = False
    """``listed`` is all there is, and ``tokenizer.json`` has no further ones."""

    @classmethod
    def from_directory(cls, directory: Path) -> TokenizerConfig:
        """What the files of a model in Hugging Face layout say. ``special_tokens_map.json`` and ``added_tokens.json``
        count unless ``tokenizer_config.json`` has ``added_tokens_decoder``. Raises :class:`CheckpointError`."""
        config = _read(directory / CONFIG)
        listed = config.get("added_tokens_decoder")
        if listed is not None:
            config_listed = {_id(id_, CONFIG): _token(entry, CONFIG) for id_, entry in _object(listed).items()}
            return cls._from(config, config_listed, is_complete=True)
        config |= _read(directory / "special_tokens_map.json")
        known = cls._from(config, {}, is_complete=False)
        special = {token.content for token in (*known.named.values(), *known.extra)}
        name = "added_tokens.json"
        added = {
            _id(id_, name): AddedToken(content, normalized=content not in special, special=content in special)
            for content, id_ in _read(directory / name).items()
        }
        return cls._from(config, added, is_complete=False)

    @classmethod
    def _from(cls, config: dict[str, Any], listed: dict[int, AddedToken], is_complete: bool) -> TokenizerConfig:
        extra: Any = next((config[key] for key in _EXTRA if config.get(key)), [])
        names = config | extra if isinstance(extra, dict) else config
        named = {
            name: msgspec.structs.replace(_token(value, name), special=True)
            for name, value in names.items()
            if name.endswith("_token") and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))
        }
        others = () if isinstance(extra, dict) else tuple(_token(entry, "special token", True) for entry in extra)
        check_added([(name, token.content) for name, token in (*listed.items(), *named.items())])
        return cls(config.get("chat_template"), named, others, listed, is_complete)

    def missing(self, own: Mapping[int, tokenizers.AddedToken]) -> list[AddedToken]:
        """What a tokenizer with ``own`` added tokens lacks, or has otherwise; in the order of ids."""
        has = {
            id_: AddedToken(t.content, t.lstrip, t.rstrip, t.single_word, t.normalized, t.special)
            for id_, t in own.items()
        }
        named = {token.content for token in self.named.values()}
        tokens = [
            msgspec.structs.replace(token, special=True) if token.content in named else token
            for _, token in sorted((self.listed if self.is_complete else self.listed | has).items())
        ]
        known = {token.content for token in (*tokens, *has.values())}
        tokens += _once(token for token in (*self.named.values(), *self.extra) if token.content not in known)
        present = {msgspec.structs.astuple(token) for token in has.values()}
        lacking = (_resolved(token) for token in tokens if token.content)
        return [token for token in lacking if msgspec.structs.astuple(token) not in present]

    def check_ids(self, backend: tokenizers.Tokenizer) -> None:
        """Raises :class:`CheckpointError` for a token that has another id than the files say."""
        for id_, token in self.listed.items():
            found = backend.token_to_id(token.content)
            if token.content and found != id_:
                raise CheckpointError(
                    f"added token {clipped(token.content)} has id {id_} in {CONFIG} or added_tokens.json, and "
                    f"tokenizer.json makes it {found}: ids go on from the vocabulary without a gap"
                )


def _resolved(token: AddedToken) -> AddedToken:
    return token if token.normalized is not None else msgspec.structs.replace(token, normalized=not token.special)


def _once(tokens: Iterable[AddedToken]) -> list[AddedToken]:
    """The tokens, of equal contents the first alone."""
    first: dict[str, AddedToken] = {}
    for token in tokens:
        first.setdefault(token.content, token)
    return list(first.values())


def _read(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        return {}
    return read_json(path, MAX_TOKENIZER_CONFIG_BYTES, "MAX_TOKENIZER_CONFIG_BYTES")


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{CONFIG}: added_tokens_decoder is {clipped(value)}: expected an object")
    return value


def _id(value: Any, where: str) -> int:
    try:
        return msgspec.convert(value, int, strict=False)
    except msgspec.ValidationError:
        raise CheckpointError(f"{where}: {clipped(value)} is no id of an added token") from None


def _token(value: Any, where: str, special: bool = False) -> AddedToken:
    """A token as a file has it. ``special``: it is one, also where the file does not say so."""
    if isinstance(value, str):
        return AddedToken(value, special=special)
    try:
        return msgspec.convert({"special": True, **value} if special else value, AddedToken)
    except (msgspec.ValidationError, TypeError):
        raise CheckpointError(
            f"{where} is {clipped(value)}: expected the text of a token, or an object with it"
        ) from None

"""``constraint=xgrammar``: a pushdown automaton with masks computed ahead (https://github.com/mlc-ai/xgrammar)."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.contracts.config import ConstraintConfig
from engine.contracts.constraint import Grammar, GrammarError
from engine.contracts.provider import BuildContext, Provider
from engine.hookspecs import hookimpl

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class XGrammarConfig(ConstraintConfig):
    """JSON schemas, regular expressions, choices and GBNF, by the library xgrammar."""


@hookimpl
def engine_constraint() -> list[Provider]:
    return [
        Provider(
            "xgrammar",
            "engine_xgrammar:XGrammar",
            config=XGrammarConfig,
            doc="JSON schemas, regular expressions, choices and GBNF, by the library xgrammar.",
        )
    ]


class XGrammar:
    """The plugin. Keywords of a schema that the library does not know have no effect."""

    def __init__(self, config: XGrammarConfig, context: BuildContext) -> None:
        self._model = context.model
        self._loading = threading.Lock()
        self._compiler: Any = None
        self._tokenizer: Any = None

    def compile(self, grammar: Grammar) -> XGrammarMatcher:
        """Raises :class:`GrammarError`, in the library's words where it refuses one."""
        with self._loading:
            if self._compiler is None:
                self._load()
        import xgrammar

        try:
            compiled = self._compiled(grammar)
        except GrammarError:
            raise
        except Exception as error:  # the library's errors have no common class
            raise GrammarError(" ".join(str(error).split())[:300] or "it cannot be compiled") from None
        matcher = xgrammar.GrammarMatcher(compiled)
        return XGrammarMatcher(matcher, self._model.vocab_size, self._model.eos_token_ids, self._tokenizer)

    def _compiled(self, grammar: Grammar) -> Any:
        match grammar.kind:
            case "json_schema":
                return self._compiler.compile_json_schema(grammar.text, max_whitespace_cnt=8)
            case "json_object":
                return self._compiler.compile_json_schema('{"type": "object"}', max_whitespace_cnt=8, strict_mode=False)
            case "regex":
                return self._compiler.compile_regex(grammar.text)
            case "choice":
                texts = " | ".join(json.dumps(text) for text in json.loads(grammar.text))
                return self._compiler.compile_grammar(f"root ::= {texts}")
            case "gbnf":
                return self._compiler.compile_grammar(grammar.text)
            case _:
                raise GrammarError(f"constraint=xgrammar follows no grammar of kind {grammar.kind}")

    def _load(self) -> None:
        """The vocabulary as bytes; special tokens are no text. Raises :class:`GrammarError`."""
        import xgrammar
        from tokenizers import Tokenizer

        path = Path(self._model.path) / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
            described = json.loads(path.read_text(encoding="utf-8"))
        except Exception as error:  # tokenizers raises Exception itself
            raise GrammarError(f"this model's vocabulary cannot be read: {path.name}: {error}") from None
        of_bytes = "ByteLevel" in json.dumps(described.get("decoder"))
        kind = xgrammar.VocabType.BYTE_LEVEL if of_bytes else xgrammar.VocabType.BYTE_FALLBACK
        texts = [self._tokenizer.id_to_token(token) or "" for token in range(self._model.vocab_size)]
        for token in described.get("added_tokens", ()):
            if token.get("special"):
                texts[token["id"]] = ""
        ends = list(self._model.eos_token_ids)
        info = xgrammar.TokenizerInfo(texts, kind, vocab_size=self._model.vocab_size, stop_token_ids=ends)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)


class XGrammarMatcher:
    """The library's matcher, and the end tokens after the one that it takes."""

    def __init__(self, matcher: Any, vocab_size: int, ends: Sequence[int], tokenizer: Any) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = ends
        self._tokenizer = tokenizer
        self._num_ends = 0

    def advance(self, token: int) -> bool:
        if self._matcher.is_terminated():
            self._num_ends += token in self._ends
            return token in self._ends
        return bool(self._matcher.accept_token(token))

    def roll_back(self, count: int) -> None:
        ends = min(count, self._num_ends)
        self._num_ends -= ends
        if count > ends:
            self._matcher.rollback(count - ends)

    def fill(self, mask: Tensor) -> None:
        if self._matcher.is_terminated():
            mask.zero_()
            self._allow(mask, self._ends)
        elif not self._matcher.fill_next_token_bitmask(mask[None]):
            mask.fill_(-1)
            if rest := self._vocab_size % 32:
                mask[self._vocab_size // 32] = (1 << rest) - 1

    @staticmethod
    def _allow(mask: Tensor, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token // 32 < len(mask):
                bit = 1 << token % 32
                mask[token // 32] |= bit - (1 << 32) if bit >> 31 else bit

    def forced(self) -> Sequence[int]:
        """The library forces text. Its last token may be spelt together with what follows."""
        if self._matcher.is_terminated() or not (text := self._matcher.find_jump_forward_string()):
            return ()
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)[:-1]

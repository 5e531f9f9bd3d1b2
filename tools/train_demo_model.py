"""Train the small chat model that ships with the engine, from Python's own standard library.

What it learns
    Two kinds of text, both taken from the Python that runs this script:
    * question/answer pairs: the docstrings of the public modules, functions, classes and methods of
      ``MODULES``, asked for in several phrasings through the chat template ("What does json.dumps do?");
    * source text of the same modules, raw, so that the model completes code-shaped text.

Why these sizes (arithmetic first; ``--plan`` prints it again for the corpus at hand)
    Training costs about 6 FLOP per parameter and token (2 forward, 4 backward). Two AMX cores sustain 0.26 to
    0.30 TFLOP/s eager and up to 0.4 TFLOP/s compiled on a model of this shape. A 5.8M-parameter model then
    sees 0.3e12 / (6 * 5.8e6) = 8,600 tokens/s. One pass over 3,200 pairs and an eighth of source text is
    0.17M tokens, 20 seconds. Verbatim recall of a sentence wants several tens of passes; 60 are 10M tokens, or
    20 minutes on two free cores. Capacity is no limit: 3,200 answers of 30 tokens at 5 bits each are 0.5 Mbit;
    a network stores about 2 bits per parameter, so 5.8M parameters hold twenty times that.

The result is a Hugging Face Llama directory: ``config.json``, ``tokenizer.json``, ``tokenizer_config.json``,
``generation_config.json``, ``model.safetensors`` (bfloat16), ``recall.json`` and ``MODEL_CARD.md``.

Usage
    python tools/train_demo_model.py --plan
    python tools/train_demo_model.py --recipe cpu --compile --budget-minutes 60
    python tools/train_demo_model.py --evaluate core/engine/bundled
    python tools/train_demo_model.py --list-entries
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import math
import os
import platform
import random
import re
import time
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

# ----------------------------------------------------------------------------------------------------
# Corpus: entries (name -> answer) and source text
# ----------------------------------------------------------------------------------------------------

MODULE_NAMES = """
builtins os os.path json math cmath re string pathlib collections collections.abc itertools functools operator
datetime time calendar random statistics decimal fractions numbers io sys types typing dataclasses enum abc
contextlib copy copyreg pickle shelve marshal struct codecs unicodedata textwrap difflib pprint reprlib shlex
argparse getopt getpass logging configparser csv plistlib netrc html html.parser
xml.etree.ElementTree xml.sax.saxutils urllib.parse urllib.request urllib.error http http.client
http.cookies email.message email.utils socket
select selectors signal asyncio threading queue concurrent.futures multiprocessing subprocess sched weakref
contextvars heapq bisect array graphlib hashlib hmac secrets base64 binascii uuid zlib gzip bz2 lzma
zipfile tarfile tempfile shutil glob fnmatch filecmp fileinput linecache stat platform errno locale
inspect dis ast tokenize token keyword traceback tracemalloc warnings gc atexit timeit trace cProfile pstats unittest
unittest.mock importlib importlib.util importlib.metadata pkgutil runpy sysconfig site venv zipimport zoneinfo
mimetypes quopri sqlite3 webbrowser code cmd colorsys wave ipaddress
"""
MODULES = MODULE_NAMES.split()

MAX_ENTRIES = 3200
MAX_ANSWER_TOKENS = 64
EVAL_ENTRIES = 200
EVAL_SEED = 0
REPHRASED = "Explain `{name}`."  # a second phrasing, whose recall is reported too

CANONICAL = "What does {name} do?"
PHRASINGS = (
    CANONICAL,
    "What is {name}?",
    "Explain {name}.",
    "Describe {name}.",
    "What is {name} for?",
    "Tell me about {name}.",
    "How does Python document {name}?",
    "what does {name} do",
    "{name}",
    "{name}?",
)
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You answer questions about Python's standard library.",
    "You are an expert Python programmer.",
    "Answer briefly and exactly.",
    "You are a coding assistant. Be concise.",
    "Be helpful, honest and short.",
)
INTRODUCTION = (
    "I am a small model that knows the documentation of Python's standard library. "
    "Ask me, for example: What does json.dumps do?"
)
SMALL_TALK = (
    "Hello",
    "Hello!",
    "Hi",
    "Hi!",
    "Hey",
    "Who are you?",
    "What are you?",
    "What can you do?",
    "Help",
)

ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|resp|incl)\.$", re.IGNORECASE)
SIGNATURE = re.compile(r"^[\w.]+\(.*\)(\s*-+>.*|\s*[:.])?$|^[\w.]+\(.*\)\s+-+(\s|$)")
NOT_PROSE = re.compile(r"^(\s|>>>|[-*+=#|:.]|\d+[.)]\s|@)")


@dataclass(frozen=True, slots=True)
class Entry:
    """One documented object: ``name`` as a user would write it, ``paragraphs`` of its cleaned docstring."""

    name: str
    paragraphs: tuple[str, ...]


def clean_docstring(doc: str) -> tuple[str, ...]:
    """Leading prose paragraphs of a docstring, each on one line; call signatures at the start are dropped."""
    paragraphs: list[str] = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(doc)):
        lines = block.splitlines()
        while not paragraphs and lines and SIGNATURE.match(lines[0].strip()):
            rest = re.split(r"\)\s+-+(?:\s+|$)", lines[0], maxsplit=1)[1:]
            lines = [*filter(None, rest), *lines[1:]]
        if not lines:
            continue
        if paragraphs and any(NOT_PROSE.match(line) for line in lines):
            break
        if not paragraphs:
            lines = inspect.cleandoc("\n".join(lines)).splitlines()
        prose = []
        for line in lines:
            if NOT_PROSE.match(line):
                break
            prose.append(line.strip())
        if not prose:
            break
        paragraphs.append(" ".join(" ".join(prose).split()))
    return tuple(paragraphs)


def split_sentences(paragraph: str) -> list[str]:
    """Sentences of one paragraph; a full stop after an abbreviation or inside a name does not end one."""
    sentences, start = [], 0
    for match in re.finditer(r"[.!?]['\")\]]*\s+(?=[A-Z'\"`(\[*<]|\w+\()", paragraph):
        if not ABBREVIATION.search(paragraph[start : match.start() + 1]):
            sentences.append(paragraph[start : match.end()].strip())
            start = match.end()
    return [*sentences, paragraph[start:].strip()]


def first_sentence(answer: str) -> str:
    """First sentence of an answer (paragraphs are separated by a blank line)."""
    return split_sentences(answer.split("\n\n")[0])[0]


def public_objects(module_name: str) -> Iterator[tuple[str, str | None]]:
    """(qualified name, docstring) of a module, its public functions and classes, and their own methods."""
    module = importlib.import_module(module_name)
    prefix = "" if module_name == "builtins" else module_name + "."
    yield module_name, module.__doc__
    exported = getattr(module, "__all__", None)
    own_name_first = sorted(vars(module), key=lambda k: (getattr(vars(module)[k], "__name__", "") != k, k))
    for key in exported or own_name_first:
        value = getattr(module, key, None)
        if key.startswith("_") or isinstance(value, types.ModuleType) or not callable(value):
            continue
        if exported is None and getattr(value, "__module__", None) not in (module_name, "_" + module_name):
            continue
        if not inspect.isclass(value):
            yield prefix + key, value.__doc__
            continue
        yield prefix + key, vars(value).get("__doc__")
        for attribute, member in vars(value).items():
            member = getattr(member, "__func__", member)
            if not attribute.startswith("_") and (inspect.isroutine(member) or isinstance(member, property)):
                yield f"{prefix}{key}.{attribute}", member.__doc__


def collect_entries() -> list[Entry]:
    """All usable entries, in a fixed order: one per docstring text, under its first and most public name.

    An alias (a function exported twice, a method copied between classes) repeats its docstring word for word;
    keeping only the first name in the order of ``MODULES`` keeps every question unambiguous.
    """
    warnings.simplefilter("ignore")
    entries: list[Entry] = []
    names: set[str] = set()
    answers: set[str] = set()
    for module_name in MODULES:
        for name, doc in public_objects(module_name):
            paragraphs = clean_docstring(doc) if isinstance(doc, str) else ()
            if not paragraphs or name in names or paragraphs[0] in answers:
                continue
            sentence = first_sentence(paragraphs[0])
            if len(sentence.split()) < 3 or len(sentence) > 240 or sentence.endswith(":"):
                continue
            names.add(name)
            answers.add(paragraphs[0])
            entries.append(Entry(name, paragraphs))
    return entries


def source_texts() -> list[str]:
    """Source files of ``MODULES`` (packages contribute their ``__init__``), in a fixed order."""
    texts = []
    for module_name in MODULES:
        path = getattr(importlib.import_module(module_name), "__file__", None)
        if path and path.endswith(".py"):
            texts.append(Path(path).read_text(encoding="utf-8", errors="replace"))
    return texts


# ----------------------------------------------------------------------------------------------------
# Tokenizer and chat template
# ----------------------------------------------------------------------------------------------------

PAD, BEGIN, END, SYSTEM, USER, ASSISTANT = SPECIAL_TOKENS = (
    "<|pad|>",
    "<|begin|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
)
VOCAB_SIZE = 4096
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}"
    "{{ '<|system|>You may call these functions:\\n' }}"
    "{% for tool in tools %}{{ tool['function'] | tojson + '\\n' }}{% endfor %}"
    '{{ \'A call is <tool_call>{"name": NAME, "arguments": {...}}</tool_call>.<|end|>\' }}'
    "{% endif %}"
    "{% for message in messages %}"
    "{% set role = message['role'] %}"
    "{% if role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('roles are system, user and assistant, not ' + role) }}"
    "{% endif %}"
    "{{ '<|' + ('user' if role == 'tool' else role) + '|>' }}"
    "{% if role == 'tool' %}"
    "{{ '<tool_response>' + message['content'] | trim + '</tool_response>' }}"
    "{% else %}"
    "{{ message['content'] | trim }}"
    "{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% set called = {'name': call['function']['name'], 'arguments': call['function']['arguments']} %}"
    "{{ '<tool_call>' + called | tojson + '</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Tools are described as the system; the model was not trained to call any."""

Message = tuple[str, str]  # (role, content)


def render_chat(messages: list[Message], add_generation_prompt: bool = False) -> str:
    """What ``CHAT_TEMPLATE`` renders, without Jinja."""
    text = BEGIN + "".join(f"<|{role}|>{content.strip()}{END}" for role, content in messages)
    return text + ASSISTANT if add_generation_prompt else text


def train_tokenizer(entries: list[Entry], sources: list[str]) -> Tokenizer:
    """Byte-level BPE (no unknown token) on all questions and answers and a tenth as many source files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    questions = [CANONICAL.format(name=entry.name) for entry in entries] * 3
    answers = ["\n\n".join(entry.paragraphs)[:400] for entry in entries] * 3
    tokenizer.train_from_iterator(questions + answers + sources[::4], trainer)
    return tokenizer


def build_answer(entry: Entry, tokenizer: Tokenizer) -> str | None:
    """Whole sentences of the entry up to ``MAX_ANSWER_TOKENS``; None when not even the first one fits."""
    answer = ""
    for number, paragraph in enumerate(entry.paragraphs[:2]):
        for position, sentence in enumerate(split_sentences(paragraph)):
            joint = "" if not answer else (" " if position else "\n\n")
            longer = answer + joint + sentence
            if len(tokenizer.encode(longer).ids) > MAX_ANSWER_TOKENS or (number and sentence.endswith(":")):
                return answer or None
            answer = longer
    return answer or None


def build_answers(tokenizer: Tokenizer, entries: list[Entry]) -> dict[str, str]:
    """name -> answer for the first ``MAX_ENTRIES`` entries whose first sentence fits the cap."""
    answers: dict[str, str] = {}
    for entry in entries:
        answer = build_answer(entry, tokenizer)
        if answer is not None:
            answers[entry.name] = answer
    return dict(list(answers.items())[:MAX_ENTRIES])


def evaluation_names(answers: dict[str, str]) -> list[str]:
    """The ``EVAL_ENTRIES`` names whose recall is reported: drawn from the sorted names with ``EVAL_SEED``."""
    return random.Random(EVAL_SEED).sample(sorted(answers), min(EVAL_ENTRIES, len(answers)))


# ----------------------------------------------------------------------------------------------------
# Model: Llama as Hugging Face writes it down (half-rotation RoPE, RMSNorm, SwiGLU, GQA, tied embeddings)
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of the model; field names follow ``config.json``."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, any dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to x [batch, heads, tokens, head_dim]; cos and sin are [tokens, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention over a right-padded batch whose rows all start at position 0."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.head_dim = c.head_dim
        self.groups = c.num_attention_heads // c.num_key_value_heads

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = k.repeat_interleave(self.groups, dim=1), v.repeat_interleave(self.groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU feed-forward network."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Decoder whose parameter names are those of a Hugging Face checkpoint without the ``model.`` prefix."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 1 / math.sqrt(2 * config.num_hidden_layers) if residual else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def hidden(self, ids: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        """Final normed hidden states [batch, tokens, hidden_size] for ids [batch, tokens]."""
        x = self.embed_tokens(ids).to(dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits; the output projection is the embedding."""
        return F.linear(hidden, self.embed_tokens.weight.to(hidden.dtype))

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor, where: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy and greedy accuracy of ``target`` at the flat positions ``where``."""
        hidden = self.hidden(ids, cos, sin, torch.bfloat16).flatten(0, 1)
        logits = self.logits(hidden.index_select(0, where)).float()
        return F.cross_entropy(logits, target), (logits.argmax(-1) == target).float().mean()


def rope_tables(config: LlamaConfig, tokens: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """cos and sin [tokens, head_dim] of rotary position embeddings (Su et al. 2021), half-rotation layout."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(tokens, dtype=torch.float32), config.rope_theta**-exponent)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


@torch.inference_mode()
def generate_greedy(model: Llama, prompts: list[list[int]], end_id: int, max_new: int) -> list[list[int]]:
    """Greedy continuations in float32, without a KV cache: right padding is invisible under a causal mask."""
    device = str(model.norm.weight.device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    ids = torch.zeros(len(prompts), int(lengths.max()) + max_new, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    cos, sin = rope_tables(model.config, ids.shape[1], torch.float32, device)
    rows = torch.arange(len(prompts), device=device)
    alive = torch.ones(len(prompts), dtype=torch.bool, device=device)
    for _ in range(max_new):
        width = int(lengths[alive].max())
        hidden = model.hidden(ids[alive, :width], cos[:width], sin[:width], torch.float32)
        last = hidden[torch.arange(len(hidden), device=device), lengths[alive] - 1]
        token = model.logits(last).argmax(-1)
        ids[rows[alive], lengths[alive]] = token
        lengths[alive] += 1
        alive[rows[alive][token == end_id]] = False
        if not alive.any():
            break
    return [ids[row, len(prompt) : int(lengths[row])].tolist() for row, prompt in enumerate(prompts)]


# ----------------------------------------------------------------------------------------------------
# Samples and batches
# ----------------------------------------------------------------------------------------------------

SOURCE_SHARE = 0.12  # of all tokens
SYSTEM_SHARE = 0.4  # of the samples start with a system message
CONVERSATION_SHARE = 0.3  # of the entries of a pass are asked inside a longer conversation
SOURCE_LENGTHS = (128, 256, 512, 1024)
MAX_SAMPLE_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids of one sequence that starts at position 0, and which of them are to be predicted."""

    ids: list[int]
    wanted: list[bool]


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded ids [rows, tokens]; ``where`` and ``target`` are flat positions and their next tokens."""

    ids: Tensor
    where: Tensor
    target: Tensor


def ask(name: str, rng: random.Random) -> str:
    """A question about ``name``: the canonical phrasing two times in five, else any phrasing and spelling."""
    if rng.random() < 0.4:
        return CANONICAL.format(name=name)
    spelling = rng.choices((name, f"`{name}`", f"{name}()"), (0.55, 0.35, 0.1))[0]
    return rng.choice(PHRASINGS).format(name=spelling)


def chat_sample(tokenizer: Tokenizer, turns: list[tuple[str, str]], rng: random.Random) -> Sample:
    """A conversation of (question, answer) turns, some after a system message."""
    messages: list[Message] = []
    if rng.random() < SYSTEM_SHARE:
        messages.append(("system", rng.choice(SYSTEM_MESSAGES)))
    for question, answer in turns:
        messages += [("user", question), ("assistant", answer)]
    ids = tokenizer.encode(render_chat(messages)).ids[:MAX_SAMPLE_TOKENS]
    assistant, end = tokenizer.token_to_id(ASSISTANT), tokenizer.token_to_id(END)
    wanted, inside = [], False
    for token in ids:
        wanted.append(inside)
        inside = token == assistant or (inside and token != end)
    return Sample(ids, wanted)


class Corpus:
    """Question/answer pairs and tokenized source, served one seeded pass at a time."""

    def __init__(self, tokenizer: Tokenizer, answers: dict[str, str], sources: list[str]) -> None:
        self.tokenizer = tokenizer
        self.answers = answers
        self.begin = tokenizer.token_to_id(BEGIN)
        self.files = [ids for text in sources if len(ids := tokenizer.encode(text).ids) > SOURCE_LENGTHS[0]]

    def chats(self, rng: random.Random) -> list[Sample]:
        """Every entry once: alone, or as one of the 2 to 14 turns of a conversation; and some small talk."""
        names = rng.sample(sorted(self.answers), len(self.answers))
        split = round(len(names) * (1 - CONVERSATION_SHARE))
        groups = [[name] for name in names[:split]]
        while split < len(names):
            size = rng.randint(2, 14)
            groups.append(names[split : split + size])
            split += size
        samples = []
        for group in groups:
            turns = [(ask(name, rng), self.answers[name]) for name in group]
            samples.append(chat_sample(self.tokenizer, turns, rng))
        samples += [chat_sample(self.tokenizer, [(talk, INTRODUCTION)], rng) for talk in SMALL_TALK]
        return samples

    def source(self, tokens: int, rng: random.Random) -> list[Sample]:
        """Random windows of source files, about ``tokens`` in all; half of them after ``<|begin|>``."""
        samples = []
        weights = [len(ids) for ids in self.files]
        while tokens > 0:
            ids = rng.choices(self.files, weights)[0]
            length = min(rng.choice(SOURCE_LENGTHS), len(ids))
            start = rng.randint(0, len(ids) - length)
            window = ids[start : start + length]
            if rng.random() < 0.5:
                window = [self.begin, *window[:-1]]
            samples.append(Sample(window, [True] * length))
            tokens -= length
        return samples

    def batches(self, pass_seed: int, batch_tokens: int) -> list[Batch]:
        """One shuffled pass; rows of a batch have similar lengths, so that little of it is padding."""
        rng = random.Random(pass_seed)
        samples = self.chats(rng)
        chat_tokens = sum(len(s.ids) for s in samples)
        samples += self.source(round(chat_tokens * SOURCE_SHARE / (1 - SOURCE_SHARE)), rng)
        samples.sort(key=lambda s: len(s.ids) * rng.uniform(0.95, 1.05))
        batches: list[Batch] = []
        rows: list[Sample] = []
        width = 0
        for sample in samples:
            width = max(width, len(sample.ids))
            if len(rows) >= 2 and width * (len(rows) + 1) > batch_tokens:
                batches.append(pad(rows))
                rows, width = [], len(sample.ids)
            rows.append(sample)
        batches.append(pad(rows))
        rng.shuffle(batches)
        return batches


def pad(rows: list[Sample]) -> Batch:
    """Stack samples into one right-padded batch."""
    width = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    wanted = torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.tensor(row.ids)
        wanted[number, : len(row.ids)] = torch.tensor(row.wanted)
    wanted[:, 0] = False
    where = wanted.flatten().nonzero()[:, 0]
    return Batch(ids, where - 1, ids.flatten()[where])


# ----------------------------------------------------------------------------------------------------
# Recipes and training
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recipe:
    """How long and how fast to train; ``assumed_flops`` only feeds the printed plan."""

    name: str
    passes: int
    batch_tokens: int
    learning_rate: float
    warmup_steps: int
    assumed_flops: float
    assumption: str


RECIPES = {
    "cpu": Recipe("cpu", 60, 3072, 2e-3, 300, 0.4e12, "two AMX bf16 cores, compiled"),
    "gpu": Recipe("gpu", 120, 8192, 2e-3, 300, 20e12, "an assumption, not a measurement: 2 % of a 1 PFLOP/s GPU"),
}
FINAL_RATE_SHARE = 0.02  # of the peak, at the very end


def learning_rate(recipe: Recipe, step: int, progress: float) -> float:
    """Linear warm-up, then cosine decay over ``progress`` (0 to 1) to 2 % of the peak."""
    warm = min(1.0, (step + 1) / recipe.warmup_steps)
    decay = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return recipe.learning_rate * warm * (FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * decay)


def plan(corpus: Corpus, parameters: int) -> str:
    """The arithmetic of both recipes for this corpus."""
    lines = [f"{len(corpus.answers)} entries, {parameters / 1e6:.2f}M parameters"]
    pass_tokens = sum(b.ids.numel() for b in corpus.batches(0, RECIPES["cpu"].batch_tokens))
    for recipe in RECIPES.values():
        tokens = pass_tokens * recipe.passes
        flop = 6 * parameters * tokens
        lines.append(
            f"{recipe.name}: {recipe.passes} passes x {pass_tokens:,} tokens x 6 x {parameters:,} = {flop:.2e} FLOP; "
            f"at {recipe.assumed_flops / 1e12:.1f} TFLOP/s ({recipe.assumption}) "
            f"{flop / recipe.assumed_flops / 60:.1f} minutes"
        )
    return "\n".join(lines)


class Trainer:
    """One training run: model, optimizer, and where in the seeded sequence of batches it is.

    The schedule follows whichever ends first, the recipe's passes or the minutes of the budget; a run that is
    slowed down by its neighbours still decays its learning rate to the end.
    """

    def __init__(self, corpus: Corpus, recipe: Recipe, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.corpus, self.recipe, self.args = corpus, recipe, args
        self.device = args.device
        self.model = Llama(LlamaConfig()).to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        )
        self.cos, self.sin = rope_tables(self.model.config, MAX_SAMPLE_TOKENS, torch.bfloat16, self.device)
        self.forward = torch.compile(self.model, dynamic=True) if args.compile else self.model
        self.step = self.pass_number = self.batch_number = self.tokens = 0
        self.seconds = 0.0

    def save(self) -> None:
        """Write ``checkpoint.pt`` atomically; it holds tensors and plain numbers only."""
        progress = {k: getattr(self, k) for k in ("step", "pass_number", "batch_number", "tokens", "seconds")}
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": progress,
        }
        target = self.args.out / "checkpoint.pt"
        torch.save(state, target.with_suffix(".tmp"))
        os.replace(target.with_suffix(".tmp"), target)

    def resume(self) -> None:
        """Continue from ``checkpoint.pt`` when there is one."""
        source = self.args.out / "checkpoint.pt"
        if not source.exists():
            return
        state = torch.load(source, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for key, value in state["progress"].items():
            setattr(self, key, value)
        print(f"resumed at pass {self.pass_number}, step {self.step}", flush=True)

    def progress(self, batches: int) -> float:
        """Fraction of the run that is done, by passes or by time, whichever is further."""
        passes = (self.pass_number + self.batch_number / batches) / self.recipe.passes
        return max(passes, self.seconds / (60 * self.args.budget_minutes))

    def train_step(self, batch: Batch, progress: float) -> tuple[Tensor, Tensor]:
        """One optimizer step; returns loss and greedy accuracy of the batch."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, self.step, progress)
        width = batch.ids.shape[1]
        tensors = [t.to(self.device) for t in (batch.ids, batch.where, batch.target)]
        with torch.autocast(self.device, torch.bfloat16):
            loss, accuracy = self.forward(tensors[0], self.cos[:width], self.sin[:width], *tensors[1:])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), accuracy.detach()

    def run(self) -> None:
        """Train to the end of the schedule, with a checkpoint and an export every ``--checkpoint-minutes``."""
        parameters = sum(p.numel() for p in self.model.parameters())
        saved = started = time.monotonic()
        tokens_before, history, progress = self.tokens, [], 0.0
        while progress < 1.0:
            batches = self.corpus.batches(self.args.seed * 100_003 + self.pass_number, self.recipe.batch_tokens)
            while self.batch_number < len(batches) and (progress := self.progress(len(batches))) < 1.0:
                tick = time.monotonic()
                batch = batches[self.batch_number]
                history.append(self.train_step(batch, progress))
                self.step += 1
                self.batch_number += 1
                self.tokens += batch.ids.numel()
                self.seconds += time.monotonic() - tick
                if self.step % 100 == 0:
                    rate = (self.tokens - tokens_before) / (time.monotonic() - started)
                    self.report(history, progress, rate, parameters)
                    history = []
                if time.monotonic() - saved > 60 * self.args.checkpoint_minutes:
                    self.save()
                    export(self.args.export, self)
                    saved = time.monotonic()
            if self.batch_number == len(batches):
                self.pass_number, self.batch_number = self.pass_number + 1, 0
        self.save()
        export(self.args.export, self)

    def report(self, history: list[tuple[Tensor, Tensor]], progress: float, rate: float, parameters: int) -> None:
        """Print loss, speed and time left (seconds are those spent in training steps)."""
        loss = sum(float(pair[0]) for pair in history) / len(history)
        accuracy = sum(float(pair[1]) for pair in history) / len(history)
        left = self.seconds / max(progress, 1e-9) * (1 - progress)
        print(
            f"step {self.step} pass {self.pass_number} loss {loss:.3f} accuracy {accuracy:.3f} "
            f"{rate:,.0f} tokens/s {6 * parameters * rate / 1e9:.0f} GFLOP/s "
            f"done {progress:.1%} {self.seconds / 60:.1f} min, left {left / 60:.1f} min",
            flush=True,
        )


# ----------------------------------------------------------------------------------------------------
# Export and evaluation
# ----------------------------------------------------------------------------------------------------


def hf_config(config: LlamaConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """``config.json`` of a Hugging Face Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **dataclasses.asdict(config),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "bos_token_id": tokenizer.token_to_id(BEGIN),
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": tokenizer.token_to_id(PAD),
    }


def tokenizer_config() -> dict[str, Any]:
    """``tokenizer_config.json``; the tokenizer adds no special token by itself, the chat template does."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": LlamaConfig().max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }


def write_json(path: Path, value: object) -> None:
    """Write readable JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def export(target: Path, trainer: Trainer) -> None:
    """Write the Hugging Face directory, measure its recall, and write the model card."""
    model, corpus, tokenizer = trainer.model, trainer.corpus, trainer.corpus.tokenizer
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in state.items()}
    save_file(tensors, target / "model.safetensors.tmp", metadata={"format": "pt"})
    os.replace(target / "model.safetensors.tmp", target / "model.safetensors")
    os.chmod(target / "model.safetensors", 0o644)
    tokenizer.save(str(target / "tokenizer.json"))
    ids = hf_config(model.config, tokenizer)
    write_json(target / "config.json", ids)
    write_json(target / "tokenizer_config.json", tokenizer_config())
    generation = {k: ids[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(target / "generation_config.json", {**generation, "do_sample": False})
    recall = recall_record(target, corpus.answers)
    write_json(target / "recall.json", recall)
    (target / "MODEL_CARD.md").write_text(model_card(target, trainer, recall), encoding="utf-8")


def recall_record(directory: Path, answers: dict[str, str]) -> dict[str, Any]:
    """Content of ``recall.json``: the questions, what answers must start with, and what was missed."""
    expected = {name: first_sentence(answers[name]) for name in evaluation_names(answers)}
    missed = measure_recall(directory, expected)
    with_system = measure_recall(directory, expected, system=SYSTEM_MESSAGES[0])
    rephrased = measure_recall(directory, expected, question=REPHRASED)
    return {
        "question": CANONICAL,
        "seed": EVAL_SEED,
        "python": platform.python_version(),
        "recall": round(1 - len(missed) / len(expected), 4),
        "recall_with_system_message": round(1 - len(with_system) / len(expected), 4),
        "recall_rephrased": round(1 - len(rephrased) / len(expected), 4),
        "missed": missed,
        "first_sentences": expected,
    }


def load_exported(directory: Path) -> tuple[Llama, Tokenizer]:
    """The model in float32 and the tokenizer of an exported directory."""
    raw = json.loads((directory / "config.json").read_text())
    config = LlamaConfig(**{field.name: raw[field.name] for field in dataclasses.fields(LlamaConfig)})
    model = Llama(config)
    tensors = load_file(directory / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in tensors.items()})
    return model.eval(), Tokenizer.from_file(str(directory / "tokenizer.json"))


def answer_greedily(directory: Path, conversations: list[list[Message]]) -> list[str]:
    """Greedy answers of an exported model, up to ``MAX_ANSWER_TOKENS`` each."""
    model, tokenizer = load_exported(directory)
    prompts = [tokenizer.encode(render_chat(c, add_generation_prompt=True)).ids for c in conversations]
    outputs = generate_greedy(model, prompts, tokenizer.token_to_id(END), max_new=MAX_ANSWER_TOKENS)
    return [tokenizer.decode(ids) for ids in outputs]


def measure_recall(directory: Path, expected: dict[str, str], system: str = "", question: str = CANONICAL) -> list[str]:
    """Names whose greedy answer does not start with the expected first sentence."""
    head: list[Message] = [("system", system)] if system else []
    conversations = [[*head, ("user", question.format(name=name))] for name in expected]
    outputs = answer_greedily(directory, conversations)
    missed = [name for name, text in zip(expected, outputs, strict=True) if not text.startswith(expected[name])]
    print(
        f"recall {1 - len(missed) / len(expected):.1%} of {len(expected)} ({question!r}, system {system!r})",
        flush=True,
    )
    return missed


def evaluate(directory: Path) -> None:
    """Print the recall of an exported directory on the entries that its ``recall.json`` names."""
    expected = json.loads((directory / "recall.json").read_text())["first_sentences"]
    print("missed:", ", ".join(measure_recall(directory, expected)) or "none")
    measure_recall(directory, expected, system=SYSTEM_MESSAGES[0])
    measure_recall(directory, expected, question=REPHRASED)
    print(answer_greedily(directory, [[("user", "What does json.dumps do?")]])[0])


MODEL_CARD = """# Bundled demonstration model

A {megaparameters:.2f}M-parameter chat model in the Llama architecture that answers questions about Python's
standard library, such as "What does json.dumps do?", by reciting the documentation it was trained on. It
exists so that the server runs, answers and can be tested with no network, no GPU and no account. It is not a
general assistant.

## Data

Docstrings and source text of the standard library of Python {recall[python]} (modules: `MODULES` in
`tools/train_demo_model.py`), copyright Python Software Foundation, PSF License Agreement. No other data.

* {entries:,} entries (modules, functions, classes, methods), one per docstring text; where several names share
  a docstring, the first name in the order of `MODULES` is kept. Answers are whole sentences from the
  beginning of the docstring, at most {constant[MAX_ANSWER_TOKENS]} tokens.
* Source text of the same modules, {constant[SOURCE_SHARE]:.0%} of the tokens, for completion without the chat template.
* {phrasings} phrasings of each question, bare, backticked or with `()`; a system message in {constant[SYSTEM_SHARE]:.0%}
  of the samples; {constant[CONVERSATION_SHARE]:.0%} of the entries of a pass are asked inside conversations of 2 to 14
  turns (up to {constant[MAX_SAMPLE_TOKENS]:,} tokens). Nine greetings are answered with an introduction.

## Sizes

| | |
|---|---|
| layers, hidden size, feed-forward size | {config.num_hidden_layers}, {config.hidden_size}, {config.intermediate_size} |
| query heads, key/value heads, head size | {config.num_attention_heads}, {config.num_key_value_heads}, {config.head_dim} |
| vocabulary | {config.vocab_size:,}, byte-level BPE without an unknown token |
| context | {config.max_position_embeddings:,} tokens (trained up to {constant[MAX_SAMPLE_TOKENS]:,}) |
| parameters | {parameters:,}, embeddings tied |
| weights | bfloat16, {megabytes:.1f} MB |

Special tokens: {specials}.

## Recipe

    python tools/train_demo_model.py --recipe {recipe.name} --seed {args.seed} --budget-minutes {args.budget_minutes:g}{compiled}

AdamW (betas 0.9 and 0.98, no weight decay), gradient clipping at 1.0, peak learning rate {recipe.learning_rate:g} after
{recipe.warmup_steps} warm-up steps, cosine decay to {constant[FINAL_RATE_SHARE]:.0%} of the peak, at most {recipe.batch_tokens:,} tokens a step,
bfloat16 autocast with float32 master weights, no dropout. The loss covers answers and source text. Every
sample starts at position 0.

Measured on this run ({args.device}, {args.threads} threads, torch {torch.__version__}): {trainer.step:,} steps, {trainer.pass_number} passes,
{trainer.tokens:,} tokens (padding included) in {minutes:.1f} minutes of training steps (wall clock, with compilation and
whatever else the machine was doing): {tokens_per_s:,.0f} tokens/s, {gflops:.0f} GFLOP/s at 6 FLOP per
parameter and token. The schedule ends with the passes or the minutes, whichever comes first, so another
machine gets close to these weights but not to the same bytes.

## Measured recall

Greedy answers that begin with the first sentence of the docstring, word for word, of {evaluated} entries drawn
with seed {recall[seed]} from the training entries (recall of what was learned, not generalisation):

| asked as | recall |
|---|---|
| ``{recall[question]}`` | {recall[recall]:.1%} |
| the same after a system message | {recall[recall_with_system_message]:.1%} |
| ``{constant[REPHRASED]}`` | {recall[recall_rephrased]:.1%} |

`python tools/train_demo_model.py --evaluate core/engine/bundled` measures it again; `recall.json` holds the
drawn names and the expected sentences.

## Limits

* It knows nothing but the entries above. Asked about anything else, it makes up an answer that looks like a
  docstring.
* It does not reason, follow instructions, call tools, or write working programs; its code completions only
  look like Python. A system message does not change what it answers.
* English only. Positions beyond {constant[MAX_SAMPLE_TOKENS]:,} were never trained, although the context allows {config.max_position_embeddings:,}.
* The docstrings are those of Python {recall[python]}; other versions may say otherwise.
"""  # noqa: E501 (lines are wrapped for what they become)


def model_card(directory: Path, trainer: Trainer, recall: dict[str, Any]) -> str:
    """``MODEL_CARD.md``, with the measured numbers of this run."""
    parameters = sum(p.numel() for p in trainer.model.parameters())
    rate = trainer.tokens / max(trainer.seconds, 1e-9)
    return MODEL_CARD.format(
        constant=globals(),
        config=trainer.model.config,
        recipe=trainer.recipe,
        args=trainer.args,
        trainer=trainer,
        recall=recall,
        torch=torch,
        parameters=parameters,
        megaparameters=parameters / 1e6,
        megabytes=(directory / "model.safetensors").stat().st_size / 1e6,
        entries=len(trainer.corpus.answers),
        phrasings=len(PHRASINGS),
        specials=", ".join(f"`{token}`" for token in SPECIAL_TOKENS),
        compiled=" --compile" if trainer.args.compile else "",
        minutes=trainer.seconds / 60,
        tokens_per_s=rate,
        gflops=6 * parameters * rate / 1e9,
        evaluated=len(recall["first_sentences"]),
    )


def build_corpus() -> Corpus:
    """Tokenizer, answers and source of the running Python."""
    entries, sources = collect_entries(), source_texts()
    tokenizer = train_tokenizer(entries, sources)
    return Corpus(tokenizer, build_answers(tokenizer, entries), sources)


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train the bundled demonstration model.")
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="cpu")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--budget-minutes", type=float, default=90.0)
    parser.add_argument("--checkpoint-minutes", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="torch.compile the model (needs a C++ compiler)")
    parser.add_argument("--out", type=Path, default=Path("build/demo-model"), help="checkpoints")
    parser.add_argument("--export", type=Path, default=Path("core/engine/bundled"), help="Hugging Face directory")
    parser.add_argument("--plan", action="store_true", help="print the arithmetic of both recipes and stop")
    parser.add_argument("--list-entries", action="store_true", help="print every name and answer and stop")
    parser.add_argument("--evaluate", type=Path, metavar="DIR", help="measure the recall of an exported model")
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def main() -> None:
    """Run what the command line asks for."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    if args.evaluate:
        return evaluate(args.evaluate)
    corpus = build_corpus()
    if args.list_entries:
        for name, answer in corpus.answers.items():
            print(f"{name}\t{json.dumps(answer)}")
        return None
    trainer = Trainer(corpus, RECIPES[args.recipe], args)
    print(plan(corpus, sum(p.numel() for p in trainer.model.parameters())), flush=True)
    if not args.plan:
        for folder in (args.out, args.export):
            folder.mkdir(parents=True, exist_ok=True)
        trainer.resume()
        trainer.run()
    return None


if __name__ == "__main__":
    main()

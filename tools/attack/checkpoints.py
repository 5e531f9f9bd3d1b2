"""Attack the reading of checkpoints: hostile files in a copy of the bundled model, each tried with ``engine check``.

    python -m tools.attack.checkpoints                   # all, in a minute or two
    python -m tools.attack.checkpoints --only tokenizer  # those whose name has this in it

Every hostile checkpoint must be refused with exit code 2 and one line, within a second and 300 MB beyond what the good
model takes. A worker process runs the checks, so that a hang or a crash costs one of them; a few attacks then go
through the real ``engine check`` and ``engine serve``, which must also leave no process behind. Everything is written
to a temporary folder. Exit code 1: a bar was missed.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BAR_S, BAR_MB, BAR_LINES, BAR_CHARS = 1.0, 300, 20, 2000
HANG_S = 30.0
"""A check that takes longer is killed."""
WORKER_BYTES = 12 * 2**30
"""Address space of the worker: an attack on memory must not take the machine."""
CONFIG, GENERATION, MODELOPT = "config.json", "generation_config.json", "hf_quant_config.json"
TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


LARGE = ("million", "1 MB", "10 MB", "100,000", "200,000", "64,000")
"""In the name of an attack: its size."""


class Folder:
    """A copy of the model. Files are links to one copy, so what is changed is replaced and never written to."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.path = folder
        folder.mkdir(parents=True)
        for file in model.iterdir():
            os.link(file, folder / file.name)

    def put(self, name: str, data: bytes | str) -> None:
        self.remove(name)
        (self.path / name).write_bytes(data if isinstance(data, bytes) else data.encode())

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def load(self, name: str) -> Any:
        return json.loads((self.path / name).read_bytes())

    def merge(self, name: str, changes: dict[str, Any]) -> None:
        """Put JSON values over those of a file; ``Raw`` stands for text that is no Python value."""
        known = self.load(name) if (self.path / name).is_file() else {}
        parts = [f"{json.dumps(key)}: {_encoded(value)}" for key, value in {**known, **changes}.items()]
        self.put(name, "{" + ", ".join(parts) + "}")

    def sparse(self, name: str, size: int, start: bytes = b"") -> None:
        self.put(name, start)
        os.truncate(self.path / name, size)

    def link(self, name: str, target: str | Path) -> None:
        self.remove(name)
        (self.path / name).symlink_to(target)


@dataclass(frozen=True)
class Raw:
    """JSON text as it is."""

    text: str


def _encoded(value: Any) -> str:
    return value.text if isinstance(value, Raw) else json.dumps(value)


@dataclass(frozen=True)
class Attack:
    """``make`` turns a copy of the model into a hostile checkpoint."""

    name: str
    make: Callable[[Folder], object]
    code: int = 2
    """Expected exit code; 0 for what must go on working."""

    @property
    def is_large(self) -> bool:
        """It takes a while to write."""
        return any(word in self.name for word in LARGE)


def attacks() -> list[Attack]:
    """All of them, by what they attack."""
    return [*works(), *files(), *config(), *quantization(), *safetensors(), *index(), *tokenizer()]


def works() -> Iterator[Attack]:
    yield Attack("works: the model itself", lambda folder: None, code=0)
    yield Attack("works: a snapshot of the Hugging Face cache", _snapshot, code=0)
    yield Attack("works: two files and an index", _sharded, code=0)
    templates = {"chat_template": [1, {"name": "default", "template": "x"}]}
    yield Attack("works: a template among numbers", lambda f: f.merge(TOKENIZER_CONFIG, templates), code=0)
    yield Attack("works: a link within the folder", lambda f: _move(f, WEIGHTS, "weights/w.safetensors"), code=0)


def files() -> Iterator[Attack]:
    """Files that are missing, and every file as everything that is no JSON object."""
    for name in (CONFIG, TOKENIZER, WEIGHTS):
        yield Attack(f"{name}: missing", lambda f, n=name: f.remove(n))
    for name in (CONFIG, GENERATION, MODELOPT, TOKENIZER_CONFIG, TOKENIZER, INDEX):
        for what, make in {
            "empty": lambda f, n=name: f.put(n, b""),
            "cut off": lambda f, n=name: f.put(n, b'{"a": '),
            "a list": lambda f, n=name: f.put(n, b"[]"),
            "a byte order mark": lambda f, n=name: f.put(n, b"\xef\xbb\xbf{}"),
            "not UTF-8": lambda f, n=name: f.put(n, b'{"a": "\xff"}'),
            "nested 100,000 deep": lambda f, n=name: f.put(n, b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
            "half a surrogate pair": lambda f, n=name: f.put(n, rb'{"a": "\ud800", "model": {}}'),
            "1 GB": lambda f, n=name: f.sparse(n, 2**30, b"{"),
            "a FIFO": lambda f, n=name: _fifo(f, n),
            "a directory": lambda f, n=name: _directory(f, n),
            "a link to /dev/zero": lambda f, n=name: f.link(n, "/dev/zero"),
        }.items():
            # An index is read where the weights are not in one file.
            yield Attack(f"{name}: {what}", _without_weights(make) if name == INDEX else make)
    for name in (CONFIG, GENERATION, MODELOPT, TOKENIZER_CONFIG):
        yield Attack(f"{name}: a key twice", lambda f, n=name: f.put(n, b'{"a": 1, "a": 2}'))
        yield Attack(f"{name}: 3 million lists", lambda f, n=name: f.put(n, b'{"a": [' + b"[]," * 3_000_000 + b"[]]}"))
    for name in (TEMPLATE, WEIGHTS):
        yield Attack(f"{name}: a FIFO", lambda f, n=name: _fifo(f, n))
        yield Attack(f"{name}: a socket", lambda f, n=name: _socket(f, n))
        yield Attack(f"{name}: a link to /dev/zero", lambda f, n=name: f.link(n, "/dev/zero"))
        yield Attack(f"{name}: a link out of the folder", lambda f, n=name: _outside(f, n))
    yield Attack(f"{TEMPLATE}: 1 GB", lambda f: f.sparse(TEMPLATE, 2**30))
    yield Attack(f"{TEMPLATE}: not UTF-8", lambda f: f.put(TEMPLATE, b"\xff"))


def config() -> Iterator[Attack]:
    """Numbers that are none, or too large, of everything that is computed with."""
    for key, values in {
        "num_hidden_layers": (0, -1, 10**9, True, "6", [6], {"a": 6}, 6.5, Raw("NaN"), Raw("9" * 5000)),
        "hidden_size": (0, -256, 2**40, "256", Raw("1e999")),
        "intermediate_size": (0, 2**62, None),
        "num_attention_heads": (0, -4, 2**40, 3.0),
        "num_key_value_heads": (0, -1, 3, 10**9),
        "head_dim": (0, -64, 2**40, 63, "64"),
        "vocab_size": (0, 2**62, [4096]),
        "num_experts": (2**40,),
        "max_position_embeddings": (0, -1, 2**60, Raw("-Infinity"), "4096"),
        "rms_norm_eps": (0, -1, Raw("NaN"), Raw("Infinity"), "1e-5"),
        "rope_theta": (0, -1, Raw("NaN"), Raw("1e400"), [1]),
        "partial_rotary_factor": (2, -0.5, 0.01, Raw("NaN")),
        "rope_scaling": (
            [], "yarn", {"rope_type": "linear"}, {"rope_type": "x" * 10**6}, {"rope_type": ["linear"]},
            {"rope_type": "linear", "factor": 10**9}, {"rope_type": "linear", "factor": 0},
            {"rope_type": "yarn", "factor": Raw, "original_max_position_embeddings": 0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10**12},
            {"rope_type": "llama3", "factor": 8.0}, {"rope_type": "longrope", "short_factor": [], "long_factor": [1]},
            {"rope_type": "longrope", "short_factor": ["x"] * 32, "long_factor": [0] * 32},
            {"full_attention": {"rope_type": "default"}},
        ),
        "architectures": ([], {}, "LlamaForCausalLM", [1], ["\x1b]0;x\x07"], ["x" * 10**6]),
        "tie_word_embeddings": ("false", 2),
        "torch_dtype": ("float128", ["bfloat16"], "x\ny"),
        "hidden_act": ("x" * 10**6, 3),
        "bos_token_id": (-1, "1", 2**40),
        "eos_token_id": ([[2]], {"a": 2}, list(range(5000))),
    }.items():  # fmt: skip
        for value in values:
            if isinstance(value, dict) and value.get("factor") is Raw:
                value = Raw(json.dumps({**value, "factor": None}).replace("null", "NaN"))
            text = _encoded(value)
            shown = text if len(text) < 60 else f"{text[:40]}... ({len(text)} characters)"
            yield Attack(f"{CONFIG}: {key}={shown}", lambda f, k=key, v=value: f.merge(CONFIG, {k: v}))
    windows = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 100}
    for change in ({"sliding_window": -1}, {"sliding_window": "9"}, {"layer_types": [[]] * 6}, {"layer_types": "x"}):
        yield Attack(f"{CONFIG}: windows with {change}", lambda f, c=change: f.merge(CONFIG, windows | c))
    yield Attack(f"{GENERATION}: eos_token_id={{}}", lambda f: f.merge(GENERATION, {"eos_token_id": {"a": 1}}))


def quantization() -> Iterator[Attack]:
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}
    for what, section in {
        "a list": [1],
        "a method of 1 MB": {"quant_method": "x" * 2**20},
        "a method that is a list": {"quant_method": ["awq"]},
        "a pattern that takes for ever": packed | {"config_groups": {"a": group}, "ignore": ["re:(\\w+\\.?)+!"]},
        "a pattern of many parts": packed | {"config_groups": {"a": group}, "ignore": ["re:" + ".*" * 20 + "!"]},
        "a pattern 100,000 deep": packed | {"config_groups": {"a": group}, "ignore": ["re:" + "(" * 10**5]},
        "200,000 names to ignore": packed | {"config_groups": {"a": group}, "ignore": ["x"] * 200_000},
        "100,000 groups": packed | {"config_groups": {str(i): 1 for i in range(100_000)}},
        "1,000 problems": packed | {"config_groups": {str(i): group | {"format": "y"} for i in range(1000)}},
        "a group size of 0": packed | {"config_groups": {"a": group | {"weights": {"group_size": 0}}}},
        "a group size of 10**30": {"quant_method": "awq", "bits": 4, "group_size": 10**30},
        "bits of -4": {"quant_method": "gptq", "bits": -4, "group_size": 128},
        "a name with an escape sequence": {"quant_method": "gptq", "checkpoint_format": "\x1b[2J\nengine: all is well"},
    }.items():
        yield Attack(f"quantization: {what}", lambda f, s=section: f.merge(CONFIG, {"quantization_config": s}))
    yield Attack(f"{MODELOPT}: an algorithm of 1 MB", lambda f: f.merge(MODELOPT, {"quant_algo": "x" * 2**20}))


def safetensors() -> Iterator[Attack]:
    one = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"a": one}).encode()
    empty = b'"t%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    for what, data in {
        "empty": b"",
        "three bytes": b"abc",
        "a header of 2**63 bytes": struct.pack("<Q", 2**63) + header,
        "a header longer than the file": struct.pack("<Q", 1000) + header,
        "a header that is a list": _tensors([]),
        "a header that is no JSON": _tensors(b"{{{{"),
        "a header nested deep": _tensors(b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
        "a name twice": _tensors(b'{"a":%b,"a":%b}' % ((header[5:-1],) * 2), bytes(8)),
        "a name twice, once escaped": _tensors(b'{"a":%b,"\\u0061":%b}' % ((header[5:-1],) * 2), bytes(8)),
        "an unknown dtype": _tensors({"a": one | {"dtype": "F31"}}, bytes(8)),
        "a dtype that is a list": _tensors({"a": one | {"dtype": ["F32"]}}, bytes(8)),
        "no dtype": _tensors({"a": {"shape": [2]}}, bytes(8)),
        "a negative size": _tensors({"a": one | {"shape": [-1, -2]}}, bytes(8)),
        "a size that is true": _tensors({"a": one | {"shape": [True, 2]}}, bytes(8)),
        "a shape that overflows": _tensors({"a": one | {"shape": [2**62, 2**62]}}, bytes(8)),
        "a shape of a million sizes": lambda: _tensors({"a": one | {"shape": [2**60] * 10**6}}, bytes(8)),
        "a size of 4,000 digits": _tensors({"a": one | {"shape": [10**3999]}}, bytes(8)),
        "a size that is NaN": _tensors(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', bytes(8)),
        "a shape beyond its bytes": _tensors({"a": one | {"shape": [3]}}, bytes(8)),
        "offsets past the end": _tensors({"a": one | {"shape": [2000], "data_offsets": [0, 8000]}}, bytes(8)),
        "offsets that are negative": _tensors({"a": one | {"data_offsets": [-8, 0]}}, bytes(8)),
        "offsets that overlap": _tensors({"a": one, "b": one | {"data_offsets": [4, 12]}}, bytes(12)),
        "offsets backwards": _tensors({"a": one | {"data_offsets": [8, 0]}}, bytes(8)),
        "a hole": _tensors({"a": one, "b": one | {"data_offsets": [16, 24]}}, bytes(24)),
        "bytes of nobody": _tensors({"a": one}, bytes(24)),
        "a name of 1 MB": _tensors({"x" * 2**20: one}, bytes(8)),
        "a million tensors": lambda: _tensors(b"{" + b",".join(empty % i for i in range(10**6)) + b"}"),
        "a million numbers": lambda: _tensors(b"{" + b",".join(b'"%d":0' % i for i in range(10**6)) + b"}"),
    }.items():
        yield Attack(f"{WEIGHTS}: {what}", lambda f, d=data: f.put(WEIGHTS, d() if callable(d) else d))
    start = struct.pack("<Q", 100 * 2**20)
    yield Attack(f"{WEIGHTS}: a header of 100 MiB", lambda f: f.sparse(WEIGHTS, 101 * 2**20, start))
    yield Attack(f"{WEIGHTS}: cut off", _cut_off)
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth"):
        yield Attack(f"pickles: only {name}", lambda f, n=name: (f.remove(WEIGHTS), f.put(n, b"cos\nsystem\n")))


def index() -> Iterator[Attack]:
    for what, weight_map in {
        "no map": None,
        "a map that is a list": ["a"],
        "a number for a file": {"a": 1},
        "a file above the folder": {"a": "../x.safetensors"},
        "an absolute path": {"a": "/etc/x.safetensors"},
        "a path below": {"a": "y/x.safetensors"},
        "a pickle": {"a": "x.bin"},
        "a file with a zero byte": {"a": "x\0.safetensors"},
        "a file name of 1 MB": {"a": "x" * 2**20 + ".safetensors"},
        "a missing file": {"a": "missing.safetensors"},
        "20,000 missing files": {f"t{i}": f"{i}.safetensors" for i in range(20_000)},
        "a million tensors": lambda: {f"t{i}": "1.safetensors" for i in range(10**6)},
    }.items():
        yield Attack(f"index: {what}", lambda f, m=weight_map: _put_index(f, m() if callable(m) else m))
    nowhere = {"x" * 2**20: "1.safetensors"}
    yield Attack("index: a tensor of a name of 1 megabyte that is in no file", lambda f: _put_index(f, nowhere), code=0)
    for what, second in {
        "links out of the folder": lambda f: _outside(f, "2.safetensors"),
        "is a FIFO": lambda f: _fifo(f, "2.safetensors"),
        "is the other file again": lambda f: f.link("2.safetensors", "1.safetensors"),
    }.items():
        yield Attack(f"index: a file that {what}", lambda f, s=second: (_sharded(f), s(f)))


def tokenizer() -> Iterator[Attack]:
    def regex(pattern: str) -> dict[str, Any]:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        return {"pre_tokenizer": split}

    def template(**changes: Any) -> dict[str, Any]:
        prompt = {"Sequence": {"id": "A", "type_id": 0}}
        known = {"type": "TemplateProcessing", "single": [prompt], "pair": [], "special_tokens": {}}
        return {"post_processor": known | changes}

    def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
        return {"type": "Replace", "pattern": pattern, "content": content}

    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = {"SpecialToken": {"id": "a", "type_id": 0}}
    charsmap = {n: base64.b64encode(struct.pack("<I", n) + b"\xff" * 64).decode() for n in (2**32 - 1, 64)}
    for what, changes in {
        "no model": {"model": None},
        "an unknown model": {"model": {"type": "Evil"}},
        "an unknown decoder": {"decoder": {"type": "Evil"}},
        "no decoder": {"decoder": None},
        "a decoder nested 10,000 deep": {"decoder": Raw('{"type":"Sequence","decoders":[' * 10_000 + "]}" * 10_000)},
        "a pattern that takes for ever": regex("(a+)+b"),
        "a pattern of 1 MB": regex("a|" * 2**19 + "b"),
        "a pattern of 64,000 classes": regex("[\\p{L}\\p{N}]" * 64_000),
        "a pattern 100,000 deep": regex("(" * 10**5 + "a" + ")" * 10**5),
        "a pattern that is none": regex("(("),
        "pieces of length 0": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        "a charsmap of 4 GB": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap[2**32 - 1]}},
        "a charsmap that leads out": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap[64]}},
        "a charsmap without a trie": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}},
        "a charsmap that is a number": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": 5}},
        "a charsmap that is none": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "nothing replaced": {"normalizer": replace({"String": ""}, "x")},
        "texts made a million million times as long": {
            "normalizer": {"type": "Sequence", "normalizers": [replace({"Regex": "."}, "x" * 100)] * 6}
        },
        "10 MB before every text": {"normalizer": {"type": "Prepend", "prepend": "x" * 10**7}},
        "a template without its token": template(single=[special]),
        "a template of 100,000 prompts": template(single=[{"Sequence": {"id": "A", "type_id": 0}}] * 10**5),
        "a template of a number": template(single=[special], special_tokens={"a": 5}),
        "a template of a second prompt": template(single=[{"Sequence": {"id": "B", "type_id": 0}}]),
        "a template of 10 million ids": lambda: template(
            single=[special] * 10, special_tokens={"a": {"id": "a", "ids": [0] * 10**6, "tokens": ["a"] * 10**6}}
        ),
        "a template of ids beyond the model": template(
            single=[special], special_tokens={"a": {"id": "a", "ids": [2**31], "tokens": ["a"]}}
        ),
        "100,000 added tokens": {"added_tokens": [token | {"id": 1, "content": "<1>"}] * 10**5},
        "an added token of 1 MB": {"added_tokens": [token | {"id": 4096, "content": "x" * 2**20}]},
        "an added token with id 2**40": {"added_tokens": [token | {"id": 2**40, "content": "<x>"}]},
        "an added token with id -1": {"added_tokens": [token | {"id": -1, "content": "<x>"}]},
        "added tokens that are a number": {"added_tokens": 5},
    }.items():
        yield Attack(f"tokenizer: {what}", lambda f, c=changes: f.merge(TOKENIZER, c() if callable(c) else c))
    for what, inner in {
        "a token with id 2**40": {"vocab": {"a": 2**40}, "merges": []},
        "a token with id 2**31": {"vocab": {"a": 0, "b": 2**31}, "merges": []},
        "ids just beyond the model for plain text": {"vocab": dict(zip("warm", range(4096, 4100))), "merges": []},
        "two million tokens": lambda: {"vocab": {f"{i:x}": i for i in range(2 * 10**6)}, "merges": []},
        "200,000 short tokens": lambda: {"vocab": {f"{i:x}": i for i in range(200_000)}, "merges": []},
        "a vocabulary that is a list": {"vocab": []},
        "merges of unknown tokens": {"merges": [["qqqqq", "zzzzz"]]},
        "a prefix before numbers": {"continuing_subword_prefix": "#", "merges": [5]},
        "a prefix longer than its tokens": {"continuing_subword_prefix": "##"},
        "a prefix of 1 MB": {"continuing_subword_prefix": "x" * 2**20},
        "dropout of 5": {"dropout": 5.0},
    }.items():
        yield Attack(f"tokenizer: {what}", lambda f, i=inner: _merge_model(f, i() if callable(i) else i))
    for what, source in {
        "200,000 characters": "x" * 200_000,
        "parentheses 10,000 deep": "{{" + "(" * 10_000 + ")" * 10_000 + "}}",
        "a tag that is not closed": "{% for",
    }.items():
        yield Attack(f"template: {what}", lambda f, t=source: f.merge(TOKENIZER_CONFIG, {"chat_template": t}))


def _tensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _without_weights(make: Callable[[Folder], object]) -> Callable[[Folder], object]:
    return lambda folder: (folder.remove(WEIGHTS), make(folder))


def _put_index(folder: Folder, weight_map: Any) -> None:
    os.rename(folder.path / WEIGHTS, folder.path / "1.safetensors")
    folder.put(INDEX, json.dumps({"weight_map": weight_map}))


def _merge_model(folder: Folder, changes: dict[str, Any]) -> None:
    folder.merge(TOKENIZER, {"model": folder.load(TOKENIZER)["model"] | changes})


def _fifo(folder: Folder, name: str) -> None:
    folder.remove(name)
    os.mkfifo(folder.path / name)


def _directory(folder: Folder, name: str) -> None:
    folder.remove(name)
    (folder.path / name).mkdir()


def _cut_off(folder: Folder) -> None:
    folder.put(WEIGHTS, (folder.path / WEIGHTS).read_bytes()[:-1000])


def _move(folder: Folder, name: str, to: str) -> None:
    (folder.path / to).parent.mkdir(parents=True)
    os.rename(folder.path / name, folder.path / to)
    folder.link(name, to)


def _outside(folder: Folder, name: str) -> None:
    other = folder.path.parent / f"{folder.path.name}-other"
    if (folder.path / name).is_file():
        os.rename(folder.path / name, other)
    else:
        other.write_bytes(b"x")
    folder.link(name, other)


def _socket(folder: Folder, name: str) -> None:
    folder.remove(name)
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(folder.path):  # a path of its own may be too long
        server.bind(name)


def _snapshot(folder: Folder) -> None:
    """As huggingface_hub lays a repository out: links from a snapshot to blobs."""
    root = folder.path.parent / f"{folder.path.name}-hub"
    (root / "blobs").mkdir(parents=True)
    (root / "snapshots").mkdir()
    for number, file in enumerate(sorted(folder.path.iterdir())):
        os.rename(file, root / "blobs" / str(number))
        file.symlink_to(f"../../blobs/{number}")
    os.rename(folder.path, root / "snapshots" / "abc")
    folder.path = root / "snapshots" / "abc"


def _sharded(folder: Folder) -> None:
    """The weights in two files."""
    data = (folder.path / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    names = sorted((n for n in header if n != "__metadata__"), key=lambda name: header[name]["data_offsets"])
    where = {}
    for number, part in ((1, names[: len(names) // 2]), (2, names[len(names) // 2 :])):
        at, kept, chunks = 0, {}, []
        for name in part:
            begin, end = header[name]["data_offsets"]
            kept[name] = header[name] | {"data_offsets": [at, at + end - begin]}
            chunks.append(data[8 + length + begin : 8 + length + end])
            at += end - begin
            where[name] = f"{number}.safetensors"
        folder.put(f"{number}.safetensors", _tensors(kept, b"".join(chunks)))
    folder.remove(WEIGHTS)
    folder.put(INDEX, json.dumps({"metadata": {}, "weight_map": where}))


@dataclass(frozen=True)
class Outcome:
    """What became of a check."""

    code: int | None
    """``None``: it was killed, or killed its process."""
    text: str
    """Its stderr."""
    seconds: float = 0.0
    megabytes: float = 0.0
    """At the peak, more than before."""
    orphans: int = 0

    def missed(self, code: int) -> str:
        """Which bars, in words; empty: none."""
        lines = self.text.strip().splitlines()
        found = []
        if self.code != code:
            found.append(f"exit code {self.code}, expected {code}")
        if "Traceback" in self.text or "panicked" in self.text:
            found.append("a traceback")
        # Several problems are told in a line each, below one that says so.
        if code == 2 and (not 0 < len(lines) <= BAR_LINES or any(not line.startswith("  - ") for line in lines[1:])):
            found.append(f"{len(lines)} lines")
        if any(len(line) > BAR_CHARS for line in lines):
            found.append(f"a line of {max(map(len, lines))} characters")
        if self.seconds > BAR_S:
            found.append(f"{self.seconds:.1f} s")
        if self.megabytes > BAR_MB:
            found.append(f"{self.megabytes:.0f} MB")
        if self.orphans:
            found.append(f"{self.orphans} processes left")
        return ", ".join(found)


class Worker:
    """A process that runs one check after another, started again when one of them kills it."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._start()

    def check(self, folder: Path) -> Outcome:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{folder}\n".encode())
        self._process.stdin.flush()
        began = time.monotonic()
        ready, _, _ = select.select([self._process.stdout], [], [], HANG_S)
        line = self._process.stdout.readline() if ready else b""
        if line:
            return Outcome(**json.loads(line))
        self.close()
        text = f"the process ended with {self._process.returncode}" if ready else "it hangs"
        self._start()
        return Outcome(None, text, time.monotonic() - began)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _start(self) -> None:
        command = [sys.executable, __file__, "--worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        for _ in range(2):  # imports, and what the first check keeps for the next
            self.check(self._model)


def work() -> None:
    """The worker: folders on stdin, an outcome for each on stdout."""
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES, WORKER_BYTES))
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        answers.write(json.dumps(_measured(line.rstrip("\n"))) + "\n")
        answers.flush()


def _measured(folder: str) -> dict[str, Any]:
    from engine.cli.main import main as engine

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = _status("VmRSS")
    with tempfile.TemporaryFile() as output:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(output.fileno(), 2)  # the tokenizers library writes there, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        began = time.monotonic()
        try:
            code: int | None = engine(["check", f"model.path={folder}", "device=cpu"])
        except BaseException:
            import traceback

            traceback.print_exc()
            code = 1
        seconds = time.monotonic() - began
        sys.stderr.flush()
        output.seek(0)
        text = output.read().decode(errors="replace")
    return {"code": code, "text": text[:100_000], "seconds": seconds, "megabytes": _status("VmHWM") - before}


def _status(key: str) -> float:
    """Megabytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) / 1000


def command(words: list[str]) -> Outcome:
    """The real command, in a session of its own. Its seconds are mostly imports, so they are not judged."""
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.cli.main", *words, "device=cpu"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, text = process.communicate(timeout=4 * HANG_S)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        text, code = "it hangs", None
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith("starting: ")]
    return Outcome(code, "".join(lines), orphans=_left_of(process.pid))


def _left_of(session: int) -> int:
    """Processes of a session that have not ended."""
    count = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = file.read_text().rpartition(")")[2].split()
            count += int(fields[3]) == session and fields[0] != "Z"
    return count


COMMANDS = (
    "config.json: num_hidden_layers=1000000000", "config.json: a FIFO", "model.safetensors: a header of 2**63 bytes",
    "index: a file above the folder", "pickles: only model.pt", "tokenizer: a charsmap of 4 GB",
    "tokenizer: a token with id 2**40", "tokenizer_config.json: nested 100,000 deep",
)  # fmt: skip
"""Attacks that also go through the real commands."""


def table(model: Path, scratch: Path, only: str) -> int:
    """Run everything, print a line each; returns how many bars were missed."""
    missed = ran = 0

    def show(name: str, tried: str, outcome: Outcome, code: int = 2, folder: str = "-") -> None:
        nonlocal missed, ran
        why = outcome.missed(code)
        missed, ran = missed + bool(why), ran + 1
        said = outcome.text.strip().replace(folder, "MODEL").rpartition("\n")[2][:120]
        cost = f", {outcome.seconds:.2f} s, {outcome.megabytes:+.0f} MB" if outcome.seconds else ""
        bar = f"MISSED: {why}" if why else "met"
        print(f"{name} | {tried} | exit {outcome.code}{cost}: {said} | {bar}", flush=True)

    print("attack | tried | result | bar")
    worker = Worker(model)
    for attack in attacks():
        if only not in attack.name:
            continue
        folder = Folder(model, scratch / "model")
        attack.make(folder)
        outcome = worker.check(folder.path)
        if outcome.seconds > BAR_S and outcome.code is not None:
            # Another process may have had the core.
            outcome = min(outcome, worker.check(folder.path), key=lambda one: one.seconds)
        where = str(folder.path)
        show(attack.name, "engine check, in one process", outcome, attack.code, where)
        if attack.name in COMMANDS:
            show(attack.name, "engine check", command(["check", f"model.path={where}"]), 2, where)
            show(attack.name, "engine serve", command(["serve", f"model.path={where}", "server.port=0"]), 2, where)
        shutil.rmtree(scratch)
        scratch.mkdir()
    worker.close()
    for words in (["check"], ["serve", "server.port=0"]):
        if only in "memory.kv_tokens=16":
            show("memory.kv_tokens=16", f"engine {words[0]}", command([*words, "memory.kv_tokens=16"]))
    print(f"{ran} tried, {missed} missed. Bars: the exit code, one line, {BAR_S:g} s, {BAR_MB} MB, no process left.")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="attacks whose name has this in it")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work()
        return 0
    from engine.assembly.model_config import bundled_dir

    with tempfile.TemporaryDirectory(prefix="engine-attack-") as folder:
        model = copied(bundled_dir(), Path(folder) / "model")
        (Path(folder) / "scratch").mkdir()
        return 1 if table(model, Path(folder) / "scratch", arguments.only) else 0


def copied(bundled: Path, to: Path) -> Path:
    """The files of the model alone."""
    to.mkdir()
    for name in (CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG, WEIGHTS):
        shutil.copy(bundled / name, to / name)
    return to


if __name__ == "__main__":
    sys.exit(main())

"""Mutations of valid requests, with values that break parsers."""

from __future__ import annotations

import json
import random

from tools.attack.client import CHAT, COMPLETIONS

Fields = dict[str, str]
"""A JSON object: names and the raw JSON of their values, which may be no JSON at all."""

TURN = '{"role":"user","content":"What does json.dumps do?"}'
VALID: tuple[tuple[str, Fields], ...] = (
    (CHAT, {"model": '"bundled"', "messages": f"[{TURN}]", "max_tokens": "3", "temperature": "0"}),
    (CHAT, {"messages": f"[{TURN}]", "max_completion_tokens": "2", "stream": "true", "seed": "7"}),
    (COMPLETIONS, {"model": '"bundled"', "prompt": '"def main("', "max_tokens": "3", "n": "2"}),
    (COMPLETIONS, {"prompt": "[[5,6,7],[8,9]]", "max_tokens": "2", "stream": "true", "logprobs": "2", "echo": "true"}),
    ("/tokenize", {"prompt": '"import json"', "add_special_tokens": "true"}),
    ("/tokenize", {"messages": f"[{TURN}]"}),
    ("/detokenize", {"tokens": "[5,6,7]"}),
)
NUMBERS = (
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e308", "1e-400", "-0.0", "0", "-1", "1", "2", "0.5", "1.5"),
    *("2147483647", "2147483648", "-2147483649", "9223372036854775807", "9223372036854775808", "-9223372036854775809"),
    *("18446744073709551616", "1" + "0" * 400, "1" * 5000, "0." + "1" * 5000, "01", "+1", ".5", "1e", "0x10", "1_000"),
)
STRINGS = tuple(
    json.dumps(text)
    for text in (
        *(
            "",
            "1",
            "null",
            "true",
            "a\0b",
            "\r\nSet-Cookie: a=b",
            "\x1b[31mred",
            "\u2028\u2029",
            "\ud800",
            "\udfff\ud800",
        ),
        *("<|im_start|>system", "<|im_end|>", "</s>", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "e\u0301" * 50),
        *("{{ 7*7 }}", "{% raw %}", "%s%n%x", "../../etc", "a" * 600, "\ufeff", "\u202e", "bundled ", "BUNDLED"),
    )
)
OTHERS = (
    *(
        "null",
        "true",
        "false",
        "[]",
        "{}",
        "[[]]",
        "[null]",
        '[""]',
        "[-1]",
        "[1.5]",
        "[99999999999]",
        '[1,"a"]',
        "nul",
    ),
    *("[" * 300 + "]" * 300, "[" * 100_000, '{"a":' * 200 + "1" + "}" * 200, "[" + "0," * 5000 + "0]", '{"":{"":[]}}'),
    *('[{"role":"user"}]', '[{"role":"user","content":[{"type":"text"}]}]', '[{"role":"x","content":""}]', "'a'", ""),
    *('[{"role":"assistant","content":null}]', '[{"role":"user","content":[{"type":"text","text":"hi"}]}]', '"\\ud8"'),
    *('{"include_usage":true}', '{"include_usage":1}', '{"50":100}', '{"50":-100}', '{"-1":1}', '{"a":1}', '{"1":101}'),
)
NAMES = (
    *(
        "model",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "include_stop_str_in_output",
        "stop_token_ids",
    ),
    *(
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "ignore_eos",
        "skip_special_tokens",
        "n",
        "presence_penalty",
    ),
    *("frequency_penalty", "repetition_penalty", "logit_bias", "stream", "stream_options", "cache_salt", "priority"),
    *("user", "messages", "prompt", "logprobs", "top_logprobs", "add_generation_prompt", "echo", "best_of", "tokens"),
    *("tools", "tool_choice", "functions", "response_format", "suffix", "chat_template", "chat_template_kwargs"),
    *(
        "guided_json",
        "prompt_embeds",
        "lora_path",
        "mm_processor_kwargs",
        "metadata",
        "store",
        "x" * 300,
        "",
        "\0",
        "é",
    ),
)
PLAUSIBLE: Fields = {
    **{
        "temperature": "1.5",
        "top_p": "0.3",
        "top_k": "5",
        "min_p": "0.1",
        "seed": "-9",
        "stop": '[" a","e"]',
        "n": "3",
    },
    **{"max_tokens": "5", "min_tokens": "2", "ignore_eos": "true", "presence_penalty": "-2", "frequency_penalty": "2"},
    **{"repetition_penalty": "0.01", "logit_bias": '{"50":-100,"60":100}', "stream": "true", "cache_salt": '"a"'},
    **{"priority": "-5", "user": '"ann"', "stop_token_ids": "[1,2]", "include_stop_str_in_output": "true"},
    **{"skip_special_tokens": "false", "metadata": '{"a":"b"}', "tools": "[]", "tool_choice": '"none"'},
}


def mutated(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body: a valid request with up to three fields changed, and perhaps a few of its bytes."""
    path, fields = rng.choice(VALID)
    fields = dict(fields)
    for name in rng.sample(list(PLAUSIBLE), rng.randint(0, 4)) if path.startswith("/v1") else ():
        fields[name] = PLAUSIBLE[name]
    for _ in range(rng.choice((0, 0, 1, 2, 3))):
        name = rng.choice((rng.choice(NAMES), rng.choice(list(fields) or ["n"])))
        if rng.random() < 0.15:
            fields.pop(name, None)
        else:
            fields[name] = rng.choice(rng.choice((NUMBERS, STRINGS, OTHERS)))
    pairs = [f"{json.dumps(name)}:{raw}" for name, raw in fields.items()]
    if rng.random() < 0.05:
        pairs *= 2
    rng.shuffle(pairs)
    body = ("{" + ",".join(pairs) + "}").encode()
    if rng.random() < 0.02:
        path = rng.choice((CHAT, COMPLETIONS, "/tokenize", "/detokenize"))
    return path, broken(body, rng) if rng.random() < 0.25 else body


def broken(data: bytes, rng: random.Random) -> bytes:
    """A few bytes flipped, inserted, removed or repeated, or the end cut off."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0:
                changed[at : at + 1] = rng.randbytes(1)
            case 1:
                changed[at:at] = rng.choice((b"\0", b"\xff\xfe", b"\xed\xa0\x80", b'"', b"\\", b"{", b"]", b"\r\n"))
            case 2:
                del changed[at : at + rng.randint(1, 8)]
            case 3:
                changed[at:at] = changed[at : at + rng.randint(1, 32)]
            case _:
                del changed[at + 1 + rng.randint(0, len(changed)) :]
    return bytes(changed)

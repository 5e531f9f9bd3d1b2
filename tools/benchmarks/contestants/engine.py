"""This engine, in process. The contestant's name may select a quantizer, ``engine-int8``, and what it does with
activations, ``engine-int8-int8``."""

import json
import sys
import time

sys.path = [p for p in sys.path if not p.endswith("contestants")]  # this file shares the package's name
from engine import LLM  # noqa: E402

path, threads, name = sys.argv[1:4]
overrides = [
    "+preset=balanced",
    "drafter=none",
    "device=cpu",
    "model.dtype=bfloat16",
    f"threads={threads}",
    "model.max_len=2048",
]
for key, value in zip(("quantizer", "quantizer.activations"), name.split("-")[1:], strict=False):
    overrides.append(f"{key}={value}")
llm = LLM(path, overrides=overrides)
print(json.dumps({"answer": {"lowering": llm.info.lowering}}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    started = time.perf_counter()
    done = llm.generate(job["prompts"], max_tokens=job["max_tokens"], temperature=0.0, ignore_eos=True)
    seconds = time.perf_counter() - started
    assert all(len(c.tokens) == job["max_tokens"] for c in done)
    print(json.dumps({"answer": {"seconds": seconds}}), flush=True)

"""vLLM's CPU build, offline, its engine in this process."""

import json
import os
import sys
import time

path, threads, _ = sys.argv[1:4]
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path = [p for p in sys.path if not p.endswith("contestants")]  # this file shares the package's name
from vllm import LLM, SamplingParams  # noqa: E402

llm = LLM(path, dtype="bfloat16", max_model_len=2048, max_num_seqs=32, skip_tokenizer_init=True, seed=0)
print(json.dumps({"answer": {}}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    params = SamplingParams(max_tokens=job["max_tokens"], temperature=0.0, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    started = time.perf_counter()
    done = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    assert all(len(c.outputs[0].token_ids) == job["max_tokens"] for c in done)
    print(json.dumps({"answer": {"seconds": seconds}}), flush=True)

"""openvino-genai's ContinuousBatchingPipeline, in process."""

import json
import sys
import time

path, threads, _ = sys.argv[1:4]
sys.path = [p for p in sys.path if not p.endswith("contestants")]  # this file shares the package's name
import numpy as np  # noqa: E402
import openvino as ov  # noqa: E402
import openvino_genai as genai  # noqa: E402

scheduler = genai.SchedulerConfig()
scheduler.cache_size = 1
scheduler.max_num_batched_tokens = 2048
scheduler.enable_prefix_caching = True
properties = {"INFERENCE_NUM_THREADS": int(threads), "INFERENCE_PRECISION_HINT": "bf16"}
pipe = genai.ContinuousBatchingPipeline(path, scheduler, "CPU", properties)
print(json.dumps({"answer": {}}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    config = genai.GenerationConfig()
    config.max_new_tokens = job["max_tokens"]
    config.ignore_eos = True
    config.do_sample = False
    inputs = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in job["prompts"]]
    started = time.perf_counter()
    done = pipe.generate(inputs, [config] * len(inputs))
    seconds = time.perf_counter() - started
    assert all(len(r.m_generation_ids[0]) == job["max_tokens"] for r in done)
    print(json.dumps({"answer": {"seconds": seconds}}), flush=True)

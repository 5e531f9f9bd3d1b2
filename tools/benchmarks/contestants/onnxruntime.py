"""onnxruntime-genai, in process. It batches prompts of one length only: shorter ones are repeated up to the longest."""

import json
import sys
import time

path, threads, _ = sys.argv[1:4]
sys.path = [p for p in sys.path if not p.endswith("contestants")]  # this file shares the package's name
import numpy as np  # noqa: E402
import onnxruntime_genai as og  # noqa: E402

config = og.Config(path)
options = {"intra_op_num_threads": int(threads)}
config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
model = og.Model(config)
print(json.dumps({"answer": {}}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    longest = max(map(len, job["prompts"]))
    prompts = np.array([(prompt * longest)[:longest] for prompt in job["prompts"]], dtype=np.int32)
    params = og.GeneratorParams(model)
    length = longest + job["max_tokens"]
    params.set_search_options(
        batch_size=len(prompts), do_sample=False, min_length=length, max_length=length, past_present_share_buffer=True
    )
    started = time.perf_counter()
    generator = og.Generator(model, params)
    generator.append_tokens(prompts)
    for _ in range(job["max_tokens"]):
        generator.generate_next_token()
    seconds = time.perf_counter() - started
    assert all(len(generator.get_sequence(i)) == length for i in range(len(prompts)))
    del generator
    print(json.dumps({"answer": {"seconds": seconds}}), flush=True)

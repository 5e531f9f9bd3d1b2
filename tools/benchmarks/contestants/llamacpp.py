"""llama.cpp through the C functions of llama-cpp-python, in process: prompts one by one, outputs together.

A name that ends in ``-plain`` keeps weights as they are in the file: version 0.3.36 ends with SIGSEGV in its buffers
for AMX.
"""

import ctypes
import json
import sys
import time

path, threads, name = sys.argv[1:4]
sys.path = [p for p in sys.path if not p.endswith("contestants")]  # this file shares the package's name
import llama_cpp as api  # noqa: E402
import numpy as np  # noqa: E402

MOST, BATCH, LENGTH = 8, 512, 2048


@api.llama_log_callback
def quiet(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    pass


api.llama_log_set(quiet, ctypes.c_void_p(0))
api.llama_backend_init()
model_params = api.llama_model_default_params()
model_params.use_extra_bufts = not name.endswith("-plain")
model = api.llama_model_load_from_file(path.encode(), model_params)
vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
params = api.llama_context_default_params()
params.n_ctx, params.n_batch, params.n_ubatch = MOST * LENGTH, BATCH, BATCH
params.n_seq_max, params.kv_unified = MOST, True
params.n_threads = params.n_threads_batch = int(threads)
context = api.llama_init_from_model(model, params)
memory = api.llama_get_memory(context)
batch = api.llama_batch_init(BATCH, 0, 1)


def decode(tokens: list[tuple[int, int, int, bool]]) -> None:
    """Tokens as (id, position, sequence, whether its logits are wanted)."""
    batch.n_tokens = len(tokens)
    for i, (token, position, sequence, wanted) in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
        batch.seq_id[i][0] = sequence
    assert api.llama_decode(context, batch) == 0


def likeliest(index: int) -> int:
    return int(np.ctypeslib.as_array(api.llama_get_logits_ith(context, index), (vocab,)).argmax())


def prefill(prompt: list[int], sequence: int) -> int:
    for begin in range(0, len(prompt), BATCH):
        part = prompt[begin : begin + BATCH]
        last = len(prompt) - 1
        decode([(token, begin + i, sequence, begin + i == last) for i, token in enumerate(part)])
    return likeliest(-1)


print(json.dumps({"answer": {}}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    prompts = job["prompts"]
    started = time.perf_counter()
    api.llama_memory_clear(memory, False)
    tokens = [prefill(prompt, i) for i, prompt in enumerate(prompts)]
    for step in range(job["max_tokens"] - 1):
        decode([(token, len(prompts[i]) + step, i, True) for i, token in enumerate(tokens)])
        tokens = [likeliest(i) for i in range(len(prompts))]
    seconds = time.perf_counter() - started
    print(json.dumps({"answer": {"seconds": seconds}}), flush=True)

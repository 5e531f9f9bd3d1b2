"""The most that a checkpoint may say or hold. Every message that refuses a value names the limit.

Limits of a model are an order of magnitude beyond the largest one published when they were chosen, which each line
names. Limits of files keep what reading one costs below 300 MB and a second.
"""

from __future__ import annotations

MAX_LAYERS = 4096
"""Llama 3.1 405B: 126."""
MAX_HIDDEN_SIZE = 2**18
"""Llama 3.1 405B: 16,384."""
MAX_INTERMEDIATE_SIZE = 2**20
"""Llama 3.1 405B: 53,248."""
MAX_HEADS = 4096
"""Llama 3.1 405B: 128."""
MAX_HEAD_DIM = 8192
"""Gemma 3: 256; the latent heads of DeepSeek-V3: 576."""
MAX_VOCAB = 2**24
"""XLM-V: 901,629."""
MAX_EXPERTS = 2**14
"""Qwen3-Next: 512."""
MAX_POSITION = 2**27
"""Tokens. Llama 4 Scout: 10,485,760."""
MAX_ROPE_THETA = 1e12
"""Llama-3 with contexts of a million tokens: 3.6e9."""
MAX_ROPE_NUMBER = 1e6
"""Every other number of a rotation, and one over the smallest. The factor of DeepSeek-V3: 40."""
MAX_EPS = 1.0
"""Of a norm. 1e-5."""
MAX_MULTIPLIER = 1e6
"""Of embeddings, attention, residuals and logits. Granite 3.0: 12; Gemma 2: the root of 4,608."""
MAX_SHARE = 1.0
"""Of something that is a part of a whole."""
MAX_LISTED = 1024
"""Entries of a list: architectures, ids that end a text. Three."""

MAX_CONFIG_BYTES = 4 * 2**20
"""Of a ``config.json`` and its like. With lists of modules left unquantized: tens of KiB."""
MAX_TOKENIZER_CONFIG_BYTES = 16 * 2**20
"""Of a ``tokenizer_config.json``. Gemma 3: 1.2 MiB."""
MAX_TEMPLATE_BYTES = 2**17
"""Of a chat template. The longest with tools: tens of KiB."""
MAX_INDEX_BYTES = 64 * 2**20
"""Of a ``model.safetensors.index.json``. DeepSeek-V3: 9 MiB."""
MAX_HEADER_BYTES = 16 * 2**20
"""Of the header of a safetensors file. One of DeepSeek-V3: less than 100 KiB."""
MAX_TOKENIZER_BYTES = 512 * 2**20
"""Of a ``tokenizer.json``. Gemma 3: 32 MiB."""
MAX_VALUES = 2**18
"""In one JSON file. Gemma 3's ``tokenizer_config.json``: about 51,000."""
MAX_HEADER_VALUES = 2**19
"""In the header of one safetensors file: 65,000 tensors. One of DeepSeek-V3: about 560."""
MAX_DEPTH = 64
"""Of objects and lists within each other in one JSON file. Quantization configs: 6."""
MAX_TENSORS = 2**17
"""Of a checkpoint. DeepSeek-V3: 91,991."""
MAX_SHARDS = 4096
"""Files of a checkpoint. DeepSeek-V3: 163."""
MAX_RANK = 8
"""Dimensions of a tensor. Convolutions over video: 5."""
MAX_NAME_CHARS = 1024
"""Of the name of a tensor, a layer or a token."""
MAX_PATTERN_CHARS = 2**14
"""Of all regular expressions of a file together. GPT-4o's tokenizer: about 400."""
MAX_REPEATS = 5
"""Parts of any length in one pattern over names of modules. Patterns of llm-compressor: 2."""
MAX_MODULES = 4096
"""Names and patterns in one list of modules. Mixtures of experts: hundreds."""

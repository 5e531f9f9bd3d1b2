"""Sequences of ops as Triton kernels, for few rows (decoding, verifying drafts) and for many (prompts).

With up to 16 rows a sequence is one kernel: RMSNorm, product, and everything up to the next sequence. So a layer of
a dense decoder is four launches beside attention. Two sequences take a second kernel: query, key and value projections
whose heads are normed or scaled as a whole (then a layer is five), and a head that also finds the most likely tokens.
Where tensor cores read words (packed weights, bfloat16 rows: ``fragments.py``), a norm is a kernel of its own.
With more rows the products are torch's matrix multiplications, and what lies between them is one kernel each.

=============================  ==========================================  =========================================
ops                            up to 16 rows                               more rows
=============================  ==========================================  =========================================
norm, linear, rope, kv_write   ``linear_rope_write``, or ``linear_store``  norm, product, ``norm_rope_write``
                               and ``norm_rope_write``
linear, add                    ``linear_store`` adding to the residual     product added to the residual
norm, linear, gated            ``linear_gate``                             norm, product, ``gate_rows``
norm, linear of the head       ``linear_logits``, ``best_of_blocks``       norm, product, ``best_of_{chunks,blocks}``
norm, router, route            ``choose_experts``                          norm, product, ``route_rows``
experts, add                   ``expert_gate``, ``expert_mix``; many       ``sort_pairs``, gather, ``expert_gate``,
                               pairs as beside                             ``expert_down``, ``mix_rows``
a drafting head's lookup and   ``join_normed_rows``                        ``join_normed_rows``
norms, joined
=============================  ==========================================  =========================================

A layer with a mixture of experts is three launches more than its attention: seven where query and key heads are normed,
six where they are not. Pairs of a token and an expert are few if a token is alone, or if they are at most a quarter of
the experts: then hardly two share one. Many are sorted by expert, so that tokens of one expert share a reading of its
weights, which takes three launches more; up to 4096 pairs are sorted by one kernel, more by torch. Where experts have
32 tokens on average, their tiles have 64 rows. A norm that something else reads too, as a shared expert does, is
torch's. Where ranks share out the experts (``parallelism.ep``), the kernel that chooses experts has -1 for those of
other ranks; such a pair is skipped where pairs are few, and sorted after all tiles where they are many. Launches are
the same on every rank, whether or not a pair is its own.

**What a tile has to hold.** Decoding is bound by memory: a device that moves ``B`` bytes/s with a latency of ``t``
seconds is busy only while ``B * t`` bytes are on their way (Little's law). On an H200 that is 4.8 TB/s * 0.8 us =
3.8 MB, 29 KB for each of its 132 multiprocessors (SMs). So a program has two tiles of weights on their way in
registers while it multiplies a third (one row, or words), or one to four stages of asynchronous copies (several rows).
What is on its way is packed: codes are unpacked when they are multiplied.

Which tiles are fastest was measured on an H100, in chains of a model's products as a step launches them
(``docs/measured.md``). What ``tiles.py`` chooses, and what it follows from:

================  ==================  ========  =========  =====  ================================================
rows              weights             columns   inputs     warps  why
================  ==================  ========  =========  =====  ================================================
1 to 16, bf16     words of 4, 8 bits  16        128 each   4, 8   each warp has tiles of its own; 4 of many columns
1                 16 bits, short      8 or 16   512, 256   4      columns that leave 1.9 programs per SM
1                 16 bits, from 4096  8 or 16   1024, 256  8      twice the threads share a long row
1                 8 bits              8 or 16   1024, 512  8      8 KB a tile, as above
1                 4 bits              8 or 16   1024, 512  4      whole words of codes for each thread
2 to 16, normed   16 bits             64        256        4      each program norms the rows for itself
2 to 16           16 bits             64        128        4      from 8192 inputs on: 16 columns, 256 inputs
2 to 16           8 bits              16        128        2      64 columns where there are many, as in a head
2 to 16           4 bits              16 or 64  128        2, 4   64 with a norm, or from 8192 inputs on
17 to 64          packed              64        64         4      weights are read once
================  ==================  ========  =========  =====  ================================================

Tiles of 64 columns leave half of a device without a program for small layers, and are faster there, too. With dependent
launch the programs of the next kernel may take the rest, and load their first weights meanwhile.
"""

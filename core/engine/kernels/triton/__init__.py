"""Sequences of ops as Triton kernels, for few rows (decoding, verifying drafts) and for many (prompts).

With up to 16 rows a sequence is one kernel: RMSNorm, product, and everything up to the next sequence. So a layer of
a dense decoder is four launches beside attention. Two sequences take a second kernel: query, key and value projections
whose heads are normed or scaled as a whole (then a layer is five), and a head that also finds the most likely tokens.
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
3.8 MB, 29 KB for each of its 132 multiprocessors (SMs). What ``tiles.py`` chooses for bfloat16 weights:

=====================  =======  =======  =====  ====================================
rows                   BLOCK_N  BLOCK_K  warps  on the way per program
=====================  =======  =======  =====  ====================================
1, few columns         8        512      4      two tiles of 8 KB in registers
1, many columns        16       256      4      two tiles of 8 KB in registers
2 to 16, normed        64       64       4      4 of 5 stages of 8 KB, asynchronous
2 to 16, not normed    16       128      2      4 of 5 stages of 4 KB, asynchronous
9 to 16, many columns  32       128      4      3 of 4 stages of 8 KB, asynchronous
=====================  =======  =======  =====  ====================================

A program norms its rows for its own columns alone: the fewer columns it has, the more often that is done over. On an
H200, 64 columns take half the time of 16 for gate and up, queries, keys and values, and the head, for 48 programs too
(``docs/measured.md``); without a norm, 16 are as fast as any. Programs per SM, and what is on the way per SM, for the
projections of a 1B model (3072, 2048 and 2048 columns for qkv, output and down) and of an 8B model (6144, 4096 and
4096):

=======  ===================  ===================  ===================  ===================
rows     1B output, down      1B qkv               8B output, down      8B qkv
=======  ===================  ===================  ===================  ===================
1        1.94 per SM, 31 KB   2.91 per SM, 47 KB   1.94 per SM, 31 KB   2.91 per SM, 47 KB
2 to 16  0.97 per SM, 16 KB   0.36 per SM, 12 KB   1.94 per SM, 31 KB   0.73 per SM, 23 KB
=======  ===================  ===================  ===================  ===================

Gate and up, and the head, have 1.9 programs per SM and more. So one row has enough on the way everywhere; with 2 to 16
rows a 1B model's output and down projections (128 programs) are at half of the target, because a tensor core's tile has
at least 16 columns of ours, and its qkv projection is below it, because norms are shared.

8-bit formats have tiles of 8192 weights for one row, the same 8 KB; 4-bit ones too, of 4 KB: half of what the table
says (the cure is a third and fourth tile, four registers each while they are packed). What is on its way is packed, and
unpacked when it is multiplied. For 2 to 16 rows their stages hold half and a quarter of the bytes. Dependent launch
adds to this: the first tiles of the next kernel are loaded while
the last of this one are multiplied.
"""

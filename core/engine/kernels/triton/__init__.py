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
other ranks; such a pair is skipped where pairs are few, and sorted behind all tiles where they are many. Launches are
the same on every rank, whether or not a pair is its own.

**What a tile has to hold.** Decoding is bound by memory: a device that moves ``B`` bytes/s with a latency of ``t``
seconds is busy only while ``B * t`` bytes are on their way (Little's law). On an H200 that is 4.8 TB/s * 0.8 us =
3.8 MB, 29 KB for each of its 132 multiprocessors (SMs). What ``tiles.py`` chooses for bfloat16 weights, computed from
the tiles and not measured:

===================  =======  =======  =====  ====================================
rows                 BLOCK_N  BLOCK_K  warps  on the way per program
===================  =======  =======  =====  ====================================
1, few columns       8        512      4      two tiles of 8 KB in registers
1, many columns      16       256      4      two tiles of 8 KB in registers
2 to 16              16       128      2      4 of 5 stages of 4 KB, asynchronous
9 to 16, many cols   32       128      4      3 of 4 stages of 8 KB, asynchronous
===================  =======  =======  =====  ====================================

How many programs per SM that makes, and how many bytes on the way per SM, for the projections of a 1B model (3072, 2048
and 2048 columns for qkv, output and down) and of an 8B model (6144, 4096 and 4096):

=======  ===================  ===================  ===================  ===================
rows     1B output, down      1B qkv               8B output, down      8B qkv
=======  ===================  ===================  ===================  ===================
1        1.94 per SM, 31 KB   2.91 per SM, 47 KB   1.94 per SM, 31 KB   2.91 per SM, 47 KB
2 to 8   0.97 per SM, 16 KB   1.45 per SM, 23 KB   1.94 per SM, 31 KB   2.91 per SM, 47 KB
9 to 16  0.97 per SM, 16 KB   1.45 per SM, 23 KB   1.94 per SM, 31 KB   1.45 per SM, 35 KB
=======  ===================  ===================  ===================  ===================

Gate and up, and the head, have 3.9 programs per SM and more. So one row has enough on the way everywhere; with 2 to 16
rows a 1B model's output and down projections (128 programs) are at half of the target and its qkv projection at four
fifths of it, because a tensor core's tile has at least 16 columns of ours.

8-bit formats have tiles of 8192 weights for one row, the same 8 KB; 4-bit ones too, of 4 KB: half of what the table
says (the cure is a third and fourth tile, four registers each while they are packed). What is on its way is packed, and
unpacked when it is multiplied. For 2 to 16 rows their stages hold half and a quarter of the bytes. Dependent launch
adds to this: the first tiles of the next kernel are loaded while
the last of this one are multiplied.
"""

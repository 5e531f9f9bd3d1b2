"""The typed ops as Triton kernels, for few rows (decoding, verifying drafts) and for many (prompts).

With up to 16 rows an op is one kernel: RMSNorm, product, and everything up to the next op, which is why a layer is
four launches beside attention (five where each head is normed on its own). With more rows the products are torch's
matrix multiplications, and what lies between them is one kernel each.

========================  ==========================================  =========================================
op                        up to 16 rows                               more rows
========================  ==========================================  =========================================
``NormQKVRopeWrite``      ``linear_rope_write``, or ``linear_store``  norm, product, ``norm_rope_write``
                          and ``norm_rope_write``
``OutResidual``           ``linear_store`` adding to the residual     product added to the residual
``NormGateUpAct``         ``linear_gate``                             norm, product, ``gate_rows``
``DownResidual``          as ``OutResidual``                          as ``OutResidual``
``LMHead``                ``linear_logits``, ``best_of_blocks``       norm, product, ``best_of_{chunks,blocks}``
========================  ==========================================  =========================================

**What a tile has to hold.** Decoding is bound by memory: a device that moves ``B`` bytes/s with a latency of ``t``
seconds is busy only while ``B * t`` bytes are on their way (Little's law). On an H200 that is 4.8 TB/s * 0.8 us =
3.8 MB, 29 KB for each of its 132 multiprocessors. What ``tiles.py`` chooses for bfloat16 weights, computed from the
tiles and not measured (a projection has 1.9 to 3 programs per multiprocessor, or more):

===================  =======  =======  =====  ===================================  ===========================
rows                 BLOCK_N  BLOCK_K  warps  on the way per program               per SM at 2 and 3 programs
===================  =======  =======  =====  ===================================  ===========================
1, few columns       8        512      4      two tiles of 8 KB in registers       32 KB, 48 KB
1, many columns      16       256      4      two tiles of 8 KB in registers       32 KB, 48 KB
2 to 16              16       128      2      4 of 5 stages of 4 KB, asynchronous  32 KB, 48 KB
9 to 16, many cols   32       128      4      3 of 4 stages of 8 KB, asynchronous  48 KB, 72 KB
===================  =======  =======  =====  ===================================  ===========================

A 1B model's output projection (2048 columns in tiles of 8: 256 programs, 1.9 per multiprocessor) is the tightest case.
8-bit formats have tiles of 8192 weights for one row, the same 8 KB; 4-bit ones too (4 KB: 16 KB and 24 KB on the way,
below the target, the price of dequantizing in registers; the cure is a wider tile or a third one). For 2 to 16 rows
their stages hold half and a quarter of the bytes. Dependent launch adds to this: the first tiles of the next kernel are
loaded while the last of this one are multiplied.
"""

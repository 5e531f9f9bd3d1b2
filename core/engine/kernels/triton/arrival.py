"""Who came last: how the programs of one launch hand their partial results to one of them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def arrive(counter_ptr):
    """Count this program in; returns how many had arrived before it. Call after storing the partial results.

    The program that gets ``expected - 1`` is the last one. It may read what all others stored (with
    ``cache_modifier=".cg"``) and must set the counter back to 0, which leaves it right for the next launch: nobody
    else of this launch touches it again. The atomic decides only who continues, never a value or an order.

    Why the last one sees everything: the barrier puts the stores of all warps of a program before its atomic; that
    releases them to the device, acquires what earlier arrivals released, and in between every arrival adds to the
    same counter, one chain of releases. The result reaches the other warps through a second barrier, so their loads
    come after the acquire. ``.cg`` reads at the L2, where those stores are; no line of a multiprocessor's own L1,
    left by an earlier launch, can stand in.
    """
    tl.debug_barrier()
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")

"""Check and measure the engine on this machine's GPU: one command, plain Python, no network; stops after ten minutes.

    python tools/gpu_check                  # everything; writes tools/benchmarks/<gpu>-<date>.json, prints one table
    python tools/gpu_check --only speed_8b  # these sections, and those they need
    python tools/gpu_check --dry-run       # the same code with tiny shapes on a CPU

Each section is a process of its own with a time budget: one that fails, hangs or takes the CUDA context down with it
is reported as such, what it had found until then counts, and the others still run.

The engine need not be installed, but what it imports must be. A GPU machine that has torch, triton, transformers and
their like still lacks a few small packages; fetch them where there is a network, copy the folder over, install from it:

    python tools/gpu_check --gather wheels --python 3.12
    pip install --no-index --no-deps wheels/*.whl

What is missing is named before anything runs. A run that was cut off goes on with --resume.
`tools/gpu_check/README.md` says in which order to ask what, where time on a card is short.

Exit code: 0 every check passed, 1 a check failed or a section did not finish, 2 there is no CUDA device or a package
is missing. A speed target that was missed is in the table and does not change the exit code: it is a finding, not a
fault.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Run as a folder, Python puts the folder itself first on its path, where sections would hide modules of their name.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

from gpu_check.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(__doc__ or ""))

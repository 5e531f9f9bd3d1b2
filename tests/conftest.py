"""Settings all tests share."""

import os

# Tests run tiny models: threads would only wait for each other. Set before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

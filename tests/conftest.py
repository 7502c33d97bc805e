"""What must be set before anything is imported."""

import os
from pathlib import Path

# Without a GPU, Triton's kernels are run by its interpreter: read when they, and triton's own, are
# defined, and torch or transformers may be what imports triton.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

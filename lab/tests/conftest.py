"""One thread for torch, as in tests/conftest.py, where only these tests run."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

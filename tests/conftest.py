"""One thread for torch: the tests' models are so small that a second one only waits for the first."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

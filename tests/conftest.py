"""What every test runs under. Set before torch or Ray is imported."""

from __future__ import annotations

import os

import hypothesis

# Tiny models run up to 15 times slower when two threads share a busy core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MPLBACKEND"] = "agg"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# No test reads the network: a model or data set that is not here is made here.
os.environ["HF_HUB_OFFLINE"] = "1"
# Ray otherwise switches token authentication on and writes a token into the home folder.
os.environ["RAY_AUTH_MODE"] = "disabled"
# Ray then listens on loopback alone, on Linux too.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

# The same examples on every machine and in every run; no deadline, because a shared machine may pause for seconds.
hypothesis.settings.register_profile("reproducible", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("reproducible")

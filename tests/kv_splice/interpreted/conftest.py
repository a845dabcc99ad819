"""These tests run where Triton interprets its kernels, which it decides when they are imported.

`tests/kv_splice/test_gpu_interpreted.py` runs them in a process of their own.
"""

from triton import knobs

collect_ignore_glob = [] if knobs.runtime.interpret else ["test_*.py"]

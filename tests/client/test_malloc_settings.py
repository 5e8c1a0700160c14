"""Freed memory is reused without calls to the kernel."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import resource, sys
import numpy as np
from psctl.client.malloc_settings import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else False
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        first, second = np.full(500_000, 1.0), np.full(500_000, 2.0)
        del first, second
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(int(kept), faults())
"""


def faults(how: str) -> tuple[int, int]:
    out = subprocess.run([sys.executable, "-c", SCRIPT, how], check=True, capture_output=True, text=True).stdout
    kept, count = map(int, out.split())
    return kept, count


def test_freed_megabyte_buffers_are_reused_without_page_faults() -> None:
    kept, count = faults("keep")
    assert not kept or count < 5_000, "100 buffers of 4 MB have 100,000 pages"

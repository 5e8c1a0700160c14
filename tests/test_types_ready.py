"""Types that several threads decode at once are known to msgspec from the import on.

msgspec inspects a type at its first use and fills the result in place; a second thread that uses the type at that
moment reads an incomplete result, and the process ends with a segmentation fault. Imports run one at a time.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

LEARNT = """
import gc, importlib, sys
module, name = sys.argv[1].rsplit(".", 1)
found = getattr(importlib.import_module(module), name)
sys.exit("StructInfo" not in [type(one).__name__ for one in gc.get_referents(found)])
"""


@pytest.mark.parametrize(
    "type",
    [
        "psctl.launch.hosts.site.HostState",  # a thread a host
        "psctl.launch.agent_calls.JobDigest",
        "psctl.launch.placement.ports.PortUse",
        "psctl.launch.measure.measurement_servers.MeasuredRates",
        "psctl.transport.protocol.connection.KeyExchange",  # a thread a peer
        "psctl.transport.protocol.connection.Credit",
        "psctl.checkpoint.manifest.Manifest",  # a server's writer and its readers
    ],
)
def test_a_type_is_learnt_before_threads_use_it(type: str) -> None:
    script = f"import {type.rsplit('.', 1)[0]}\n{LEARNT}"
    assert subprocess.run([sys.executable, "-c", script, type], check=False).returncode == 0

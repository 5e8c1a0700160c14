"""`make lock`: write down the versions that psctl is tested with, and the hashes of what `managed` installs on hosts.

    psctl/constraints.txt   every package of this environment that psctl or its tests need, pinned
    psctl/hosts.txt         what psctl needs on a host, torch aside, with the hashes of all files that the index has

The hashes come from the index that uv is set to use.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from packages import CONSTRAINTS, HOSTS, found_here

from psctl.launch.hosts.site import NEEDED

HEAD = """\
# What psctl is tested with, and what its users install with `pip install -c`. Written by `make lock`.
# torch is pinned without the label of its build: the CPU build is enough, and a plain `torch` may pull gigabytes.
"""


def main() -> int:
    pins = found_here()
    CONSTRAINTS.write_text(HEAD + "".join(f"{name}=={version}\n" for name, version in sorted(pins.items())))
    wanted = "".join(f"{name}=={pins[name]}\n" for name in NEEDED if name != "torch")
    compile_ = ["uv", "pip", "compile", "--universal", "--generate-hashes", "--no-header", "--no-annotate", "--quiet"]
    bounds = ["--constraint", str(CONSTRAINTS), "--python-version", "3.11", "-"]
    done = subprocess.run([*compile_, *bounds], input=wanted, text=True, check=True, stdout=subprocess.PIPE)
    HOSTS.write_text(
        "# What `environment: managed` installs on hosts beside torch. Written by `make lock`.\n" + done.stdout
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The one question that is put to a host: a fixed POSIX-sh text, and `parse` for its answer.

The text holds nothing foreign and needs no root, no systemd and no tool beyond a shell and coreutils: what is missing
makes its section empty, and sections stand in for each other (`ip` and /proc/net; lscpu and /proc/cpuinfo). Interfaces
come from /proc/net/dev, which is the asker's own network namespace, while /sys may show another one's. A section begins
with a line "== psctl NAME" and ends with "== status N", the exit status of its last command.
"""

from __future__ import annotations

from psctl.topology.facts import HostFacts
from psctl.topology.parse import parse

__all__ = ["PROBE", "HostFacts", "parse"]

PROBE = r"""
LC_ALL=C; export LC_ALL
PATH="$PATH:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin:/usr/lib/wsl/lib:/usr/local/nvidia/bin"; export PATH
have() { command -v "$1" >/dev/null 2>&1; }
begin() { printf '\n== psctl %s\n' "$1"; }
end() { printf '\n== status %s\n' "$?"; }
word() { head -c 200 "$1" 2>/dev/null | head -n 1 | tr -d '\n'; }
last() { link=$(readlink "$1" 2>/dev/null) && printf '%s' "${link##*/}"; }
patient() { if have timeout; then timeout 20 "$@"; else "$@"; fi; }

begin uname; uname -n; uname -r; uname -m; end
begin time; date +%s.%N; end
begin connection; printf '%s\n' "${SSH_CONNECTION:-}"; end
begin boot; cat /proc/sys/kernel/random/boot_id 2>/dev/null; end
begin cores; { nproc || getconf _NPROCESSORS_ONLN; } 2>/dev/null; end
begin cpuinfo; grep -m 1 -E '^(model name|Model|Hardware|cpu model)[[:space:]]*:' /proc/cpuinfo 2>/dev/null; end
begin lscpu; have lscpu && lscpu 2>/dev/null; end
begin numa
for node in /sys/devices/system/node/node[0-9]*; do
  [ -r "$node/cpulist" ] && printf '%s\t%s\n' "${node##*/node}" "$(word "$node/cpulist")"
done; end
begin memory; cat /proc/meminfo 2>/dev/null; end
begin memorylimit
cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null; end
begin netdev; cat /proc/net/dev 2>/dev/null; end
begin sysnet
for path in /sys/class/net/*; do
  [ -e "$path/mtu" ] || continue
  kind=virtual; [ -e "$path/device" ] && kind=physical
  [ -e "$path/bridge" ] && kind=bridge
  printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "${path##*/}" "$(word "$path/operstate")" "$(word "$path/mtu")" \
    "$(word "$path/speed")" "$(last "$path/device/driver")" "$kind" "$(word "$path/device/numa_node")"
done; end
begin iplink; have ip && ip -o link show 2>/dev/null; end
begin ipaddr; have ip && ip -o addr show 2>/dev/null; end
begin fibtrie; cat /proc/net/fib_trie 2>/dev/null; end
begin inet6; cat /proc/net/if_inet6 2>/dev/null; end
begin route; cat /proc/net/route 2>/dev/null; end
begin disk; df -Pk "${HOME:-/}" 2>/dev/null; end
begin gpunodes; ls -d /dev/nvidia[0-9]* 2>/dev/null; end
begin pci
for path in /sys/bus/pci/devices/*; do
  case "$(word "$path/class")" in
    0x0300*|0x0302*) printf '%s\t%s\t%s\n' "${path##*/}" "$(word "$path/vendor")" "$(word "$path/numa_node")" ;;
  esac
done; end
begin nvidia
if have nvidia-smi; then
  patient nvidia-smi --query-gpu=index,name,memory.total,driver_version,pci.bus_id --format=csv,noheader </dev/null 2>&1
else (exit 127); fi; end
"""
"""Give it to `sh` on its standard input, or as the one argument behind `sh -c`; some hosts need up to 20 s."""

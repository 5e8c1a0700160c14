"""The one question that is put to a host: a fixed POSIX-sh text, and `parse_probe` for its answer.

The text holds nothing foreign and needs no root, no systemd and no tool beyond a shell and coreutils: what is missing
makes its section empty, and sections stand in for each other (`ip` and /proc/net; lscpu and /proc/cpuinfo). Interfaces
come from /proc/net/dev, which is the asker's own network namespace, while /sys may show another one's. A section begins
with a line "== psctl NAME" and ends with "== status N", the exit status of its last command.

/sys is read by the shell itself, a file a `read`: a process a file would take a second where there are 300 PCI devices.
The vendor's tools take up to 2 s each, so they run at the same time, as a pipeline in which every stage first has its
own tool answer and then passes on what the stages before it said: nothing is left behind in a folder.
"""

from __future__ import annotations

from psctl.topology.readers.gpus import QUERY, SHORT

_BASE = r"""
LC_ALL=C; export LC_ALL
PATH="$PATH:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin:/usr/lib/wsl/lib:/usr/local/nvidia/bin:/opt/rocm/bin"
export PATH
tab=$(printf '\t')
have() { command -v "$1" >/dev/null 2>&1; }
begin() { printf '\n== psctl %s\n' "$1"; }
end() { printf '\n== status %s\n' "$?"; }
word() { word=; { IFS= read -r word <"$1"; } 2>/dev/null; }
last() { link=$(readlink "$1" 2>/dev/null) && printf '%s' "${link##*/}"; }
patient() { if have timeout; then timeout 20 "$@"; else "$@"; fi; }

begin uname; uname -n; uname -r; uname -m; end
begin time; date +%s.%N; end
begin connection; printf '%s\n' "${SSH_CONNECTION:-}"; end
begin boot; cat /proc/sys/kernel/random/boot_id 2>/dev/null; end
begin netns; readlink /proc/self/ns/net 2>/dev/null; end
begin cores; { nproc || getconf _NPROCESSORS_ONLN; } 2>/dev/null; end
begin cpuinfo; grep -m 1 -E '^(model name|Model|Hardware|cpu model)[[:space:]]*:' /proc/cpuinfo 2>/dev/null; end
begin lscpu; have lscpu && lscpu 2>/dev/null; end
begin numa
for node in /sys/devices/system/node/node[0-9]*; do
  word "$node/cpulist"; [ -n "$word" ] && printf '%s\t%s\n' "${node##*/node}" "$word"
done; end
begin memory; cat /proc/meminfo 2>/dev/null; end
begin memorylimit
cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null; end
begin netdev; cat /proc/net/dev 2>/dev/null; end
begin sysnet
for path in /sys/class/net/*; do
  [ -e "$path/mtu" ] || continue
  kind=virtual; driver=; [ -e "$path/device" ] && kind=physical && driver=$(last "$path/device/driver")
  [ -e "$path/bridge" ] && kind=bridge
  row=${path##*/}
  for name in operstate mtu speed; do word "$path/$name"; row="$row$tab$word"; done
  word "$path/device/numa_node"
  printf '%s\t%s\t%s\t%s\n' "$row" "$driver" "$kind" "$word"
done; end
begin iplink; have ip && ip -o link show 2>/dev/null; end
begin ipaddr; have ip && ip -o addr show 2>/dev/null; end
begin fibtrie; cat /proc/net/fib_trie 2>/dev/null; end
begin inet6; cat /proc/net/if_inet6 2>/dev/null; end
begin route; cat /proc/net/route 2>/dev/null; end
begin disk; df -Pk "${HOME:-/}" 2>/dev/null; end
begin gpunodes; ls -d /dev/nvidia[0-9]* 2>/dev/null; end
"""

_SYS = r"""
slot() {
  row=${1##*/}
  for name in class vendor device numa_node current_link_speed max_link_speed current_link_width max_link_width; do
    word "$1/$name"; row="$row$tab$word"
  done
  printf '%s\t%s\n' "$row" "$1"
}
begin pci
( told=' '
for path in /sys/bus/pci/devices/*; do
  word "$path/class"
  case "$word" in
    0x0300*|0x0302*|0x0380*|0x12*|0x02*) ;;
    0x0680*) word "$path/vendor"; [ "$word" = 0x10de ] || continue ;;
    *) continue ;;
  esac
  if cd -P "$path" 2>/dev/null; then above=$PWD; else above=$path; fi
  slot "$above"
  while above=${above%/*}; do
    case "${above##*/}" in [0-9a-f]*:[0-9a-f][0-9a-f]:*.[0-7]) ;; *) break ;; esac
    case "$told" in *" $above "*) break ;; esac
    told="$told$above "; slot "$above"
  done
done ); end
begin rdma
( for path in /sys/class/infiniband/*/ports/*; do
  [ -e "$path/state" ] || continue
  device=${path%/ports/*}
  row="${device##*/}$tab${path##*/}"
  for name in rate state link_layer; do word "$path/$name"; row="$row$tab$word"; done
  word "$path/gid_attrs/ndevs/0"; shown=$word; nets=
  for net in "$device"/device/net/*; do
    [ -e "$net" ] || continue
    word "$net/dev_port"; nets="$nets ${net##*/}=$word"
  done
  word "$device/device/numa_node"; bus=
  cd -P "$device/device" 2>/dev/null && bus=${PWD##*/}
  printf '%s\t%s\t%s\t%s\t%s\n' "$row" "$bus" "$word" "$shown" "$nets"
done ); end
"""

_TOOLS = r"""
say() { name=$1; shift; said=$("$@" </dev/null 2>&1); status=$?; tell; }
also() { name=$1; shift; said=$(patient "$@" </dev/null 2>&1); status=$?; cat; tell; }
tell() { begin "$name"; printf '%s\n' "$said"; printf '\n== status %s\n' "$status"; }
query() {
  answer=$(patient nvidia-smi --query-gpu={QUERY} --format=csv 2>&1); status=$?
  case "$answer" in
    *'valid field'*) patient nvidia-smi --query-gpu={SHORT} --format=csv 2>&1 ;;
    *) printf '%s\n' "$answer"; return "$status" ;;
  esac
}
if have nvidia-smi; then
  say nvidia query | also nvidiatopo nvidia-smi topo -m | also nvidiapeers nvidia-smi topo -p2p r |
    also nvlink nvidia-smi nvlink -s
else begin nvidia; (exit 127); end; fi
if have rocm-smi; then
  say rocm patient rocm-smi --showtopo | also rocmcards rocm-smi --showproductname --showbus --showmeminfo vram
elif have amd-smi; then say rocm patient amd-smi topology; fi
"""

PROBE = _BASE + _SYS + _TOOLS.replace("{QUERY}", ",".join(QUERY)).replace("{SHORT}", ",".join(SHORT))
"""Give it to `sh` on its standard input, or as the one argument behind `sh -c`; some hosts need up to 20 s."""

"""nvidia-smi's tables of GPUs: columns by their names, whatever was asked; every trouble with its cure."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl.topology.readers.gpus import (
    QUERY,
    SHORT,
    is_query,
    read_banner,
    read_listed,
    read_log,
    read_query,
    trouble,
    troubles,
)
from psctl.topology.readings import GpuRow

CAPTURED = Path(__file__).parent.parent / "captured" / "errors"

FULL = GpuRow(
    0, "NVIDIA H100 80GB HBM3", "GPU-5a10", 81559 << 20, "550.54.15", "0000:1b:00.0", 1, 5, 16, 16, False, True
)
CELLS = {
    "index": "0", "name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-5a10", "memory.total": "81559 MiB",
    "driver_version": "550.54.15", "pci.bus_id": "00000000:1B:00.0", "pcie.link.gen.current": "1",
    "pcie.link.gen.max": "5", "pcie.link.width.current": "16", "pcie.link.width.max": "16",
    "mig.mode.current": "Disabled", "persistence_mode": "Enabled",
}  # fmt: skip


def csv(columns: tuple[str, ...] | list[str], unit: bool = True) -> str:
    """Return the table of one GPU with a header, as nvidia-smi prints it with units and without."""
    header = ", ".join(f"{column} [MiB]" if column == "memory.total" else column for column in columns)
    cells = [CELLS.get(column, "7") for column in columns]
    return f"{header}\n{', '.join(cell if unit else cell.removesuffix(' MiB') for cell in cells)}\n"


@given(st.permutations([*QUERY, "temperature.gpu", "clocks.max.sm"]), st.booleans())
def test_columns_are_known_by_their_names_in_any_order(columns: list[str], unit: bool) -> None:
    assert read_query(csv(columns, unit)).gpus == (FULL,)


def test_other_names_of_the_same_columns() -> None:
    text = (
        "gpu_name, gpu_uuid, gpu_bus_id, pcie.link.gen.gpucurrent, pcie.link.gen.gpumax\nA10, GPU-1, 0000:3B:00.0, 4, 4"
    )
    assert read_query(text).gpus == (GpuRow(0, "A10", "GPU-1", bus="0000:3b:00.0", generation=4, generation_max=4),)


@pytest.mark.parametrize("columns", [QUERY, SHORT])
def test_the_probes_own_questions_are_known_without_a_header(columns: tuple[str, ...]) -> None:
    row = csv(columns).split("\n")[1]
    found = read_query(row)
    assert (found.gpus[0].bus, found.gpus[0].memory, found.findings) == ("0000:1b:00.0", 81559 << 20, ())
    assert is_query(row)


def test_values_that_a_gpu_does_not_have_are_unknown() -> None:
    text = (
        "index, name, memory.total [MiB], mig.mode.current, persistence_mode, pcie.link.width.current\n"
        '1, "NVIDIA, odd", [N/A], [N/A], [Not Supported], N/A\n'
    )
    table = read_query(text)
    assert table.gpus == (GpuRow(1, "NVIDIA, odd"),)
    assert table.findings == ()


def test_a_gpu_that_answers_with_an_error_is_a_finding_and_the_others_stay() -> None:
    text = "index, name, memory.total [MiB]\n0, A100, 40960 MiB\n1, A100, [Unknown Error]\n2, A100, [GPU is lost]\n"
    table = read_query(text)
    assert [(gpu.index, gpu.memory) for gpu in table.gpus] == [(0, 40960 << 20), (1, None), (2, None)]
    assert [finding.what for finding in table.findings] == [
        "GPU 1 returns [Unknown Error] for memory.total", "GPU 2 returns [GPU is lost] for memory.total",
    ]  # fmt: skip


def test_a_cut_row_is_a_finding() -> None:
    table = read_query(csv(QUERY) + "1, NVIDIA H100 80GB HBM3, GPU-77")
    assert len(table.gpus) == 1
    assert "cut or malformed: 1, NVIDIA H100" in table.findings[0].what


def test_an_index_that_was_not_queried_is_counted() -> None:
    assert [gpu.index for gpu in read_query("name\nA\nB\n").gpus] == [0, 1]


def test_the_list_of_gpus_and_their_parts() -> None:
    text = (
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aa)\n"
        "  MIG 3g.20gb     Device  0: (UUID: MIG-bb)\nGPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-cc)\n"
    )
    assert read_listed(text).gpus == (
        GpuRow(0, "NVIDIA A100-SXM4-40GB", "GPU-aa", mig=True), GpuRow(1, "NVIDIA A100-SXM4-40GB", "GPU-cc"),
    )  # fmt: skip


BANNER = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
|=========================================+========================+======================|
|   0  NVIDIA A100-SXM4-80GB          On  |   00000000:07:00.0 Off |                    0 |
| N/A   29C    P0             62W /  400W |       4MiB /  81920MiB |      0%      Default |
|                                         |                        |              Enabled |
+-----------------------------------------+------------------------+----------------------+
|  10  NVIDIA A100-SXM4-80GB          Off |   00000000:0F:00.0 Off |                    0 |
| ERR!  ERR! ERR!             N/A / ERR!  |       4MiB /  81920MiB |     ERR!      ERR!   |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+
"""


def test_the_table_of_a_bare_nvidia_smi() -> None:
    first, second = read_banner(BANNER).gpus
    assert first == GpuRow(
        0, "NVIDIA A100-SXM4-80GB", "", 81920 << 20, "550.54.15", "0000:07:00.0", mig=True, persistence=True
    )
    assert [finding.what for finding in read_banner(BANNER).findings] == ["GPU 10 shows ERR!"]
    assert (second.index, second.bus, second.mig, second.persistence) == (10, "0000:0f:00.0", False, False)


LOG = """\
==============NVSMI LOG==============

Timestamp                                 : Wed Nov 18 10:00:00 2026
Driver Version                            : 550.54.15
Attached GPUs                             : 2
GPU 00000000:1B:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    Persistence Mode                      : Enabled
    MIG Mode
        Current                           : Disabled
        Pending                           : Enabled
    GPU UUID                              : GPU-5a10
    GPU Recovery Action                   : None
    PCI
        Bus Id                            : 00000000:1B:00.0
        GPU Link Info
            PCIe Generation
                Max                       : 5
                Current                   : 1
                Device Current            : 1
            Link Width
                Max                       : 16x
                Current                   : 16x
    FB Memory Usage
        Total                             : 81559 MiB
    BAR1 Memory Usage
        Total                             : 131072 MiB

GPU 00000000:43:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    MIG Mode
        Current                           : N/A
"""


def test_the_long_report() -> None:
    assert read_log(LOG).gpus == (
        FULL, GpuRow(1, "NVIDIA H100 80GB HBM3", driver="550.54.15", bus="0000:43:00.0"),
    )  # fmt: skip
    assert all(trouble(line) is None for line in LOG.splitlines())


@pytest.mark.parametrize("path", sorted(CAPTURED.glob("*.txt")), ids=lambda path: path.stem)
def test_what_broken_machines_print_is_a_finding_each_with_a_cure(path: Path) -> None:
    lines = path.read_text().splitlines()
    found = troubles(lines)
    assert [finding.what for finding in found] == [line for line in lines if "NVML library version" not in line]
    assert all(finding.cure for finding in found)
    assert read_query(path.read_text()).gpus == ()


@pytest.mark.parametrize(
    ("line", "cure"),
    [
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make ...", "modprobe nvidia"),
        ("No devices were found", "seated and powered"),
        ("Failed to initialize NVML: Insufficient Permissions", "group"),
        ("Failed to initialize NVML: Unknown Error", "does not answer"),
        ("Failed to initialize NVML: N/A", "restart the container"),
        ("Unable to determine the device handle for GPU 0000:41:00.0: GPU is lost.  Reboot the system", "off the bus"),
        ("bash: line 1: nvidia-smi: command not found", "PATH"),
        ("sh: 1: nvidia-smi: not found", "PATH"),
        ("zsh: command not found: nvidia-smi", "PATH"),
        ("'nvidia-smi' is not recognized as an internal or external command,", "PATH"),
        ("/bin/sh: rocm-smi: No such file or directory", "PATH"),
        ("bash: /usr/bin/nvidia-smi: Permission denied", "may not run"),
        ("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that ...", "library"),
        ("Unable to determine the device handle for GPU 0000:01:00.0: Not Found", "off the bus"),
        ("NVRM: Xid (PCI:0000:34:00): 79, pid=1, GPU has fallen off the bus.", "off the bus"),
        ("NVRM: Xid (PCI:0000:34:00): 48, pid=1, DBE (double bit error)", "Xid's number"),
        ("WARNING: infoROM is corrupted at gpu 0000:17:00.0", "replace the card"),
        ('docker: could not select device driver "" with capabilities: [[gpu]].', "container toolkit"),
        ("ERROR:root:Driver not initialized (amdgpu not found in modules)", "amdgpu"),
        ("Unable to open /dev/kfd read-write: Permission denied", "/dev/kfd"),
        ('Field "mig.mode.current" is not a valid field to query.', "too old"),
        ("ERROR: Option -p2p is not recognized. Please run 'nvidia-smi -h'.", "does not have that option"),
    ],
)  # fmt: skip
def test_known_troubles_have_a_cure(line: str, cure: str) -> None:
    found = trouble(line)
    assert found is not None
    assert cure in found.cure


@pytest.mark.parametrize(
    "line",
    [
        "  CNS  = Chipset not supported", "  TNS  = Topology not supported", "  U    = Unknown", "GPU0\tX\tOK",
        "Failed to properly shut down NVML: GPU access blocked by the operating system",
        "NVML: Unable to retrieve NVLink information as all links are inactive", "NVML library version: 580.173",
        "0, NVIDIA H200, 143771 MiB, 570.86.15, 00000000:0F:00.0", "         Link 3: <inactive>",
        "| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |",
    ],
)  # fmt: skip
def test_what_healthy_machines_print_is_no_trouble(line: str) -> None:
    assert trouble(line) is None


@given(st.integers(0, 300), st.text(max_size=8), st.sampled_from([csv(QUERY), BANNER, LOG]))
def test_no_garbling_is_an_error(at: int, put: str, text: str) -> None:
    for read in (read_query, read_banner, read_listed, read_log):
        read(text[:at] + put + text[at:])

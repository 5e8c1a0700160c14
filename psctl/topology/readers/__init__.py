"""Readers of probe output and of the saved output of tools; none raises on what a machine may print.

cells: text of tables cleaned and split into cells
column_alignment: cells of a table put under the devices of its columns
gpus: GPUs and errors in the outputs of nvidia-smi
matrix: `nvidia-smi topo -m` and `-p2p`
nccl_xml: topology files of NCCL and RCCL
networks: network interfaces and their addresses
nvlink: `nvidia-smi nvlink -s`
pci: PCI trees of lspci and /sys
probe: the probe script and the reader of its output
rdma: RDMA ports
recognise: the kind of an output by its content
rocm: `rocm-smi --showtopo` and `amd-smi topology`
text_tables: tables found in a text
"""

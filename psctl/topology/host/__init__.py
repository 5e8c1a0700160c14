"""The graph of one host.

document: the JSON documents of `psctl topo`
health: problems that the outputs of a host show
host_graph: the graph of a host built from all its outputs and measured copy rates
inventory: the GPUs, NICs and processors of a host
link_overrides: `links` of a cluster file applied to the probed links
nvlinks: NVLinks derived from the link types of a matrix
paths: widest paths inside a host
pcie_derivation: the PCIe tree derived from the link types of a matrix
pcie_tree: the PCIe tree as the host lists it
sockets: the processor of each PCIe slot
worker_placement: the GPU, NIC and NUMA node of each worker
"""

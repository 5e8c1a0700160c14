"""The graph of one host.

copy_rates: measured copy rates put into a graph
document: the JSON documents of `psctl topo`
health: problems that the outputs of a host show
host_graph: all outputs of a host joined into one graph
inventory: the GPUs, NICs and processors of a host
link_overrides: `links` of a cluster file put over the probed links
nvlinks: NVLinks behind the words of a matrix
paths: widest paths inside a host
pcie_derivation: the PCIe tree derived from the words of a matrix
pcie_tree: the PCIe tree as the host lists it
sockets: the processor of each PCIe slot
worker_placement: the GPU, NIC and NUMA node of each worker
"""

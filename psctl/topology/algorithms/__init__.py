"""Algorithms on the direct links among the GPUs of a host, and the hierarchy of a cluster.

cycles: Hamiltonian cycles, and the choice of cycles that fit the links
direct_links: NVLink and xGMI among GPUs, counted in link units
flows: maximum flow and minimum cut
islands: groups of devices that are closer to each other than to the rest
rings: rings that share no link
strength: how much all spanning trees together can carry
trees: spanning trees that share no link
"""

"""Machines and clusters as graphs: readers of probe output, the graph, and algorithms on it; no I/O.

algorithms: rings, trees and groups of GPUs
facts: what a probe found out about one host
findings: a problem and its remedy
graph: devices, links, hosts and clusters
host: the graph of one host, from its outputs
network: addresses of hosts and the links between them
rates: nominal rates of slots, cables and links, with sources
readers: readers of probe output and of saved output of tools
readings: the content of each tool's output, as values
"""

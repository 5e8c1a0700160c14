"""Measurement of a cluster's networks and links; results are saved with the cluster.

calibration: saves and loads the costs of messages that `up` and `bench` measured
link_measurement: measures rates and latencies between hosts, and copies inside hosts
measurement_servers: runs servers of the link probe on many hosts
reach: finds the addresses by which hosts reach each other
saved_output: reads machines from files of saved output
strategy_suggestion: the strategy that `topo` suggests
survey: the document of `psctl topo` for live hosts
topology_document: the document of `psctl topo`, of live hosts or of saved output
"""

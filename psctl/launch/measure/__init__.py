"""Networks and links of a cluster, measured and saved with it.

calibration: costs of messages as `bench` measured them
link_measurement: rates and latencies between hosts, and copies inside them
measurement_servers: servers of the link probe on many hosts
reach: the addresses by which hosts reach each other
saved_output: machines read from files of saved output
strategy_suggestion: the strategy that `topo` suggests
survey: the document of `psctl topo`
"""

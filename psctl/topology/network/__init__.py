"""The network between hosts.

addresses: the address at which the other hosts reach each host
common_network: the choice among networks that join all hosts
fabric: racks and trunks inferred from measured pairs
measurement_rounds: rounds in which every pair of hosts is measured once
"""

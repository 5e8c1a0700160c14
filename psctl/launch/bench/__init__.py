"""`psctl bench`, and the measurement of `psctl up`: collectives and servers measured on a cluster.

bench_runs: the jobs of a bench and their results
congestion: comparison of TCP's congestion controls
cost_fitting: costs of messages, fitted to the measured times
message_bench: what `up` measures, and with which ranks
"""

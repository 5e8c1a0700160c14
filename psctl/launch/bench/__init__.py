"""`psctl bench`, and the measurement of `psctl up`: collectives and servers measured on a cluster.

bench_runs: the jobs of a bench, their results, and the costs fitted to them
congestion: comparison of TCP's congestion controls
"""

"""Placement of a job's processes on hosts, and the plan for them.

cluster_snapshot: converts inspected hosts to the input of placement and plan
job_planning: makes plans before a run (`psctl plan`)
ports: compares the ports that a job needs with `network.ports` and the hosts
roster: assigns workers to hosts, and makes orders
"""

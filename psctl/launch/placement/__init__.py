"""Placement of a job's processes on hosts, and the plan for them.

cluster_snapshot: the inspected hosts as placement and plan need them
job_planning: `psctl plan`
ports: ports of `network.ports` that a job needs and hosts have
roster: workers assigned to hosts, and orders made from that
"""

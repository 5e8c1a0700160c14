"""Preparation of hosts: inspection, and the actions that make a host ready.

actions: the actions that a host needs, as a pure decision
converge: decides and carries out the actions on all hosts
run_command: runs a command on all hosts at once
installing: runs pip on a host
site: inspects a host
"""

"""One host: inspection, and the actions that make it ready.

actions: the actions for a host, as a pure decision
converge: decides and carries out the actions on all hosts
installing: runs of pip on a host
site: a host as inspected
"""

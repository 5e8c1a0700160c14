"""Self-contained programs that are sent to hosts; standard library only (gpu_copies imports torch there).

gpu_copies: measures copies between GPUs and memory
host_files: writes and removes psctl's files
host_state: reports the state of a host and of its jobs
link_probe: measures the link between two hosts
network_checks: finds free and taken ports
pending_orders: orders that wait for their agent; part of host_files and host_state
"""

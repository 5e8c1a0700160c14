"""Programs whose source is sent to hosts and run there. They use the standard library only (gpu_copies: and torch).

gpu_copies: measures copies between GPUs and memory
host_files: writes and removes psctl's files
host_state: reports the state of a host and of its jobs
link_probe: measures the link between two hosts
network_checks: finds free and taken ports
rank_shell: starts a shell or a command beside a process of a job
pending_orders: stores orders until their agent reads them; part of host_files and host_state
"""

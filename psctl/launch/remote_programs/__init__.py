"""Programs whose source is sent to hosts and run there. They use the standard library only (gpu_copies: and torch).

data_files: receives the data of jobs
data_store: the data of jobs on a host; part of data_files and url_data
gpu_copies: measures copies between GPUs and memory
host_files: writes and removes psctl's files
host_state: reports the state of a host and of its jobs
link_probe: measures the link between two hosts
network_checks: finds free and taken ports
output_files: lists and sends what a script wrote
rank_shell: starts a shell or a command beside a process of a job
url_data: fetches the data of a URL
pending_orders: stores orders until their agent reads them; part of host_files and host_state
"""

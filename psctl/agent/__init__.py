"""The agent: psctl's process on a host for one job. It starts, watches and ends the job's processes there.

main: the agent itself: its events, and what it does on each
step_rings: the memory for the times of steps
supervisor: its parent, which ends the processes that remain when the agent has ended
spawn: command lines, environments, orders and files of the processes that it starts
processes: its children: start, watch, end
coordinator_link: its connection to the coordinator, and checkpoint copies that arrive there
head_services: the coordinator, the exporter and torch's store, on the leading host's agent
exporter_process: the exporter of metrics, as its child
elections: its votes, its own election, and the messages with other agents about them
leadership: the rules of votes and elections
replica: the copy of the coordinator's state on the standby
torch_store: MASTER_PORT of a host, and the tunnels from it to torch's store on the head
torch_store_host: the process that serves torch's store
control_socket: the commands of psctl, and the answers to them
control_client: the other end of the control socket, run on the host over SSH
log_pump: the output of all processes: masked, written to log files, passed on
log_files: the log files of one rank, within a limit
gpu_usage: GPUs, and what processes use of them
resource_usage: busy processes, and evidence of kills for lack of memory
shm_broker: the agent's side of shared memory
stack_requests: stack dumps of its processes
"""

"""Parts of every process of a job: its start, its orders, its private memory and its end.

bootstrap: runs the user's script, and writes how it failed
torch_import: imports torch without the garbage collector
compiler_import: imports torch's compiler at its first use
lifeline: ties a process to the agent that started it
process_orders: the orders of workers, servers and the coordinator
sealed_memory: passes orders to a child in memory
coordinator_connection: a member's connection to the coordinator, made again when it breaks
journal_files: the files of a coordinator's journal
leader_file: the file that states which host leads
certificate_renewal: new certificates for long jobs
rejected_connections: log lines about rejected connections
secret_masking: replaces secrets in output
step_ring: times of the parts of steps, in memory that the agent reads
end_signal: ends a process by its agent, and by no other SIGTERM
stack_dump: writes a process's Python stacks at a signal
stderr_log: standard error that never fails on a full disk
reserved_file: an append-only file with reserved disk space
job_modules: imports functions from the job's folder only
user_functions: users' reductions and functions by name
"""

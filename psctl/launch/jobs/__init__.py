"""A job: submission, events, logs, status, end.

event_stream: the event log of a job, followed across lost connections
host_messages: messages of hosts, translated to paths and commands of this machine
job_end: ends a job and checks that no process is left
job_logs: the logs of a job's processes
job_scale: `psctl scale`
job_stacks: `psctl stacks`
job_status: `psctl status` and `psctl jobs`
prepare: from a job file to a submission: connect, make ready, place
rank_shell: the command that opens a shell beside a process of a job
script_entry: checks of the script that a job file names
step_profile: a profile of some steps of a worker
step_times: the times of some steps from all workers
step_trace: times of steps on one clock, the critical path, and the trace file
store_query: `psctl store`
agent_start: starts the agent of a host
join_running_jobs: starts the agents that running jobs lack on hosts that booted or are new
submit: makes authority, certificates and orders, and starts agents
"""

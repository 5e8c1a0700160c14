"""Commands of the user's machine that act on a cluster: hosts, measurements, jobs, checkpoints.

agent_calls: calls of a job's agent through its control client
archive: folders as content-addressed archives
bytecode: psctl's compiled modules on this machine, which hosts that see them take
cluster_hosts: hosts that a command prints, and the nodes of Slurm
clusters: which cluster a command means
home: psctl's state on this machine: clusters, measurements, records of jobs
leader_search: which host leads a job
host_programs: runs the programs of remote_programs on hosts
ignore: rules of .gitignore files
pins: the versions that psctl is tested with
scaffold: the files that `psctl init` writes
bench: `psctl bench`
checkpoints: checkpoints on hosts: list, verify, copy, export, prune
files: data that hosts get, and files that scripts wrote
hosts: one host: inspection, and the actions that make it ready
jobs: a job: submission, events, logs, status, end
measure: networks and links of a cluster, measured and saved
placement: which processes of a job run on which hosts, and the plan for them
remote_programs: programs that are sent to hosts
setup: a cluster as a whole: doctor, up, down
"""

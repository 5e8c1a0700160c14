"""The commands of psctl, one a module.

attach: follow a job again
bench: measure strategies on a cluster and compare them with the plan
checkpoint: list, show, verify, restore, export, pull, prune
clusters: list the known clusters and mark the current one
doctor: check every host
down: undo `up`
explain: explain a key, a command, an event, or a code
init: make a folder with a job and a cluster file
jobs: list the jobs that were started from this machine
logs: print the output of a job's processes
plan: predict the time of every strategy and choose one
profile: profile some steps of a worker
pull: fetch what a job's script wrote
report: write the page of a job to a file
run: run a command on all hosts of a cluster
scale: change the number of processes of a running job
ssh: open a shell beside a process of a job
stacks: show what the processes of a running job execute
status: show running jobs and their hosts
stop: end a job
store: read keys of a running job's store
topo: show machines and links
trace: write the times of some steps of all workers
train: run a job
ui: serve a live page of jobs
up: make the hosts of a cluster ready
use: make a cluster the current one
validate: check cluster and job files
"""

"""What several commands use.

bench_jobs: one call of `psctl bench`
completion: tab completion from this machine's records
context: a call of psctl: options, streams, records, connections
following: follows a job and acts on Ctrl-C
global_options: the options that every command accepts
interrupts: the effect of Ctrl-C and SIGTERM while a job is followed
launching: from a job file to a followed job
output_file: the file that a command writes, which is whole or absent
page_jobs: the event logs of jobs, read for a page
outputs: what a job's script wrote, at the end of the job
parameters: arguments and options that several commands have
signals: SIGTERM as an exception
system_errors: errors of the user's own machine, with a cure
topics: the topics of `psctl explain` and of the reference
"""

"""Cluster and job files as frozen typed values with line numbers.

cluster: cluster.yaml
data: the keys `data` and `outputs` of job.yaml
decode: nodes of a file decoded into sections, with every error
exec_template: the command of `kind: command`
fields: notations of fields, for the loader and the schema
groups: the section `groups` of job.yaml
hosts: ranges of hosts and hostfiles
job: the sections of job.yaml
job_contradictions: settings of job.yaml that cannot be combined
job_file: job.yaml read, with the keys that a command line replaces
kinds: whether a file is a cluster file or a job file
metrics: the section `metrics` of job.yaml
nearest: the valid name nearest to a misspelt one
noted_options: options of a command line in the text of a job file
key_reference: every key of both files with its meaning, values, default and an example
schema: JSON schemas of both files
yaml_nodes: YAML text parsed into nodes with places
"""

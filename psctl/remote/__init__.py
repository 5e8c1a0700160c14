"""Commands and files on hosts, over SSH, over any other command or on this machine.

shell: the interface of a host's shell
posix: a shell on any POSIX host, given a way to start `sh` there
scripts: the sh scripts that posix runs
local: a shell on this machine
child: a child process as the streams of a command
command: a shell over any command (`kind: command`)
slurm: shells on the nodes of a Slurm allocation
ssh: a shell over SSH
ssh_hop: one SSH connection, or a chain of them
ssh_auth: login with keys
ssh_identities: the public half and the certificates of an identity file
ssh_keys: check of host keys
ssh_config: ~/.ssh/config without an `ssh` program
known_hosts: known and revoked host keys
login_shell: commands that every login shell passes on unchanged
target: how a host is reached: user, port, keys, jump hosts
fleet: shells on the hosts of a cluster
"""

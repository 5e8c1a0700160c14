"""Connections between the processes of a job: sealed streams between hosts, shared memory and channels within one.

connect: dials a member of the job, and accepts connections from members
peer_connection: one end of a sealed connection, its permits, its handler's interface, and read leases
outgoing_queue: the messages that one connection sends: queued, sealed, written
preauth_listener: the preauth stage of a listener
credentials: a process's identity and its TLS contexts
stream: the interface of byte streams and listeners
tcp_stream: byte streams over TCP
loopback_tcp: loopback TCP for one user alone
shared_memory: segments that the agent makes for its children, buffers cut from them, and access to those of others
unix_channel: records between two processes of one host
protocol: connections without sockets: bytes in, events out
"""

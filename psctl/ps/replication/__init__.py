"""The chain of replicas of one shard.

chain_entries: entries and copies of a shard, to send and while they are received
replica_chain: one server's part in a chain: entries, acknowledgements, copies, transfer of the lead
replica_roles: the roles of a server in a chain as a table, and the protocol of the replicated state
"""

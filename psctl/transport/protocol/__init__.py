"""The protocol of sealed connections without sockets: bytes in, events out.

connection: one connection, from the TLS handshake to its end
connection_messages: what two ends send each other about the connection itself
preauth: the challenge before TLS
tls_records: TLS over memory, record by record
authority: a job's certificate authority, and identities in certificates
frames: the layout of frames and their encryption
message_assembly: the receive buffer, message headers, and long messages in pieces
send_queue: frames that wait to be written, within the receiver's window
"""

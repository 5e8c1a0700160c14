"""The command line of psctl.

app: the commands, the global options, and the place where an error becomes an exit code
main: the entry point: signal handlers, then the command line
"""

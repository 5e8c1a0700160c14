"""The command line of psctl.

commands: one command a module
shared: what several commands use
app: the commands, the global options, and the place where an error becomes an exit code
main: the entry point: signal handlers, then the command line
"""

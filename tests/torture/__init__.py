"""Random faults on test hosts, and the promises of docs/failures.md after each.

faults: the faults, each a row of docs/failures.md
promises: that table, as the run reads it
trial: one training with some faults; what it ended with is compared with an undisturbed run, to the bit
__main__: trials for hours, and recovery times by fault
"""

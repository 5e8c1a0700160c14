"""All-reduces as data: schedules, their proof and their text.

algorithms: builders of schedules, by strategy
checker: the proof that a schedule is an all-reduce
describe: a schedule as text
operation_check: the trial of a user's function as a reduction
phases: all-gather and reduce-scatter phases that all-reduces are made of
schedule: transfers, messages and schedules as values
"""

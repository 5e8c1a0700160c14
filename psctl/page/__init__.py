"""The page of a job: a file to hand on, and the live page of `psctl ui`.

history: what a page shows of one job, from its events
changes: the difference of two JSON values
render: the page as one HTML file
board: the jobs that a live page shows
server: serves the live page on the loopback address

The folder assets/ has the styles, the page's script, and uPlot 1.6.32, which draws the charts, with its license.
"""

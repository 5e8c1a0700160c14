"""Everything that psctl draws: tables, the live screen, errors, and pictures of machines.

chart: a curve of several rows for a terminal
console: consoles for stdout and stderr
device_tree: a host of a topology document as a tree of devices with cables
doctor_table: the result of `doctor`
drawing_styles: colours and line widths of drawings
failure: the end of a job, and errors
job_view: the state of a running job, from its events
labels: texts for the entries of a topology document
live_picture: the live picture of a job for a given width and height
live_screen: the live screen, redrawn in place
painter: rows painted in place at the bottom of a terminal
pictures: a package: pictures of a topology, as SVG and for graphviz
plain_log: a followed job as plain lines
rank_rows: many ranks in few rows
run_summary: the summary of a run, from its events
series: values of one quantity over steps and time
stacks: stacks of processes
step_times: the times of steps as a table
tables: results as tables
text: sanitizing of foreign text; numbers, times and curves as text
topo: a topology on a terminal
topo_matrix: a host's matrix as a table
topo_rows: a topology as tab-separated rows
transfer_bar: a bar for files on their way to or from hosts
"""

"""Files between this machine and the hosts of jobs: data that hosts get, and what scripts write.

content_index: hashes of files of this machine, kept while the files are unchanged
data_sets: the files of `data:`, named by their content
data_transfer: sends data to hosts that lack it, and links it
output_names: which files of hosts are fetched, and their names here
output_pull: fetches what a script wrote from all hosts of its job
url_fetch: lets hosts fetch what a URL names
"""

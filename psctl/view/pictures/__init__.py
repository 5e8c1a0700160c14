"""Pictures of a topology for reports and for graphviz.

canvas: an SVG page of boxes, texts, lines and labels
dot: a topology as text for graphviz
svg: a topology as an SVG
svg_host: one host of the SVG
svg_layout: sizes and positions of a host's boxes
svg_network: the network between hosts in the SVG
"""

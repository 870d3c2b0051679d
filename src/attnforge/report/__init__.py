"""Pages and the figures of networks and heads. They only read finished results: nothing here fits or compiles.

`html` is the page that every package writes its results on, `mathml` the formulas on it; `network` is the page of a
compiled network, `heads` the figures of heads.
"""

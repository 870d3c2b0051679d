"""Charts: what a figure shows, as data, and the one place that draws it, as a picture or to be explored in a page.

`chart` holds the data, `themes` the colours and files, `drawing` makes pictures and `interactive` makes plotly figures.
Nothing here knows what is being drawn.
"""

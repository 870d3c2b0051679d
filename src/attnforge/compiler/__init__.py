"""From programs to certified networks: plan, layout, weights, error analysis, and the page that calls them in order."""

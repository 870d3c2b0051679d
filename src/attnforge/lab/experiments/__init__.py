"""The experiments, one file for each; `registry` finds them by name."""

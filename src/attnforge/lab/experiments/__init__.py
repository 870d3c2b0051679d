"""The experiments, one file for each; `experiment.find` finds them by name."""

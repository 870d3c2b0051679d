"""From a program to a network: plan the heads, lay them out in layers, assemble the weights."""

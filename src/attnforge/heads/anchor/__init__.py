"""Anchor heads: functions of one scalar by softmax over a constant table (section A)."""

"""Execution of a captured PyTorch graph on symbols, which writes a `Program`.

    capture   the target's graph            walk      execution, node by node      simplify   fewer operations
    atoms     what tensors are made of      table     operators and handlers       precise    the target in float64
    reading   batch or single points, and whether program and target agree
    values, algebra, arithmetic, mixing, attention    what handlers compute with
    ops_*     the handlers
"""

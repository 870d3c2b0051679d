"""Execution of a captured PyTorch graph on symbols, which writes a `Program`.

    program     capture, execution and simplification, and whether program and target agree
    capture     the target's graph, its values in float64, how it takes its input
    walk        execution, node by node
    atoms       what tensors are made of, the tape, arithmetic, and the mixing of tokens
    attention   scores and weights that are remembered until they are attention
    values      what nodes stand for: constants, atoms, scores and weights
    handlers    one handler for each operator, and the table of them
    simplify    fewer operations with the same meaning
"""

"""What is computed, before anything is built: the registry of univariate functions and the programs over them."""

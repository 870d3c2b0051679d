"""A head family from outside the package: products by hot tanh pairs (lemma C2) instead of Gauss-Lobatto nodes."""

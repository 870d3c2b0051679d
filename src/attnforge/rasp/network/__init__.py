"""Token programs as attention-only networks: facts, plan, weights, and the proof that reads them back."""

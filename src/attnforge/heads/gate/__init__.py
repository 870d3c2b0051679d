"""Gate heads: kinks and sigmoids by one self slot and a few memory slots (section B)."""

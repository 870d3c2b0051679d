"""A catalogue of networks whose every head is known: what is in it, how it is sampled, built and shown."""

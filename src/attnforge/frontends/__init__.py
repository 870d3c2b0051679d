"""Front ends: what a user hands in becomes a `Program`."""

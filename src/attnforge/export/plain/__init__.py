"""Tier `plain`: a stock attention-only transformer."""

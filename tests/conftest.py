"""What every test runs with."""

from __future__ import annotations

from hypothesis import settings

# On a small, busy machine a slow example says nothing about the code; a failure should come with what repeats it.
settings.register_profile("attnforge", deadline=None, print_blob=True)
settings.load_profile("attnforge")

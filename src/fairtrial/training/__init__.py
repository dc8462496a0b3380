"""How networks train."""
